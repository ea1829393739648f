//! Every order in which ranks give gradients and calls come to pass, for the real rule and for
//! known mistakes.
//!
//! Two ranks run two steps of three gradients in three buckets. A world of calls is simulated: call
//! `k` comes to pass when every rank has started its `k`-th bucket, and adds what the buckets hold
//! at that moment. All interleavings are walked through.

use std::collections::HashSet;

use super::Ready;

const RANKS: usize = 2;
const STEPS: usize = 2;
/// The bucket of each gradient; the last bucket has two.
const BUCKET_OF: [usize; 4] = [0, 1, 2, 2];
const BUCKETS: usize = 3;

/// A mistake that some program of this kind has made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Bug {
    None,
    /// A bucket starts with the first of its gradients.
    StartsTooEarly,
    /// Buckets start in the order in which they become full, which ranks do not share.
    StartsInOwnOrder,
    /// What was given in one step still counts in the next.
    ForgetsToCountAgain,
    /// Results are read when the calls have been started, not when they are through.
    ReadsBeforeTheEnd,
    /// The last bucket is started only if it is full.
    LeavesOutTheLast,
    /// The next step writes into buckets of calls that are not through.
    WritesIntoFlight,
    /// All buckets start after the last gradient.
    NeverOverlaps,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Rank {
    ready: Ready,
    /// Steps and gradients of the step under way that are done.
    step: usize,
    at: usize,
    /// Whether the step's gradients are all given and it waits for its calls.
    waits: bool,
    memory: [u64; BUCKETS],
    /// Buckets in the order they were started in this run, and those of them that are through.
    calls: Vec<usize>,
    through: usize,
    first_call_of_step: usize,
    own_order: Vec<bool>,
    results: Vec<[u64; BUCKETS]>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    bug: Bug,
    ranks: [Rank; RANKS],
}

/// What a gradient is worth, so that every wrong sum is another number.
fn value(rank: usize, step: usize, gradient: usize) -> u64 {
    1 << (8 * (step * RANKS + rank) + gradient)
}

/// The order in which a rank's gradients become ready: not the same on all.
fn order(rank: usize) -> [usize; 4] {
    [[0, 1, 2, 3], [1, 0, 3, 2]][rank]
}

/// Whether a rank gives this gradient at all: the second has none of the last one in the second
/// step.
fn gives(rank: usize, step: usize, gradient: usize) -> bool {
    (rank, step, gradient) != (1, 1, 3)
}

fn expected(step: usize) -> [u64; BUCKETS] {
    let mut sums = [0; BUCKETS];
    for rank in 0..RANKS {
        for (gradient, &bucket) in BUCKET_OF.iter().enumerate() {
            if gives(rank, step, gradient) {
                sums[bucket] += value(rank, step, gradient);
            }
        }
    }
    sums
}

impl World {
    fn new(bug: Bug) -> Self {
        let rank = Rank {
            ready: Ready::new(vec![1, 1, 2]),
            step: 0,
            at: 0,
            waits: false,
            memory: [0; BUCKETS],
            calls: Vec::new(),
            through: 0,
            first_call_of_step: 0,
            own_order: vec![false; BUCKETS],
            results: Vec::new(),
        };
        Self { bug, ranks: [rank.clone(), rank] }
    }

    fn start(rank: &mut Rank, bucket: usize) {
        rank.calls.push(bucket);
        rank.ready.start();
    }

    /// Buckets that the rule starts after a gradient of `bucket`.
    fn start_full(bug: Bug, rank: &mut Rank, bucket: usize) {
        match bug {
            Bug::NeverOverlaps => {}
            Bug::StartsInOwnOrder => {
                let mut alone = rank.ready.clone();
                while alone.started() < bucket {
                    alone.start();
                }
                if alone.full() == Some(bucket) && !rank.own_order[bucket] {
                    rank.own_order[bucket] = true;
                    rank.calls.push(bucket);
                }
            }
            Bug::StartsTooEarly => {
                while rank.ready.rest().is_some_and(|next| next <= bucket) {
                    let next = rank.ready.started();
                    Self::start(rank, next);
                }
            }
            _ => {
                while let Some(next) = rank.ready.full() {
                    Self::start(rank, next);
                }
            }
        }
    }

    /// Lets a rank give its next gradient, end its backward pass or read its results; `None` if it
    /// has to wait.
    fn advance(&self, index: usize) -> Option<World> {
        let mut world = self.clone();
        let (bug, rank) = (self.bug, &mut world.ranks[index]);
        if rank.step == STEPS {
            return None;
        }
        if rank.waits {
            let through = rank.through == rank.calls.len();
            if !through && !matches!(bug, Bug::ReadsBeforeTheEnd | Bug::WritesIntoFlight) {
                return None;
            }
            if bug == Bug::WritesIntoFlight && rank.through == rank.first_call_of_step {
                return None;
            }
            rank.results.push(rank.memory);
            rank.first_call_of_step = rank.calls.len();
            rank.step += 1;
            (rank.at, rank.waits) = (0, false);
            rank.memory = [0; BUCKETS];
            rank.own_order = vec![false; BUCKETS];
            match bug {
                Bug::ForgetsToCountAgain => {
                    let counted = rank.ready.clone();
                    rank.ready.again();
                    for (gradient, &bucket) in BUCKET_OF.iter().enumerate() {
                        if gradient == 0 && counted.rest().is_none() {
                            rank.ready.given(bucket);
                        }
                    }
                }
                _ => rank.ready.again(),
            }
            return Some(world);
        }
        let Some(&gradient) = order(index).get(rank.at) else {
            match bug {
                Bug::StartsInOwnOrder => {
                    for bucket in 0..BUCKETS {
                        if !rank.own_order[bucket] {
                            rank.calls.push(bucket);
                        }
                    }
                }
                Bug::LeavesOutTheLast => {}
                _ => {
                    while let Some(next) = rank.ready.rest() {
                        Self::start(rank, next);
                    }
                }
            }
            rank.waits = true;
            return Some(world);
        };
        rank.at += 1;
        if gives(index, rank.step, gradient) {
            let bucket = BUCKET_OF[gradient];
            if bug == Bug::ForgetsToCountAgain && bucket == 0 {
                Self::start_full(bug, rank, bucket);
            }
            rank.memory[bucket] += value(index, rank.step, gradient);
            rank.ready.given(bucket);
            Self::start_full(bug, rank, bucket);
        }
        Some(world)
    }

    /// Lets the next call come to pass, if all ranks have started it.
    fn call(&self) -> Option<Result<World, String>> {
        let at = self.ranks[0].through;
        let [first, second] = [0, 1].map(|rank| self.ranks[rank].calls.get(at).copied());
        let (first, second) = (first?, second?);
        if first != second {
            return Some(Err(format!("call {at}: bucket {first} on rank 0, {second} on rank 1")));
        }
        let mut world = self.clone();
        let sum = self.ranks.iter().map(|rank| rank.memory[first]).sum();
        for rank in &mut world.ranks {
            rank.memory[first] = sum;
            rank.through += 1;
        }
        Some(Ok(world))
    }

    fn check_end(&self) -> Result<(), String> {
        for (index, rank) in self.ranks.iter().enumerate() {
            if rank.step < STEPS {
                return Err(format!("rank {index} waits for ever in step {}", rank.step));
            }
            for (step, result) in rank.results.iter().enumerate() {
                if *result != expected(step) {
                    return Err(format!("rank {index}, step {step}: {result:?}"));
                }
            }
        }
        Ok(())
    }
}

/// What walking through all interleavings has found.
#[derive(Debug, Default)]
struct Walk {
    worlds: usize,
    ends: usize,
    /// Whether in some interleaving a call came to pass before a step's last gradient.
    overlapped: bool,
    wrong: Option<String>,
}

fn walk(bug: Bug) -> Walk {
    let mut found = Walk::default();
    let mut seen = HashSet::new();
    let mut open = vec![World::new(bug)];
    while let Some(world) = open.pop() {
        if !seen.insert(world.clone()) {
            continue;
        }
        found.worlds += 1;
        let mut next: Vec<World> = (0..RANKS).filter_map(|rank| world.advance(rank)).collect();
        match world.call() {
            Some(Ok(after)) => {
                let busy = |rank: &Rank| !rank.waits && rank.at < BUCKET_OF.len();
                found.overlapped |= world.ranks.iter().all(|rank| rank.step == 0 && busy(rank));
                next.push(after);
            }
            Some(Err(why)) => {
                found.wrong = Some(why);
                return found;
            }
            None => {}
        }
        if next.is_empty() {
            found.ends += 1;
            if let Err(why) = world.check_end() {
                found.wrong = Some(why);
                return found;
            }
        }
        open.append(&mut next);
    }
    found
}

#[test]
fn no_interleaving_changes_a_sum_or_waits_for_ever() {
    let found = walk(Bug::None);
    assert_eq!(found.wrong, None);
    assert!(found.overlapped && found.ends > 0 && found.worlds > 50, "{found:?}");
}

#[test]
fn every_known_mistake_is_found() {
    for bug in [
        Bug::StartsTooEarly,
        Bug::StartsInOwnOrder,
        Bug::ForgetsToCountAgain,
        Bug::ReadsBeforeTheEnd,
        Bug::LeavesOutTheLast,
        Bug::WritesIntoFlight,
    ] {
        let found = walk(bug);
        assert!(found.wrong.is_some(), "{bug:?}: {found:?}");
    }
    let found = walk(Bug::NeverOverlaps);
    assert!(found.wrong.is_none() && !found.overlapped, "{found:?}");
}
