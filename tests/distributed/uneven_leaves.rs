//! Slices that end inside a leaf of the fixed tree: norms differ from one rank's by rounding.

use std::num::NonZeroUsize;

use fusestep_collective::{Communicator, Options, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::Lars;
use fusestep_planner::{
    ClipByGlobalNorm, Comms, Distributed, Optimizer, Plan, Planner, Run, State, Topology,
};
use fusestep_tensor::{DType, ParamDesc, Role, Shape};

use crate::run::noise;

/// Elements of a slice: one leaf of 1,024 and part of the next.
const SLICE: u64 = 1_500;
const STEPS: u64 = 4;

fn values(key: u64, elements: std::ops::Range<u64>) -> Vec<u8> {
    let values = elements.map(|element| noise([key, 1, element]));
    values.flat_map(f32::to_le_bytes).collect()
}

fn plan(rule: Optimizer, topology: Topology, numel: u64) -> Plan {
    let shape = Shape::new([numel]).unwrap();
    Planner::new(rule)
        .with(Distributed::params(["head"]))
        .with(ClipByGlobalNorm::new(0.5))
        .plan_for(&[ParamDesc::new("head", shape, DType::F32)], topology)
        .unwrap()
}

/// The elements `own` of the tensor after some steps.
fn train(
    plan: &Plan,
    comms: &mut Comms<'_>,
    backend: &CpuBackend,
    own: std::ops::Range<u64>,
) -> Vec<f32> {
    let mut state: State = plan.allocate(backend).unwrap();
    let first = values(100, own.clone());
    state.write(backend, Role::Param, "head", &first).unwrap();
    for step in 0..STEPS {
        let grad = values(step, own.clone());
        let mut run = Run::of(plan, &mut state, backend, comms);
        run.push_grad("head", &grad).unwrap();
        run.step().unwrap();
    }
    state.param::<f32>("head").unwrap().to_vec()
}

#[test]
fn slices_that_cut_leaves_train_as_the_whole_tensor_but_for_rounding() {
    for rule in [Optimizer::from(Lars::default()), Lamb::default().into()] {
        for world in 2..=4 {
            let numel = world as u64 * SLICE;
            let whole = plan(rule, Topology::SOLO, numel);
            let backend = CpuBackend::new(NonZeroUsize::MIN);
            let mut solo = fusestep_collective::Solo::new();
            let expected = train(&whole, &mut Comms::direct(&mut solo), &backend, 0..numel);
            let outcomes = run_ranks(world, &Options::default(), |mut comm| {
                let plan = plan(rule, Topology::of(&comm), SLICE);
                let first = comm.rank() as u64 * SLICE;
                let backend = CpuBackend::new(NonZeroUsize::MIN);
                let mut comms = Comms::direct(&mut comm);
                train(&plan, &mut comms, &backend, first..first + SLICE)
            });
            let ranks = outcomes.unwrap().into_iter().map(Result::unwrap);
            let found: Vec<f32> = ranks.flatten().collect();
            // Sums of squares differ by some 2⁻⁵³, so a rate, rounded to f32, differs by its last
            // bit at most, and a step of a rate below 1 by less than that of the parameter.
            let bound = STEPS as f32 * 2.0 * f32::EPSILON;
            for (found, expected) in found.iter().zip(&expected) {
                assert!(
                    (found - expected).abs() <= bound * expected.abs().max(0.1),
                    "{rule:?}, {world} ranks: {found} and {expected}"
                );
            }
        }
    }
}
