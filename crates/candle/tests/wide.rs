//! Gradients in f32 of variables of 16 bits: nothing rounds them before the update.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW};
use fusestep_candle::{
    AdamW, Fused, Master, Options, Params, ParamsLars, ParamsSgd, Precision, ReduceDType,
};
use fusestep_collective::{Communicator, Options as CommOptions, run_ranks};

/// Edges of what kernels and the pool share out.
const NUMELS: [usize; 6] = [1, 0, 17, 4_097, 65_537, 131_072];

const HALVES: [DType; 2] = [DType::F16, DType::BF16];

/// Values that no type of 16 bits has.
fn values(numel: usize, seed: u64) -> Tensor {
    let value = |at: usize| {
        let mixed = (at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (seed << 17);
        let mixed = mixed.wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40;
        mixed as f32 / 16_777_216.0 - 0.5
    };
    let all: Vec<f32> = (0..numel).map(value).collect();
    Tensor::from_vec(all, numel, &Device::Cpu).unwrap()
}

/// Variables of 16 bits, and ones in f32 of the same values.
fn twins(dtype: DType) -> [Vec<(String, Var)>; 2] {
    let narrow = |(index, &numel): (usize, &usize)| {
        values(numel, 900 + index as u64).to_dtype(dtype).unwrap()
    };
    let all: Vec<Tensor> = NUMELS.iter().enumerate().map(narrow).collect();
    [dtype, DType::F32].map(|dtype| {
        let own = all.iter().enumerate();
        let own = own.map(|(index, of)| (index, Var::from_tensor(&of.to_dtype(dtype).unwrap())));
        own.map(|(index, var)| (format!("v{index}"), var.unwrap())).collect()
    })
}

/// Gradients in f32 for every variable; of some in the variable's own type, which has their values,
/// where `mixed`.
fn grads(vars: &[(String, Var)], narrow: DType, seed: u64, mixed: bool) -> GradStore {
    let mut store = GradStore::default();
    for (index, (_, var)) in vars.iter().enumerate() {
        let mut grad = values(var.elem_count(), 100 * seed + index as u64);
        if mixed && index % 2 == 0 {
            grad = grad.to_dtype(narrow).unwrap().to_dtype(var.dtype()).unwrap();
        }
        store.insert(var, grad);
    }
    store
}

fn bits(vars: &[(String, Var)], dtype: DType) -> Vec<Vec<u32>> {
    let of = |(_, var): &(String, Var)| {
        let rounded = var.as_tensor().to_dtype(dtype).unwrap().to_dtype(DType::F32).unwrap();
        rounded.to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
    };
    vars.iter().map(of).collect()
}

fn with_masters(options: &Options) -> Options {
    let precision = Precision { master: Master::F32, ..Precision::default() };
    Options { precision, reduce_dtype: ReduceDType::F32, ..options.clone() }
}

/// Three updates, in one process, have the bits of f32 variables, rounded.
fn has_the_bits_of_f32<P: Params>(params: P, options: &Options) {
    for dtype in HALVES {
        for mixed in [false, true] {
            let [narrow, wide] = twins(dtype);
            let (masters, plain) = (with_masters(options), options.clone());
            let mut ours = Fused::with_options(narrow.clone(), params.clone(), &masters).unwrap();
            let mut others = Fused::with_options(wide.clone(), params.clone(), &plain).unwrap();
            for step in 0..3 * u64::from(options.accumulate) {
                ours.step(&grads(&narrow, dtype, step, mixed)).unwrap();
                others.step(&grads(&wide, dtype, step, mixed)).unwrap();
            }
            assert!(bits(&narrow, dtype) == bits(&wide, dtype), "{dtype:?} {options:?} {mixed}");
            assert_eq!(ours.report().grad_norm, others.report().grad_norm);
        }
    }
}

#[test]
fn one_process_takes_them_as_they_are() {
    has_the_bits_of_f32(ParamsAdamW::default(), &Options::default());
    has_the_bits_of_f32(ParamsSgd::with_momentum(), &Options::default());
    let clipped = Options { clip_norm: Some(0.5), ..Options::default() };
    has_the_bits_of_f32(ParamsAdamW::default(), &clipped);
    has_the_bits_of_f32(ParamsLars::default(), &clipped);
    has_the_bits_of_f32(ParamsAdamW::default(), &Options { naive: true, ..Options::default() });
}

#[test]
fn sums_of_micro_steps_are_not_rounded() {
    let sums = Options { accumulate: 3, ..Options::default() };
    has_the_bits_of_f32(ParamsAdamW::default(), &sums);
}

#[test]
fn ranks_take_them_as_they_are() {
    for (world, zero) in [(1, 0), (2, 0), (2, 1), (3, 2), (2, 3)] {
        let shared = Options { zero, ..Options::default() };
        let ranks = run_ranks(world, &CommOptions::default(), |mut comm| {
            let dtype = DType::BF16;
            let [narrow, wide] = twins(dtype);
            let all = [(&narrow, with_masters(&shared)), (&wide, shared.clone())];
            let rank = comm.rank() as u64;
            for (vars, options) in all {
                let made = AdamW::with_options(vars.clone(), ParamsAdamW::default(), &options);
                let mut ranked = made.unwrap().on(&mut comm).unwrap();
                for step in 0..3 {
                    ranked.step(&grads(vars, dtype, 7 * step + rank, step == 1)).unwrap();
                }
            }
            assert!(bits(&narrow, dtype) == bits(&wide, dtype), "{world} ranks, zero {zero}");
        });
        assert!(ranks.unwrap().iter().all(Result::is_ok));
    }
}

#[test]
fn a_gradient_that_would_be_rounded_is_refused_and_the_setting_is_named() {
    for dtype in HALVES {
        let [narrow, _] = twins(dtype);
        let before = bits(&narrow, dtype);
        let params = ParamsAdamW::default();
        let mut plain = AdamW::new(narrow.clone(), params.clone()).unwrap();
        let error = plain.step(&grads(&narrow, dtype, 1, false)).unwrap_err().to_string();
        let expected = format!("gradient of `v0`: expected {dtype:?}");
        assert!(error.contains(&expected) && error.contains("ReduceDType::F32"), "{error}");
        // Nothing else is wider than a sum in f32.
        let options = with_masters(&Options::default());
        let mut wide = AdamW::with_options(narrow.clone(), params, &options).unwrap();
        let mut store = grads(&narrow, dtype, 1, false);
        let (_, last) = &narrow[5];
        store.insert(last, values(last.elem_count(), 3).to_dtype(DType::F64).unwrap());
        let error = wide.step(&store).unwrap_err().to_string();
        assert!(error.contains("gradient of `v5`") && error.contains("found F64"), "{error}");
        assert!(bits(&narrow, dtype) == before, "{dtype:?} changed");
    }
}
