//! Variables on a CUDA device, updated where candle keeps them: allocation, copies and steps, on
//! the emulated driver under `cargo xtask candle-cuda`. candle's own kernels are not run: there
//! they are files without code, so gradients come from the host in place of a backward pass.

use candle_core::backprop::GradStore;
use candle_core::cuda_backend::cudarc::driver::sys::{
    CUgraphInstantiate_flags, CUstreamCaptureMode,
};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW};
use fusestep_candle::{
    AnyRule, Lamb, LossScale, Master, Nesterov, Options, Params, ParamsLamb, ParamsScheduleFree,
    ParamsSgd, Precision, ReduceDType, ScheduleFree, Solo,
};
use fusestep_planner::Optimizer as Rule;
use fusestep_tensor::Role;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Edges of chunks, and lengths that no pack fits.
const NUMELS: [usize; 8] = [1, 16_383, 17, 16_385, 65_537, 3, 131_072, 33];

/// candle's two kinds of device: on the calling thread's stream, and on one of its own.
fn devices() -> [Device; 2] {
    let (shared, own) = (Device::new_cuda(0), Device::new_cuda_with_stream(0));
    [shared.unwrap(), own.unwrap()]
}

fn values(numel: usize, seed: u64, dtype: DType) -> Tensor {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let values: Vec<f32> = (0..numel).map(|_| rng.random::<f32>() - 0.5).collect();
    let tensor = Tensor::from_vec(values, numel, &Device::Cpu).unwrap();
    tensor.to_dtype(dtype).unwrap()
}

fn vars(dtype: DType, device: &Device) -> Vec<(String, Var)> {
    vars_of(&NUMELS, dtype, device)
}

fn vars_of(numels: &[usize], dtype: DType, device: &Device) -> Vec<(String, Var)> {
    let var = |(index, &numel): (usize, &usize)| {
        let values = values(numel, index as u64, dtype).to_device(device).unwrap();
        (format!("v{index}"), Var::from_tensor(&values).unwrap())
    };
    numels.iter().enumerate().map(var).collect()
}

/// Gradients of the variables' own type.
fn grads(vars: &[(String, Var)], step: u64) -> GradStore {
    grads_of(vars, step, |var| var.dtype())
}

/// Gradients that begin a few elements behind the start of their memory.
fn grads_of(vars: &[(String, Var)], step: u64, dtype: impl Fn(&Var) -> DType) -> GradStore {
    let mut store = GradStore::default();
    for (name, var) in vars {
        let index: u64 = name[1..].parse().unwrap();
        let (numel, ahead) = (var.elem_count(), index as usize % 5);
        let all = values(numel + ahead, 1000 * step + index, dtype(var));
        let all = all.to_device(var.device()).unwrap();
        store.insert(var, all.narrow(0, ahead, numel).unwrap());
    }
    store
}

fn bits(tensor: &Tensor) -> Vec<u8> {
    let tensor = tensor.to_device(&Device::Cpu).unwrap();
    match tensor.dtype() {
        DType::F32 => {
            let values: Vec<f32> = tensor.to_vec1().unwrap();
            values.into_iter().flat_map(f32::to_le_bytes).collect()
        }
        _ => {
            let values: Vec<half::bf16> = tensor.to_vec1().unwrap();
            values.into_iter().flat_map(half::bf16::to_le_bytes).collect()
        }
    }
}

/// All variables and first moments.
fn all_bits<P: Params>(optimizer: &fusestep_candle::Fused<'_, P>, role: Role) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    for (name, var) in optimizer.variables() {
        all.push(bits(var.as_tensor()));
        all.push(bits(&optimizer.moment(role, name).unwrap()));
    }
    all
}

fn rules() -> [(Rule, Role); 3] {
    let sgd = ParamsSgd { momentum: 0.9, nesterov: Nesterov::Nesterov, ..ParamsSgd::default() };
    [
        (ParamsAdamW::default().rule(), Role::Moment1),
        (sgd.rule(), Role::Velocity),
        (ParamsLamb::default().rule(), Role::Moment1),
    ]
}

#[test]
fn variables_on_the_device_get_the_bits_of_those_on_the_host() {
    let master = Precision { master: Master::F32, ..Precision::default() };
    let plain = Options::default();
    let clipped = Options {
        clip_norm: Some(0.5),
        loss_scale: Some(LossScale::dynamic()),
        ..Options::default()
    };
    let kept = Options { precision: master, clip_norm: Some(0.5), ..Options::default() };
    for (rule, role) in rules() {
        for (dtype, options) in [(DType::F32, &plain), (DType::F32, &clipped), (DType::BF16, &kept)]
        {
            let steps = |device: &Device| {
                let vars = vars(dtype, device);
                let mut optimizer = AnyRule::with_options(vars.clone(), rule, options).unwrap();
                for step in 1..=3 {
                    optimizer.step(&grads(&vars, step)).unwrap();
                }
                assert_eq!(optimizer.report().copied_gradients, 0);
                all_bits(&optimizer, role)
            };
            let expected = steps(&Device::Cpu);
            for device in devices() {
                let found = steps(&device);
                let first = found.iter().zip(&expected).position(|(a, b)| a != b);
                assert_eq!(first, None, "{rule}, {dtype:?}, {device:?}");
            }
        }
    }
}

#[test]
fn gradients_in_f32_of_narrow_variables_get_the_bits_of_those_on_the_host() {
    let precision = Precision { master: Master::F32, ..Precision::default() };
    let wide = Options { precision, reduce_dtype: ReduceDType::F32, ..Options::default() };
    let clipped = Options { clip_norm: Some(0.5), ..wide.clone() };
    for (rule, role) in rules() {
        for options in [&wide, &clipped] {
            let steps = |device: &Device| {
                let vars = vars(DType::BF16, device);
                let mut optimizer = AnyRule::with_options(vars.clone(), rule, options).unwrap();
                for step in 1..=3 {
                    optimizer.step(&grads_of(&vars, step, |_| DType::F32)).unwrap();
                }
                assert_eq!(optimizer.report().copied_gradients, 0);
                all_bits(&optimizer, role)
            };
            let expected = steps(&Device::Cpu);
            for device in devices() {
                assert!(steps(&device) == expected, "{rule}, {device:?}");
            }
        }
    }
}

#[test]
fn tables_that_stay_on_the_device_give_the_bits_of_the_host() {
    // As many variables as a table is kept for, and one of them without a gradient in a step.
    let numels: Vec<usize> = (1..40).collect();
    let clipped = Options {
        clip_norm: Some(0.5),
        loss_scale: Some(LossScale::dynamic()),
        ..Options::default()
    };
    for (rule, role) in rules() {
        for options in [&Options::default(), &clipped] {
            let steps = |device: &Device| {
                let vars = vars_of(&numels, DType::F32, device);
                let mut optimizer = AnyRule::with_options(vars.clone(), rule, options).unwrap();
                for step in 1..=6 {
                    let mut store = grads(&vars, step);
                    if step == 3 {
                        store.remove(&vars[7].1);
                    }
                    if step == 4 {
                        let bad = Tensor::new(&[f32::INFINITY], &Device::Cpu).unwrap();
                        let is_scaled = options.loss_scale.is_some();
                        let bad = if is_scaled { bad } else { values(1, 9, DType::F32) };
                        store.insert(&vars[0].1, bad.to_device(device).unwrap());
                    }
                    optimizer.step(&store).unwrap();
                    // These gradients once more, whose addresses the table has.
                    optimizer.step(&store).unwrap();
                }
                all_bits(&optimizer, role)
            };
            let expected = steps(&Device::Cpu);
            for device in devices() {
                let found = steps(&device);
                let first = found.iter().zip(&expected).position(|(a, b)| a != b);
                assert_eq!(first, None, "{rule}, {device:?}");
            }
        }
    }
}

#[test]
fn a_step_follows_what_candle_has_enqueued_and_precedes_what_it_enqueues_next() {
    let relaxed = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    for device in devices() {
        let stream = device.as_cuda_device().unwrap().cuda_stream();
        // Where tensors remember who used them last, a use waits for that, which a graph cannot.
        // SAFETY: what is made here is used on this stream, and on ours in its order.
        unsafe { stream.context().disable_event_tracking() };
        let vars = vars(DType::F32, &device);
        let mut optimizer = Lamb::new(vars.clone(), ParamsLamb::default()).unwrap();
        let grads = grads(&vars, 1);
        optimizer.step(&grads).unwrap();
        let before = bits(vars[4].1.as_tensor());
        // Launches on candle's stream, or ordered behind it, are recorded in place of being done,
        // and the recording ends well only if candle's stream waits for them.
        stream.begin_capture(relaxed).unwrap();
        optimizer.step(&grads).unwrap();
        let graph = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().unwrap();
        assert!(bits(vars[4].1.as_tensor()) == before, "done although it is recorded");
        graph.launch().unwrap();
        assert!(bits(vars[4].1.as_tensor()) != before, "not recorded");
    }
}

#[test]
fn saved_state_and_checkpoints_go_from_one_device_to_another() {
    let folder = tempfile::tempdir().unwrap();
    let [device, _] = devices();
    let start = |device: &Device| {
        let vars = vars(DType::F32, device);
        let optimizer = Lamb::new(vars.clone(), ParamsLamb::default()).unwrap();
        (vars, optimizer)
    };
    let (own, mut saved) = start(&device);
    saved.step(&grads(&own, 1)).unwrap();
    saved.save_checkpoint(folder.path(), 1).unwrap();
    saved.step(&grads(&own, 2)).unwrap();
    for device in [Device::Cpu, device] {
        let (vars, mut resumed) = start(&device);
        assert_eq!(resumed.resume(folder.path()).unwrap(), 1);
        resumed.step(&grads(&vars, 2)).unwrap();
        let (found, expected) =
            (all_bits(&resumed, Role::Moment2), all_bits(&saved, Role::Moment2));
        assert!(found == expected, "{device:?}");
    }
}

#[test]
fn averages_are_lent_to_the_model_on_the_device() {
    let evaluated = |device: &Device| {
        let vars = vars(DType::F32, device);
        let params = ParamsScheduleFree::default();
        let mut optimizer = ScheduleFree::new(vars.clone(), params).unwrap();
        for step in 1..=3 {
            optimizer.step(&grads(&vars, step)).unwrap();
        }
        let trained = bits(vars[2].1.as_tensor());
        let averages = optimizer.evaluate(|| Ok(bits(vars[2].1.as_tensor()))).unwrap();
        assert!(averages != trained && bits(vars[2].1.as_tensor()) == trained);
        averages
    };
    let [device, _] = devices();
    assert_eq!(evaluated(&device), evaluated(&Device::Cpu));
}

#[test]
fn what_cannot_be_on_a_device_is_named() {
    let [device, _] = devices();
    let mut mixed = vars(DType::F32, &device);
    mixed[1] = vars(DType::F32, &Device::Cpu).swap_remove(1);
    let error = Lamb::new(mixed, ParamsLamb::default()).unwrap_err().to_string();
    assert!(
        error.starts_with(
            "variable `v1`: expected it on the CUDA device of the first variable, found it on Cpu"
        ),
        "{error}"
    );
    let optimizer = Lamb::new(vars(DType::F32, &device), ParamsLamb::default()).unwrap();
    let error = optimizer.on(&mut Solo::new()).unwrap_err().to_string();
    assert!(
        error.starts_with("variable `v0`: expected it on the cpu, found it on Cuda"),
        "{error}"
    );
    let options = Options { update_norms: true, ..Options::default() };
    let vars = vars(DType::F32, &device);
    let error = Lamb::with_options(vars, ParamsLamb::default(), &options).unwrap_err();
    assert!(
        error.to_string().starts_with(
            "option `update_norms`: expected variables on the cpu, found variables on a CUDA device"
        ),
        "{error}"
    );
}
