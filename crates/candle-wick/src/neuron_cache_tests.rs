//! The neuron cache against a naive model: a map of contents, executed pass by pass.

use std::collections::{BTreeMap, BTreeSet};

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
    let ranks = cache.order.ranks();
    for list in 0..ranks.end {
        let mut slot = cache.order.first(list);
        while let Some(current) = slot {
            assert!(listed.insert(current), "slot listed twice");
            let used = cache.neuron_of[current as usize] != NONE;
            assert_eq!(
                used,
                ranks.contains(&list),
                "free slots have a list of their own"
            );
            slot = cache.order.next(current);
        }
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
    ahead(&mut reads, device, PASSES_IN_FLIGHT);
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
        step.used_by(position)
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
    /// Some of the step's tokens.
    fn used_by(&self, position: usize) -> u128 {
        1 + (position as u128 * 7 + 3) % ((1 << self.tokens) - 1)
    }

    /// How many tokens ago the last of them was.
    fn last_use(&self, position: usize) -> usize {
        let mut newest = self.tokens - 1;
        while self.used_by(position) >> newest & 1 == 0 {
            newest -= 1;
        }
        self.tokens - 1 - newest
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

/// What a cache holds, kept by the definition of its policy alone: everything is looked through for each decision.
struct Naive {
    policy: CachePolicy,
    window_tokens: Option<usize>,
    slot_count: usize,
    /// When each resident neuron was used: token count, and place in the order of uses.
    residents: BTreeMap<u32, (usize, usize)>,
    counts: BTreeMap<u32, u32>,
    now: usize,
    places: usize,
    halved_at: usize,
}

impl Naive {
    fn new(policy: CachePolicy, window_tokens: Option<usize>, slot_count: usize) -> Self {
        Self {
            policy,
            window_tokens,
            slot_count,
            residents: BTreeMap::new(),
            counts: BTreeMap::new(),
            now: 0,
            places: 0,
            halved_at: 0,
        }
    }

    /// Small for those who leave first.
    fn worth(&self, neuron: u32) -> (u32, usize) {
        let place = self.residents[&neuron].1;
        match self.policy {
            CachePolicy::Lru => (0, place),
            CachePolicy::Lfu => (self.counts[&neuron], place),
        }
    }

    fn run(&mut self, step: &Step) {
        let is_hit = |n: &u32| self.residents.contains_key(n);
        let (hits, misses): (Vec<u32>, Vec<u32>) = step.neurons.iter().partition(|n| is_hit(n));
        while self.residents.len() + misses.len() > self.slot_count {
            let others = self.residents.keys().copied();
            let others = others.filter(|n| !step.neurons.contains(n));
            let worst = others.min_by_key(|n| self.worth(*n)).unwrap();
            self.residents.remove(&worst);
        }
        self.now += step.tokens;
        // What one step uses is used at once: hits touch their slots first, counting comes last.
        let order: Vec<u32> = match self.policy {
            CachePolicy::Lru => hits.into_iter().chain(misses).collect(),
            CachePolicy::Lfu => step.neurons.iter().copied().collect(),
        };
        for neuron in order {
            let position = step.neurons.iter().position(|n| *n == neuron).unwrap();
            self.places += 1;
            let used_at = self.now - step.last_use(position);
            self.residents.insert(neuron, (used_at, self.places));
            let count = self.counts.entry(neuron).or_default();
            *count = (*count + step.used_by(position).count_ones()).min(255);
        }
        if let Some(window) = self.window_tokens {
            let now = self.now;
            self.residents.retain(|_, used| used.0 + window > now);
        }
        if self.now - self.halved_at >= 128 {
            self.halve();
        }
    }

    /// Halves the counts; who was worth less before still is.
    fn halve(&mut self) {
        self.halved_at = self.now;
        let mut in_order: Vec<u32> = self.residents.keys().copied().collect();
        in_order.sort_by_key(|n| self.worth(*n));
        if self.policy == CachePolicy::Lfu {
            for neuron in in_order {
                self.places += 1;
                self.residents.get_mut(&neuron).unwrap().1 = self.places;
            }
        }
        self.counts.values_mut().for_each(|count| *count /= 2);
    }
}

fn policies() -> impl Strategy<Value = CachePolicy> {
    prop_oneof![Just(CachePolicy::Lru), Just(CachePolicy::Lfu)]
}

proptest! {
    #[test]
    fn every_pass_computes_over_the_right_neurons(
        steps in steps(40),
        slot_count in 2..45usize,
        policy in policies(),
        window_tokens in proptest::option::of(1..6usize),
    ) {
        let mut cache = NeuronCache::new(40, slot_count, policy, window_tokens);
        let mut device = Device { content: vec![NONE - 1; slot_count] };
        for step in &steps {
            run(&mut cache, &mut device, step);
            check(&cache, &device);
        }
    }

    /// While selections fit, residents are exactly those that the policy's definition keeps. Steps come again and
    /// again, so that counts grow and are halved.
    #[test]
    fn a_policy_keeps_whom_its_definition_keeps(
        steps in steps(40),
        slot_count in 20..41usize,
        policy in policies(),
        window_tokens in proptest::option::weighted(0.3, 1..20usize),
    ) {
        let mut cache = NeuronCache::new(40, slot_count, policy, window_tokens);
        let mut device = Device { content: vec![NONE - 1; slot_count] };
        let mut naive = Naive::new(policy, window_tokens, slot_count);
        let fits = |step: &&Step| step.neurons.len() <= slot_count && !step.fails;
        for step in steps.iter().cycle().filter(fits).take(300.min(30 * steps.iter().filter(fits).count())) {
            let expected = step.neurons.iter().filter(|n| !naive.residents.contains_key(n)).count();
            prop_assert_eq!(run(&mut cache, &mut device, step), expected);
            naive.run(step);
            let kept: Vec<u32> = naive.residents.keys().copied().collect();
            let residents: Vec<u32> = (0..40).filter(|n| cache.contains(*n)).collect();
            prop_assert_eq!(residents, kept);
        }
    }

    /// With a window, what stays is what the window's tokens used; slots for all, so that nothing else counts.
    #[test]
    fn the_window_keeps_what_its_tokens_used(steps in steps(40), window_tokens in 1..6usize) {
        let mut cache = NeuronCache::new(40, 40, CachePolicy::Lru, Some(window_tokens));
        let mut device = Device { content: vec![NONE - 1; 40] };
        let mut used_at = BTreeMap::<u32, usize>::new();
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
}

#[test]
fn all_slots_means_nothing_is_read_twice() {
    let mut cache = NeuronCache::new(30, 30, CachePolicy::Lru, None);
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
    let mut cache = NeuronCache::new(1000, 600, CachePolicy::Lru, None);
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
    let mut cache = NeuronCache::new(10, 10, CachePolicy::Lru, Some(2));
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

/// Books that are cleared while a step is on its way, as anybody may do who has the layer.
#[test]
fn a_plan_from_before_a_clear_leaves_nothing_behind() {
    for policy in CachePolicy::ALL {
        for fails in [false, true] {
            let mut cache = NeuronCache::new(40, 12, policy, None);
            let mut device = Device {
                content: vec![NONE - 1; 12],
            };
            for turn in 0..6u32 {
                let step = |first: u32| Step {
                    neurons: (first..first + 9).collect(),
                    tokens: 1,
                    pass_neurons: 4,
                    fails: false,
                };
                run(&mut cache, &mut device, &step(3 * turn));
                let selection: Vec<u32> = (3 * turn..3 * turn + 9).collect();
                let plan = cache.plan(&selection, 4);
                cache.clear();
                match fails {
                    true => cache.abort(plan),
                    false => cache.commit(&selection, plan, 1, |_| 1),
                }
                assert_eq!(cache.used_count(), 0);
                check(&cache, &device);
                // Every slot can still be had.
                run(&mut cache, &mut device, &step(20));
                check(&cache, &device);
            }
        }
    }
}

#[test]
fn a_window_longer_than_any_text_drops_nothing() {
    let mut cache = NeuronCache::new(40, 40, CachePolicy::Lru, Some(usize::MAX));
    for first in 0..20 {
        let selection = [first, first + 1];
        let plan = cache.plan(&selection, 4);
        cache.commit(&selection, plan, 1, |_| 1);
    }
    assert_eq!(cache.used_count(), 21);
}
