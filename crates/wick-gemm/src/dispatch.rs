//! `dst = alpha dst + beta lhs rhs` over strided matrices, by the kernel of the element type.
//!
//! The kernels want destinations whose columns are contiguous or nearly so, and strides of the destination and of the left
//! side that are not negative: the product is turned around or walked backwards to have it so.

use std::any::TypeId;

use gemm_common::Parallelism;

use crate::wick;

/// A complex number of two `f32`.
#[expect(non_camel_case_types, reason = "gemm's own names")]
pub type c32 = num_complex::Complex<f32>;
/// A complex number of two `f64`.
#[expect(non_camel_case_types, reason = "gemm's own names")]
pub type c64 = num_complex::Complex<f64>;

/// What the kernels look like, those of numbers that are not complex included.
type Kernel<T> = unsafe fn(
    usize,
    usize,
    usize,
    *mut T,
    isize,
    isize,
    bool,
    *const T,
    isize,
    isize,
    *const T,
    isize,
    isize,
    T,
    T,
    bool,
    bool,
    bool,
    Parallelism,
);

/// The kernel for `T`, and whether its numbers are complex.
fn kernel<T: 'static>() -> Option<(Kernel<T>, bool)> {
    fn same<T: 'static, U: 'static>(kernel: Kernel<U>) -> Option<Kernel<T>> {
        // SAFETY: T is U, so the two are one type.
        let cast = || unsafe { std::mem::transmute::<Kernel<U>, Kernel<T>>(kernel) };
        (TypeId::of::<T>() == TypeId::of::<U>()).then(cast)
    }
    #[cfg(feature = "f16")]
    if let Some(kernel) = same::<T, gemm_f16::f16>(gemm_f16::gemm::f16::get_gemm_fn()) {
        return Some((kernel, false));
    }
    let real = same::<T, f32>(gemm_f32::gemm::f32::get_gemm_fn());
    let real = real.or_else(|| same::<T, f64>(gemm_f64::gemm::f64::get_gemm_fn()));
    if let Some(kernel) = real {
        return Some((kernel, false));
    }
    let complex = same::<T, c32>(gemm_c32::gemm::f32::get_gemm_fn());
    let complex = complex.or_else(|| same::<T, c64>(gemm_c64::gemm::f64::get_gemm_fn()));
    complex.map(|kernel| (kernel, true))
}

/// A matrix in somebody's memory: its first element, and how many elements lie between columns and between rows.
#[derive(Clone, Copy)]
pub(crate) struct Strided<P> {
    pub(crate) start: P,
    pub(crate) column_stride: isize,
    pub(crate) row_stride: isize,
}

impl<P> Strided<P> {
    fn transposed(self) -> Self {
        Self {
            start: self.start,
            column_stride: self.row_stride,
            row_stride: self.column_stride,
        }
    }
}

/// The element that is `count` elements of `stride` on; nothing is read there.
fn ahead<T>(start: *const T, count: usize, stride: isize) -> *const T {
    start.wrapping_offset(count as isize * stride)
}

/// `dst = alpha dst + beta lhs rhs`, where `dst` `(m, n)` counts if `read_dst`, with `lhs` `(m, k)` and `rhs` `(k, n)`.
///
/// # Panics
/// `T` is none of `f32`, `f64`, `f16`, [`c32`] and [`c64`]; or a product with a weight that is not in memory fails, outside of
/// [`wick::catching`].
///
/// # Safety
/// The pointers and strides describe matrices in memory, nothing else has access to `dst` meanwhile, and with `read_dst` it is
/// initialised.
#[expect(clippy::too_many_arguments, reason = "the signature that candle calls")]
pub unsafe fn gemm<T: 'static>(
    m: usize,
    n: usize,
    k: usize,
    dst: *mut T,
    dst_cs: isize,
    dst_rs: isize,
    read_dst: bool,
    lhs: *const T,
    lhs_cs: isize,
    lhs_rs: isize,
    rhs: *const T,
    rhs_cs: isize,
    rhs_rs: isize,
    alpha: T,
    beta: T,
    conj_dst: bool,
    conj_lhs: bool,
    conj_rhs: bool,
    parallelism: Parallelism,
) {
    let strided = |start, column_stride, row_stride| Strided {
        start,
        column_stride,
        row_stride,
    };
    let to = Strided {
        start: dst,
        column_stride: dst_cs,
        row_stride: dst_rs,
    };
    let (left, right) = (strided(lhs, lhs_cs, lhs_rs), strided(rhs, rhs_cs, rhs_rs));
    if wick::is_in_use() {
        // SAFETY: as of this function.
        let is_done = unsafe {
            let scale = wick::Scale {
                read_dst,
                alpha: &alpha,
                beta: &beta,
            };
            wick::take_over((m, n, k), to, left, right, scale)
        };
        if is_done {
            return;
        }
    }
    let size = Size { m, n, k, read_dst };
    let conjugated = [conj_dst, conj_lhs, conj_rhs];
    // SAFETY: as of this function.
    unsafe {
        multiply(
            size,
            to,
            [left, right],
            [alpha, beta],
            conjugated,
            parallelism,
        )
    }
}

struct Size {
    m: usize,
    n: usize,
    k: usize,
    read_dst: bool,
}

/// The product by a kernel.
///
/// # Safety
/// As of [`gemm`].
unsafe fn multiply<T: 'static>(
    size: Size,
    mut dst: Strided<*mut T>,
    [mut lhs, mut rhs]: [Strided<*const T>; 2],
    [alpha, beta]: [T; 2],
    [conj_dst, mut conj_lhs, mut conj_rhs]: [bool; 3],
    parallelism: Parallelism,
) {
    let (kernel, is_complex) =
        kernel::<T>().expect("gemm multiplies f32, f64, f16, c32 and c64 alone");
    let Size {
        mut m,
        mut n,
        k,
        read_dst,
    } = size;
    if dst.column_stride.abs() < dst.row_stride.abs() {
        // The transposed product is the product of the transposed, the other way round.
        (m, n) = (n, m);
        dst = dst.transposed();
        (lhs, rhs) = (rhs.transposed(), lhs.transposed());
        (conj_lhs, conj_rhs) = (conj_rhs, conj_lhs);
    }
    if dst.row_stride < 0 && m > 0 {
        dst.start = ahead(dst.start, m - 1, dst.row_stride).cast_mut();
        lhs.start = ahead(lhs.start, m - 1, lhs.row_stride);
        (dst.row_stride, lhs.row_stride) = (-dst.row_stride, -lhs.row_stride);
    }
    if dst.column_stride < 0 && n > 0 {
        dst.start = ahead(dst.start, n - 1, dst.column_stride).cast_mut();
        rhs.start = ahead(rhs.start, n - 1, rhs.column_stride);
        (dst.column_stride, rhs.column_stride) = (-dst.column_stride, -rhs.column_stride);
    }
    if lhs.column_stride < 0 && k > 0 {
        lhs.start = ahead(lhs.start, k - 1, lhs.column_stride);
        rhs.start = ahead(rhs.start, k - 1, rhs.row_stride);
        (lhs.column_stride, rhs.row_stride) = (-lhs.column_stride, -rhs.row_stride);
    }
    // SAFETY: the same elements, walked in another order.
    unsafe {
        kernel(
            m,
            n,
            k,
            dst.start,
            dst.column_stride,
            dst.row_stride,
            read_dst,
            lhs.start,
            lhs.column_stride,
            lhs.row_stride,
            rhs.start,
            rhs.column_stride,
            rhs.row_stride,
            alpha,
            beta,
            is_complex && conj_dst,
            is_complex && conj_lhs,
            is_complex && conj_rhs,
            parallelism,
        )
    }
}
