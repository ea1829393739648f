//! Norm, clipping and loss scaling against their references, and what is refused.

use std::num::NonZeroUsize;

use fusestep_amp::reference::{Scaler, clip_factor, grad_norm, update_scale};
use fusestep_amp::{Finding, LossScale, ScalePolicy};
use fusestep_checkpoint::{load_state, save_state};
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_planner::{ClipByGlobalNorm, LossScaling, Optimizer, Planner, RunAlone};
use fusestep_tensor::{DType, Role};
use fusestep_testkit::{Case, EDGE_NUMELS};

fn cpu() -> CpuBackend {
    CpuBackend::new(NonZeroUsize::new(2).unwrap())
}

fn planner() -> Planner {
    Planner::new(Optimizer::Adam(Adam::default()))
}

#[test]
fn the_scale_follows_the_reference_over_100_000_steps() {
    let policy = ScalePolicy {
        growth: 4.0,
        backoff: 0.25,
        growth_interval: 3,
        backoff_interval: 2,
        floor: 2.0,
        ceiling: 32_768.0,
    };
    let mut scale = LossScale::with_policy(1024.0, policy).unwrap();
    let mut reference = Scaler { scale: 1024.0, good: 0, bad: 0 };
    let (mut seed, mut seen) = (1u32, [false; 2]);
    for step in 0..100_000 {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // Long runs of either kind, so that floor and ceiling are reached.
        let bad = (seed >> 16) % 10 < if step / 500 % 2 == 0 { 2 } else { 8 };
        scale = scale.after(if bad { Finding::NonFinite } else { Finding::Finite });
        let (growth, backoff) = ((4.0, 3, 32_768.0), (0.25, 2, 2.0));
        reference = update_scale(reference, u32::from(bad), growth, backoff);
        let found =
            Scaler { scale: scale.scale(), good: scale.good_steps(), bad: scale.bad_steps() };
        assert_eq!(found, reference, "step {step}");
        seen[0] |= scale.scale() == policy.floor;
        seen[1] |= scale.scale() == policy.ceiling;
    }
    assert_eq!(seen, [true; 2], "floor and ceiling were reached");
}

#[test]
fn the_norm_is_the_references_and_so_is_each_tensors() {
    let case = Case::new(EDGE_NUMELS, DType::F32);
    let backend = cpu();
    let plan = planner().with(ClipByGlobalNorm::new(0.5)).plan(&case.params).unwrap();
    let mut state = plan.allocate(&backend).unwrap();
    let mut all = Vec::new();
    for (index, param) in case.params.iter().enumerate() {
        let bytes = case.grad_bytes(index, 1);
        state.write(&backend, Role::Grad, &param.name, &bytes).unwrap();
        let values: Vec<f32> = bytemuck::pod_collect_to_vec(&bytes);
        all.push(values.into_iter().map(f64::from).collect::<Vec<_>>());
    }
    let report = RunAlone::of(&plan, &mut state, &backend).step_all().unwrap();
    let tensors: Vec<&[f64]> = all.iter().map(Vec::as_slice).collect();
    let (expected, found) = (grad_norm(&tensors), report.grad_norm.unwrap());
    assert!((found / expected - 1.0).abs() < 1e-13, "expected {expected}, found {found}");
    assert!(clip_factor(expected, 0.5) < 1.0 && !report.skipped);
    let reports = state.grad_reports(&backend).unwrap().unwrap();
    for (tensor, found) in tensors.iter().zip(reports.iter().map(|report| report.norm)) {
        let expected = grad_norm(&[*tensor]);
        assert!((found - expected).abs() <= 1e-13 * expected);
    }
}

#[test]
fn absent_parameters_are_no_part_of_the_norm() {
    let case = Case::new([10, 20, 30], DType::F32);
    let backend = cpu();
    let plan = planner().with(ClipByGlobalNorm::new(0.5)).plan(&case.params).unwrap();
    let mut state = plan.allocate(&backend).unwrap();
    for param in &case.params {
        state.grad_mut::<f32>(&param.name).unwrap().fill(2.0);
    }
    state.grad_mut::<f32>("tensor.1").unwrap().fill(f32::NAN);
    state.set_without_gradient("tensor.1").unwrap();
    let report = RunAlone::of(&plan, &mut state, &backend).step_all().unwrap();
    assert_eq!(report.grad_norm, Some(160f64.sqrt()));
    let reports = state.grad_reports(&backend).unwrap().unwrap();
    let norms: Vec<f64> = reports.iter().map(|report| report.norm).collect();
    assert_eq!(norms, [40f64.sqrt(), 0.0, 120f64.sqrt()]);
    // With its gradient the step is skipped, and nobody has missed anything.
    state.set_without_gradient("tensor.0").unwrap();
    assert!(RunAlone::of(&plan, &mut state, &backend).step_all().unwrap().skipped);
    let reports = state.grad_reports(&backend).unwrap().unwrap();
    assert_eq!(reports.iter().map(|g| g.non_finite).collect::<Vec<_>>(), [0, 20, 0]);
    assert_eq!([reports[0].norm, reports[2].norm], [0.0, 120f64.sqrt()]);
    assert!(!reports[1].norm.is_finite());
    let steps = ["tensor.0", "tensor.1"].map(|name| state.step_of(name).unwrap());
    assert_eq!((steps, state.step()), ([1, 0], 1));
    state.grad_mut::<f32>("tensor.1").unwrap().fill(2.0);
    let report = RunAlone::of(&plan, &mut state, &backend).step_all().unwrap();
    assert_eq!((report.grad_norm, report.step), (Some(240f64.sqrt()), 2));
}

#[test]
fn all_empty_and_no_parameters_at_all_are_a_norm_of_0() {
    for numels in [&[0u64, 0][..], &[]] {
        let case = Case::new(numels.iter().copied(), DType::F32);
        let plan = planner().with(ClipByGlobalNorm::new(1.0)).plan(&case.params).unwrap();
        let backend = cpu();
        let mut state = plan.allocate(&backend).unwrap();
        let report = RunAlone::of(&plan, &mut state, &backend).step_all().unwrap();
        assert_eq!((report.grad_norm, report.skipped), (Some(0.0), false));
    }
}

#[test]
fn a_checkpoint_keeps_the_scale_and_its_counters() {
    let case = Case::new([10], DType::F32);
    let backend = cpu();
    let plan = planner().with(LossScaling::dynamic()).plan(&case.params).unwrap();
    let mut state = plan.allocate(&backend).unwrap();
    RunAlone::of(&plan, &mut state, &backend).step_all().unwrap();
    state.grad_mut::<f32>("tensor.0").unwrap().as_mut_slice()[3] = f32::INFINITY;
    RunAlone::of(&plan, &mut state, &backend).step_all().unwrap();
    state.grad_mut::<f32>("tensor.0").unwrap().as_mut_slice()[3] = 0.0;
    RunAlone::of(&plan, &mut state, &backend).step_all().unwrap();
    let folder = std::env::temp_dir().join(format!("fusestep-amp-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("state.safetensors");
    save_state(&state, &backend, &path).unwrap();
    let mut loaded = plan.allocate(&backend).unwrap();
    load_state(&mut loaded, &backend, &path).unwrap();
    let scale = loaded.loss_scale().unwrap();
    assert_eq!((scale.scale(), scale.good_steps()), (32_768.0, 1));
    assert_eq!((loaded.skipped(), loaded.step()), (1, 2));
    assert_eq!(loaded.loss_scale(), state.loss_scale());
    // The device's block is the restored one, too: the next bad step halves it again.
    loaded.grad_mut::<f32>("tensor.0").unwrap().as_mut_slice()[3] = f32::NAN;
    let report = RunAlone::of(&plan, &mut loaded, &backend).step_all().unwrap();
    assert_eq!((report.loss_scale, loaded.skipped()), (Some(16_384.0), 2));
    let fixed = planner().with(LossScaling::fixed(8.0)).plan(&case.params).unwrap();
    let mut other = fixed.allocate(&backend).unwrap();
    load_state(&mut other, &backend, &path).unwrap();
    assert_eq!(other.loss_scale().unwrap().scale(), 8.0);
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let case = Case::new([10], DType::F32);
    let refused = |planner: Planner| planner.plan(&case.params).unwrap_err().to_string();
    assert_eq!(
        refused(planner().with(ClipByGlobalNorm::new(0.0))),
        "max_norm: expected a finite value above 0, found 0; leave the pass out to clip nothing"
    );
    let text = refused(planner().with(LossScaling::fixed(3.0)));
    assert!(text.starts_with("loss scale: expected a power of two from 1e0 to 8.5"), "{text}");
    let clip = || ClipByGlobalNorm::new(1.0);
    let text = refused(planner().with(clip()).with(clip()));
    assert_eq!(text, "clip_by_global_norm: expected the pass once, found it twice; remove one");
}

#[test]
fn the_plan_says_what_it_reads_and_decides() {
    let case = Case::new([70_000, 10], DType::F32);
    let passes = planner().with(ClipByGlobalNorm::new(1.0)).with(LossScaling::dynamic());
    let plan = passes.plan(&case.params).unwrap();
    let text = plan.to_string();
    for line in [
        "stage 0: norm of all gradients in 2 launches, 3 chunks, clipped to 1, loss scale 65536\n",
        "note clip_by_global_norm applied: gradients of a norm above 1 are multiplied",
        "note loss_scaling applied: the loss is multiplied by 65536, times 2 after 2000 good steps",
        "note norm applied: 273.5 KiB of gradients are read once, in 2 launches, before the first update\n",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
    assert_eq!((plan.launches(), plan.naive_launches()), (3, 5));
    let plain = planner().plan(&case.params).unwrap();
    assert_eq!(plan.traffic_bytes(), plain.traffic_bytes() + 4 * 70_010);
    assert!(plan.hash() != plain.hash());
    let other = planner().with(ClipByGlobalNorm::new(2.0)).plan(&case.params).unwrap();
    assert!(other.hash() != plain.hash());
    assert!(plan.to_html().contains("norm of gradients, 2 tensors, 3 chunks"));
    assert_eq!(plan.summary().max_norm, Some(1.0));
}
