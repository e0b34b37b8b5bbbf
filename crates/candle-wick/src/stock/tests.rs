//! Trouble that no file and no model can be made to cause.

use std::sync::mpsc;
use std::sync::Arc;
use std::time::Duration;

use candle::{DType, Tensor};

use super::buffer::without_values;
use super::source::StockSource;
use super::store::Store;
use super::unit::{StreamedMatrix, Unit};
use super::ExpertPolicy;
use crate::io_options::IoOptions;

const DENSE: bool = false;
const EXPERT: bool = true;

/// A store over matrices `0`, `1`.. of 8 values each, all of them their number, with room for `room` of each kind;
/// matrix `broken` has a buffer that is too short for it.
fn store(kinds: &[bool], room: u64, policy: ExpertPolicy, broken: Option<usize>) -> Store {
    let count = kinds.len();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let tensor = |index: usize| {
        let tensor = Tensor::full(index as f32, (2, 4), &candle::Device::Cpu);
        (index.to_string(), tensor.unwrap())
    };
    let tensors = (0..count).map(tensor).collect();
    candle::safetensors::save(&tensors, &path).unwrap();
    let source = Arc::new(StockSource::open(&path, IoOptions::default()).unwrap());
    let units = (0..count).map(|index| {
        let len = if broken == Some(index) { 7 } else { 8 };
        Unit {
            extents: vec![source.extents(&[&index.to_string()]).unwrap()],
            sizes: vec![(DType::F32, len)],
            is_expert: kinds[index],
        }
    });
    let units = units.collect();
    let matrices = (0..count).map(|index| StreamedMatrix {
        name: index.to_string(),
        tensor: without_values(DType::F32, (2, 4).into()).unwrap(),
        unit: index,
        member: 0,
    });
    let matrices = matrices.collect();
    Store::new(source, units, matrices, room * 32, room * 32, policy).unwrap()
}

fn values(store: &Store, index: usize) -> Option<Vec<f32>> {
    let tensor = store.shared().placeholder(index);
    tensor.flatten_all().unwrap().to_vec1().ok()
}

/// The outcome of `run`, which must come within a few seconds.
fn soon<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || sender.send(run()));
    receiver
        .recv_timeout(Duration::from_secs(20))
        .expect("hangs or panics")
}

#[test]
fn a_loader_that_panics_is_an_error_and_the_next_unit_is_loaded_all_the_same() {
    soon(|| {
        let store = store(&[DENSE; 2], 1, ExpertPolicy::Lfu, Some(0));
        for _ in 0..3 {
            store.shared().enter(0);
            assert_eq!(values(&store, 0), None);
            store.shared().exit(0);
            let error = store.shared().take_error().unwrap().to_string();
            assert!(error.contains("panicked"), "{error}");
            store.shared().enter(1);
            assert_eq!(values(&store, 1), Some(vec![1.0; 8]));
            store.shared().exit(1);
            assert_eq!(values(&store, 1), None);
            assert!(store.shared().take_error().is_none());
        }
    });
}

#[test]
fn a_span_inside_a_span_is_an_error_where_there_is_no_room_and_does_not_wait_for_itself() {
    for kind in [DENSE, EXPERT] {
        soon(move || {
            let store = store(&[kind; 3], 1, ExpertPolicy::Window, None);
            let shared = store.shared();
            shared.enter(0);
            shared.enter(0);
            shared.enter(1);
            assert_eq!(
                (values(&store, 0), values(&store, 1)),
                (Some(vec![0.0; 8]), None)
            );
            assert!(shared.take_error().unwrap().to_string().contains("no room"));
            shared.exit(1);
            shared.exit(0);
            assert_eq!(values(&store, 0), Some(vec![0.0; 8]));
            shared.exit(0);
            shared.enter(1);
            assert_eq!(
                (values(&store, 0), values(&store, 1)),
                (None, Some(vec![1.0; 8]))
            );
            shared.exit(1);
            assert!(shared.take_error().is_none());
        });
    }
}

/// Threads in each other's way, all of them with room for one matrix in all.
#[test]
fn many_threads_get_the_right_values_of_a_pool_for_one() {
    for kind in [DENSE, EXPERT] {
        soon(move || {
            let store = store(&[kind; 5], 1, ExpertPolicy::Lfu, None);
            std::thread::scope(|scope| {
                for thread in 0..4 {
                    let store = &store;
                    scope.spawn(move || {
                        for turn in 0..200 {
                            let index = (turn * (thread + 1)) % 5;
                            store.shared().enter(index);
                            assert_eq!(values(store, index), Some(vec![index as f32; 8]));
                            store.shared().exit(index);
                        }
                    });
                }
            });
            assert!(store.shared().take_error().is_none());
            assert!((0..5).all(|index| values(&store, index).is_none()));
        });
    }
}

/// Random walks over dense units and an expert: read-ahead follows what it learnt and always ends.
#[test]
fn reading_ahead_ends_whatever_the_order() {
    soon(|| {
        let mut random = 1u64;
        for room in [1, 2, 3, 4, 9] {
            let store = store(&[DENSE; 4], room, ExpertPolicy::Lfu, None);
            for turn in 0..300usize {
                random = random.wrapping_mul(6364136223846793005).wrapping_add(1);
                let is_round = turn % 100 < 60;
                let index = if is_round {
                    turn % 4
                } else {
                    (random >> 60) as usize % 4
                };
                store.shared().enter(index);
                assert_eq!(values(&store, index), Some(vec![index as f32; 8]));
                store.shared().exit(index);
            }
        }
    });
}

/// All dense units fit into their pool, so none is left to read ahead when an expert is entered.
#[test]
fn an_expert_after_dense_units_that_are_all_loaded() {
    soon(|| {
        for dense in [2, 3] {
            let mut kinds = vec![DENSE; dense];
            kinds.push(EXPERT);
            let store = store(&kinds, dense as u64, ExpertPolicy::Lfu, None);
            for index in (0..kinds.len()).cycle().take(20) {
                store.shared().enter(index);
                assert_eq!(values(&store, index), Some(vec![index as f32; 8]));
                store.shared().exit(index);
            }
        }
    });
}

/// The cache as it is described, over the whole history.
fn naive_misses(uses: &[usize], room: usize, policy: ExpertPolicy) -> u64 {
    let mut cached: Vec<usize> = Vec::new();
    let mut misses = 0;
    for (now, wanted) in uses.iter().enumerate() {
        if cached.contains(wanted) {
            continue;
        }
        misses += 1;
        if cached.len() == room {
            let last = |unit: usize| uses[..now].iter().rposition(|used| *used == unit);
            let times = |unit: usize| uses[..now].iter().filter(|used| **used == unit).count();
            let victim = cached.iter().copied().min_by_key(|&unit| match policy {
                ExpertPolicy::Lfu => (times(unit), last(unit)),
                ExpertPolicy::Window => (0, last(unit)),
            });
            cached.retain(|unit| Some(*unit) != victim);
        }
        cached.push(*wanted);
    }
    misses
}

#[test]
fn experts_leave_as_their_policy_says() {
    let mut random = 7u64;
    let uses = (0..400).map(|_| {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1);
        let (a, b) = ((random >> 61) as usize, (random >> 58) as usize % 8);
        a.min(b) // some more often than others
    });
    let uses: Vec<usize> = uses.collect();
    for policy in [ExpertPolicy::Lfu, ExpertPolicy::Window] {
        for room in [1, 2, 3, 5, 8] {
            let store = store(&[EXPERT; 8], room, policy, None);
            for &index in &uses {
                store.shared().enter(index);
                store.shared().exit(index);
            }
            let stats = store.shared().stats();
            let expected = naive_misses(&uses, room as usize, policy);
            assert_eq!(
                (stats.uses, stats.misses, stats.loads),
                (400, expected, expected)
            );
        }
    }
}
