//! Weights that are not in memory, and the products with them.
//!
//! A weight `(n, k)` has a placeholder: memory of its size whose values mean nothing. Who has the values registers the
//! placeholder's addresses with a product of its own, and is called with `x` `(m, k)` for `y = x wᵀ` `(m, n)`, in f32, whenever
//! [`gemm`](crate::gemm()) is asked for it, on the thread that asks.
//!
//! `gemm` has no way to give an error. Inside of [`catching`] a product that fails gives NaN and its reason comes out
//! there; outside it panics with the reason.
//!
//! Invariant: an address is registered once, and as long as its [`Registration`] lives. Who registers keeps the memory
//! behind it until then, so that no other matrix ever lies there.

use std::any::TypeId;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use crate::dispatch::Strided;

/// Computes `y` `(m, n)` of `x` `(m, k)`, or says why not; `y` is zeros before.
pub type Product = dyn Fn(&[f32], &mut [f32]) -> Result<(), String> + Send + Sync;

struct Weight {
    end: usize,
    rows: usize,
    columns: usize,
    product: Box<Product>,
}

/// By the address of the placeholder.
static WEIGHTS: RwLock<BTreeMap<usize, Arc<Weight>>> = RwLock::new(BTreeMap::new());
/// How many there are, for the many products that have nothing to do with them.
static COUNT: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Reasons of the thread's innermost [`catching`].
    static CATCHER: RefCell<Option<Option<String>>> = const { RefCell::new(None) };
}

/// Keeps a weight registered.
#[must_use = "a weight is registered as long as this lives"]
pub struct Registration(usize);

impl Drop for Registration {
    fn drop(&mut self) {
        let mut weights = WEIGHTS.write().unwrap_or_else(PoisonError::into_inner);
        let weight = weights.remove(&self.0);
        COUNT.store(weights.len(), Ordering::Release);
        drop(weights);
        drop(weight); // what it owns may be registered, too
    }
}

/// Registers a weight of `rows` outputs and `columns` inputs, whose placeholder lies at `addresses`, in bytes.
///
/// # Panics
/// The addresses are none, or those of another weight.
pub fn register(
    addresses: Range<usize>,
    [rows, columns]: [usize; 2],
    product: Box<Product>,
) -> Registration {
    assert!(!addresses.is_empty(), "a weight without elements");
    let (start, end) = (addresses.start, addresses.end);
    let weight = Weight {
        end,
        rows,
        columns,
        product,
    };
    let mut weights = WEIGHTS.write().unwrap_or_else(PoisonError::into_inner);
    let before = weights.range(..end).next_back();
    let is_free = before.is_none_or(|(_, other)| other.end <= start);
    assert!(is_free, "two weights at one address");
    weights.insert(start, Arc::new(weight));
    COUNT.store(weights.len(), Ordering::Release);
    Registration(start)
}

/// Runs `work` and gives, beside what it gives, why a product with a registered weight failed meanwhile on this thread:
/// the first reason, if any. Results that depend on that product are NaN then.
pub fn catching<T>(work: impl FnOnce() -> T) -> (T, Option<String>) {
    /// Puts back what was there, also when `work` panics.
    struct Restore(Option<Option<String>>);
    impl Drop for Restore {
        fn drop(&mut self) {
            CATCHER.set(self.0.take());
        }
    }
    let _restore = Restore(CATCHER.replace(Some(None)));
    let result = work();
    (result, CATCHER.take().flatten())
}

/// Whether there are weights at all.
pub(crate) fn is_in_use() -> bool {
    COUNT.load(Ordering::Acquire) > 0
}

/// The weights whose placeholders have these addresses, and where they start.
fn find<const N: usize>(addresses: [usize; N]) -> [Option<(usize, Arc<Weight>)>; N] {
    let weights = WEIGHTS.read().unwrap_or_else(PoisonError::into_inner);
    addresses.map(|address| {
        let (start, weight) = weights.range(..=address).next_back()?;
        (address < weight.end).then(|| (*start, weight.clone()))
    })
}

/// The factors of a product.
pub(crate) struct Scale<'a, T> {
    pub(crate) read_dst: bool,
    pub(crate) alpha: &'a T,
    pub(crate) beta: &'a T,
}

/// Computes the product if it is one with a weight from here; whether it was.
///
/// # Safety
/// As of [`gemm`](crate::gemm()).
pub(crate) unsafe fn take_over<T: 'static>(
    (m, n, k): (usize, usize, usize),
    dst: Strided<*mut T>,
    lhs: Strided<*const T>,
    rhs: Strided<*const T>,
    scale: Scale<'_, T>,
) -> bool {
    let [on_left, on_right] = find([lhs.start as usize, rhs.start as usize]);
    if on_left.is_none() && on_right.is_none() {
        return false;
    }
    let mut y = vec![0.0; m * n];
    let element = Element::of::<T>();
    let outcome = match on_right {
        Some((start, weight)) if on_left.is_none() => {
            let is_whole = start == rhs.start as usize
                && (weight.rows, weight.columns) == (n, k)
                && (rhs.row_stride == 1 || k == 1)
                && (rhs.column_stride == k as isize || n == 1);
            match element {
                Some(element) if is_whole => {
                    // SAFETY: `lhs` is a matrix in memory, of this type.
                    let x = unsafe { rows_of(element, lhs, m, k) };
                    (weight.product)(&x, &mut y)
                }
                _ => {
                    let (rows, columns) = (weight.rows, weight.columns);
                    Err(format!(
                        "a weight ({rows}, {columns}) that is not in memory is multiplied in part, turned, or as another type: as \
                         ({n}, {k})"
                    ))
                }
            }
        }
        _ => Err("a weight that is not in memory is on the left side of a product".to_owned()),
    };
    if let Err(reason) = outcome {
        y.fill(f32::NAN);
        note(reason);
    }
    // Where numbers are of other types `dst` stays as it was, and the reason alone tells.
    if let Some(element) = element {
        // SAFETY: `dst` is a matrix in memory, of this type, that nobody else has access to.
        unsafe { write_rows(element, dst, (m, n), &y, scale) };
    }
    true
}

/// Keeps a reason for the thread's [`catching`].
fn note(reason: String) {
    let is_caught = CATCHER.with_borrow_mut(|catcher| match catcher {
        Some(first) => {
            first.get_or_insert_with(|| reason.clone());
            true
        }
        None => false,
    });
    assert!(is_caught, "{reason}");
}

/// The element types of weights.
#[derive(Clone, Copy)]
enum Element {
    F32,
    #[cfg(feature = "f16")]
    F16,
}

impl Element {
    fn of<T: 'static>() -> Option<Self> {
        #[cfg(feature = "f16")]
        if TypeId::of::<T>() == TypeId::of::<gemm_f16::f16>() {
            return Some(Self::F16);
        }
        (TypeId::of::<T>() == TypeId::of::<f32>()).then_some(Self::F32)
    }

    /// # Safety
    /// `at` is an element of this type.
    unsafe fn read<T>(self, at: *const T) -> f32 {
        // SAFETY: as of this function.
        unsafe {
            match self {
                Self::F32 => at.cast::<f32>().read(),
                #[cfg(feature = "f16")]
                Self::F16 => at.cast::<gemm_f16::f16>().read().to_f32(),
            }
        }
    }

    /// # Safety
    /// As of [`Self::read`], and nobody else has access.
    unsafe fn write<T>(self, at: *mut T, value: f32) {
        // SAFETY: as of this function.
        unsafe {
            match self {
                Self::F32 => at.cast::<f32>().write(value),
                #[cfg(feature = "f16")]
                Self::F16 => at
                    .cast::<gemm_f16::f16>()
                    .write(gemm_f16::f16::from_f32(value)),
            }
        }
    }
}

/// The rows of a matrix `(m, k)`, one after the other.
///
/// # Safety
/// It is in memory, and its elements are of the type `element`.
unsafe fn rows_of<T>(element: Element, matrix: Strided<*const T>, m: usize, k: usize) -> Vec<f32> {
    let mut rows = Vec::with_capacity(m * k);
    for row in 0..m as isize {
        for column in 0..k as isize {
            let offset = row * matrix.row_stride + column * matrix.column_stride;
            // SAFETY: an element of the matrix.
            rows.push(unsafe { element.read(matrix.start.offset(offset)) });
        }
    }
    rows
}

/// `dst = alpha dst + beta y`, for `y` `(m, n)`.
///
/// # Safety
/// `dst` is a matrix in memory that nobody else has access to, initialised where it counts, and its elements are of the type
/// `element`.
unsafe fn write_rows<T>(
    element: Element,
    dst: Strided<*mut T>,
    (m, n): (usize, usize),
    y: &[f32],
    scale: Scale<'_, T>,
) {
    // SAFETY: references to elements of this type.
    let (alpha, beta) = unsafe { (element.read(scale.alpha), element.read(scale.beta)) };
    for (row, values) in y.chunks(n.max(1)).enumerate().take(m) {
        for (column, value) in values.iter().enumerate() {
            let offset = row as isize * dst.row_stride + column as isize * dst.column_stride;
            // SAFETY: an element of `dst`.
            unsafe {
                let at = dst.start.offset(offset);
                let before = if scale.read_dst {
                    alpha * element.read(at)
                } else {
                    0.0
                };
                element.write(at, before + beta * value);
            }
        }
    }
}
