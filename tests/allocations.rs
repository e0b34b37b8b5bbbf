//! A token's way through an FFN allocates nothing, once buffers have grown: counted over the whole process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_wick::{
    Activation, CachePolicy, Engine, FlashFolder, FlashMlp, FlashVarBuilder, IoOptions, Placement,
    SelectorKind,
};
use candle_wick_convert::synthetic::{synthesise, Geometry, SyntheticOptions};
use wick_format::{Dtype, Layout as StoredLayout};

/// The system's allocator, with a count.
struct Counting;

static COUNT: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is left to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise is the one `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const HIDDEN: usize = 768;
const FFN: usize = 3072;

/// The same tokens, from a cold cache.
fn decode(mlp: &FlashMlp, inputs: &[Vec<f32>], y: &mut [f32]) {
    mlp.clear_neuron_cache();
    for x in inputs {
        mlp.forward_rows(x, y).unwrap();
    }
}

#[test]
fn decoding_allocates_nothing() {
    let out = tempfile::tempdir().unwrap();
    let geometry = Geometry::find("opt-125m").unwrap();
    let options = SyntheticOptions {
        dtype: Dtype::F16,
        layout: StoredLayout::Both,
        layers: Some(1),
        seed: 1,
    };
    synthesise(geometry, out.path(), &options, &|_| {}).unwrap();
    let wave = |token: usize| (0..HIDDEN).map(move |i| ((token * 31 + i) as f32 * 0.7).sin());
    let inputs: Vec<Vec<f32>> = (0..40).map(|token| wave(token).collect()).collect();
    let mut y = vec![0.0; HIDDEN];
    for engine in [Engine::Pool, Engine::Uring] {
        let io = IoOptions {
            engine,
            ..IoOptions::default()
        };
        let folder = FlashFolder::open(out.path(), io).unwrap();
        // All fits; misses all the time, by each policy; more selected than slots; everything streamed.
        let (lru, lfu) = (CachePolicy::Lru, CachePolicy::Lfu);
        for (selector, slots, cache_policy, window_tokens) in [
            (SelectorKind::LowRank, FFN, lru, None),
            (SelectorKind::LowRank, 600, lru, None),
            (SelectorKind::LowRank, 600, lfu, None),
            (SelectorKind::LowRank, FFN, lru, Some(2)),
            (SelectorKind::LowRank, 100, lfu, None),
            (SelectorKind::LowRank, 100, lru, None),
            (SelectorKind::Dense, 256, lru, None),
            (SelectorKind::Dip, 700, lfu, None),
            (SelectorKind::Dip, 100, lru, None),
            (SelectorKind::DipCa, 600, lfu, None),
        ] {
            let placement = Placement {
                slots_per_layer: vec![slots],
                channel_slots_per_layer: vec![slots / 2],
                cache_policy,
                window_tokens,
                ..Placement::resident(&folder, selector)
            };
            let vb = FlashVarBuilder::new(&folder, placement);
            let at = vb.pp("model").pp("decoder").pp("layers").pp(0);
            let mlp = FlashMlp::load(HIDDEN, FFN, Activation::Relu, at).unwrap();
            // Handing work to the pool from outside would allocate in rayon's queue.
            let count = rayon::scope(|_| {
                decode(&mlp, &inputs, &mut y);
                decode(&mlp, &inputs, &mut y);
                let before = COUNT.load(Ordering::Relaxed);
                decode(&mlp, &inputs, &mut y);
                COUNT.load(Ordering::Relaxed) - before
            });
            let stats = vb.ffn_stats()[0];
            assert!(stats.misses > 0 && stats.active > 0, "{stats:?}");
            assert_eq!(
                count, 0,
                "{engine}, {selector}, {slots} slots, {cache_policy}"
            );
        }
    }
}
