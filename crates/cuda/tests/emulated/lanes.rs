//! Sums along lanes in memory of a device: the bits of the host.

use std::num::NonZeroU32;

use fusestep_fused_adam::Adam;
use fusestep_launch::Backend;
use fusestep_planner::{Comms, GradientAccumulation, Lanes, Planner, Run};
use fusestep_tensor::{DType, ParamDesc, Role, Shape};
use half::bf16;

use crate::common::{cpu, cuda};

/// Lanes of a run, and micro-batches of each.
#[derive(Clone, Copy, Debug)]
struct Cut {
    lanes: u32,
    of_lane: u32,
    weighted: bool,
}

const NUMELS: [u64; 4] = [1, 0, 1_000, 77];

fn gradient(dtype: DType, micro_batch: u64, param: u64) -> Vec<u8> {
    let value = |element: u64| {
        let mixed = (micro_batch * 8 + param + 1) * (element + 3) * 0x9e37_79b9;
        (mixed % 10_007) as f32 / 977.0 - 5.0
    };
    let values = (0..NUMELS[param as usize]).map(value);
    match dtype {
        DType::BF16 => values.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
        _ => values.flat_map(f32::to_le_bytes).collect(),
    }
}

/// The parameters behind two updates.
fn train(backend: &dyn Backend, dtype: DType, cut: Cut) -> Vec<Vec<u8>> {
    let count = |count| NonZeroU32::new(count).unwrap();
    let mut planner = Planner::new(Adam::default().into()).limits(backend.limits());
    planner = planner.with(Lanes::new(count(cut.lanes)));
    if cut.of_lane > 1 {
        planner = planner.with(GradientAccumulation::every(count(cut.of_lane)));
    }
    let names = NUMELS.iter().enumerate();
    let params: Vec<ParamDesc> = names
        .map(|(at, numel)| ParamDesc::new(format!("p{at}"), Shape::new([*numel]).unwrap(), dtype))
        .collect();
    let plan = planner.plan(&params).unwrap();
    let mut state = plan.allocate(backend).unwrap();
    let mut comms = Comms::alone();
    for update in 0..2 {
        let mut run = Run::of(&plan, &mut state, backend, &mut comms);
        // The second is of fewer micro-batches.
        let all = u64::from(cut.lanes * cut.of_lane) - update;
        if all > 0 {
            run.state_mut().set_micro_batches(all).unwrap();
        }
        loop {
            let micro_batch = run.state().micro_batch().unwrap();
            if cut.weighted {
                run.state_mut().set_weight(0.5 + micro_batch as f64).unwrap();
            }
            for (at, param) in params.iter().enumerate() {
                // One gradient comes late, another is missing at times.
                if at == 3 && micro_batch < 2 || at == 2 && micro_batch % 3 == 1 {
                    continue;
                }
                run.push_grad(&param.name, &gradient(dtype, micro_batch, at as u64)).unwrap();
            }
            if run.step().unwrap().update.is_some() {
                break;
            }
        }
    }
    let read = |param: &ParamDesc| {
        let mut bytes = vec![0; param.numel() as usize * dtype.len_bytes()];
        state.read(backend, Role::Param, &param.name, &mut bytes).unwrap();
        bytes
    };
    params.iter().map(read).collect()
}

#[test]
fn sums_along_lanes_are_those_of_the_host() {
    for dtype in [DType::F32, DType::BF16] {
        for (lanes, of_lane) in [(2, 1), (4, 1), (6, 1), (5, 3), (8, 2)] {
            for weighted in [false, true] {
                let cut = Cut { lanes, of_lane, weighted };
                let (host, device) = (cpu(), cuda());
                let expected = train(&host, dtype, cut);
                assert!(train(&device, dtype, cut) == expected, "{dtype} {cut:?}");
                assert!(expected[2].iter().any(|byte| *byte != 0));
            }
        }
    }
}
