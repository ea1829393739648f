//! AdamW with moments of 8 bits against AdamW in f32, of one tensor, at every level of instructions
//! and at one thread and all.
//!
//! `cargo bench --bench coded -- memory` runs the part whose names match: 16 million elements,
//! which no cache holds, in pages of 2 MiB. `cache` has 8,192, whose time is arithmetic alone.
//! Compare only within one run. Throughput counts the bytes that a step must move, by how a
//! parameter is kept; `ceiling` reads four arrays of f32 and writes three, as AdamW in f32 does.

use std::num::NonZeroUsize;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_launch::{Master, Precision, StateDType};
use fusestep_planner::{Optimizer, Plan, Planner, RunAlone, State};
use fusestep_simd::Level;
use fusestep_tensor::{DType, Element, ParamDesc, Role, Shape};
use half::bf16;

#[path = "support/memory.rs"]
mod memory;
#[path = "support/timing.rs"]
mod timing;

use memory::{Ceiling, thread_counts};
use timing::group;

/// Elements ahead that the ceiling prefetches: 512 bytes, as the kernels do.
const PREFETCH_DISTANCE: usize = 128;

/// A way to keep a parameter and its moments.
struct Way {
    name: &'static str,
    dtype: DType,
    precision: Precision,
    /// Bytes of an element in hundredths.
    hundredths: u64,
}

/// Every way, f32 first.
fn ways() -> [Way; 4] {
    let plain = Precision::default();
    let coded = Precision { state: StateDType::Int8, ..plain };
    let beside = Precision { master: Master::Remainder8, ..coded };
    [
        Way { name: "f32", dtype: DType::F32, precision: plain, hundredths: 2800 },
        Way { name: "f32_8bit", dtype: DType::F32, precision: coded, hundredths: 1650 },
        Way { name: "bf16_8bit", dtype: DType::BF16, precision: coded, hundredths: 1050 },
        Way { name: "bf16_r8_8bit", dtype: DType::BF16, precision: beside, hundredths: 1250 },
    ]
}

/// One tensor of a plan, with its state.
struct Tensor {
    plan: Plan,
    state: State,
}

impl Tensor {
    /// A parameter of 0.5 and a gradient of 0.01 everywhere, stepped once.
    fn new(way: &Way, numel: u64, backend: &CpuBackend) -> Self {
        let rule = Optimizer::Adam(Adam::default()).with_lr(1e-3);
        let desc = ParamDesc::new("p", Shape::new([numel]).expect("a shape"), way.dtype);
        let plan = Planner::new(rule).precision(way.precision).plan(&[desc]).expect("a plan");
        let mut state = plan.allocate(backend).expect("memory");
        match way.dtype {
            DType::BF16 => fill(&mut state, [0.5, 0.01].map(bf16::from_f32)),
            _ => fill(&mut state, [0.5f32, 0.01]),
        }
        let mut tensor = Self { plan, state };
        tensor.step(backend);
        let first = tensor.first(way);
        assert!((first - 0.499).abs() < 2e-3, "{}: {first}", way.name);
        tensor
    }

    fn step(&mut self, backend: &CpuBackend) {
        RunAlone::of(&self.plan, &mut self.state, backend).step_all().expect("a step");
    }

    /// The first parameter, as it is kept.
    fn first(&self, way: &Way) -> f32 {
        match way.dtype {
            DType::BF16 => self.state.param::<bf16>("p").expect("a parameter")[0].to_f32(),
            _ => self.state.param::<f32>("p").expect("a parameter")[0],
        }
    }
}

/// Fills parameter and gradient with a value each.
fn fill<T: Element>(state: &mut State, [param, grad]: [T; 2]) {
    state.view_mut::<T>(Role::Param, "p").expect("a parameter").fill(param);
    state.grad_mut::<T>("p").expect("a gradient").fill(grad);
}

fn coded(criterion: &mut Criterion) {
    for (part, numel) in [("memory", 16 << 20), ("cache", 8192)] {
        for level in Level::available().into_iter().rev() {
            let mut group = group(criterion, &format!("coded/{part}/{level}"));
            for threads in thread_counts() {
                let backend = CpuBackend::new(threads).at_level(level);
                for way in ways() {
                    one(&mut group, &way, numel, threads, &backend);
                }
                let mut ceiling = Ceiling::new(numel as usize, &backend);
                group.throughput(Throughput::Bytes(28 * numel));
                group.bench_function(format!("ceiling/t{threads}"), |b| {
                    b.iter(|| ceiling.pass(&backend, PREFETCH_DISTANCE));
                });
            }
            group.finish();
        }
    }
}

fn one(
    group: &mut criterion::BenchmarkGroup<'_, criterion::measurement::WallTime>,
    way: &Way,
    numel: u64,
    threads: NonZeroUsize,
    backend: &CpuBackend,
) {
    let mut tensor = Tensor::new(way, numel, backend);
    group.throughput(Throughput::Bytes(numel * way.hundredths / 100));
    group.bench_function(format!("{}/t{threads}", way.name), |b| b.iter(|| tensor.step(backend)));
}

criterion_group!(benches, coded);
criterion_main!(benches);
