//! Runs of one case on every backend.

use std::num::NonZeroUsize;

use fusestep_cpu::CpuBackend;
use fusestep_launch::{Backend, LaunchLimits, Precision};
use fusestep_planner::{Optimizer, Plan, Planner, RunAlone};
use fusestep_simd::Level;
use fusestep_tensor::{DType, Role};
use half::{bf16, f16};

use crate::Case;
use crate::normed_reference::{near_lamb, near_lars};
use crate::reference::near_elementwise;

/// Every backend of this build and machine, with a name for messages; missing backends are printed.
pub fn backends() -> Vec<(String, Box<dyn Backend>)> {
    let mut all: Vec<(String, Box<dyn Backend>)> = Vec::new();
    for level in Level::available() {
        for threads in [1, 2, 3] {
            let count = NonZeroUsize::new(threads).expect("not zero");
            let cpu = CpuBackend::new(count);
            all.push((format!("cpu, {level}, {threads} threads"), Box::new(cpu.at_level(level))));
        }
    }
    add_cuda(&mut all);
    all
}

#[cfg(feature = "cuda")]
fn add_cuda(all: &mut Vec<(String, Box<dyn Backend>)>) {
    match fusestep_cuda::CudaBackend::open(0) {
        Ok(cuda) => all.push((format!("cuda, {}", cuda.device_info()), Box::new(cuda))),
        Err(error) => println!("skipped a backend: {error}"),
    }
}

#[cfg(not(feature = "cuda"))]
fn add_cuda(_: &mut Vec<(String, Box<dyn Backend>)>) {
    println!("skipped a backend: cuda: this build leaves it out; `cargo xtask emulate` has it");
}

/// Limits that distribute tensors over launches in all the ways tests need: default, classic, tiny,
/// and cut by chunks.
fn limits() -> [LaunchLimits; 4] {
    let tiny_chunks = LaunchLimits {
        argument_bytes: 700,
        chunk_elements: 512,
        chunks_per_launch: 5,
        ..LaunchLimits::default()
    };
    [
        LaunchLimits::default(),
        LaunchLimits::with_argument_bytes(4096),
        LaunchLimits::with_argument_bytes(400),
        tiny_chunks,
    ]
}

/// Runs a case on a plan and returns the bytes of all parameters and state, in plan order. Behind
/// them come the reported numbers of all gradients and updates. All NaN have one payload.
///
/// # Panics
/// If the case cannot be run; tests only give cases that can.
pub fn outcome(plan: &Plan, case: &Case, backend: &dyn Backend) -> Vec<u8> {
    let mut state = plan.allocate(backend).expect("memory for a test");
    for (index, param) in case.params.iter().enumerate() {
        let bytes = case.param_bytes(index);
        state.write(backend, Role::Param, &param.name, &bytes).expect("the case's own parameter");
    }
    let mut reported = Vec::new();
    for step in 1..=case.steps {
        for (index, param) in case.params.iter().enumerate() {
            let bytes = case.grad_bytes_as(index, step, plan.grad_dtype(index));
            state.write(backend, Role::Grad, &param.name, &bytes).expect("the case's own gradient");
        }
        let report = RunAlone::of(plan, &mut state, backend).step_all();
        let report = report.expect("a step of a valid plan");
        if let Some(norm) = report.grad_norm {
            let scale = report.loss_scale.unwrap_or(1.0);
            reported.extend([norm, report.non_finite as f64, scale, report.step as f64]);
        }
        if let Some(norm) = report.update_norm {
            reported.push(norm);
            let norms = state.update_norms(backend).expect("sums can be read");
            reported.extend(norms.expect("the plan asks for them"));
        }
    }
    backend.synchronize().expect("the device finishes");
    let mut all = Vec::new();
    for param in &case.params {
        for role in state.roles(&param.name).expect("a parameter of the plan") {
            let dtype = state.dtype(role, &param.name).expect("a tensor of the plan");
            let mut bytes = vec![0; role.entries(param.numel()) as usize * dtype.len_bytes()];
            state.read(backend, role, &param.name, &mut bytes).expect("a tensor of the plan");
            one_nan(&mut bytes, dtype);
            all.extend_from_slice(&bytes);
        }
    }
    let mut reported = bytemuck::pod_collect_to_vec(&reported);
    one_nan(&mut reported, DType::F64);
    all.extend_from_slice(&reported);
    all
}

/// Requires the bits of the naive plan on one portable thread from every backend, plan and limit.
/// The naive plan itself must have the values of the f64 reference.
///
/// # Panics
/// If a single byte differs, naming backend, plan and limits, or a value is far from the reference.
pub fn check(optimizer: Optimizer, case: &Case) {
    check_at(optimizer, Precision::default(), case);
}

/// [`check`] for parameters and state kept with this precision.
///
/// # Panics
/// As [`check`].
pub fn check_at(optimizer: Optimizer, precision: Precision, case: &Case) {
    let with_precision = |planner: Planner| planner.precision(precision);
    let expected = check_bits(optimizer, case, &with_precision);
    let plan = with_precision(Planner::new(optimizer)).plan(&case.params);
    near_reference(&plan.expect("a valid case"), case, &expected);
}

/// Requires the values of the reference, up to rounding; `found` is laid out as by
/// [`outcome`].
///
/// Elements that meet an extreme gradient are left out: f32 overflows there where f64 does not.
///
/// # Panics
/// If a value is further from the reference than rounding explains, naming tensor and element.
fn near_reference(plan: &Plan, case: &Case, found: &[u8]) {
    match plan.optimizer() {
        Optimizer::Lars(lars) => near_lars(lars, plan, case, found),
        Optimizer::Lamb(lamb) => near_lamb(lamb, plan, case, found),
        _ => near_elementwise(plan, case, found),
    }
}

/// Requires the bits of the naive plan on one portable thread from every backend, plan and limit,
/// each with the passes that `passes` adds. Returns these bits, so that the caller compares them
/// with other values: kernels that do nothing agree, too.
///
/// # Panics
/// If a single byte differs, naming backend, plan and limits.
pub fn check_bits(
    optimizer: Optimizer,
    case: &Case,
    passes: &dyn Fn(Planner) -> Planner,
) -> Vec<u8> {
    let oracle = CpuBackend::new(NonZeroUsize::MIN).at_level(Level::PORTABLE);
    let naive = passes(Planner::new(optimizer).naive());
    let plan = naive.plan(&case.params).expect("a valid case");
    let expected = outcome(&plan, case, &oracle);
    for (name, backend) in backends() {
        for limits in limits() {
            let planners = [
                ("fused", Planner::new(optimizer).limits(limits)),
                ("naive", Planner::new(optimizer).limits(limits).naive()),
            ];
            for (kind, planner) in planners {
                let plan = passes(planner).plan(&case.params).expect("a valid case");
                let found = outcome(&plan, case, backend.as_ref());
                assert!(
                    found == expected,
                    "{name}, {kind} plan, {limits:?}: first difference at byte {:?} of {}: {plan}",
                    found.iter().zip(&expected).position(|(a, b)| a != b),
                    expected.len(),
                );
            }
        }
    }
    expected
}

/// Gives every NaN the same payload: payloads are outside the numeric contract.
fn one_nan(bytes: &mut [u8], dtype: DType) {
    match dtype {
        DType::F32 => replace(bytes, f32::NAN.to_le_bytes(), |b| f32::from_le_bytes(b).is_nan()),
        DType::F64 => replace(bytes, f64::NAN.to_le_bytes(), |b| f64::from_le_bytes(b).is_nan()),
        DType::F16 => replace(bytes, f16::NAN.to_le_bytes(), |b| f16::from_le_bytes(b).is_nan()),
        DType::BF16 => replace(bytes, bf16::NAN.to_le_bytes(), |b| bf16::from_le_bytes(b).is_nan()),
        _ => {}
    }
}

fn replace<const N: usize>(bytes: &mut [u8], nan: [u8; N], is_nan: impl Fn([u8; N]) -> bool) {
    let (values, _) = bytes.as_chunks_mut::<N>();
    for value in values.iter_mut().filter(|value| is_nan(**value)) {
        *value = nan;
    }
}
