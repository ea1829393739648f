//! A step with an unchanged plan allocates nothing, and planning is quick enough to be done at
//! every start.

use std::alloc::{GlobalAlloc, Layout, System};
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};

use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_fused_sgd::Sgd;
use fusestep_launch::{Precision, Rounding, StateDType};
use fusestep_planner::{ClipByGlobalNorm, LossScaling, Planner, UpdateNorms};
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

#[test]
fn a_step_with_an_unchanged_plan_allocates_nothing() {
    let numels = (0..500).map(|i| i * 37 % 4001).chain([300_000]);
    let case = Case::new(numels, DType::F32).with_hyper_classes();
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
    for planner in planners.chain([random]) {
        let plan = planner.plan(&case.params).unwrap();
        for threads in [1, 2, 3] {
            let backend = CpuBackend::new(NonZeroUsize::new(threads).unwrap()).unwrap();
            let mut state = plan.allocate(&backend).unwrap();
            plan.run(&mut state, &backend).unwrap();
            let mut allocations = || {
                let before = ALLOCATIONS.load(Ordering::Relaxed);
                for _ in 0..200 {
                    plan.run(&mut state, &backend).unwrap();
                }
                ALLOCATIONS.load(Ordering::Relaxed) - before
            };
            // A thread allocates for itself when it first runs, and on a busy machine that may be
            // after the first steps. What a step allocates comes in every round.
            let mut found = Vec::new();
            while found.len() < 5 && found.last() != Some(&0) {
                found.push(allocations());
            }
            assert_eq!(found.last(), Some(&0), "{threads} threads: {found:?}");
        }
    }
}
