//! Windows of lanes that are saved before their update, and go on at another number of ranks.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::Path;

use fusestep_checkpoint::{load, save};
use fusestep_collective::{Communicator, Options, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_launch::Backend;
use fusestep_planner::{Comms, Run, RunToLoad, RunToSave, Topology, ZeroStage};
use fusestep_tensor::Role;

use crate::lane_case::{End, LaneCase, norms};
use crate::run::{Mixed, whole_params};

impl LaneCase {
    /// A rank of a run that is saved within its second window, behind so many micro-steps of each
    /// rank, or of one that goes on from there; the parameters at the end.
    fn part(&self, comm: &mut dyn Communicator, folder: &Path, saved: Option<u32>) -> End {
        let backend: &dyn Backend = &CpuBackend::new(NonZeroUsize::MIN);
        let planner = self.planner().limits(backend.limits());
        let plan = planner.plan_for(&self.case.params(), Topology::of(comm)).unwrap();
        let rank = comm.rank();
        let mut comms = match self.case.streams {
            0 => Comms::direct(comm).reducing_when_full(),
            streams => Comms::with_streams(comm, streams).unwrap(),
        };
        let mut state = plan.allocate_on(backend, comms.communicator()).unwrap();
        if saved.is_some() {
            for (param, desc) in plan.params().iter().enumerate() {
                let first = self.case.first_values(param);
                state.write(backend, Role::Param, &desc.name, &first).unwrap();
            }
        } else {
            load(RunToLoad::of(&plan, &mut state, backend), folder).unwrap();
        }
        let mut reports = Vec::new();
        for update in u64::from(saved.is_none())..self.case.steps {
            let mut run = Run::of(&plan, &mut state, backend, &mut comms);
            for step in 0.. {
                if saved == Some(step) && update == 1 {
                    let run = RunToSave::of(&plan, &state, backend);
                    save(run, &mut comms, folder, BTreeMap::new()).unwrap();
                    return End::default();
                }
                if let Some(micro_batch) = run.state().micro_batch() {
                    self.give(&mut run, update, micro_batch, rank);
                } else if self.weighted {
                    run.state_mut().set_weight(1.0).unwrap();
                }
                if let Some(report) = run.step().unwrap().update {
                    reports.push(norms(&report));
                    break;
                }
            }
            assert_eq!(state.memory_bytes(), plan.memory_bytes(), "{self:?}");
        }
        (whole_params(&mut Run::of(&plan, &mut state, backend, &mut comms)), reports)
    }

    /// [`Self::part`] on all ranks.
    fn parts(&self, world: usize, folder: &Path, saved: Option<u32>) -> End {
        let mut other = self.clone();
        other.case.world = world;
        let ends =
            run_ranks(world, &Options::default(), |mut comm| other.part(&mut comm, folder, saved));
        let last = ends.unwrap().pop().unwrap();
        last.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

#[test]
fn a_window_that_is_saved_goes_on_at_any_number_of_ranks() {
    let lacking = |update, micro_batch, param| match param {
        0 => update == 1 && micro_batch % 3 == 0,
        1 => update == 1,
        4 => micro_batch < 7,
        _ => false,
    };
    let mut plain = LaneCase { lanes: 12, without_gradient: lacking, ..LaneCase::default() };
    plain.case.steps = 3;
    let mut mixed = LaneCase { of_lane: 2, lanes: 6, weighted: true, ..plain.clone() };
    (mixed.case.mixed, mixed.case.clip, mixed.case.scaled) = (Mixed::Yes, Some(0.5), Some(64.0));
    let fused = LaneCase { fused: true, ..plain.clone() };
    let in_backward = LaneCase { in_backward: true, ..plain.clone() };
    for case in [plain, mixed, fused, in_backward] {
        let expected = case.on(1);
        for (before, done) in [(4, 1), (4, 2), (3, 3), (1, 5), (2, 1)] {
            if case.lanes / before * case.of_lane <= done {
                // A rank that has given all of its micro-batches waits in the update.
                continue;
            }
            let folder = tempfile::tempdir().unwrap();
            let mut saving = case.clone();
            saving.case.zero = ZeroStage::One;
            saving.parts(before as usize, folder.path(), Some(done));
            for (after, zero, streams) in [
                (3, ZeroStage::None, 0),
                (1, ZeroStage::None, 0),
                (4, ZeroStage::Two, 2),
                (5, ZeroStage::One, 0),
                (6, ZeroStage::None, 2),
            ] {
                let mut other = case.clone();
                (other.case.zero, other.case.streams) = (zero, streams);
                let found = other.parts(after, folder.path(), None);
                assert!(found.0 == expected.0, "{before} at {done} to {after}: {other:?}");
                assert_eq!(found.1, expected.1[1..], "{before} at {done} to {after}");
            }
        }
    }
}

#[test]
fn a_window_of_other_lanes_is_refused() {
    let case = LaneCase { lanes: 8, ..LaneCase::default() };
    let folder = tempfile::tempdir().unwrap();
    case.parts(2, folder.path(), Some(3));
    let backend: &dyn Backend = &CpuBackend::new(NonZeroUsize::MIN);
    for other in [LaneCase { lanes: 4, ..case.clone() }, LaneCase { of_lane: 2, ..case.clone() }] {
        let plan = other.planner().plan(&other.case.params()).unwrap();
        let mut state = plan.allocate(backend).unwrap();
        state.any_settings();
        let error = load(RunToLoad::of(&plan, &mut state, backend), folder.path()).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("lanes") && error.contains("8 lanes of 1 micro-batch"), "{error}");
    }
}
