//! A step with an unchanged plan allocates nothing that grows with the plan: on one thread nothing
//! at all, on more a few dozen bytes for each piece of work that is handed over.

use std::alloc::{GlobalAlloc, Layout, System};
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};

use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_fused_sgd::Sgd;
use fusestep_launch::{Precision, Rounding, StateDType};
use fusestep_planner::{ClipByGlobalNorm, LossScaling, Planner, RunAlone, UpdateNorms};
use fusestep_tensor::DType;
use fusestep_testkit::{Case, each_rule};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed on unchanged to the system's allocator, which upholds the contract.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Steps over which allocations are counted.
const STEPS: u64 = 100;

/// Every kind of plan of a case.
fn planners() -> impl Iterator<Item = Planner> {
    let rules = each_rule().into_iter().chain([Sgd::default().into()]);
    let planners = rules.flat_map(|rule| {
        let clipped = Planner::new(rule).with(ClipByGlobalNorm::new(0.5));
        [
            Planner::new(rule),
            Planner::new(rule).naive(),
            clipped.with(LossScaling::dynamic()),
            Planner::new(rule).with(UpdateNorms),
        ]
    });
    let random = Planner::new(Adam::default().into()).precision(Precision {
        state: StateDType::Bf16,
        rounding: Rounding::Stochastic { seed: 1 },
        ..Precision::default()
    });
    planners.chain([random])
}

/// Most blocks of a queue that so many pieces of work take, each of which has room for 63.
fn blocks(pieces: u64) -> u64 {
    pieces / 63 + 1
}

/// The least that one of a few rounds of [`STEPS`] steps allocates: a thread allocates for itself
/// when it first runs, and on a busy machine that may be after the first steps.
fn allocations(planner: &Planner, case: &Case, threads: usize) -> u64 {
    let plan = planner.plan(&case.params).unwrap();
    let backend = CpuBackend::new(NonZeroUsize::new(threads).unwrap());
    let mut state = plan.allocate(&backend).unwrap();
    let mut run = RunAlone::of(&plan, &mut state, &backend);
    run.step_all().unwrap();
    let mut round = || {
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        for _ in 0..STEPS {
            run.step_all().unwrap();
        }
        ALLOCATIONS.load(Ordering::Relaxed) - before
    };
    let (mut least, mut rounds) = (round(), 1);
    while rounds < 5 && least % STEPS > blocks(least) {
        least = least.min(round());
        rounds += 1;
    }
    least
}

/// So many small tensors and one that is worth handing over to other threads.
fn case(tensors: u64) -> Case {
    let numels = (0..tensors).map(|i| i * 37 % 4001).chain([300_000]);
    Case::new(numels, DType::F32).with_groups()
}

/// Work handed over to rayon is three small allocations: what worker and caller share, the task,
/// and rayon's own. Every 63rd is one more, the queue's block.
///
/// One test, so that no other one allocates meanwhile.
#[test]
fn a_step_with_an_unchanged_plan_allocates_nothing_that_grows_with_it() {
    /// Most allocations for the pieces of work that any of the plans hands over in a step.
    const MOST: u64 = 18;
    let cases = [case(100), case(400)];
    for planner in planners() {
        let count = |threads| cases.each_ref().map(|case| allocations(&planner, case, threads));
        assert_eq!(count(1), [0, 0], "{planner:?}, one thread");
        for threads in [2, 3] {
            let counts = count(threads);
            let pieces = counts.map(|count| count / STEPS);
            let few = |count: u64| count % STEPS <= blocks(count);
            assert!(
                pieces[0] == pieces[1] && pieces[0] <= MOST && counts.into_iter().all(few),
                "{planner:?}, {threads} threads: {counts:?}"
            );
        }
    }
}
