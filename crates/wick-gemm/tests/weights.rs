//! Products with weights that are not in memory.

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use gemm::wick::{catching, register, Product, Registration};
use gemm::{gemm, Parallelism};

const ROWS: usize = 3;
const COLUMNS: usize = 2;

/// A placeholder of zeros, and its weight.
struct Away {
    placeholder: Vec<f32>,
    registration: Option<Registration>,
}

fn away(product: Box<Product>) -> Away {
    let placeholder = vec![0f32; ROWS * COLUMNS];
    let range = placeholder.as_ptr_range();
    let addresses = range.start as usize..range.end as usize;
    Away {
        placeholder,
        registration: Some(register(addresses, [ROWS, COLUMNS], product)),
    }
}

/// `y[row] = 10 row + x[0]`.
fn numbered(x: &[f32], y: &mut [f32]) -> Result<(), String> {
    for (x, y) in x.chunks(COLUMNS).zip(y.chunks_mut(ROWS)) {
        y.iter_mut()
            .enumerate()
            .for_each(|(row, y)| *y = 10.0 * row as f32 + x[0]);
    }
    Ok(())
}

/// `x` `(m, 2)` times `w` `(n, 2)`, as candle multiplies with a linear layer's weight.
fn times(x: &[f32], w: &[f32], n: usize) -> Vec<f32> {
    let m = x.len() / COLUMNS;
    let mut y = vec![-1f32; m * n];
    let (columns, rows) = (COLUMNS as isize, n as isize);
    let (to, left, right) = (y.as_mut_ptr(), x.as_ptr(), w.as_ptr());
    // SAFETY: matrices of these sizes.
    unsafe {
        gemm(
            m,
            n,
            COLUMNS,
            to,
            1,
            rows,
            false,
            left,
            1,
            columns,
            right,
            columns,
            1,
            0.0,
            1.0,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
    y
}

#[test]
fn a_registered_weight_is_multiplied_by_who_registered_it_and_others_are_as_before() {
    let mut away = away(Box::new(numbered));
    let y = times(&[1.0, 2.0, 5.0, 6.0], &away.placeholder, ROWS);
    assert_eq!(y, [1.0, 11.0, 21.0, 5.0, 15.0, 25.0]);
    let here = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0];
    assert_eq!(times(&[1.0, 2.0], &here, ROWS), [1.0, 2.0, 3.0]);
    // The same memory is any other matrix later.
    drop(away.registration.take());
    away.placeholder.copy_from_slice(&here);
    assert_eq!(times(&[1.0, 2.0], &away.placeholder, ROWS), [1.0, 2.0, 3.0]);
}

#[test]
fn a_weight_in_part_on_the_left_or_in_f64_is_an_error() {
    let away = away(Box::new(numbered));
    let weight = &away.placeholder;
    let part = || times(&[1.0, 2.0], weight, ROWS - 1);
    let end = || times(&[1.0, 2.0], &weight[COLUMNS..], ROWS - 1);
    let left = || times(weight, &[1.0, 2.0], 1);
    for (number, product) in [&part as &dyn Fn() -> Vec<f32>, &end, &left]
        .into_iter()
        .enumerate()
    {
        let (y, reason) = catching(product);
        assert!(y.iter().all(|y| y.is_nan()), "{number}: {y:?}");
        let reason = reason.unwrap();
        let expected = if number < 2 { "in part" } else { "on the left" };
        assert!(reason.contains(expected), "{reason}");
    }
    let doubles = [0f64; 3];
    let range = doubles.as_ptr_range();
    let addresses = range.start as usize..range.end as usize;
    let _registration = register(addresses, [3, 1], Box::new(numbered));
    let mut y = [0f64; 3];
    let multiply = || {
        let (to, right) = (y.as_mut_ptr(), doubles.as_ptr());
        // SAFETY: matrices of these sizes.
        unsafe {
            gemm(
                1,
                3,
                1,
                to,
                1,
                3,
                false,
                [1f64].as_ptr(),
                1,
                1,
                right,
                1,
                1,
                0.0,
                1.0,
                false,
                false,
                false,
                Parallelism::None,
            );
        }
    };
    assert!(catching(multiply).1.unwrap().contains("as another type"));
}

#[test]
fn a_failure_is_caught_where_somebody_catches_and_a_panic_elsewhere() {
    let away = away(Box::new(|_, _| Err("the disk is gone".to_owned())));
    let multiply = || times(&[1.0, 2.0], &away.placeholder, ROWS);
    let ((y, inner), outer) = catching(|| catching(multiply));
    assert!(y.iter().all(|y| y.is_nan()));
    assert_eq!((inner.as_deref(), outer), (Some("the disk is gone"), None));
    let panic = catch_unwind(AssertUnwindSafe(multiply)).unwrap_err();
    assert_eq!(*panic.downcast::<String>().unwrap(), "the disk is gone");
    // A panic inside leaves nobody catching.
    let panics = || catching(|| panic!("as asked"));
    assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
    assert!(catch_unwind(AssertUnwindSafe(multiply)).is_err());
    assert_eq!(catching(|| 7), (7, None));
}

#[test]
fn a_product_that_fails_keeps_its_reason_on_its_own_thread() {
    let away = away(Box::new(|x, _| Err(format!("no {}", x[0]))));
    std::thread::scope(|scope| {
        for number in 0..4 {
            let weight = &away.placeholder;
            scope.spawn(move || {
                for _ in 0..100 {
                    let (_, reason) = catching(|| times(&[number as f32, 0.0], weight, ROWS));
                    assert_eq!(reason, Some(format!("no {number}")));
                }
            });
        }
    });
}

#[test]
fn what_a_product_owns_is_freed_with_its_registration() {
    let owned = Arc::new(AtomicUsize::new(0));
    let inside = owned.clone();
    let away = away(Box::new(move |_, _| {
        inside.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }));
    times(&[1.0, 2.0], &away.placeholder, ROWS);
    assert_eq!(
        (owned.load(Ordering::Relaxed), Arc::strong_count(&owned)),
        (1, 2)
    );
    drop(away);
    assert_eq!(Arc::strong_count(&owned), 1);
}

#[test]
#[should_panic(expected = "two weights at one address")]
fn an_address_is_registered_once() {
    let away = away(Box::new(numbered));
    let last = away.placeholder.last().unwrap() as *const f32 as usize;
    let _second = register(last..last + 100, [1, 1], Box::new(numbered));
}
