//! AdamW with moments of 8 bits against AdamW in f32, on slices, at one thread and all.
//!
//! `cargo bench --bench coded -- memory` runs the part whose names match: 16 million elements,
//! which no cache holds. `cache` has 8,192, whose time is arithmetic alone. Compare only within one
//! run. Throughput counts the bytes that a step must move, by how a parameter is kept.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use fusestep_fused_adam::{
    Adam, AdamTensors, CodedAdamTensors, CodedState, ParamSlices, WeightDecay, units_of,
};
use fusestep_simd::Pool;
use half::bf16;

#[path = "support/timing.rs"]
mod timing;

use timing::group;

/// A parameter with gradients and both kinds of moments.
struct Tensor {
    wide: Vec<f32>,
    wide_grad: Vec<f32>,
    narrow: Vec<bf16>,
    narrow_grad: Vec<bf16>,
    remainder: Vec<i8>,
    plain: [Vec<f32>; 2],
    codes: [Vec<u8>; 2],
    units: [Vec<f32>; 2],
}

/// Ways to keep a parameter and its moments.
#[derive(Clone, Copy)]
enum Kept {
    Plain,
    F32,
    Bf16,
    Bf16Remainder8,
}

/// Names, and bytes of an element in hundredths.
const ALL: [(&str, Kept, u64); 4] = [
    ("f32", Kept::Plain, 2800),
    ("f32_8bit", Kept::F32, 1650),
    ("bf16_8bit", Kept::Bf16, 1050),
    ("bf16_r8_8bit", Kept::Bf16Remainder8, 1250),
];

impl Tensor {
    fn new(numel: usize) -> Self {
        Self {
            wide: vec![0.5; numel],
            wide_grad: vec![0.01; numel],
            narrow: vec![bf16::from_f32(0.5); numel],
            narrow_grad: vec![bf16::from_f32(0.01); numel],
            remainder: vec![0; numel],
            plain: [0; 2].map(|_| vec![0.0; numel]),
            codes: [0; 2].map(|_| vec![0; numel]),
            units: [0; 2].map(|_| vec![0.0; units_of(numel)]),
        }
    }

    fn step(&mut self, pool: &Pool, kept: Kept, step: u64) {
        let adam = Adam { weight_decay: WeightDecay::Decoupled(0.0), ..Adam::default() };
        let Self { wide, wide_grad, narrow, narrow_grad, remainder, plain, codes, units } = self;
        let param = match kept {
            Kept::Plain => {
                let [moment1, moment2] = plain;
                let (param, grad) = (&mut wide[..], &wide_grad[..]);
                let tensor = AdamTensors { param, grad, moment1, moment2, max_moment2: None };
                return adam.step_with(pool, step, &mut [tensor]).expect("lists of one numel");
            }
            Kept::F32 => ParamSlices::F32 { param: wide, grad: wide_grad },
            Kept::Bf16 => ParamSlices::Bf16 { param: narrow, grad: narrow_grad },
            Kept::Bf16Remainder8 => {
                ParamSlices::Bf16Remainder8 { param: narrow, remainder, grad: narrow_grad }
            }
        };
        let ([codes1, codes2], [units1, units2]) = (codes, units);
        let tensor = CodedAdamTensors {
            param,
            moment1: CodedState { codes: codes1, units: units1 },
            moment2: CodedState { codes: codes2, units: units2 },
            max_moment2: None,
        };
        adam.step_coded_with(pool, step, &mut [tensor]).expect("lists of one numel");
    }

    /// The first parameter, as it is kept.
    fn first(&self, kept: Kept) -> f32 {
        match kept {
            Kept::Plain | Kept::F32 => self.wide[0],
            Kept::Bf16 | Kept::Bf16Remainder8 => self.narrow[0].to_f32(),
        }
    }
}

fn coded(criterion: &mut Criterion) {
    let all = std::thread::available_parallelism().expect("a number of threads");
    for (part, numel) in [("memory", 16 << 20), ("cache", 8192)] {
        let mut group = group(criterion, &format!("coded/{part}"));
        for threads in [std::num::NonZeroUsize::MIN, all] {
            let pool = Pool::new(threads);
            for (name, kept, hundredths) in ALL {
                let mut tensor = Tensor::new(numel);
                tensor.step(&pool, kept, 1);
                assert!((tensor.first(kept) - 0.499).abs() < 2e-3, "{name}");
                group.throughput(Throughput::Bytes(numel as u64 * hundredths / 100));
                let mut step = 1;
                group.bench_function(format!("{name}/t{threads}"), |b| {
                    b.iter(|| {
                        step += 1;
                        tensor.step(&pool, kept, step);
                    });
                });
                black_box(&tensor.wide);
            }
            if all.get() == 1 {
                break;
            }
        }
        group.finish();
    }
}

criterion_group!(benches, coded);
criterion_main!(benches);
