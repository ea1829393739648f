//! The gradients of ResNet-50 between two ranks: calls beside a backward pass beside calls after
//! it, in buckets and one per tensor. The backward pass is simulated: gradients become ready
//! evenly, element by element, and the time in between is slept. `fusestep bench --ranks` times
//! calls alone.

use std::hint::black_box;
use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use fusestep_collective::{Collectives, Options, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_fused_sgd::Sgd;
use fusestep_planner::{Comms, FuseAllReduce, Planner, Run, Topology};
use fusestep_tensor::ParamDesc;

#[path = "support/shapes.rs"]
#[expect(dead_code, reason = "other benches use other sets")]
mod shapes;
#[path = "support/timing.rs"]
mod timing;

use timing::group;

const RANKS: usize = 2;

/// Length of the simulated backward pass: what ResNet-50 takes on a small accelerator.
const BACKWARD: Duration = Duration::from_millis(300);

/// How gradients come together.
#[derive(Clone, Copy, Debug)]
struct Way {
    name: &'static str,
    /// Bytes of a bucket; `None` for one call per tensor.
    cap_bytes: Option<u64>,
    /// Communication streams beside the backward pass; 0 for calls after it.
    streams: usize,
}

const WAYS: [Way; 5] = [
    Way { name: "per_tensor", cap_bytes: None, streams: 0 },
    Way { name: "buckets_25_mib", cap_bytes: Some(25 << 20), streams: 0 },
    Way { name: "buckets_25_mib_overlapped", cap_bytes: Some(25 << 20), streams: 1 },
    Way { name: "buckets_4_mib", cap_bytes: Some(4 << 20), streams: 0 },
    Way { name: "buckets_4_mib_overlapped", cap_bytes: Some(4 << 20), streams: 1 },
];

/// Time of `rounds` steps' calls that the backward pass does not hide, on rank 0.
fn time(params: &[ParamDesc], way: Way, rounds: u64) -> Duration {
    let outcomes = run_ranks(RANKS, &Options::default(), |mut comm| {
        let rule = Sgd { momentum: 0.0, ..Sgd::default() };
        let mut planner = Planner::new(rule.into());
        if let Some(cap) = way.cap_bytes {
            planner = planner.with(FuseAllReduce::of_bytes(cap));
        }
        let plan = planner.plan_for(params, Topology::of(&comm)).expect("a plan");
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let mut state = plan.allocate(&backend).expect("memory");
        let grads: Vec<Vec<u8>> = params
            .iter()
            .map(|param| 1.0f32.to_le_bytes().repeat(param.numel() as usize))
            .collect();
        let total: u64 = params.iter().map(ParamDesc::numel).sum();
        let mut comms = Comms::with_streams(&mut comm, way.streams).expect("streams");
        let mut exposed = Duration::ZERO;
        for round in 0..=rounds {
            comms.communicator().barrier().expect("all ranks come");
            let start = Instant::now();
            let mut ready = 0;
            let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
            for (param, grad) in params.iter().zip(&grads).rev() {
                ready += param.numel();
                let due = start + BACKWARD.mul_f64(ready as f64 / total as f64);
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
                run.push_grad(&param.name, grad).expect("a gradient of the plan");
            }
            let report = run.step().expect("equal calls");
            // The first round touches memory for the first time.
            if round > 0 {
                exposed += Duration::from_nanos(report.exposed_ns);
            }
        }
        black_box(state);
        exposed
    });
    let mut outcomes = outcomes.expect("threads").into_iter();
    outcomes.next().expect("rank 0").expect("no panic")
}

fn distributed(criterion: &mut Criterion) {
    let set = shapes::model("resnet50");
    let mut group = group(criterion, "distributed_exposed");
    group.sample_size(10);
    for way in WAYS {
        group.bench_function(way.name, |b| {
            b.iter_custom(|rounds| time(&set.params, way, rounds));
        });
    }
    group.finish();
}

criterion_group!(benches, distributed);
criterion_main!(benches);
