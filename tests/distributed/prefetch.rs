//! Parameters of stage 3 that are asked for ahead of their use.

use std::num::NonZeroUsize;
use std::time::Duration;

use fusestep_collective::{
    CollectiveError, Collectives, Communicator, Fault, FaultKind, Faulty, Membership, Options,
    run_ranks,
};
use fusestep_cpu::CpuBackend;
use fusestep_planner::{Comms, Plan, PlanError, Run, State, Topology, ZeroStage};
use fusestep_tensor::Role;

use crate::run::{Case, Mixed, whole_params};

fn case(world: usize) -> Case {
    Case {
        numels: vec![70_001, 3, 0, 1, 5_000, 257],
        world,
        zero: ZeroStage::Three,
        clip: Some(1.0),
        ..Case::default()
    }
}

fn comms<'a>(case: &Case, comm: &'a mut dyn Communicator) -> Result<Comms<'a>, CollectiveError> {
    match case.shard_group {
        Some(group) => Comms::in_groups(comm, group, case.streams),
        None => Comms::with_streams(comm, case.streams),
    }
}

fn start(case: &Case, comm: &dyn Communicator, backend: &CpuBackend) -> (Plan, State) {
    let plan = case.planner();
    let plan = plan.plan_for(&case.params(), Topology::of(comm)).unwrap();
    let mut state = plan.allocate(backend).unwrap();
    for (param, desc) in plan.params().iter().enumerate() {
        let values = case.first_values(param);
        state.write(backend, Role::Param, &desc.name, &values).unwrap();
    }
    (plan, state)
}

/// Two steps in which each parameter is asked for while the one after it gives its gradient, and
/// compared with what is gathered.
fn train_ahead(case: &Case, comm: &mut dyn Communicator) -> Result<Vec<Vec<u8>>, PlanError> {
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let (plan, mut state) = start(case, comm, &backend);
    let rank = comm.rank();
    let mut comms = comms(case, comm)?;
    let name = |param: usize| plan.params()[param].name.as_str();
    for step in 0..case.steps {
        let mut ahead = None;
        for param in (0..case.numels.len()).rev() {
            let pending = match ahead.take() {
                Some(pending) => pending,
                None => {
                    Run::of(&plan, &mut state, &backend, &mut comms).prefetch(&[name(param)])?
                }
            };
            let here = pending.wait(&state)?;
            let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
            if param > 0 {
                let pending = run.prefetch(&[name(param - 1)])?;
                assert_eq!(pending.len_bytes() as u64, 4 * case.numels[param - 1]);
                ahead = Some(pending);
            }
            if step == 0 {
                assert!(here.bytes(0) == case.first_values(param));
            }
            if !case.lacks_gradient(rank, step, param) {
                let gradient = case.gradient(rank, step, param);
                run.push_grad(name(param), &gradient)?;
            }
        }
        Run::of(&plan, &mut state, &backend, &mut comms).step()?;
    }
    Ok(whole_params(&mut Run::of(&plan, &mut state, &backend, &mut comms)))
}

#[test]
fn asking_ahead_changes_no_bit_whatever_gradients_ranks_give_meanwhile() {
    for world in 1..=5 {
        // One rank gives nothing at all, so it starts its buckets long after the others.
        let without_gradient = (0..6).map(|param| (world - 1, 1, param)).collect();
        let base = Case { without_gradient, ..case(world) };
        let expected = base.run().params;
        for (streams, group) in [(0, None), (1, None), (2, None), (1, NonZeroUsize::new(2))] {
            let shard_group = group.filter(|group| world.is_multiple_of(group.get()));
            let case = Case { streams, shard_group, cap: Some(4_000), ..base.clone() };
            let expected = match shard_group {
                Some(_) => case.by_hand().params,
                None => expected.clone(),
            };
            let found = run_ranks(world, &Options::default(), |mut comm| {
                train_ahead(&case, &mut comm).unwrap()
            });
            for found in found.unwrap() {
                assert!(found.unwrap() == expected, "{world} {streams} {group:?}");
            }
        }
    }
}

#[test]
fn several_dtypes_come_in_one_go_and_other_stages_copy() {
    for zero in [ZeroStage::None, ZeroStage::One, ZeroStage::Two, ZeroStage::Three] {
        let case = Case { zero, streams: 1, mixed: Mixed::Yes, ..case(3) };
        let ranks = run_ranks(3, &Options::default(), |mut comm| {
            let backend = CpuBackend::new(NonZeroUsize::MIN);
            let (plan, mut state) = start(&case, &comm, &backend);
            let mut comms = comms(&case, &mut comm).unwrap();
            let order = [5, 0, 4, 1, 2];
            let names: Vec<&str> = order.map(|at| plan.params()[at].name.as_str()).to_vec();
            let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
            let first = run.prefetch(&names).unwrap();
            let second = run.prefetch(&names[..1]);
            // In another order than they were asked for.
            let second = second.unwrap().wait(&state).unwrap();
            let first = first.wait(&state).unwrap();
            for (at, &param) in order.iter().enumerate() {
                assert!(first.bytes(at) == case.first_values(param), "{zero:?}");
            }
            assert!(second.bytes(0) == case.first_values(5) && second.bytes(1).is_empty());
            // Of buckets of at most 24 leaves of f32: three of the first parameter and one of the
            // fifth, the third is empty. One of all bf16 parameters, which comes twice.
            assert_eq!(comms.calls(), if zero == ZeroStage::Three { 6 } else { 0 });
        });
        ranks.unwrap().into_iter().for_each(|rank| rank.unwrap());
    }
}

#[test]
fn parameters_that_change_on_the_way_are_refused_and_the_stream_goes_on() {
    for streams in [0, 1] {
        let case = Case { streams, ..case(2) };
        let ranks = run_ranks(2, &Options::default(), |mut comm| {
            let backend = CpuBackend::new(NonZeroUsize::MIN);
            let (plan, mut state) = start(&case, &comm, &backend);
            let mut comms = comms(&case, &mut comm).unwrap();
            let name = plan.params()[0].name.as_str();
            let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
            let pending = run.prefetch(&[name]);
            let gradient = case.gradient(0, 0, 0);
            run.push_grad(name, &gradient).unwrap();
            run.step().unwrap();
            let error = pending.unwrap().wait(&state).unwrap_err();
            assert!(matches!(error, PlanError::StaleParams { changes: 1 }), "{error}");
            let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
            let pending = run.prefetch(&[name]);
            let other = plan.allocate(&backend).unwrap();
            let error = pending.unwrap().wait(&other).unwrap_err();
            assert!(matches!(error, PlanError::StaleParams { .. }), "{error}");
            let pending = run.prefetch(&[name]);
            let found = pending.unwrap().wait(&state).unwrap();
            let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
            let whole = run.gather(&[name]).unwrap();
            assert!(found.bytes(0) == whole.bytes(0));
            let error = run.prefetch(&["none"]);
            assert!(matches!(error.unwrap_err(), PlanError::UnknownName { .. }));
        });
        ranks.unwrap().into_iter().for_each(|rank| rank.unwrap());
    }
}

#[test]
fn parameters_given_up_on_their_way_close_the_stream_with_an_error_that_names_the_rank() {
    let case = Case { streams: 1, ..case(3) };
    let errors = run_ranks(3, &Options::default(), |mut comm| {
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let (plan, mut state) = start(&case, &comm, &backend);
        let rank = comm.rank();
        let mut comms = comms(&case, &mut comm).unwrap();
        let name = plan.params()[0].name.as_str();
        let pending = Run::of(&plan, &mut state, &backend, &mut comms).prefetch(&[name]);
        match rank {
            1 => drop(pending.unwrap()),
            _ => drop(pending.unwrap().wait(&state)),
        }
        comms.communicator().barrier().unwrap();
        let next = Run::of(&plan, &mut state, &backend, &mut comms).prefetch(&[name]);
        next.unwrap().wait(&state).unwrap_err().to_string()
    });
    for error in errors.unwrap() {
        let error = error.unwrap();
        assert!(error.contains("rank 1") && error.contains("prefetch"), "{error}");
    }
}

/// A communicator whose third group, the communication stream of parameters, misbehaves.
struct StreamFaults<C> {
    inner: C,
    splits: usize,
    fault: Fault,
}

impl<C: Communicator> Communicator for StreamFaults<C> {
    fusestep_collective::forward_calls! {
        this => this.inner;
        rank, world_size, execute, set_context, aborter, recorder, failure,
    }

    fn split(
        &mut self,
        membership: Option<Membership>,
    ) -> Result<Option<Box<dyn Communicator>>, CollectiveError> {
        self.splits += 1;
        let made = self.inner.split(membership)?;
        Ok(made.map(|made| match self.splits {
            3 => Box::new(Faulty::new(made, &[self.fault])) as Box<dyn Communicator>,
            _ => made,
        }))
    }
}

#[test]
fn a_rank_that_fails_dies_or_stalls_on_the_way_ends_all_ranks_with_an_error_that_names_it() {
    let options = Options { timeout: Duration::from_millis(400), ..Options::default() };
    for kind in [FaultKind::Fail, FaultKind::Kill, FaultKind::StallMs(1_500)] {
        for call in [1, 4, 9] {
            let (rank, world) = (call as usize % 3, 3);
            let fault = Fault { rank, call, kind };
            let case = Case { streams: 2, ..case(world) };
            let ended = run_ranks(world, &options, |comm| {
                let mut comm = StreamFaults { inner: comm, splits: 0, fault };
                train_ahead(&case, &mut comm).map(drop)
            });
            let errors: Vec<String> = ended
                .unwrap()
                .into_iter()
                .map(|ended| ended.unwrap().unwrap_err().to_string())
                .collect();
            // Every rank's error says whose fault it was.
            let names = [format!("rank {rank}"), format!("[{rank}]")];
            let named = |error: &String| names.iter().any(|name| error.contains(name));
            assert!(errors.iter().all(named), "{fault:?}: {errors:?}");
        }
    }
}

#[test]
fn a_rank_whose_own_code_fails_while_parameters_are_on_their_way_ends_the_others_too() {
    let case = Case { streams: 1, ..case(3) };
    let errors = run_ranks(3, &Options::default(), |mut comm| {
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let (plan, mut state) = start(&case, &comm, &backend);
        let rank = comm.rank();
        let mut comms = comms(&case, &mut comm).unwrap();
        let name = plan.params()[0].name.as_str();
        for round in 0.. {
            let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
            if rank == 2 && round == 3 {
                let _on_its_way = run.prefetch(&[name]);
                return "the model's own error".to_owned();
            }
            let pending = run.prefetch(&[name]);
            if let Err(error) = pending.and_then(|pending| pending.wait(&state)) {
                return error.to_string();
            }
            if let Err(error) = comms.communicator().barrier() {
                return error.to_string();
            }
        }
        String::new()
    });
    let errors: Vec<String> = errors.unwrap().into_iter().map(Result::unwrap).collect();
    for error in &errors[..2] {
        assert!(error.contains("rank 2"), "{errors:?}");
    }
}
