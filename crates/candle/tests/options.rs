//! Clipping, loss scaling and 16-bit variables through the adapter: against a planned state that
//! keeps everything itself.

use std::num::NonZeroUsize;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW};
use fusestep_candle::{
    AdamW, Lars, LossScale, Master, Options, OwnRule, Params, ParamsLars, Precision, Rounding,
    Schedule, StateDType, group,
};
use fusestep_cpu::CpuBackend;
use fusestep_planner::{ClipByGlobalNorm, LossScaling, Planner, RunAlone, UpdateNorms};
use fusestep_tensor::{ParamDesc, Role, Shape};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Edges of chunks and of what the pool shares, and one tensor that the whole pool works on.
const NUMELS: [usize; 6] = [1, 0, 17, 65_537, 131_072, 300_001];

const DTYPES: [(DType, fusestep_tensor::DType); 4] = [
    (DType::F32, fusestep_tensor::DType::F32),
    (DType::F64, fusestep_tensor::DType::F64),
    (DType::F16, fusestep_tensor::DType::F16),
    (DType::BF16, fusestep_tensor::DType::BF16),
];

fn values(numel: usize, seed: u64, dtype: DType) -> Tensor {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let values: Vec<f32> = (0..numel).map(|_| rng.random::<f32>() - 0.5).collect();
    let tensor = Tensor::from_vec(values, numel, &Device::Cpu).unwrap();
    tensor.to_dtype(dtype).unwrap()
}

fn vars(dtype: DType) -> Vec<(String, Var)> {
    let var = |(index, &numel): (usize, &usize)| {
        let values = values(numel, index as u64, dtype);
        (format!("v{index}"), Var::from_tensor(&values).unwrap())
    };
    NUMELS.iter().enumerate().map(var).collect()
}

fn grads(vars: &[(String, Var)], step: u64) -> GradStore {
    let mut store = GradStore::default();
    for (name, var) in vars {
        let index: u64 = name[1..].parse().unwrap();
        store.insert(var, values(var.elem_count(), 1000 * step + index, var.dtype()));
    }
    store
}

fn bytes(tensor: &Tensor) -> Vec<u8> {
    match tensor.dtype() {
        DType::F64 => {
            let values: Vec<f64> = tensor.to_vec1().unwrap();
            values.into_iter().flat_map(f64::to_le_bytes).collect()
        }
        DType::F16 => {
            let values: Vec<half::f16> = tensor.to_vec1().unwrap();
            values.into_iter().flat_map(half::f16::to_le_bytes).collect()
        }
        DType::BF16 => {
            let values: Vec<half::bf16> = tensor.to_vec1().unwrap();
            values.into_iter().flat_map(half::bf16::to_le_bytes).collect()
        }
        _ => {
            let values: Vec<f32> = tensor.to_vec1().unwrap();
            values.into_iter().flat_map(f32::to_le_bytes).collect()
        }
    }
}

fn bits(vars: &[(String, Var)]) -> Vec<Vec<u8>> {
    vars.iter().map(|(_, var)| bytes(var.as_tensor())).collect()
}

/// Norms of gradients and updates: of all together, and the latter of each.
type Norms = (Option<f64>, Option<f64>, Option<Vec<f64>>);

/// The parameters, and the norms after three steps of a state that keeps them itself.
fn planned(
    params: &impl Params,
    options: &Options,
    (dtype, planned): (DType, fusestep_tensor::DType),
) -> (Vec<Vec<u8>>, Norms) {
    let vars = vars(dtype);
    let describe = |(name, var): &(String, Var)| {
        let shape = Shape::new([var.elem_count() as u64]).unwrap();
        ParamDesc::new(name, shape, planned)
    };
    let descs: Vec<ParamDesc> = vars.iter().map(describe).collect();
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let mut planner = Planner::new(params.rule()).precision(options.precision);
    if let Some(scale) = options.loss_scale {
        planner = planner.with(LossScaling::from(scale));
    }
    if let Some(norm) = options.clip_norm {
        planner = planner.with(ClipByGlobalNorm::new(norm));
    }
    if let Some(schedule) = &options.schedule {
        planner = planner.schedule(schedule.clone());
    }
    if options.update_norms {
        planner = planner.with(UpdateNorms);
    }
    let plan = planner.plan(&descs).unwrap();
    let mut state = plan.allocate(&backend).unwrap();
    for (name, var) in &vars {
        let bytes = bytes(var.as_tensor());
        state.write(&backend, Role::Param, name, &bytes).unwrap();
    }
    let mut norms = (None, None, None);
    for step in 1..=3 {
        let store = grads(&vars, step);
        for (name, var) in &vars {
            let grad = bytes(store.get(var).unwrap());
            state.write(&backend, Role::Grad, name, &grad).unwrap();
        }
        let report = RunAlone::of(&plan, &mut state, &backend).step_all().unwrap();
        let each = state.update_norms(&backend).unwrap();
        norms = (report.grad_norm, report.update_norm, each);
    }
    let found = vars.iter().map(|(name, var)| {
        let mut found = bytes(var.as_tensor());
        state.read(&backend, Role::Param, name, &mut found).unwrap();
        found
    });
    (found.collect(), norms)
}

fn has_the_bits_of_a_planned_state(options: &Options, dtypes: &[usize]) {
    let params = ParamsAdamW::default();
    for &(dtype, of_plan) in dtypes.iter().map(|&dtype| &DTYPES[dtype]) {
        let (expected, norms) = planned(&params, options, (dtype, of_plan));
        for threads in [1, 2, 3] {
            for naive in [false, true] {
                let options = Options { threads: Some(threads), naive, ..options.clone() };
                let vars = vars(dtype);
                let mut optimizer =
                    AdamW::with_options(vars.clone(), params.clone(), &options).unwrap();
                for step in 1..=3 {
                    optimizer.step(&grads(&vars, step)).unwrap();
                }
                assert!(bits(&vars) == expected, "{dtype:?} {options:?}, {threads} threads");
                let report = optimizer.report();
                let each = optimizer.update_norms().unwrap();
                assert_eq!((report.grad_norm, report.update_norm, each), norms);
                assert!(!report.skipped);
            }
        }
    }
}

#[test]
fn clipped_and_scaled_steps_have_the_bits_of_a_planned_state() {
    let clipped = Options { clip_norm: Some(0.5), ..Options::default() };
    has_the_bits_of_a_planned_state(&clipped, &[0, 1, 2, 3]);
    let scaled = Options { loss_scale: Some(LossScale::dynamic()), ..clipped };
    has_the_bits_of_a_planned_state(&scaled, &[0, 3]);
}

#[test]
fn scheduled_steps_have_the_bits_of_a_planned_state_and_say_their_rate() {
    let options = Options {
        schedule: Some(Schedule::warmup(2).then(Schedule::cosine(4))),
        ..Options::default()
    };
    has_the_bits_of_a_planned_state(&options, &[0, 3]);
    let rule = ParamsAdamW::default();
    let (vars, base) = (vars(DType::F32), rule.lr);
    let mut optimizer = AdamW::with_options(vars.clone(), rule, &options).unwrap();
    for (step, factor) in [1.0 / 3.0, 2.0 / 3.0, 1.0].into_iter().enumerate() {
        assert!((optimizer.scheduled_rate() / base - factor).abs() < 1e-15);
        optimizer.step(&grads(&vars, step as u64)).unwrap();
    }
    assert_eq!(optimizer.learning_rate(), base);
}

#[test]
fn measured_steps_have_the_bits_and_norms_of_a_planned_state() {
    let measured = Options { update_norms: true, ..Options::default() };
    has_the_bits_of_a_planned_state(&measured, &[0, 1, 2, 3]);
    let skipping = Options {
        loss_scale: Some(LossScale::dynamic()),
        precision: Precision { master: Master::F32, ..Precision::default() },
        ..measured
    };
    has_the_bits_of_a_planned_state(&skipping, &[2, 3]);
}

#[test]
fn masters_and_remainders_have_the_bits_of_a_planned_state() {
    for (master, dtypes) in [(Master::F32, &[2, 3][..]), (Master::Remainder, &[3])] {
        let precision = Precision { master, ..Precision::default() };
        let options = Options { precision, ..Options::default() };
        has_the_bits_of_a_planned_state(&options, dtypes);
    }
    let precision = Precision {
        state: StateDType::Bf16,
        rounding: Rounding::Stochastic { seed: 7 },
        ..Precision::default()
    };
    let options = Options { precision, ..Options::default() };
    has_the_bits_of_a_planned_state(&options, &[3]);
}

#[test]
fn a_master_keeps_what_16_bits_lose_and_follows_the_variable() {
    let var = Var::new(&[256.0f32], &Device::Cpu).unwrap();
    let var = Var::from_tensor(&var.to_dtype(DType::BF16).unwrap()).unwrap();
    let vars = vec![("v0".to_owned(), var.clone())];
    let options = Options {
        precision: Precision { master: Master::F32, ..Precision::default() },
        ..Options::default()
    };
    let params = fusestep_candle::ParamsSgd { lr: 0.25, ..fusestep_candle::ParamsSgd::default() };
    let mut optimizer = fusestep_candle::Sgd::with_options(vars.clone(), params, &options).unwrap();
    let mut store = GradStore::default();
    let one = Tensor::ones(1, DType::BF16, &Device::Cpu).unwrap();
    store.insert(&var, one);
    // Neighbours of 256 in bf16 are 1 and 2 away, so a quarter alone would be lost for ever.
    for _ in 0..4 {
        optimizer.step(&store).unwrap();
    }
    let value = || -> f32 {
        let wide = var.to_dtype(DType::F32).unwrap();
        wide.to_vec1::<f32>().unwrap()[0]
    };
    assert_eq!(value(), 255.0);
    let set = Tensor::new(&[8.0f32], &Device::Cpu).unwrap();
    var.set(&set.to_dtype(DType::BF16).unwrap()).unwrap();
    optimizer.follow_variables().unwrap();
    optimizer.step(&store).unwrap();
    assert_eq!(value(), 7.75);
}

#[test]
fn a_step_with_a_gradient_that_is_not_finite_changes_nothing_and_halves_the_scale() {
    for bad in [f32::NAN, f32::INFINITY] {
        let vars = vars(DType::F32);
        let options = Options { loss_scale: Some(LossScale::dynamic()), ..Options::default() };
        let mut optimizer =
            AdamW::with_options(vars.clone(), ParamsAdamW::default(), &options).unwrap();
        optimizer.step(&grads(&vars, 1)).unwrap();
        let (before, scale) = (bits(&vars), optimizer.loss_scale());
        let mut store = grads(&vars, 2);
        let mut values = vec![0.0f32; NUMELS[3]];
        values[65_536] = bad;
        let grad = Tensor::from_vec(values, NUMELS[3], &Device::Cpu).unwrap();
        store.insert(&vars[3].1, grad);
        optimizer.step(&store).unwrap();
        let report = optimizer.report();
        assert!(report.skipped && report.non_finite == 1 && report.step == 1);
        assert!(before == bits(&vars));
        assert_eq!(optimizer.loss_scale(), scale / 2.0);
    }
}

#[test]
fn excluded_names_have_no_decay_and_names_that_match_nothing_are_refused() {
    let with = |exclude: &[&str], groups: Vec<OwnRule>| {
        let vars = vars(DType::F32);
        let options = Options {
            exclude: exclude.iter().map(|part| (*part).to_owned()).collect(),
            groups,
            ..Options::default()
        };
        let params = ParamsLars { lr: 1.0, weight_decay: 0.5, ..ParamsLars::default() };
        let optimizer = Lars::with_options(vars.clone(), params, &options);
        optimizer.map(|optimizer| (vars, optimizer)).map_err(|error| error.to_string())
    };
    let shrink = |exclude: &[&str]| {
        let (vars, mut optimizer) = with(exclude, Vec::new()).unwrap();
        optimizer.step(&grads(&vars, 1)).unwrap();
        bits(&vars)
    };
    let (plain, excluded) = (shrink(&[]), shrink(&["v3"]));
    assert!(plain[3] != excluded[3] && plain[4] == excluded[4]);
    let error = with(&["v3", "bias"], Vec::new()).err().unwrap();
    assert!(error.contains("exclude: expected") && error.contains("found `bias`"), "{error}");
    assert!(error.contains("such as `v0`"), "{error}");
    let norms = group(["norm"], ParamsLars::default());
    let error = with(&[], vec![norms]).err().unwrap();
    assert!(error.contains("groups: expected") && error.contains("found `norm`"), "{error}");
}

#[test]
fn an_optimizer_of_nothing_is_refused() {
    let empty = candle_nn::VarMap::new();
    for error in [
        AdamW::new(&empty, ParamsAdamW::default()).err().unwrap(),
        AdamW::new(Vec::<Var>::new(), ParamsAdamW::default()).err().unwrap(),
    ] {
        let error = error.to_string();
        assert!(error.contains("expected at least one of floating point, found none"), "{error}");
    }
}

#[test]
fn options_of_ranks_are_refused_where_there_are_none() {
    let refused = |options: Options| {
        let vars = vars(DType::F32);
        let optimizer = AdamW::with_options(vars.clone(), ParamsAdamW::default(), &options);
        optimizer.unwrap().step(&grads(&vars, 1)).unwrap_err().to_string()
    };
    for (options, name) in [
        (Options { zero: 2, ..Options::default() }, "zero"),
        (Options { bucket_cap_mib: Some(1.0), ..Options::default() }, "bucket_cap_mib"),
        (Options { comm_streams: Some(2), ..Options::default() }, "comm_streams"),
    ] {
        let error = refused(options);
        assert!(error.starts_with(&format!("{name} of ")) && error.contains(".on("), "{error}");
    }
}

#[test]
fn options_out_of_range_name_the_option_or_the_variable() {
    let refused = |options: Options| {
        let made = AdamW::with_options(vars(DType::F16), ParamsAdamW::default(), &options);
        made.unwrap_err().to_string()
    };
    let error = refused(Options { clip_norm: Some(-1.0), ..Options::default() });
    assert!(error.contains("clip_norm: expected a finite number above 0, found `-1`"));
    let error = refused(Options {
        precision: Precision { master: Master::Remainder, ..Precision::default() },
        ..Options::default()
    });
    assert!(
        error.contains("`v0`: adamw: master weights of f16 parameters: expected none or f32"),
        "{error}"
    );
}
