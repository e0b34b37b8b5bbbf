//! Several models, several threads, and weights that come and go.

use std::sync::Mutex;

use rayon::prelude::*;

use super::*;

const NAME: &str = "llama-2-silu";

#[test]
fn two_models_and_two_threads_give_what_one_gives() {
    for slots in [None, Some(30)] {
        let (first, second) = (Stock::of(NAME), Stock::of("phi-2"));
        let expected = [&first, &second].map(|stock| {
            let (mut forward, vb) = stock.with_slots(SelectorKind::Dense, slots);
            decode(&stock.ids, |ids, at| vb.forward(|| forward(ids, at)))
        });
        let loaded = [&first, &second].map(|stock| {
            let (forward, vb) = stock.with_slots(SelectorKind::Dense, slots);
            // Two structs over one set of weights, each with a cache of its own.
            let other = (stock.build)(&stock.config, vb.sparse().unwrap()).unwrap();
            (stock, vb, [forward, other])
        });
        std::thread::scope(|scope| {
            for ((stock, vb, structs), expected) in loaded.into_iter().zip(&expected) {
                for mut forward in structs {
                    let vb = vb.clone();
                    scope.spawn(move || {
                        for _ in 0..5 {
                            let got = decode(&stock.ids, |ids, at| vb.forward(|| forward(ids, at)));
                            assert!(got == *expected, "{slots:?}");
                        }
                    });
                }
            }
        });
    }
}

#[test]
fn a_model_that_outlives_its_weights_errs_and_their_places_are_free_for_others() {
    let stock = Stock::of(NAME);
    let expected = decode(&stock.ids, stock.in_memory());
    let (mut forward, vb) = stock.with_slots(SelectorKind::Dense, None);
    vb.forward(|| forward(&stock.ids, 0)).unwrap();
    drop(vb);
    assert!(forward(&stock.ids, 0).is_err());
    drop(forward);
    // Where placeholders lay, other tensors may lie now.
    for _ in 0..3 {
        assert!(decode(&stock.ids, stock.in_memory()) == expected);
        let (mut forward, vb) = stock.with_slots(SelectorKind::Dense, None);
        let got = decode(&stock.ids, |ids, at| vb.forward(|| forward(ids, at)));
        assert!(distance(&got, &expected) < 1e-5);
    }
}

/// A thread of a pool that waits picks up other tasks of it; none of them may want the turn that it has.
#[test]
fn forwards_may_begin_in_any_pool_and_inside_of_each_other() {
    let (first, second) = (Stock::of(NAME), Stock::of("phi-2"));
    let [(forward, vb), (other, other_vb)] =
        [&first, &second].map(|stock| stock.with_slots(SelectorKind::Dense, None));
    let (forward, other) = (Mutex::new(forward), Mutex::new(other));
    let pass = || vb.forward(|| (forward.lock().unwrap())(&first.ids, 0));
    let expected = pass().unwrap();
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(3)
        .build()
        .unwrap();
    let all: Vec<Vec<f32>> =
        pool.install(|| (0..12).into_par_iter().map(|_| pass().unwrap()).collect());
    assert!(all.iter().all(|logits| *logits == expected));
    // Another model's inside of it, and its own: the innermost is part of the one around it.
    let nested = vb.forward(|| {
        let theirs = other_vb.forward(|| (other.lock().unwrap())(&second.ids, 0))?;
        Ok((pass()?, theirs))
    });
    assert!(nested.unwrap().0 == expected);
    // Around a corner it would wait for itself.
    let error = vb
        .forward(|| other_vb.forward(pass))
        .unwrap_err()
        .to_string();
    assert!(error.contains("inside of another one"), "{error}");
    assert!(pass().unwrap() == expected);
}

#[test]
fn structs_may_be_built_at_once() {
    let stock = Stock::of(NAME);
    let expected = decode(&stock.ids, stock.in_memory());
    let placement = stock.placement(SelectorKind::Dense, None);
    let vb = FlashVarBuilder::new(&stock.folder, placement);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let (vb, stock, expected) = (vb.clone(), &stock, &expected);
            scope.spawn(move || {
                let mut forward = (stock.build)(&stock.config, vb.sparse().unwrap()).unwrap();
                let got = decode(&stock.ids, |ids, at| vb.forward(|| forward(ids, at)));
                assert!(distance(&got, expected) < 1e-5);
            });
        }
    });
    // In a pool, where a thread that loads and waits could begin the next one's loading.
    for _ in 0..8 {
        let placement = stock.placement(SelectorKind::Dense, Some(30));
        let vb = FlashVarBuilder::new(&stock.folder, placement);
        (0..8).into_par_iter().for_each(|_| {
            let built = (stock.build)(&stock.config, vb.sparse().unwrap());
            assert!(built.is_ok());
        });
    }
}
