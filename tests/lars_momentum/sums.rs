//! Sums that are at hand: those over parameters that the update before has taken along, those over
//! gradients that the step has taken for the global norm.

use std::num::NonZeroUsize;

use fusestep_cpu::CpuBackend;
use fusestep_elementwise::{Tensor, square_sum, step_tensor};
use fusestep_launch::{
    GroupValues, HostCall, HostList, MAX_LISTS, Master, Outcome, Precision, UpdateRule,
};
use fusestep_planner::{ClipByGlobalNorm, Optimizer, Planner, RunAlone};
use fusestep_simd::{Level, Pool};
use fusestep_tensor::{DType, Role};
use fusestep_testkit::Case;
use half::bf16;

use crate::lars;

/// What is written between steps of the law below.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Between {
    Nothing,
    /// Other values, by a copy.
    Copied(Role),
    /// Other values, in place.
    InPlace,
}

/// All tensors after four steps on the host, with gradients clipped to a norm. `anew` lends
/// parameters or masters for writing before each step, so that all sums are taken anew.
fn after_four_steps(
    precision: Precision,
    dtype: DType,
    between: Between,
    max_norm: Option<f64>,
    anew: bool,
) -> Vec<u8> {
    let case = Case::new([70_000, 3, 200_001, 0], dtype);
    let backend = CpuBackend::new(NonZeroUsize::new(2).unwrap());
    let mut planner = Planner::new(Optimizer::Lars(lars())).precision(precision);
    if let Some(max_norm) = max_norm {
        planner = planner.with(ClipByGlobalNorm::new(max_norm));
    }
    let plan = planner.plan(&case.params).unwrap();
    let mut state = plan.allocate(&backend).unwrap();
    for step in 0..4 {
        for (index, param) in case.params.iter().enumerate() {
            let name = &param.name;
            if step == 0 {
                let bytes = case.param_bytes(index);
                state.write(&backend, Role::Param, name, &bytes).unwrap();
            }
            let bytes = case.grad_bytes(index, step);
            state.write(&backend, Role::Grad, name, &bytes).unwrap();
            match (dtype, precision.master) {
                _ if !anew => {}
                // A master follows a parameter that was borrowed, so here it is borrowed itself.
                (_, Master::F32) => drop(state.view_mut::<f32>(Role::Master, name).unwrap()),
                (DType::F32, _) => drop(state.view_mut::<f32>(Role::Param, name).unwrap()),
                _ => drop(state.view_mut::<bf16>(Role::Param, name).unwrap()),
            }
        }
        let name = "tensor.2";
        match between {
            Between::Copied(role) if step == 2 => {
                let width = state.dtype(role, name).unwrap().len_bytes();
                let mut bytes = vec![0; 200_001 * width];
                state.read(&backend, role, name, &mut bytes).unwrap();
                // Half as many values, each twice.
                bytes.copy_within(..100_000 * width, 100_000 * width);
                state.write(&backend, role, name, &bytes).unwrap();
            }
            Between::InPlace if step == 2 && dtype == DType::F32 => {
                state.view_mut::<f32>(Role::Param, name).unwrap()[5..1000].fill(3.0);
            }
            Between::InPlace if step == 2 => {
                let values = state.view_mut::<bf16>(Role::Param, name).unwrap();
                values[5..1000].fill(bf16::from_f32(3.0));
            }
            _ => {}
        }
        RunAlone::of(&plan, &mut state, &backend).step_all().unwrap();
    }
    let mut found = Vec::new();
    for param in &case.params {
        for role in state.roles(&param.name).unwrap() {
            let width = state.dtype(role, &param.name).unwrap().len_bytes();
            let mut bytes = vec![0; param.numel() as usize * width];
            state.read(&backend, role, &param.name, &mut bytes).unwrap();
            found.extend(bytes);
        }
    }
    found
}

#[test]
fn norms_carried_from_the_update_before_are_those_of_what_the_parameters_hold() {
    for (dtype, master, beside) in [
        (DType::F32, Master::None, None),
        (DType::BF16, Master::None, None),
        (DType::BF16, Master::F32, Some(Role::Master)),
        (DType::BF16, Master::Remainder, Some(Role::Remainder)),
    ] {
        let precision = Precision { master, ..Precision::default() };
        let writes = [Between::Copied(Role::Param), Between::InPlace];
        let writes = writes.into_iter().chain(beside.map(Between::Copied));
        let after =
            |between, max_norm, anew| after_four_steps(precision, dtype, between, max_norm, anew);
        let plain = after(Between::Nothing, None, true);
        for between in std::iter::once(Between::Nothing).chain(writes) {
            let anew = after(between, None, true);
            assert_eq!(anew == plain, between == Between::Nothing, "{between:?}");
            // A norm that nothing exceeds changes nothing, but the gradients' sums are then taken
            // before the update.
            for max_norm in [None, Some(1e30)] {
                let cached = after(between, max_norm, false);
                assert!(cached == anew, "{dtype}, {precision}, {between:?}, {max_norm:?}");
            }
        }
        let clipped = [false, true].map(|anew| after(Between::Nothing, Some(1e-3), anew));
        assert!(clipped[0] == clipped[1] && clipped[0] != plain);
    }
}

/// Largest error of a parameter after each of `marks`, in units in the last place of the largest
/// value it has had. A tensor after one step with the sum of its gradient taken, or given as a
/// multiple of what it is.
fn after_one_step(given: Option<f64>, pool: Option<&Pool>) -> Vec<f32> {
    let kernel = lars().kernel(DType::F32, Precision::default()).unwrap();
    let layout = kernel.argument_layout();
    let mut scalars = vec![0; layout.scalar_bytes];
    let mut step_scalars = vec![0; layout.step_scalar_bytes];
    kernel.write_scalars(&mut scalars);
    let values = GroupValues { lr: 0.5, lr_scale: 1.0, weight_decay: None, trust: None, step: 1 };
    kernel.write_step_scalars(values, &mut step_scalars);
    let mut p: Vec<f32> = (0..200_001).map(|i| (i % 97) as f32 * 0.01).collect();
    let g: Vec<f32> = (0..200_001).map(|i| (i % 89) as f32 - 40.0).collect();
    let mut u = vec![0f32; 200_001];
    let level = Level::detect();
    let mut lists: [HostList<'_>; MAX_LISTS] = Default::default();
    lists[0] = HostList::ReadWrite(bytemuck::cast_slice_mut(&mut p));
    lists[1] = HostList::Read(bytemuck::cast_slice(&g));
    lists[2] = HostList::ReadWrite(bytemuck::cast_slice_mut(&mut u));
    let tensor = Tensor {
        kernel: kernel.as_ref(),
        call: HostCall {
            level,
            scalars: &scalars,
            grad_factor: 0.5,
            step_scalars: &step_scalars,
            changes: None,
            squares: None,
        },
        group: 0,
        numel: 200_001,
        parameter: 0,
        first_element: 0,
        lists,
        cached: None,
        sums: None,
        grad_sum: given.map(|times| times * square_sum::<f32, f32>(level, &g).sum),
        update_sums: None,
    };
    assert_eq!(step_tensor(tensor, pool), Outcome::Update);
    p
}

#[test]
fn a_gradient_whose_sum_is_given_is_not_summed_again() {
    let pool = Pool::new(NonZeroUsize::new(3).unwrap());
    for pool in [None, Some(&pool)] {
        let taken = after_one_step(None, pool);
        assert!(after_one_step(Some(1.0), pool) == taken);
        assert!(after_one_step(Some(4.0), pool) != taken);
    }
}
