//! What the clones of a `FlashVarBuilder` share for stock models: FFNs, other matrices, placeholders, and the turns of forwards.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use candle::Tensor;
use gemm::wick::catching;

use super::placeholder::{Placeholder, Uses};
use super::running::{outer, Running};
use crate::error::{Error, Result};
use crate::folder::FlashFolder;
use crate::matrix::Matrix;
use crate::sparse::ffn::SparseFfn;
use crate::sparse::is_bias;
use crate::sparse::turns::{outside_of_pools, Turns};

/// Distinguishes stores for as long as the process lives, which addresses would not.
static NEXT_ID: AtomicU64 = AtomicU64::new(0);

/// The weights of stock models built from one `FlashVarBuilder`.
pub(crate) struct Store {
    id: u64,
    loaded: OnceLock<Loaded>,
    /// One thread loads.
    loading: Mutex<()>,
    tensors: Mutex<Tensors>,
}

/// What is loaded for the first struct.
struct Loaded {
    /// Forwards go one after the other.
    turns: Turns,
    ffns: Vec<Arc<SparseFfn>>,
    /// The names of the model's biases.
    biases: Vec<String>,
}

/// What structs were given.
#[derive(Default)]
pub(super) struct Tensors {
    pub(super) matrices: HashMap<String, Arc<Matrix>>,
    pub(super) embeddings: HashMap<String, Placeholder>,
    structs: Vec<Struct>,
}

/// What one struct was given: placeholders of its own, so that none hides that another struct's is not multiplied.
#[derive(Default)]
struct Struct {
    /// Products with them so far.
    products: Arc<AtomicU64>,
    placeholders: Vec<(String, Placeholder)>,
    /// The biases that it asked for.
    biases: BTreeSet<String>,
}

impl Tensors {
    /// The structs that have multiplied since these were their products.
    fn passed<'a>(&'a self, before: &'a [u64]) -> impl Iterator<Item = &'a Struct> {
        let structs = self.structs.iter().zip(before);
        let passed =
            structs.filter(|(built, before)| built.products.load(Ordering::Relaxed) > **before);
        passed.map(|(built, _)| built)
    }
}

impl Default for Store {
    fn default() -> Self {
        Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            loaded: OnceLock::new(),
            loading: Mutex::new(()),
            tensors: Mutex::default(),
        }
    }
}

impl Store {
    pub(super) fn tensors(&self) -> MutexGuard<'_, Tensors> {
        self.tensors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Loads the FFNs once.
    pub(super) fn load(
        &self,
        folder: &FlashFolder,
        load: impl FnOnce() -> Result<Vec<Arc<SparseFfn>>> + Send,
    ) -> Result<()> {
        outside_of_pools(|| {
            let _loading = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
            if self.loaded.get().is_none() {
                let turns = Turns::new()?;
                let ffns = load()?;
                let names = folder.resident_tensors().map(|(name, _)| name);
                let biases = names.filter(|name| is_bias(name)).cloned().collect();
                let _is_first = self.loaded.set(Loaded {
                    turns,
                    ffns,
                    biases,
                });
            }
            Ok(())
        })
    }

    pub(super) fn ffns(&self) -> &[Arc<SparseFfn>] {
        self.loaded.get().map_or(&[], |loaded| &loaded.ffns)
    }

    /// The number of a struct that will be built.
    pub(super) fn begin_struct(&self) -> usize {
        let mut tensors = self.tensors();
        tensors.structs.push(Struct::default());
        tensors.structs.len() - 1
    }

    /// What placeholders of this struct count by, or what no struct has alone.
    pub(super) fn uses(&self, of_struct: Option<usize>) -> Uses {
        let products = of_struct.map(|number| self.tensors().structs[number].products.clone());
        Uses {
            store: self.id,
            products: products.unwrap_or_default(),
        }
    }

    /// Keeps a placeholder of a struct, and gives what stands for it.
    pub(super) fn keep(&self, of_struct: usize, name: &str, placeholder: Placeholder) -> Tensor {
        let tensor = placeholder.tensor();
        let kept = (name.to_owned(), placeholder);
        self.tensors().structs[of_struct].placeholders.push(kept);
        tensor
    }

    /// Notes that a struct asked for a bias.
    pub(super) fn note_bias(&self, of_struct: usize, name: &str) {
        let mut tensors = self.tensors();
        tensors.structs[of_struct].biases.insert(name.to_owned());
    }

    /// Products of each struct so far.
    fn products(&self) -> Vec<u64> {
        let tensors = self.tensors();
        let structs = tensors.structs.iter();
        structs
            .map(|built| built.products.load(Ordering::Relaxed))
            .collect()
    }

    /// Runs `forward` when it is its turn.
    pub(super) fn forward<T: Send>(
        &self,
        forward: impl FnOnce() -> candle::Result<T> + Send,
    ) -> candle::Result<T> {
        let outer = outer();
        let loaded = match self.loaded.get() {
            Some(loaded) if outer.last() != Some(&self.id) => loaded,
            _ => return forward(), // a part of the one around it, or of a struct that is not from here
        };
        if outer.contains(&self.id) || loaded.turns.are_current() {
            let reason =
                "a forward of these weights is begun inside of another one, which waits for it"
                    .to_owned();
            return Err(Error::Stock { reason }.into());
        }
        loaded.turns.run(|| self.run(outer, loaded, forward))
    }

    fn run<T>(
        &self,
        outer: Vec<u64>,
        loaded: &Loaded,
        forward: impl FnOnce() -> candle::Result<T>,
    ) -> candle::Result<T> {
        let _running = Running::begin(outer, self.id);
        let before = self.products();
        let (result, failure) = catching(forward);
        self.check_biases(&before, &loaded.biases)?;
        if let Some(reason) = failure {
            return Err(Error::Stock { reason }.into());
        }
        let result = result?;
        if let Some(reason) = loaded.ffns.iter().find_map(|ffn| ffn.unfinished()) {
            return Err(Error::Stock { reason }.into());
        }
        self.check_all_used(&before)?;
        Ok(result)
    }

    /// A struct that has been passed through adds all biases that the model has, or it is another model's.
    fn check_biases(&self, before: &[u64], biases: &[String]) -> Result<()> {
        let tensors = self.tensors();
        let mut unasked = tensors.passed(before).flat_map(|built| {
            let mut biases = biases.iter();
            biases.find(|name| !built.biases.contains(*name))
        });
        match unasked.next() {
            None => Ok(()),
            Some(name) => {
                let reason = format!(
                    "{name} was never asked for: the struct is not that of the folder's model"
                );
                Err(Error::Stock { reason })
            }
        }
    }

    /// A pass through a struct multiplies with all of its weights.
    fn check_all_used(&self, before: &[u64]) -> Result<()> {
        let tensors = self.tensors();
        let passed = tensors.passed(before);
        let mut placeholders = passed.flat_map(|built| &built.placeholders);
        match placeholders.find(|(_, weight)| !weight.was_used()) {
            None => Ok(()),
            Some((name, _)) => {
                let reason = format!(
                    "{name} was not multiplied: the model uses this weight in another way than a linear layer does, and saw zeros"
                );
                Err(Error::Stock { reason })
            }
        }
    }
}
