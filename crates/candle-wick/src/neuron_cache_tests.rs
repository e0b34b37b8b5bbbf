//! The neuron cache against a naive model: a map of contents, executed pass by pass.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

/// Slots with the neuron that really lies in each, filled as the reader would fill them.
struct Device {
    content: Vec<u32>,
}

impl Device {
    fn read(&mut self, selection: &[u32], plan: &StepPlan, pass: &Range<usize>) {
        let mut written = BTreeSet::new();
        for position in pass.clone() {
            if plan.is_miss(position) {
                assert!(
                    written.insert(plan.slot(position)),
                    "slot written twice in a pass"
                );
                self.content[plan.slot(position)] = selection[position];
            }
        }
    }
}

fn check(cache: &NeuronCache, device: &Device) {
    for (neuron, &slot) in cache.slot_of.iter().enumerate() {
        if slot != NONE {
            assert_eq!(
                cache.neuron_of[slot as usize], neuron as u32,
                "inverse maps"
            );
            assert_eq!(
                device.content[slot as usize], neuron as u32,
                "slot holds its neuron"
            );
        }
    }
    let resident = cache.slot_of.iter().filter(|slot| **slot != NONE).count();
    assert_eq!(resident, cache.used_count(), "inverse maps");
    let mut listed = BTreeSet::new();
    let (mut slot, mut seen_used) = (cache.recency.first(), false);
    while let Some(current) = slot {
        assert!(listed.insert(current), "slot listed twice");
        let used = cache.neuron_of[current as usize] != NONE;
        assert!(used || !seen_used, "free slots come first");
        seen_used |= used;
        slot = cache.recency.after(current);
    }
    assert_eq!(listed.len(), cache.slot_count());
}

/// One step as `FlashMlp` drives it: reads of later passes are issued before a pass is computed.
fn run(cache: &mut NeuronCache, device: &mut Device, step: &Step) -> usize {
    let selection: Vec<u32> = step.neurons.iter().copied().collect();
    let resident_before: BTreeSet<u32> = selection
        .iter()
        .copied()
        .filter(|n| cache.contains(*n))
        .collect();
    let plan = cache.plan(&selection, step.pass_neurons);
    let passes = plan.passes().to_vec();
    assert_eq!(passes[0].start, 0);
    assert!(passes.windows(2).all(|pair| pair[0].end == pair[1].start));
    assert_eq!(passes.last().unwrap().end, selection.len());
    if step.fails {
        device
            .content
            .iter_mut()
            .for_each(|content| *content = NONE - 1);
        for (slot, &neuron) in cache.neuron_of.iter().enumerate() {
            if neuron != NONE {
                device.content[slot] = neuron;
            }
        }
        cache.abort(plan);
        return 0;
    }
    let is_read =
        |pass: &&Range<usize>| (pass.start..pass.end).any(|position| plan.is_miss(position));
    let mut reads = passes.iter().filter(is_read);
    let ahead = |reads: &mut dyn Iterator<Item = &Range<usize>>, device: &mut Device, count| {
        let next: Vec<_> = reads.take(count).collect();
        next.iter()
            .for_each(|pass| device.read(&selection, &plan, pass));
    };
    assert!((1..=2).contains(&plan.passes_in_flight()));
    ahead(&mut reads, device, plan.passes_in_flight());
    for pass in &passes {
        assert!(pass.len() <= step.pass_neurons);
        // Its own reads are through, so one more may be on their way.
        if is_read(&pass) {
            ahead(&mut reads, device, 1);
        }
        for position in pass.clone() {
            assert_eq!(device.content[plan.slot(position)], selection[position]);
        }
    }
    if selection.len() <= cache.slot_count() {
        for (position, neuron) in selection.iter().enumerate() {
            assert_eq!(plan.is_miss(position), !resident_before.contains(neuron));
        }
    }
    let misses = plan.miss_count();
    cache.commit(&selection, plan, step.tokens, |position| {
        step.last_use(position)
    });
    misses
}

#[derive(Clone, Debug)]
struct Step {
    neurons: BTreeSet<u32>,
    tokens: usize,
    pass_neurons: usize,
    fails: bool,
}

impl Step {
    /// Some number of tokens ago, within the step.
    fn last_use(&self, position: usize) -> usize {
        (position * 7 + 3) % self.tokens
    }
}

fn steps(neuron_count: u32) -> impl Strategy<Value = Vec<Step>> {
    let step = (
        proptest::collection::btree_set(0..neuron_count, 0..neuron_count as usize + 1),
        1..4usize,
        prop_oneof![1..9usize, Just(PASS_NEURONS)],
        proptest::bool::weighted(0.1),
    )
        .prop_map(|(neurons, tokens, pass_neurons, fails)| Step {
            neurons,
            tokens,
            pass_neurons,
            fails,
        });
    proptest::collection::vec(step, 1..30)
}

proptest! {
    #[test]
    fn every_pass_computes_over_the_right_neurons(
        steps in steps(40),
        slot_count in 2..45usize,
        window_tokens in proptest::option::of(1..6usize),
    ) {
        let mut cache = NeuronCache::new(40, slot_count, window_tokens);
        let mut device = Device { content: vec![NONE - 1; slot_count] };
        for step in &steps {
            run(&mut cache, &mut device, step);
            check(&cache, &device);
        }
    }

    /// With a window, what stays is what the window's tokens used; slots for all, so that nothing else counts.
    #[test]
    fn the_window_keeps_what_its_tokens_used(steps in steps(40), window_tokens in 1..6usize) {
        let mut cache = NeuronCache::new(40, 40, Some(window_tokens));
        let mut device = Device { content: vec![NONE - 1; 40] };
        let mut used_at = std::collections::BTreeMap::<u32, usize>::new();
        let mut now = 0;
        for step in &steps {
            run(&mut cache, &mut device, step);
            if step.fails {
                continue;
            }
            now += step.tokens;
            for (position, neuron) in step.neurons.iter().enumerate() {
                used_at.insert(*neuron, now - step.last_use(position));
            }
            for neuron in 0..40 {
                let fresh = used_at.get(&neuron).is_some_and(|used| used + window_tokens > now);
                prop_assert_eq!(cache.contains(neuron), fresh, "neuron {} at {}", neuron, now);
            }
        }
    }

    /// Without a window and while selections fit, the cache is least recently used by step.
    #[test]
    fn evicts_the_oldest_use(steps in steps(24), slot_count in 24..25usize, extra in 0..8u32) {
        let capacity = slot_count - extra as usize;
        let mut cache = NeuronCache::new(24, capacity, None);
        let mut device = Device { content: vec![NONE - 1; capacity] };
        let mut last_use = std::collections::BTreeMap::<u32, usize>::new();
        for (time, step) in steps.iter().enumerate() {
            if step.neurons.len() > capacity || step.fails {
                continue;
            }
            run(&mut cache, &mut device, step);
            for neuron in &step.neurons {
                last_use.insert(*neuron, time + 1);
            }
            // Whoever is out was used no later than whoever is in.
            let oldest_in = (0..24)
                .filter(|n| cache.contains(*n))
                .filter_map(|n| last_use.get(&n))
                .min();
            let newest_out = (0..24)
                .filter(|n| !cache.contains(*n))
                .filter_map(|n| last_use.get(&n))
                .max();
            if let (Some(inside), Some(outside)) = (oldest_in, newest_out) {
                prop_assert!(outside <= inside);
            }
        }
    }
}

#[test]
fn all_slots_means_nothing_is_read_twice() {
    let mut cache = NeuronCache::new(30, 30, None);
    let mut device = Device {
        content: vec![NONE - 1; 30],
    };
    let all = Step {
        neurons: (0..30).collect(),
        tokens: 1,
        pass_neurons: 8,
        fails: false,
    };
    assert_eq!(run(&mut cache, &mut device, &all), 30);
    assert_eq!(run(&mut cache, &mut device, &all), 0);
}

#[test]
fn dense_scan_keeps_what_fits_resident() {
    let mut cache = NeuronCache::new(1000, 600, None);
    let mut device = Device {
        content: vec![NONE - 1; 600],
    };
    let all = Step {
        neurons: (0..1000).collect(),
        tokens: 1,
        pass_neurons: 256,
        fails: false,
    };
    assert_eq!(run(&mut cache, &mut device, &all), 1000);
    for _ in 0..3 {
        // 600 slots, 150 of them a ring of two halves: 450 neurons never leave.
        let misses = run(&mut cache, &mut device, &all);
        assert!(misses <= 550, "{misses}");
    }
}

#[test]
fn the_window_drops_what_its_tokens_did_not_use() {
    let mut cache = NeuronCache::new(10, 10, Some(2));
    let mut device = Device {
        content: vec![NONE - 1; 10],
    };
    let step = |neurons: &[u32]| Step {
        neurons: neurons.iter().copied().collect(),
        tokens: 1,
        pass_neurons: 8,
        fails: false,
    };
    run(&mut cache, &mut device, &step(&[1, 2]));
    run(&mut cache, &mut device, &step(&[2, 3]));
    assert!(cache.contains(1) && cache.contains(2) && cache.contains(3));
    run(&mut cache, &mut device, &step(&[3]));
    assert!(!cache.contains(1) && cache.contains(2) && cache.contains(3));
    run(&mut cache, &mut device, &step(&[4]));
    assert!(!cache.contains(2) && cache.contains(3) && cache.contains(4));
}
