//! One rank of many, on a thread of its own: it has the communicator, and does what Python asks.
//!
//! Python waits for it in short pauses, so that Ctrl-C ends the wait of a call that other ranks do
//! not come to.

use std::path::Path;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fusestep::collective::Aborter;
use fusestep::planner::{
    Checkpoints, Comms, MicroStepReport, Optimizer, Plan, PlanError, RunToSave, State, Topology,
};
use fusestep::tensor::{Element, ParamDesc, Role};
use fusestep::{Communicator, CpuBackend, DType, Error};
use half::{bf16, f16};

use crate::engine::connect;
use crate::setup::Setup;

/// Something to do on the rank's thread.
pub(crate) type Task = Box<dyn FnOnce(&mut Rank<'_>) + Send>;

/// What a rank says once it is set up.
pub(crate) struct Ready {
    pub(crate) rank: usize,
    pub(crate) world: usize,
    pub(crate) plan: String,
    pub(crate) aborter: Aborter,
    pub(crate) kept: Arc<Kept>,
    pub(crate) places: Vec<Borrowed>,
}

/// Where a parameter of the rank's own memory and its gradient begin.
pub(crate) struct Borrowed {
    pub(crate) param: usize,
    /// `None` where gradients move while they are reduced.
    pub(crate) grad: Option<usize>,
    /// Bytes of each.
    pub(crate) len_bytes: usize,
}

/// The memory that Python has views of, for as long as any of them is there.
pub(crate) struct Kept {
    state: Mutex<State>,
    /// Keeps what the engine has shared with other processes, also when calls have lost theirs.
    _shared: Mutex<fusestep::coalesce::HostMemory>,
}

impl Kept {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The rank, on its thread.
pub(crate) struct Rank<'c> {
    plan: Plan,
    kept: Arc<Kept>,
    backend: CpuBackend,
    comms: Comms<'c>,
    checkpoints: Checkpoints,
    /// A save that has failed on all ranks, and that nobody has been told of.
    failed_save: Option<PlanError>,
    /// What has gone wrong that other ranks may not know of.
    failed: Option<String>,
}

/// Joins the others, says how it went, and does tasks until nobody can send any more. `_ended` is
/// dropped last.
pub(crate) fn serve(
    setup: Setup,
    ready: &Sender<Result<Ready, Error>>,
    tasks: &Receiver<Task>,
    _ended: Sender<()>,
) {
    let mut comm = match connect(setup.engine.as_deref(), setup.timeout) {
        Ok(comm) => comm,
        Err(error) => return drop(ready.send(Err(error))),
    };
    match Rank::new(setup, comm.as_mut()) {
        Ok((mut rank, first)) => {
            if ready.send(Ok(first)).is_err() {
                return;
            }
            for task in tasks {
                task(&mut rank);
            }
            if rank.failed.is_none() {
                let _ = rank.checkpoints.finish(&rank.plan, &mut rank.comms);
            }
        }
        Err(error) => drop(ready.send(Err(error))),
    }
}

impl<'c> Rank<'c> {
    fn new(setup: Setup, comm: &'c mut dyn Communicator) -> Result<(Self, Ready), Error> {
        let topology = Topology::of(comm);
        let (streams, backend) = (setup.streams, CpuBackend::new(setup.threads));
        // Memory that calls give back at the same place, and that outlives calls that fail.
        let lends = setup.zero < 2
            && setup.accumulate.get() == 1
            && (comm.shares_memory() || topology.world == 1);
        let plan = setup.plan(topology)?;
        let (rank, world, aborter) = (topology.rank, topology.world, comm.aborter());
        Comms::direct(comm).compare(&[("comm_streams", streams.to_string())])?;
        let state = plan.allocate_on(&backend, comm)?;
        let shared = comm.allocate(1)?;
        let mut rank_of = Self {
            kept: Arc::new(Kept { state: Mutex::new(state), _shared: Mutex::new(shared) }),
            comms: Comms::with_streams(comm, streams)?.reducing_when_full(),
            plan,
            backend,
            checkpoints: Checkpoints::default(),
            failed_save: None,
            failed: None,
        };
        if world > 1 {
            let state = rank_of.kept.state();
            rank_of.plan.compare_settings(&state, &mut rank_of.comms)?;
        }
        let ready = Ready {
            rank,
            world,
            plan: rank_of.plan.to_string(),
            aborter,
            kept: Arc::clone(&rank_of.kept),
            places: rank_of.places(lends)?,
        };
        Ok((rank_of, ready))
    }

    fn places(&self, lends: bool) -> Result<Vec<Borrowed>, Error> {
        let mut state = self.kept.state();
        let mut places = Vec::with_capacity(self.plan.params().len());
        for desc in self.plan.params() {
            // What has no elements has no memory to lend.
            let borrowed = lends && desc.numel() > 0;
            places.push(Borrowed {
                param: param_address(&mut state, desc)?,
                grad: borrowed.then(|| grad_address(&state, desc)).transpose()?,
                len_bytes: desc.numel() as usize * desc.dtype.len_bytes(),
            });
        }
        Ok(places)
    }

    /// Does `work` unless something has failed before, and remembers what fails now.
    ///
    /// # Errors
    /// That of `work`, or of what has failed before.
    pub(crate) fn attempt<T>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<T, Error> {
        if let Some(failed) = &self.failed {
            return Err(format!("expected ranks that are well, found: {failed}").into());
        }
        let done = work(self);
        if let Err(error) = &done {
            let known = error.downcast_ref::<PlanError>();
            if !known.is_some_and(PlanError::is_of_checkpoint) {
                self.failed = Some(error.to_string());
            }
        }
        done
    }

    /// Takes the parameters of rank 0, which Python has written to its memory, and compares all
    /// that decides the bits of the run.
    pub(crate) fn begin(&mut self) -> Result<(), Error> {
        let mut state = self.kept.state();
        if self.plan.topology().world > 1 {
            self.plan.broadcast_parameters(&mut state, &self.backend, &mut self.comms, 0)?;
        }
        self.plan.handshake(&state, &self.backend, &mut self.comms, &[])?;
        Ok(())
    }

    /// Says that a parameter's gradient is whole in its view.
    pub(crate) fn given(&mut self, param: usize) -> Result<(), Error> {
        let mut state = self.kept.state();
        let name = &self.plan.params()[param].name;
        self.plan.give_view(&mut state, &self.backend, &mut self.comms, name)?;
        Ok(())
    }

    /// Takes a gradient.
    pub(crate) fn push(&mut self, param: usize, bytes: &[u8]) -> Result<(), Error> {
        let mut state = self.kept.state();
        let name = &self.plan.params()[param].name;
        self.plan.push_grad(&mut state, &self.backend, &mut self.comms, name, bytes)?;
        Ok(())
    }

    /// Ends a micro-step with these rules, numbered as the planner does.
    pub(crate) fn step(&mut self, rules: &[(usize, Optimizer)]) -> Result<Stepped, Error> {
        // Other ranks may be within calls of the step already: those of saves follow it then, and
        // what they say is told by the next step, on all ranks alike.
        let behind = self.plan.calls_while_given(&self.comms);
        self.tell_of_saves()?;
        if !behind {
            self.checkpoints.poll(&self.plan, &mut self.comms)?;
        }
        let stepped = self.update(rules)?;
        if behind {
            match self.checkpoints.poll(&self.plan, &mut self.comms) {
                Err(error) if error.is_of_checkpoint() => self.failed_save = Some(error),
                polled => drop(polled?),
            }
        }
        Ok(stepped)
    }

    /// The failure of a save that nobody has been told of.
    fn tell_of_saves(&mut self) -> Result<(), PlanError> {
        self.failed_save.take().map_or(Ok(()), Err)
    }

    fn update(&mut self, rules: &[(usize, Optimizer)]) -> Result<Stepped, Error> {
        let mut state = self.kept.state();
        take_rules(&mut state, rules)?;
        let report = self.plan.step(&mut state, &self.backend, &mut self.comms)?;
        Self::stepped(&state, &self.backend, report)
    }

    /// Updates from fewer micro-steps than asked for.
    pub(crate) fn flush(&mut self, rules: &[(usize, Optimizer)]) -> Result<Stepped, Error> {
        let mut state = self.kept.state();
        take_rules(&mut state, rules)?;
        let report = self.plan.flush(&mut state, &self.backend, &mut self.comms)?;
        Self::stepped(&state, &self.backend, report)
    }

    fn stepped(
        state: &State,
        backend: &CpuBackend,
        report: MicroStepReport,
    ) -> Result<Stepped, Error> {
        Ok(Stepped {
            report,
            loss_scale: state.loss_scale().map_or(1.0, |scale| scale.scale()),
            update_norms: state.update_norms(backend)?,
        })
    }

    /// Has masters follow parameters that are about to be written through their views.
    pub(crate) fn touch(&mut self) -> Result<(), Error> {
        let mut state = self.kept.state();
        for desc in self.plan.params() {
            param_address(&mut state, desc)?;
        }
        Ok(())
    }

    pub(crate) fn loss_scale(&mut self) -> Result<f64, Error> {
        let scale = self.kept.state().loss_scale().map(|scale| scale.scale());
        Ok(scale.unwrap_or(1.0))
    }

    /// Goes on from a checkpoint; how many steps had been done, `None` if there is none.
    pub(crate) fn resume(&mut self, folder: &Path) -> Result<Option<usize>, Error> {
        let mut state = self.kept.state();
        let resumed = self.checkpoints.resume(
            &self.plan,
            (&mut state, &self.backend),
            None,
            (&mut self.comms, folder),
        )?;
        if resumed.is_some() {
            self.plan.handshake(&state, &self.backend, &mut self.comms, &[])?;
        }
        Ok(resumed)
    }

    /// Begins a checkpoint, which is written behind the steps that follow.
    pub(crate) fn save(&mut self, folder: &Path, steps: usize) -> Result<(), Error> {
        self.tell_of_saves()?;
        let state = self.kept.state();
        let run = RunToSave { state: &state, backend: &self.backend, params: None };
        self.checkpoints.begin(&self.plan, run, &mut self.comms, (folder, steps))?;
        Ok(())
    }

    /// Waits for the checkpoint under way.
    pub(crate) fn finish_saves(&mut self) -> Result<(), Error> {
        self.tell_of_saves()?;
        self.checkpoints.finish(&self.plan, &mut self.comms)?;
        Ok(())
    }
}

/// What the end of a micro-step says.
pub(crate) struct Stepped {
    pub(crate) report: MicroStepReport,
    pub(crate) loss_scale: f64,
    pub(crate) update_norms: Option<Vec<f64>>,
}

/// Where a parameter lies; its master takes over what will be written there.
fn param_address(state: &mut State, desc: &ParamDesc) -> Result<usize, PlanError> {
    fn of<T: Element>(state: &mut State, name: &str) -> Result<usize, PlanError> {
        let view = state.view_mut::<T>(Role::Param, name)?;
        Ok(view.as_mut_ptr().expose_provenance())
    }
    match desc.dtype {
        DType::F64 => of::<f64>(state, &desc.name),
        DType::F16 => of::<f16>(state, &desc.name),
        DType::BF16 => of::<bf16>(state, &desc.name),
        _ => of::<f32>(state, &desc.name),
    }
}

/// Where a gradient lies, without its counting as given.
fn grad_address(state: &State, desc: &ParamDesc) -> Result<usize, PlanError> {
    fn of<T: Element>(state: &State, name: &str) -> Result<usize, PlanError> {
        Ok(state.view::<T>(Role::Grad, name)?.as_ptr().expose_provenance())
    }
    match desc.dtype {
        DType::F64 => of::<f64>(state, &desc.name),
        DType::F16 => of::<f16>(state, &desc.name),
        DType::BF16 => of::<bf16>(state, &desc.name),
        _ => of::<f32>(state, &desc.name),
    }
}

/// Takes the settings of the update to come, each of the rule of that number.
fn take_rules(state: &mut State, rules: &[(usize, Optimizer)]) -> Result<(), PlanError> {
    for (number, rule) in rules {
        if state.rules()[*number] != *rule {
            state.set_optimizer_of(*number, *rule)?;
        }
    }
    Ok(())
}
