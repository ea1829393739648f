//! Fused against naive against the ceiling, for any rule.

use std::ops::Range;

use criterion::{BenchmarkId, Criterion, Throughput};
use fusestep_cpu::CpuBackend;
use fusestep_launch::Precision;
use fusestep_planner::{Optimizer, Plan, Planner, RunAlone, State};
use fusestep_tensor::{DType, ParamDesc, Role, Shape};

use crate::asked::is_asked;
use crate::memory::{Ceiling, thread_counts};
use crate::shapes::{Set, model, tiny};
use crate::timing::group;

/// Elements ahead that the ceiling prefetches: 512 bytes, as the kernels do.
const PREFETCH_DISTANCE: usize = 128;

/// Bytes that one element of the ceiling's stream moves: four reads, three writes.
const STREAM_BYTES: u64 = 28;

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
        let report = RunAlone::of(&self.plan, &mut self.state, backend).step_all();
        report.expect("a step of a valid plan");
    }

    fn check_first_step(&mut self, set: &Set, backend: &CpuBackend, expected: Range<f64>) {
        self.step(backend);
        for param in &set.params {
            let found = self.state.param::<f32>(&param.name).expect("a parameter");
            assert!(
                found.iter().all(|&p| expected.contains(&f64::from(p))),
                "{}: expected {expected:?} everywhere",
                param.name
            );
        }
    }
}

/// One tensor of as many elements as [`tiny`] has.
fn tiny_flat() -> Set {
    let shape = Shape::new([tiny().elements()]).expect("a count is a shape");
    Set { name: "tiny_flat", params: vec![ParamDesc::new("flat", shape, DType::F32)] }
}

/// Times a rule on 10,000 tiny tensors and one of as many elements, ResNet-50 and GPT-2: fused,
/// naive and a stream of as many bytes, in turn.
///
/// The first step must take 0.5 with gradient 0.01 to within 1e-6 of `after_first_step`.
pub(crate) fn contest(
    criterion: &mut Criterion,
    name: &str,
    rule: Optimizer,
    after_first_step: f64,
) {
    for set in [tiny_flat(), tiny(), model("resnet50"), model("gpt2")] {
        let name = format!("{name}/{}", set.name);
        if !is_asked(&name, &["fused", "naive", "ceiling"]) {
            continue;
        }
        let kernel = rule.rule().kernel(DType::F32, Precision::default()).expect("an f32 kernel");
        let bytes = kernel.traffic_bytes(set.elements());
        let mut group = group(criterion, &name);
        group.throughput(Throughput::Bytes(bytes));
        for threads in thread_counts() {
            let backend = CpuBackend::new(threads);
            let planners = [("fused", Planner::new(rule)), ("naive", Planner::new(rule).naive())];
            for (kind, planner) in planners {
                let mut ready = Ready::new(&set, &planner, &backend);
                let expected = after_first_step - 1e-6..after_first_step + 1e-6;
                ready.check_first_step(&set, &backend, expected);
                group.bench_function(BenchmarkId::new(kind, format!("t{threads}")), |b| {
                    b.iter(|| ready.step(&backend));
                });
            }
            let mut ceiling = Ceiling::new(bytes.div_ceil(STREAM_BYTES) as usize, &backend);
            group.bench_function(BenchmarkId::new("ceiling", format!("t{threads}")), |b| {
                b.iter(|| ceiling.pass(&backend, PREFETCH_DISTANCE));
            });
        }
        group.finish();
    }
}
