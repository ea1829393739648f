//! What ranks hold, as the allocator sees it, beside what their stage of ZeRO promises and what
//! their plan says.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::num::{NonZeroU32, NonZeroUsize};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, Ordering};

use fusestep_collective::{Collectives, Link, Options, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_fused_sgd::Sgd;
use fusestep_launch::{Precision, StateDType};
use fusestep_planner::{
    Comms, FuseAllReduce, GradientAccumulation, Lanes, Plan, Planner, RankBytes, ReducedWhen, Run,
    Shard, Topology, ZeroStage,
};
use fusestep_tensor::{DType, ParamDesc, Shape};
use fusestep_tensor_file::{TensorBytes, serialize};

/// Passes every call on and keeps the sum of what is allocated, and the most that it has been.
struct Summing;

static HELD: AtomicI64 = AtomicI64::new(0);
static MOST: AtomicI64 = AtomicI64::new(0);

thread_local! {
    /// What this thread has allocated and not freed.
    static OWN: Cell<i64> = const { Cell::new(0) };
}

/// Tests that look at what all threads hold take turns.
static TURN: Mutex<()> = Mutex::new(());

/// Counts bytes that the caller's thread takes, or gives back if there are fewer than none.
fn count(len_bytes: i64) {
    let held = HELD.fetch_add(len_bytes, Ordering::SeqCst) + len_bytes;
    MOST.fetch_max(held, Ordering::SeqCst);
    OWN.set(OWN.get() + len_bytes);
}

// SAFETY: every call is passed on unchanged to the system's allocator, which upholds the contract.
unsafe impl GlobalAlloc for Summing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Summing = Summing;

/// Elements of the tensors: arenas of them are small enough to come from the allocator and not from
/// maps.
const NUMELS: [u64; 6] = [40_000, 10_000, 64, 30_000, 50_000, 1_000];

/// Bytes of a bucket, which some tensors are larger than.
const CAP_BYTES: u64 = 64 << 10;

/// Bytes that a rank may hold besides: padding, names, what its backend has for itself.
const SLACK_BYTES: i64 = 16 << 10;

fn params() -> Vec<ParamDesc> {
    let numels = NUMELS.iter().enumerate();
    let describe = |(at, &numel): (usize, &u64)| {
        ParamDesc::new(format!("t{at}"), Shape::new([numel]).unwrap(), DType::F32)
    };
    numels.map(describe).collect()
}

fn plan_of(
    planner: Planner,
    (zero, sums): (ZeroStage, Option<GradientAccumulation>),
    topology: Topology,
) -> Plan {
    let planner = planner.with(FuseAllReduce::of_bytes(CAP_BYTES));
    let planner = planner.with(Shard::new(zero));
    let planner = match sums {
        Some(rule) => planner.with(rule),
        None => planner,
    };
    planner.plan_for(&params(), topology).unwrap()
}

/// When segments are reduced, without streams.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Reduced {
    InStep,
    WhenFull,
}

/// Bytes of all ranks: between steps, and the most in a step beyond that.
fn measured(zero: ZeroStage, world: usize, reduced: Reduced) -> (i64, i64) {
    let params = params();
    let gradients: Vec<Vec<u8>> = NUMELS.map(|numel| vec![0; 4 * numel as usize]).to_vec();
    let ranks = run_ranks(world, &Options::default(), |mut comm| {
        let plan = plan_of(Planner::new(Adam::default().into()), (zero, None), Topology::of(&comm));
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        comm.barrier().unwrap();
        let before = HELD.load(Ordering::SeqCst);
        comm.barrier().unwrap();
        let mut state = plan.allocate_on(&backend, &mut comm).unwrap();
        let mut comms = Comms::direct(&mut comm);
        if reduced == Reduced::WhenFull {
            comms = comms.reducing_when_full();
        }
        let mut step = || {
            let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
            for (param, gradient) in params.iter().zip(&gradients).rev() {
                run.push_grad(&param.name, gradient).unwrap();
            }
            run.step().unwrap();
            comms.communicator().barrier().unwrap();
            let seen = (HELD.load(Ordering::SeqCst), MOST.load(Ordering::SeqCst));
            comms.communicator().barrier().unwrap();
            seen
        };
        let (held, _) = step();
        MOST.store(held, Ordering::SeqCst);
        let (_, most) = step();
        (held - before, most - held)
    });
    let ranks = ranks.unwrap().into_iter().map(Result::unwrap);
    // Ranks look at slightly different times.
    ranks.reduce(|a, b| (a.0.max(b.0), a.1.max(b.1))).unwrap()
}

#[test]
fn ranks_hold_what_their_stage_promises() {
    let _turn = TURN.lock().unwrap();
    let bytes = 4 * NUMELS.iter().sum::<u64>() as i64;
    // From stage 2 on one bucket stays. The tensor of 1,000 lies in it, the longest needs more.
    let (kept, short, longest) = (4 * 10_064, 4 * 1_000, 4 * 50_000);
    for world in [2, 3, 4] {
        let ranks = world as i64;
        // Parameter, gradient and two moments; of what is sharded all ranks together have one.
        // Segments of gradients that are given back are whole ones while a step has them.
        let (two, three) = (ranks * bytes + 3 * bytes, 4 * bytes);
        let [all, one] = [bytes - short, longest].map(|of_rank| ranks * of_rank);
        let (in_step, when_full) = (Reduced::InStep, Reduced::WhenFull);
        let promised = [
            (ZeroStage::None, in_step, 4 * ranks * bytes, 0),
            (ZeroStage::None, when_full, 4 * ranks * bytes, 0),
            (ZeroStage::One, in_step, 2 * ranks * bytes + 2 * bytes, 0),
            (ZeroStage::Two, in_step, two + ranks * kept, all),
            (ZeroStage::Two, when_full, two + ranks * kept, one),
            (ZeroStage::Three, in_step, three + ranks * kept, all),
            (ZeroStage::Three, when_full, three + ranks * kept, one),
        ];
        for (zero, reduced, between, within) in promised {
            let (held, more) = measured(zero, world, reduced);
            let slack = SLACK_BYTES * ranks;
            assert!(
                (between..between + slack).contains(&held),
                "{zero:?}, {reduced:?}, on {world} ranks: expected {between} bytes between steps, found {held}"
            );
            assert!(
                (within..within + slack).contains(&more),
                "{zero:?}, {reduced:?}, on {world} ranks: expected {within} bytes more in a step, found {more}"
            );
        }
    }
}

/// Bytes that each rank's own thread allocates for a plan, between steps, and the plan itself.
fn of_each_rank(
    planner: impl Fn() -> Planner + Sync,
    what: (ZeroStage, Option<GradientAccumulation>),
    world: usize,
) -> Vec<(i64, Plan)> {
    let ranks = run_ranks(world, &Options::default(), |mut comm| {
        let plan = plan_of(planner(), what, Topology::of(&comm));
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let before = OWN.get();
        let mut state = plan.allocate_on(&backend, &mut comm).unwrap();
        let mut comms = Comms::direct(&mut comm);
        for _ in 0..plan.micro_steps() {
            let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
            for (param, numel) in plan.params().iter().zip(NUMELS).rev() {
                let gradient = vec![0; 4 * numel as usize];
                run.push_grad(&param.name, &gradient).unwrap();
            }
            run.step().unwrap();
        }
        drop(comms);
        (OWN.get() - before, plan)
    });
    ranks.unwrap().into_iter().map(Result::unwrap).collect()
}

#[test]
fn every_rank_allocates_what_its_plan_and_the_plan_of_the_world_say() {
    let _turn = TURN.lock().unwrap();
    let stages = [ZeroStage::None, ZeroStage::One, ZeroStage::Two, ZeroStage::Three];
    let plain = || Planner::new(Sgd { momentum: 0.0, ..Sgd::default() }.into());
    let adam_with = |state| {
        let precision = Precision { state, ..Precision::default() };
        move || Planner::new(Adam::default().into()).precision(precision)
    };
    let each = GradientAccumulation::every(NonZeroU32::new(2).unwrap());
    let each = each.reduced(ReducedWhen::PerMicroStep);
    let cases = stages.map(|zero| [(zero, None), (zero, Some(each))]);
    for world in [1, 2, 4] {
        for what in cases.into_iter().flatten() {
            let text = format!("{what:?} on {world} ranks");
            let adam = of_each_rank(adam_with(StateDType::Compute), what, world);
            check(&adam, &text);
            // What a rule without state has not. With codes buckets are others, too.
            let stateless = of_each_rank(plain, what, world);
            for ((held, plan), (without, _)) in adam.iter().zip(stateless) {
                within(held - without, plan.state_bytes(), &text);
            }
            let coded = of_each_rank(adam_with(StateDType::Int8), what, world);
            let state_bytes = |ranks: &[(i64, Plan)]| ranks[0].1.state_bytes();
            assert!(state_bytes(&coded) < state_bytes(&adam) * 2 / 5, "{text}");
            check(&coded, &format!("{text}, state in codes"));
        }
    }
}

#[test]
fn ranks_with_lanes_allocate_the_sums_that_their_plans_say() {
    let _turn = TURN.lock().unwrap();
    for (lanes, worlds) in [(8, &[1, 2, 4][..]), (12, &[1, 3, 5])] {
        let lanes = NonZeroU32::new(lanes).unwrap();
        let adam = || Planner::new(Adam::default().into()).with(Lanes::new(lanes));
        for &world in worlds {
            for zero in [ZeroStage::None, ZeroStage::One, ZeroStage::Two, ZeroStage::Three] {
                let ranks = of_each_rank(adam, (zero, None), world);
                check(&ranks, &format!("{lanes} lanes at {zero:?} on {world} ranks"));
            }
        }
    }
}

fn within(found: i64, said: u64, text: &str) {
    let expected = said as i64..said as i64 + SLACK_BYTES;
    assert!(expected.contains(&found), "{text}: expected {expected:?} bytes, found {found}");
}

/// Holds what ranks have allocated to what their plans say.
fn check(ranks: &[(i64, Plan)], text: &str) {
    for (held, plan) in ranks {
        within(*held, plan.memory_bytes(), text);
    }
    let link = Link { alpha_seconds: 1e-5, beta_bytes_per_second: 1e9 };
    // Rank 0 knows the numbers of all.
    let summary = ranks[0].1.rank_summary(link);
    let RankBytes { memory_bytes, .. } = summary.worst_rank;
    let helds = ranks.iter().map(|(held, _)| *held);
    within(helds.clone().max().unwrap(), memory_bytes, text);
    let mean = helds.sum::<i64>() / ranks.len() as i64;
    within(mean, summary.mean_rank.memory_bytes, text);
}

/// What is held at most, beside what was held before.
fn most_of(work: impl FnOnce()) -> i64 {
    let before = HELD.load(Ordering::SeqCst);
    MOST.store(before, Ordering::SeqCst);
    work();
    MOST.load(Ordering::SeqCst) - before
}

#[test]
fn a_file_of_many_small_tensors_takes_less_than_a_kilobyte_for_each_to_write() {
    const COUNT: i64 = 5_000;
    // What is made for the test counts in the others, too.
    let _turn = TURN.lock().unwrap();
    let name = |at: i64| format!("model.layers.{at}.weight@moment1");
    let tensors: Vec<(String, TensorBytes<'static>)> = (0..COUNT)
        .map(|at| {
            let shape = Shape::new([2]).unwrap();
            (name(at), TensorBytes::of(DType::F32, &shape, vec![0; 8].into()))
        })
        .collect();
    let texts = (0..COUNT).map(|at| (format!("xxh3@{}", name(at)), "0123456789abcdef".to_owned()));
    let texts = texts.collect();
    let most = most_of(|| drop(serialize(Path::new("state"), &tensors, texts).unwrap()));
    assert!(most < COUNT * 1_500, "{} bytes for each", most / COUNT);
}
