//! Several models, several threads, and weights that come and go.

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
