//! LARS against the naive plan, against momentum's memory traffic and against the f64 reference, in
//! turn.
//!
//! `cargo bench --bench lars_momentum -- gpt2` runs the part whose names match; compare only within
//! one run. Throughput counts the 20 bytes per element that momentum must move: what LARS needs
//! beyond is the second read of parameter and gradient, from cache where a tensor fits. `ceiling`
//! is the memory stream over as many bytes as momentum moves.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use fusestep_cpu::CpuBackend;
use fusestep_lars_momentum::{Lars, Trust, reference::update};
use fusestep_planner::{Optimizer, Plan, Planner, State};
use fusestep_tensor::Role;

#[path = "support/memory.rs"]
mod memory;
#[path = "support/shapes.rs"]
mod shapes;
#[path = "support/timing.rs"]
mod timing;

use memory::{Ceiling, thread_counts};
use shapes::{Set, model, tiny};
use timing::group;

/// Elements ahead that the ceiling prefetches: 512 bytes, as the kernel does.
const PREFETCH_DISTANCE: usize = 128;

/// A plan with a state to run it on; every parameter starts at 0.5 with gradient 0.01.
struct Ready {
    plan: Plan,
    state: State,
}

impl Ready {
    fn new(set: &Set, planner: &Planner, backend: &CpuBackend) -> Self {
        let plan = planner.plan(&set.params).expect("a valid set");
        let mut state = plan.allocate(backend).expect("memory for the set");
        for param in &set.params {
            let value = state.view_mut::<f32>(Role::Param, &param.name);
            value.expect("an f32 parameter").fill(0.5);
            let grad = state.grad_mut::<f32>(&param.name);
            grad.expect("an f32 gradient").fill(0.01);
        }
        Self { plan, state }
    }

    fn step(&mut self, backend: &CpuBackend) {
        let report = self.plan.run(&mut self.state, backend);
        report.expect("a step of a valid plan");
    }

    /// Requires of the first step what the formula gives, up to rounding: P = 0.5·√n, G = 0.01·√n,
    /// so that the rate is the same for every tensor.
    fn check_first_step(&mut self, set: &Set, backend: &CpuBackend) {
        self.step(backend);
        let local = 0.1 * 0.001 * 0.5 / (0.01 + 0.0005 * 0.5);
        let expected = 0.5 - local * (0.01 + 0.0005 * 0.5);
        for param in &set.params {
            let found = self.state.param::<f32>(&param.name).expect("a parameter");
            assert!(
                found
                    .iter()
                    .all(|&p| (f64::from(p) - expected).abs() < 1e-6),
                "{}: expected {expected} everywhere",
                param.name
            );
        }
    }
}

/// The f64 reference, one tensor at a time: what the update costs without any care.
fn reference(criterion: &mut Criterion) {
    let numel = tiny().elements() as usize;
    let (mut p, g, mut u) = (vec![0.5; numel], vec![0.01; numel], vec![0.0; numel]);
    let mut group = group(criterion, "lars_momentum/tiny_flat");
    group.throughput(Throughput::Bytes(20 * numel as u64));
    group.bench_function("reference/t1", |b| {
        b.iter(|| update(&Lars::default(), Trust::Ratio, &mut p, &g, &mut u));
    });
    assert!(p.iter().all(|p| p.is_finite() && *p < 0.5));
    group.finish();
}

fn lars_momentum(criterion: &mut Criterion) {
    let lars = || Planner::new(Optimizer::Lars(Lars::default()));
    for set in [tiny(), model("resnet50"), model("gpt2")] {
        let mut group = group(criterion, &format!("lars_momentum/{}", set.name));
        group.throughput(Throughput::Bytes(20 * set.elements()));
        for threads in thread_counts() {
            let backend = CpuBackend::new(threads);
            for (name, planner) in [("fused", lars()), ("naive", lars().naive())] {
                let mut ready = Ready::new(&set, &planner, &backend);
                ready.check_first_step(&set, &backend);
                group.bench_function(BenchmarkId::new(name, format!("t{threads}")), |b| {
                    b.iter(|| ready.step(&backend));
                });
            }
            // 28 bytes per element of the ceiling's four reads and three writes: 5/7 of its
            // elements move 20 bytes per element.
            let mut ceiling = Ceiling::new(set.elements() as usize * 5 / 7, &backend);
            group.bench_function(BenchmarkId::new("ceiling", format!("t{threads}")), |b| {
                b.iter(|| ceiling.pass(&backend, PREFETCH_DISTANCE));
            });
        }
        group.finish();
    }
}

criterion_group!(benches, reference, lars_momentum);
criterion_main!(benches);
