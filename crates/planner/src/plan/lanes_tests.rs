use super::*;

fn lanes(count: u32) -> Lanes {
    Lanes::new(NonZeroU32::new(count).unwrap())
}

/// Values whose sums depend on their order.
fn value(lane: u32, micro_batch: u32) -> f32 {
    let mixed = (u64::from(lane) * 64 + u64::from(micro_batch) + 1) * 0x9e37_79b9_7f4a_7c15;
    (mixed >> 40) as f32 * 10f32.powi((mixed >> 32) as i32 % 7)
}

fn lane(lane: u32, of_lane: u32) -> f32 {
    (1..of_lane).fold(value(lane, 0), |sum, at| sum + value(lane, at))
}

/// The tree by its definition.
fn tree(sum: LaneSum, of_lane: u32) -> f32 {
    match sum.halves() {
        None => lane(sum.first, of_lane),
        Some([left, right]) => tree(left, of_lane) + tree(right, of_lane),
    }
}

/// The largest sums of the tree that lie within some lanes, in order.
fn sums_within(lanes: Lanes, within: Range<u32>) -> Vec<LaneSum> {
    let mut found = Vec::new();
    let mut left = vec![lanes.root()];
    while let Some(sum) = left.pop() {
        if within.start <= sum.first && sum.end <= within.end {
            found.push(sum);
        } else if sum.end > within.start && within.end > sum.first {
            left.extend(sum.halves().into_iter().flatten().rev());
        }
    }
    found
}

/// Runs a schedule on one number.
fn run(plan: &LaneSchedule, memory: &mut Vec<f32>) {
    memory.resize(memory.len().max(plan.slots + 1), f32::NAN);
    for step in &plan.steps {
        let mut sum = value(step.lane, step.of_lane);
        if !step.begins() {
            sum += memory[step.slot];
        }
        match &step.ends {
            None => memory[step.slot] = sum,
            Some(end) => {
                for &at in &end.adds {
                    sum += memory[at];
                }
                memory[end.into] = sum;
            }
        }
    }
    assert!(memory[plan.slots].is_nan(), "memory beyond the slots that were planned");
}

/// Adds sums in the order of lanes.
fn join(lanes: Lanes, mut given: Vec<(LaneSum, f32)>) -> f32 {
    given.sort_by_key(|(sum, _)| *sum);
    let merges = lanes.merges(given.iter().map(|(sum, _)| *sum));
    let mut held = Vec::new();
    for ((_, mut sum), merges) in given.into_iter().zip(merges) {
        for _ in 0..merges {
            sum += held.pop().unwrap();
        }
        held.push(sum);
    }
    assert_eq!(held.len(), 1);
    held[0]
}

fn given(plan: &LaneSchedule, memory: &[f32]) -> Vec<(LaneSum, f32)> {
    let sums = plan.sums.iter().enumerate();
    sums.filter_map(|(slot, sum)| Some(((*sum)?, memory[slot]))).collect()
}

#[test]
fn any_number_of_ranks_has_the_bits_of_one() {
    for count in (1..34).chain([48, 64, 100]) {
        for of_lane in [1, 3] {
            let lanes = lanes(count);
            let expected = tree(lanes.root(), of_lane);
            for world in 1..=count as usize {
                let mut all = Vec::new();
                let mut micro_steps = 0;
                for rank in 0..world {
                    let plan = lanes.of_window(rank, world, of_lane);
                    let mut memory = Vec::new();
                    run(&plan, &mut memory);
                    micro_steps += plan.steps.len();
                    let given = given(&plan, &memory);
                    let sums: Vec<_> = given.iter().map(|(sum, _)| *sum).collect();
                    let mut sorted = sums.clone();
                    sorted.sort();
                    assert_eq!(sorted, sums_within(lanes, lanes.of_rank(rank, world)));
                    all.extend(given);
                }
                assert_eq!(micro_steps, (count * of_lane) as usize);
                let contributions = lanes.contributions(world);
                assert_eq!(contributions.len(), all.len());
                if lanes.is_tree_of_ranks(world) {
                    assert_eq!(contributions.len(), world);
                }
                assert_eq!(join(lanes, all).to_bits(), expected.to_bits(), "{count} on {world}");
            }
        }
    }
}

#[test]
fn one_rank_holds_as_many_sums_as_the_count_has_digits() {
    for (count, world, given, held) in
        [(8, 1, 1, 3), (8, 2, 1, 2), (8, 8, 1, 1), (12, 1, 1, 3), (12, 5, 2, 2), (64, 4, 1, 4)]
    {
        assert_eq!(lanes(count).most(world, 1), [given, held], "{count} lanes on {world}");
    }
    // A lane of several micro-batches lies beside the sums of those before it.
    assert_eq!(lanes(8).most(1, 2), [1, 4]);
    assert_eq!(lanes(8).most(8, 2), [1, 1]);
}

#[test]
fn a_window_that_goes_on_elsewhere_has_the_same_bits() {
    for count in [4u32, 6, 8, 12] {
        let (lanes, of_lane) = (lanes(count), 2);
        let expected = tree(lanes.root(), of_lane).to_bits();
        for (before, after, done) in [(4, 3, 1), (4, 1, 1), (4, 1, 2), (1, 4, 3), (2, 3, 3)] {
            // Some micro-steps at the first number of ranks.
            let (mut sums, mut open) = (Vec::new(), Vec::new());
            for rank in 0..before {
                let mut plan = lanes.of_window(rank, before, of_lane);
                let rest = plan.steps.split_off(done.min(plan.steps.len()));
                let mut memory = Vec::new();
                run(&plan, &mut memory);
                let (held, begun) = plan.held_after(plan.steps.len());
                let held = held.iter().enumerate();
                sums.extend(held.filter_map(|(at, sum)| Some(((*sum)?, memory[at]))));
                let begun = begun.into_iter();
                open.extend(begun.map(|lane| (lane, memory[lane.slot.unwrap()])));
                let rest = rest.iter().filter(|step| step.begins());
                let whole = |lane| OpenLane { lane, done: 0, slot: None };
                open.extend(rest.map(|step| (whole(step.lane), f32::NAN)));
            }
            open.sort_by_key(|(open, _)| open.lane);
            // The others, and what there is, at the second.
            let mut all = Vec::new();
            for rank in 0..after {
                let share = |of: usize| of * rank / after..of * (rank + 1) / after;
                let mut memory: Vec<f32> = Vec::new();
                let mut held = Vec::new();
                for (sum, value) in &sums[share(sums.len())] {
                    held.push(Some(*sum));
                    memory.push(*value);
                }
                let mut mine = Vec::new();
                for (lane, value) in &open[share(open.len())] {
                    let slot = (lane.done > 0).then(|| {
                        memory.push(*value);
                        memory.len() - 1
                    });
                    mine.push(OpenLane { slot, ..*lane });
                }
                let plan = lanes.schedule(mine, of_lane, held);
                run(&plan, &mut memory);
                all.extend(given(&plan, &memory));
            }
            assert_eq!(join(lanes, all).to_bits(), expected, "{count}: {before} to {after}");
        }
    }
}

#[test]
fn sums_above_are_those_of_the_tree() {
    let six = lanes(6);
    let sum = |first, end| LaneSum { first, end };
    assert_eq!(six.above(sum(4, 6)), Some([sum(0, 6), sum(0, 4)]));
    assert_eq!(six.above(sum(4, 5)), Some([sum(4, 6), sum(5, 6)]));
    assert_eq!(six.above(sum(0, 6)), None);
    assert_eq!(six.above(sum(1, 3)), None);
    assert_eq!(six.merges([sum(0, 4), sum(4, 5), sum(5, 6)]), [0, 0, 2]);
}
