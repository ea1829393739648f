//! What ranks hold, as the allocator sees it, beside what their stage of ZeRO promises.

use std::alloc::{GlobalAlloc, Layout, System};
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicI64, Ordering};

use fusestep_collective::{Collectives, Options, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_planner::{Comms, FuseAllReduce, Planner, Shard, Topology, ZeroStage};
use fusestep_tensor::{DType, ParamDesc, Shape};

/// Passes every call on and keeps the sum of what is allocated, and the most that it has been.
struct Summing;

static HELD: AtomicI64 = AtomicI64::new(0);
static MOST: AtomicI64 = AtomicI64::new(0);

// SAFETY: every call is passed on unchanged to the system's allocator, which upholds the contract.
unsafe impl GlobalAlloc for Summing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size() as i64, Ordering::SeqCst) + layout.size() as i64;
        MOST.fetch_max(held, Ordering::SeqCst);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size() as i64, Ordering::SeqCst);
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

/// Bytes of all ranks: between steps, and the most in a step beyond that.
fn measured(zero: ZeroStage, world: usize) -> (i64, i64) {
    let params: Vec<ParamDesc> = NUMELS
        .iter()
        .enumerate()
        .map(|(at, &numel)| {
            ParamDesc::new(format!("t{at}"), Shape::new([numel]).unwrap(), DType::F32)
        })
        .collect();
    let gradients: Vec<Vec<u8>> = NUMELS.map(|numel| vec![0; 4 * numel as usize]).to_vec();
    let ranks = run_ranks(world, &Options::default(), |mut comm| {
        let rank = Topology::of(&comm);
        let planner = Planner::new(Adam::default().into()).with(FuseAllReduce::of_bytes(CAP_BYTES));
        let plan = planner
            .with(Shard::new(zero))
            .plan_for(&params, rank)
            .unwrap();
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        comm.barrier().unwrap();
        let before = HELD.load(Ordering::SeqCst);
        comm.barrier().unwrap();
        let mut state = plan.allocate_on(&backend, &mut comm).unwrap();
        let mut comms = Comms::direct(&mut comm);
        let mut step = || {
            for (param, gradient) in params.iter().zip(&gradients).rev() {
                plan.push_grad(&mut state, &backend, &mut comms, &param.name, gradient)
                    .unwrap();
            }
            plan.step(&mut state, &backend, &mut comms).unwrap();
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
    let bytes = 4 * NUMELS.iter().sum::<u64>() as i64;
    for world in [2, 3, 4] {
        let ranks = world as i64;
        // Parameter, gradient and two moments; of what is sharded all ranks together have one.
        // Segments of gradients that are given back are whole ones while a step has them.
        let promised = [
            (ZeroStage::None, 4 * ranks * bytes, 0),
            (ZeroStage::One, 2 * ranks * bytes + 2 * bytes, 0),
            (ZeroStage::Two, ranks * bytes + 3 * bytes, ranks * bytes),
            (ZeroStage::Three, 4 * bytes, ranks * bytes),
        ];
        for (zero, between, within) in promised {
            let (held, more) = measured(zero, world);
            let slack = SLACK_BYTES * ranks;
            assert!(
                (between..between + slack).contains(&held),
                "{zero:?} on {world} ranks: expected {between} bytes between steps, found {held}"
            );
            assert!(
                (within..within + slack).contains(&more),
                "{zero:?} on {world} ranks: expected {within} bytes more in a step, found {more}"
            );
        }
    }
}
