//! AdamW with clipping and loss scaling against AdamW alone, and the read of the gradients by
//! itself, in turn.
//!
//! `cargo bench --bench amp -- resnet50` runs the part whose names match; compare only within one
//! run. A clipped step should take the plain step's time and that of `norm`: the factor costs
//! nothing, because the update waits for memory. `reference` is the sum one element after the
//! other.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use fusestep_amp::reference::grad_norm;
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_planner::{ClipByGlobalNorm, LossScaling, Optimizer, Plan, Planner, RunAlone, State};
use fusestep_tensor::Role;

#[path = "support/asked.rs"]
mod asked;
#[path = "support/memory.rs"]
mod memory;
#[path = "support/shapes.rs"]
mod shapes;
#[path = "support/timing.rs"]
mod timing;

use asked::is_asked;
use memory::{Ceiling, thread_counts};
use shapes::{Set, model, tiny};
use timing::group;

/// Elements ahead that the ceiling prefetches.
const PREFETCH_DISTANCE: usize = 128;

/// A plan with a state to run it on; every gradient is 0.01 times `scale`.
struct Ready {
    plan: Plan,
    state: State,
}

impl Ready {
    fn new(set: &Set, planner: &Planner, scale: f32, backend: &CpuBackend) -> Self {
        let plan = planner.plan(&set.params).expect("a valid set");
        let mut state = plan.allocate(backend).expect("memory for the set");
        for param in &set.params {
            let value = state.view_mut::<f32>(Role::Param, &param.name);
            value.expect("an f32 parameter").fill(0.5);
            let grad = state.grad_mut::<f32>(&param.name);
            grad.expect("an f32 gradient").fill(0.01 * scale);
        }
        Self { plan, state }
    }

    fn step(&mut self, backend: &CpuBackend) -> Option<f64> {
        let report = RunAlone::of(&self.plan, &mut self.state, backend).step_all();
        report.expect("a step of a valid plan").grad_norm
    }
}

/// The sum one element after the other, over as many elements as [`tiny`] has.
fn reference(criterion: &mut Criterion) {
    let numel = tiny().elements();
    let values = vec![0.01f64; numel as usize];
    let mut group = group(criterion, "amp/tiny_flat");
    group.throughput(Throughput::Bytes(8 * numel));
    group.bench_function("reference/t1", |b| b.iter(|| grad_norm(&[&values])));
    group.finish();
}

fn amp(criterion: &mut Criterion) {
    let adamw = || Planner::new(Optimizer::Adam(Adam::default()));
    let clip = |planner: Planner| {
        let planner = planner.with(ClipByGlobalNorm::new(1.0));
        planner.with(LossScaling::fixed(1024.0))
    };
    for set in [tiny(), model("resnet50"), model("gpt2")] {
        let name = format!("amp/{}", set.name);
        if !is_asked(&name, &["clipped", "naive", "plain", "norm", "ceiling"]) {
            continue;
        }
        let mut group = group(criterion, &name);
        for threads in thread_counts() {
            let backend = CpuBackend::new(threads);
            let expected = 0.01 * (set.elements() as f64).sqrt();
            group.throughput(Throughput::Bytes(32 * set.elements()));
            for (name, planner) in [("clipped", clip(adamw())), ("naive", clip(adamw().naive()))] {
                let mut ready = Ready::new(&set, &planner, 1024.0, &backend);
                let norm = ready.step(&backend).expect("a norm");
                assert!((norm / expected - 1.0).abs() < 1e-6, "{norm}, expected {expected}");
                group.bench_function(BenchmarkId::new(name, format!("t{threads}")), |b| {
                    b.iter(|| ready.step(&backend));
                });
            }
            group.throughput(Throughput::Bytes(28 * set.elements()));
            let mut plain = Ready::new(&set, &adamw(), 1.0, &backend);
            group.bench_function(BenchmarkId::new("plain", format!("t{threads}")), |b| {
                b.iter(|| plain.step(&backend));
            });
            // A step that is skipped is the read of the gradients and nothing else.
            let mut skipped = Ready::new(&set, &clip(adamw()), 1.0, &backend);
            let first = &set.params[0].name;
            let mut grad = skipped.state.grad_mut::<f32>(first).expect("a gradient");
            grad.as_mut_slice()[0] = f32::NAN;
            drop(grad);
            group.throughput(Throughput::Bytes(4 * set.elements()));
            group.bench_function(BenchmarkId::new("norm", format!("t{threads}")), |b| {
                b.iter(|| skipped.step(&backend));
            });
            let mut ceiling = Ceiling::new(set.elements() as usize, &backend);
            group.throughput(Throughput::Bytes(28 * set.elements()));
            group.bench_function(BenchmarkId::new("ceiling", format!("t{threads}")), |b| {
                b.iter(|| ceiling.pass(&backend, PREFETCH_DISTANCE));
            });
        }
        group.finish();
    }
}

criterion_group!(benches, reference, amp);
criterion_main!(benches);
