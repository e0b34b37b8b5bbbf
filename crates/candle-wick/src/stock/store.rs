//! The matrices on flash: which of them are loaded, being loaded, in use.
//!
//! What is read together is a unit: one matrix, the FFN of a layer in a converted folder, or one expert. A unit
//! is loaded by a background thread into buffers of its pool; when a span of one of its matrices is entered, the
//! buffer's values go into the tensor, and come out when the span is left. A dense unit gives its buffers back
//! once each of its matrices was used; an expert stays until its place is wanted.
//!
//! The order of dense units is learnt as they are used; those that always followed are read ahead, as far as the
//! pool goes. Experts are never guessed.
//!
//! Invariants:
//! - buffers of a pool never exceed its bytes;
//! - a unit in use keeps its buffers; a matrix whose unit could not be read is NaN while in use, and the error
//!   is kept for [`Store::take_error`].
//!
//! Not here: what is in DRAM all the time (`plan`), spans (`layer`).

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use candle::Tensor;

use super::buffer::{exchange, Buffer};
use super::pool::Pool;
use super::source::{Extents, StockSource};
use super::{ExpertPolicy, StockStats};
use crate::error::{Error, Result};
use crate::stored::StreamRing;

/// Threads that load units: one converts while the other one's reads are in flight.
pub(super) const LOADERS: usize = 2;

/// A matrix that a model holds a placeholder of.
pub(super) struct StreamedMatrix {
    pub(super) name: String,
    /// Shares its storage with the model's.
    pub(super) tensor: Tensor,
    pub(super) unit: usize,
    /// Position among the matrices of its unit.
    pub(super) member: usize,
}

/// Matrices that are read together.
pub(super) struct Unit {
    pub(super) extents: Vec<Extents>,
    /// Dtype and number of values of each matrix.
    pub(super) sizes: Vec<(candle::DType, usize)>,
    pub(super) is_expert: bool,
}

impl Unit {
    pub(super) fn bytes(&self) -> u64 {
        let bytes = |(dtype, len): &(candle::DType, usize)| (dtype.size_in_bytes() * len) as u64;
        self.sizes.iter().map(bytes).sum()
    }
}

/// Where the values of a unit are.
enum Place {
    Flash,
    Loading,
    Loaded(Vec<Member>),
    Failed(String),
}

/// One matrix of a loaded unit.
struct Member {
    /// Its values; the tensor's zeros while it is in use.
    buffer: Buffer,
    users: usize,
    was_used: bool,
}

struct UnitState {
    place: Place,
    uses: u64,
    last_use: u64,
    /// The dense unit that came next so far; `None` before it is known and once it varied.
    next: Option<usize>,
    next_varies: bool,
}

struct Inner {
    units: Vec<UnitState>,
    queue: VecDeque<(usize, Vec<Buffer>)>,
    dense: Pool,
    experts: Pool,
    last_dense: Option<usize>,
    clock: u64,
    stats: StockStats,
    error: Option<Error>,
    /// What the tensor of a matrix that could not be read held before it was filled with NaN.
    poisoned: BTreeMap<usize, Buffer>,
    is_stopping: bool,
}

/// What loaders and spans share.
pub(super) struct Shared {
    pub(super) source: Arc<StockSource>,
    units: Vec<Unit>,
    matrices: Vec<StreamedMatrix>,
    policy: ExpertPolicy,
    inner: Mutex<Inner>,
    /// Told when a unit was loaded, failed, or gave room; and when there is something to load.
    changed: Condvar,
}

/// The store with its loader threads; gone with the last model and handle.
pub(super) struct Store {
    shared: Arc<Shared>,
    loaders: Vec<JoinHandle<()>>,
}

impl Store {
    pub(super) fn new(
        source: Arc<StockSource>,
        units: Vec<Unit>,
        matrices: Vec<StreamedMatrix>,
        dense_bytes: u64,
        expert_bytes: u64,
        policy: ExpertPolicy,
    ) -> Result<Self> {
        let state = || UnitState {
            place: Place::Flash,
            uses: 0,
            last_use: 0,
            next: None,
            next_varies: false,
        };
        let block_bytes = units.iter().flat_map(|unit| &unit.extents);
        let block_bytes = block_bytes.map(Extents::block_bytes).max().unwrap_or(0);
        let shared = Arc::new(Shared {
            inner: Mutex::new(Inner {
                units: units.iter().map(|_| state()).collect(),
                queue: VecDeque::new(),
                dense: Pool::new(dense_bytes),
                experts: Pool::new(expert_bytes),
                last_dense: None,
                clock: 0,
                stats: StockStats::default(),
                error: None,
                poisoned: BTreeMap::new(),
                is_stopping: false,
            }),
            source,
            units,
            matrices,
            policy,
            changed: Condvar::new(),
        });
        let mut store = Self {
            shared,
            loaders: Vec::new(),
        };
        for index in 0..LOADERS {
            let (shared, ring) = (store.shared.clone(), StreamRing::new(block_bytes)?);
            let loader = std::thread::Builder::new()
                .name(format!("wick-stock-{index}"))
                .spawn(move || shared.load_units(ring));
            store.loaders.push(loader.map_err(|error| Error::Stock {
                reason: format!("no loader thread: {error}"),
            })?);
        }
        Ok(store)
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.shared.lock().is_stopping = true;
        self.shared.changed.notify_all();
        for loader in self.loaders.drain(..) {
            // A loader that panicked has nothing left to tell.
            let _ = loader.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn stats(&self) -> StockStats {
        let io = self.source.reader().counters();
        StockStats {
            bytes: io.bytes,
            ..self.lock().stats
        }
    }

    /// The tensor that stands for a matrix.
    pub(super) fn placeholder(&self, matrix: usize) -> Tensor {
        self.matrices[matrix].tensor.clone()
    }

    /// What went wrong since the last call.
    pub(super) fn take_error(&self) -> Option<Error> {
        self.lock().error.take()
    }

    /// Puts the values of a matrix into its tensor, waiting for them when they are on flash.
    pub(super) fn enter(&self, index: usize) {
        let matrix = &self.matrices[index];
        let mut inner = self.lock();
        inner.learn(&self.units, matrix.unit);
        let mut counted = false;
        loop {
            match &inner.units[matrix.unit].place {
                Place::Loaded(_) => break,
                Place::Loading => {}
                Place::Flash => {
                    let is_queued = inner.queue_demand(self, matrix.unit);
                    counted |= is_queued;
                    if is_queued {
                        self.changed.notify_all();
                        continue;
                    }
                }
                Place::Failed(reason) => {
                    let reason = reason.clone();
                    inner.units[matrix.unit].place = Place::Flash;
                    inner.poison(index, matrix, &reason);
                    return;
                }
            }
            inner = self
                .changed
                .wait(inner)
                .unwrap_or_else(PoisonError::into_inner);
        }
        inner.count_use(matrix, counted);
        let Place::Loaded(members) = &mut inner.units[matrix.unit].place else {
            return;
        };
        let member = &mut members[matrix.member];
        member.users += 1;
        let outcome = match member.users {
            1 => exchange(&matrix.tensor, &mut member.buffer),
            _ => Ok(()),
        };
        if let Err(error) = outcome {
            inner.error.get_or_insert(error.into());
        }
        inner.read_ahead(self, matrix.unit);
        drop(inner);
        self.changed.notify_all();
    }

    /// Takes the values of a matrix out of its tensor again.
    pub(super) fn exit(&self, index: usize) {
        let matrix = &self.matrices[index];
        let mut inner = self.lock();
        if let Some(mut zeros) = inner.poisoned.remove(&index) {
            // Can fail no more than the exchange that put the NaN there.
            let _ = exchange(&matrix.tensor, &mut zeros);
            return;
        }
        let Place::Loaded(members) = &mut inner.units[matrix.unit].place else {
            return;
        };
        let member = &mut members[matrix.member];
        member.users = member.users.saturating_sub(1);
        let mut outcome = Ok(());
        if member.users == 0 {
            member.was_used = true;
            outcome = exchange(&matrix.tensor, &mut member.buffer);
        }
        let is_done = members.iter().all(|m| m.was_used && m.users == 0);
        if is_done && !self.units[matrix.unit].is_expert {
            inner.give_back(&self.units, matrix.unit);
            inner.read_ahead(self, matrix.unit);
        }
        if let Err(error) = outcome {
            inner.error.get_or_insert(error.into());
        }
        drop(inner);
        self.changed.notify_all();
    }

    /// The life of a loader thread.
    fn load_units(&self, mut ring: StreamRing) {
        loop {
            let mut inner = self.lock();
            let (unit, mut buffers) = loop {
                if inner.is_stopping {
                    return;
                }
                if let Some(job) = inner.queue.pop_front() {
                    break job;
                }
                inner = self
                    .changed
                    .wait(inner)
                    .unwrap_or_else(PoisonError::into_inner);
            };
            drop(inner);
            let outcome = self.load_unit(unit, &mut buffers, &mut ring);
            let mut inner = self.lock();
            inner.stats.loads += 1;
            inner.units[unit].place = match outcome {
                Ok(()) => Place::Loaded(buffers.into_iter().map(Member::fresh).collect()),
                Err(error) => {
                    inner.pool(&self.units[unit]).give_back(buffers);
                    Place::Failed(error.to_string())
                }
            };
            drop(inner);
            self.changed.notify_all();
        }
    }

    fn load_unit(&self, unit: usize, buffers: &mut [Buffer], ring: &mut StreamRing) -> Result<()> {
        let unit = &self.units[unit];
        let reader = self.source.reader();
        if let [extents] = unit.extents.as_slice() {
            return extents.load(reader, ring, buffers);
        }
        for (extents, buffer) in unit.extents.iter().zip(buffers) {
            extents.load(reader, ring, std::slice::from_mut(buffer))?;
        }
        Ok(())
    }
}

impl Member {
    fn fresh(buffer: Buffer) -> Self {
        Self {
            buffer,
            users: 0,
            was_used: false,
        }
    }
}

impl Inner {
    fn pool(&mut self, unit: &Unit) -> &mut Pool {
        if unit.is_expert {
            &mut self.experts
        } else {
            &mut self.dense
        }
    }

    /// Remembers which dense unit follows which.
    fn learn(&mut self, units: &[Unit], unit: usize) {
        if units[unit].is_expert || self.last_dense == Some(unit) {
            return;
        }
        if let Some(last) = self.last_dense.replace(unit) {
            let last = &mut self.units[last];
            last.next_varies |= last.next.is_some_and(|next| next != unit);
            last.next = if last.next_varies { None } else { Some(unit) };
        }
    }

    fn count_use(&mut self, matrix: &StreamedMatrix, was_missing: bool) {
        self.clock += 1;
        let state = &mut self.units[matrix.unit];
        state.last_use = self.clock;
        if matrix.member == 0 {
            state.uses += 1;
            self.stats.uses += 1;
            self.stats.misses += u64::from(was_missing);
        }
    }

    /// Queues a unit that is wanted now, making room if need be; whether there was room.
    fn queue_demand(&mut self, shared: &Shared, unit: usize) -> bool {
        loop {
            let sizes = &shared.units[unit].sizes;
            match self.pool(&shared.units[unit]).take(sizes) {
                Ok(Some(buffers)) => {
                    self.units[unit].place = Place::Loading;
                    self.queue.push_front((unit, buffers));
                    return true;
                }
                Ok(None) => {}
                Err(error) => {
                    self.units[unit].place = Place::Failed(error.to_string());
                    return true;
                }
            }
            let Some(victim) = self.victim(shared, unit) else {
                return false; // somebody who uses a unit now will give it back
            };
            self.give_back(&shared.units, victim);
        }
    }

    /// The loaded unit of the same pool that is needed last, among those nobody uses.
    fn victim(&self, shared: &Shared, for_unit: usize) -> Option<usize> {
        let is_expert = shared.units[for_unit].is_expert;
        let idle = (0..self.units.len()).filter(|&unit| {
            shared.units[unit].is_expert == is_expert
                && matches!(&self.units[unit].place, Place::Loaded(members)
                    if members.iter().all(|member| member.users == 0))
        });
        idle.min_by_key(|&unit| {
            let UnitState { uses, last_use, .. } = self.units[unit];
            match shared.policy {
                // Dense units come round in turn: the one used last is needed last.
                _ if !is_expert => (0, u64::MAX - last_use),
                ExpertPolicy::Lfu => (uses, last_use),
                ExpertPolicy::Window => (0, last_use),
            }
        })
    }

    fn give_back(&mut self, units: &[Unit], unit: usize) {
        let place = std::mem::replace(&mut self.units[unit].place, Place::Flash);
        if let Place::Loaded(members) = place {
            let buffers = members.into_iter().map(|member| member.buffer).collect();
            self.pool(&units[unit]).give_back(buffers);
        }
    }

    /// Queues the dense units that always followed, as far as there is room.
    fn read_ahead(&mut self, shared: &Shared, from: usize) {
        let mut at = match shared.units[from].is_expert {
            true => self.last_dense,
            false => Some(from),
        };
        while let Some(next) = at.and_then(|unit| self.units[unit].next) {
            if next == from {
                return; // once around
            }
            if matches!(self.units[next].place, Place::Flash) {
                match self.dense.take(&shared.units[next].sizes) {
                    Ok(Some(buffers)) => {
                        self.units[next].place = Place::Loading;
                        self.queue.push_back((next, buffers));
                    }
                    _ => return,
                }
            }
            at = Some(next);
        }
    }

    /// Fills a matrix that could not be read with NaN, so that no use of it goes unseen.
    fn poison(&mut self, index: usize, matrix: &StreamedMatrix, reason: &str) {
        let reason = format!("{}: {reason}", matrix.name);
        self.error.get_or_insert(Error::Stock { reason });
        let tensor = &matrix.tensor;
        let Ok(mut values) = Buffer::zeroed(tensor.dtype(), tensor.elem_count()) else {
            return; // zeros in the tensor, and the error is kept
        };
        values.fill_nan();
        if exchange(tensor, &mut values).is_ok() {
            self.poisoned.insert(index, values);
        }
    }
}
