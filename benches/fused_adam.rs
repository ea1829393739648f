//! Fused AdamW against the naive plan and against the memory traffic of the step alone, in turn.
//!
//! `cargo bench --bench fused_adam -- gpt2` runs the part whose names match. Times of different
//! runs differ with the machine's load; compare only within one run, where fused, naive and ceiling
//! take turns. Throughput counts the 28 bytes per element that a step must move. `ceiling / fused`
//! in one run is the share of the machine that fused AdamW reaches.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_fused_adam::reference::{Element, update};
use fusestep_planner::{Optimizer, Plan, Planner, State};
use fusestep_tensor::{DType, ParamDesc, Role, Shape};

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

    /// Requires of the first step what the formula gives: p·(1 − lr·λ) − lr, up to rounding.
    fn check_first_step(&mut self, set: &Set, backend: &CpuBackend) {
        self.step(backend);
        let expected = 0.5 * (1.0 - 1e-3 * 0.01) - 1e-3;
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

/// One tensor of as many elements as [`tiny`] has.
fn tiny_flat() -> Set {
    let shape = Shape::new([tiny().elements()]).expect("a count is a shape");
    Set {
        name: "tiny_flat",
        params: vec![ParamDesc::new("flat", shape, DType::F32)],
    }
}

/// The f64 reference, one element at a time: what the update costs without any care.
fn reference(criterion: &mut Criterion) {
    let (numel, adam) = (tiny().elements(), Adam::default());
    let start = Element {
        param: 0.5,
        ..Element::default()
    };
    let mut elements = vec![start; numel as usize];
    assert!((update(&adam, 1, start, 0.01).param - 0.498995).abs() < 1e-8);
    let mut group = group(criterion, "fused_adam/tiny_flat");
    group.throughput(Throughput::Bytes(28 * numel));
    group.bench_function("reference/t1", |b| {
        b.iter(|| {
            for element in &mut elements {
                *element = update(&adam, 10, *element, 0.01);
            }
        });
    });
    group.finish();
}

fn fused_adam(criterion: &mut Criterion) {
    let adamw = || Planner::new(Optimizer::Adam(Adam::default()));
    for set in [tiny_flat(), tiny(), model("resnet50"), model("gpt2")] {
        let mut group = group(criterion, &format!("fused_adam/{}", set.name));
        group.throughput(Throughput::Bytes(28 * set.elements()));
        for threads in thread_counts() {
            let backend = CpuBackend::new(threads);
            for (name, planner) in [("fused", adamw()), ("naive", adamw().naive())] {
                let mut ready = Ready::new(&set, &planner, &backend);
                ready.check_first_step(&set, &backend);
                group.bench_function(BenchmarkId::new(name, format!("t{threads}")), |b| {
                    b.iter(|| ready.step(&backend));
                });
            }
            let mut ceiling = Ceiling::new(set.elements() as usize, &backend);
            group.bench_function(BenchmarkId::new("ceiling", format!("t{threads}")), |b| {
                b.iter(|| ceiling.pass(&backend, PREFETCH_DISTANCE));
            });
        }
        group.finish();
    }
}

criterion_group!(benches, reference, fused_adam);
criterion_main!(benches);
