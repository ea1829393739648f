//! One of many ranks, on a thread of its own: the thread has the communicator and runs Python's
//! tasks.
//!
//! Python waits for the thread in short pauses, so that Ctrl-C ends the wait for a call to which
//! other ranks do not come.

use std::path::Path;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fusestep::collective::Aborter;
use fusestep::planner::{
    Checkpoints, Comms, Initial, MicroStepReport, Optimizer, Plan, PlanError, RunToSave, State,
    Topology,
};
use fusestep::tensor::{Element, ParamDesc, Role};
use fusestep::{Communicator, CpuBackend, DType, Error};
use half::{bf16, f16};

use crate::engine::connect;
use crate::setup::Setup;

/// Task for the rank's thread.
pub(crate) type Task = Box<dyn FnOnce(&mut Rank<'_>) + Send>;

/// Facts about a rank, sent once it is set up.
pub(crate) struct Ready {
    pub(crate) rank: usize,
    pub(crate) world: usize,
    pub(crate) plan: String,
    pub(crate) aborter: Aborter,
    pub(crate) kept: Arc<Kept>,
    pub(crate) places: Vec<Borrowed>,
    /// Whether parameters are updated while gradients come.
    pub(crate) is_in_backward: bool,
    /// Whether ranks average parameters instead of gradients.
    pub(crate) averages: bool,
}

/// Addresses of a parameter in the rank's own memory, and of its gradient.
pub(crate) struct Borrowed {
    pub(crate) param: usize,
    /// `None` if gradients move while they are reduced.
    pub(crate) grad: Option<usize>,
    /// Bytes of the parameter, and of its gradient.
    pub(crate) len_bytes: usize,
}

/// Memory of which Python has views, kept as long as any of these views.
pub(crate) struct Kept {
    state: Mutex<State>,
    /// Keeps memory that the engine shares with other processes, even after failed calls have lost
    /// theirs.
    _shared: Mutex<fusestep::coalesce::HostMemory>,
}

impl Kept {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Kind of checkpoint that a rank goes on from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Resumed {
    SameSettings,
    AnySettings,
}

/// The rank, as its thread has it.
pub(crate) struct Rank<'c> {
    plan: Plan,
    kept: Arc<Kept>,
    backend: CpuBackend,
    comms: Comms<'c>,
    /// First values that ranks train.
    initial: Initial,
    checkpoints: Checkpoints,
    /// Failure of a save on all ranks that Python has not been told of.
    failed_save: Option<PlanError>,
    /// Failure that other ranks may not know of.
    failed: Option<String>,
}

/// Joins the other ranks, sends the outcome, and runs tasks until nobody can send more. `_ended` is
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
        let backend = CpuBackend::new(setup.threads);
        // Views need memory that calls leave at its place, and that outlives failed calls.
        let lends = setup.lends_gradients() && (comm.shares_memory() || topology.world == 1);
        let plan = setup.plan(comm)?;
        let (rank, world, aborter) = (topology.rank, topology.world, comm.aborter());
        let state = plan.allocate_on(&backend, comm)?;
        let shared = comm.allocate(1)?;
        let mut rank_of = Self {
            kept: Arc::new(Kept { state: Mutex::new(state), _shared: Mutex::new(shared) }),
            comms: setup.step.comms(comm)?,
            initial: setup.step.initial,
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
            is_in_backward: setup.is_in_backward,
            averages: rank_of.plan.averaging().is_some(),
        };
        Ok((rank_of, ready))
    }

    fn places(&self, lends: bool) -> Result<Vec<Borrowed>, Error> {
        let mut state = self.kept.state();
        let mut places = Vec::with_capacity(self.plan.params().len());
        for desc in self.plan.params() {
            // A parameter without elements has no memory to lend.
            let borrowed = lends && desc.numel() > 0;
            places.push(Borrowed {
                param: param_address(&mut state, desc)?,
                grad: borrowed.then(|| grad_address(&state, desc)).transpose()?,
                len_bytes: desc.numel() as usize * desc.dtype.len_bytes(),
            });
        }
        Ok(places)
    }

    /// Runs `work`, unless an earlier task has failed, and remembers a failure.
    ///
    /// # Errors
    /// The error of `work`, or one that names the earlier failure.
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

    /// Takes the parameters of rank 0, which Python has written to its memory, unless each rank has
    /// its own. Then compares all settings and values that decide the bits of the run.
    pub(crate) fn begin(&mut self) -> Result<(), Error> {
        let mut state = self.kept.state();
        let brings = self.initial == Initial::OfRankZero;
        if self.plan.topology().world > 1 && brings {
            self.plan.broadcast_parameters(&mut state, &self.backend, &mut self.comms, 0)?;
        }
        self.plan.handshake(&state, &self.backend, &mut self.comms, &[])?;
        Ok(())
    }

    /// Marks a parameter's gradient as complete in its view.
    pub(crate) fn given(&mut self, param: usize) -> Result<(), Error> {
        let mut state = self.kept.state();
        let name = &self.plan.params()[param].name;
        self.plan.give_view(&mut state, &self.backend, &mut self.comms, name)?;
        Ok(())
    }

    /// Copies a parameter's gradient from `bytes`.
    pub(crate) fn push(&mut self, param: usize, bytes: &[u8]) -> Result<(), Error> {
        let mut state = self.kept.state();
        let name = &self.plan.params()[param].name;
        self.plan.push_grad(&mut state, &self.backend, &mut self.comms, name, bytes)?;
        Ok(())
    }

    /// Ends a micro-step with these rules, which have the planner's numbers.
    pub(crate) fn step(&mut self, rules: &[(usize, Optimizer)]) -> Result<Stepped, Error> {
        // Other ranks may be within calls of the step already, so calls of saves come after it.
        // Their failure is then told by the next step, on all ranks alike.
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

    /// Returns the failure of a save of which Python has not been told.
    fn tell_of_saves(&mut self) -> Result<(), PlanError> {
        self.failed_save.take().map_or(Ok(()), Err)
    }

    fn update(&mut self, rules: &[(usize, Optimizer)]) -> Result<Stepped, Error> {
        let mut state = self.kept.state();
        take_rules(&mut state, rules)?;
        let report = self.plan.step(&mut state, &self.backend, &mut self.comms)?;
        Self::stepped(&state, &self.backend, report)
    }

    /// Takes these rules, which have the planner's numbers, for updates that begin with gradients.
    pub(crate) fn take(&mut self, rules: &[(usize, Optimizer)]) -> Result<(), Error> {
        take_rules(&mut self.kept.state(), rules)?;
        Ok(())
    }

    /// Takes the loss of the step under way, for an interval between averages that follows it.
    pub(crate) fn set_loss(&mut self, loss: f64) -> Result<(), Error> {
        self.kept.state().set_loss(loss);
        Ok(())
    }

    /// Averages parameters over all ranks.
    pub(crate) fn average(&mut self) -> Result<(), Error> {
        let mut state = self.kept.state();
        self.plan.average_now(&mut state, &self.backend, &mut self.comms)?;
        Ok(())
    }

    /// Updates from fewer micro-steps than the plan accumulates.
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

    /// Makes masters follow parameters that are about to be written through their views.
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

    /// Goes on from a checkpoint and returns the number of steps that were done; `None` without a
    /// checkpoint.
    pub(crate) fn resume(
        &mut self,
        folder: &Path,
        settings: Resumed,
    ) -> Result<Option<usize>, Error> {
        let mut state = self.kept.state();
        match settings {
            Resumed::SameSettings => state.same_settings(),
            Resumed::AnySettings => state.any_settings(),
        }
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

    /// Begins a checkpoint, which is written in the background during the next steps.
    pub(crate) fn save(&mut self, folder: &Path, steps: usize) -> Result<(), Error> {
        self.tell_of_saves()?;
        let state = self.kept.state();
        let run = RunToSave { state: &state, backend: &self.backend, params: None };
        self.checkpoints.begin(&self.plan, run, &mut self.comms, (folder, steps))?;
        Ok(())
    }

    /// Waits for the checkpoint that is being written.
    pub(crate) fn finish_saves(&mut self) -> Result<(), Error> {
        self.tell_of_saves()?;
        self.checkpoints.finish(&self.plan, &mut self.comms)?;
        Ok(())
    }
}

/// Results of the end of a micro-step.
pub(crate) struct Stepped {
    pub(crate) report: MicroStepReport,
    pub(crate) loss_scale: f64,
    pub(crate) update_norms: Option<Vec<f64>>,
}

/// The address of a parameter; its master takes over values that are written there.
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

/// The address of a gradient; the gradient does not count as given.
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

/// Takes settings for the next update; each pair has the number of a rule.
fn take_rules(state: &mut State, rules: &[(usize, Optimizer)]) -> Result<(), PlanError> {
    for (number, rule) in rules {
        if state.rules()[*number] != *rule {
            state.set_optimizer_of(*number, *rule)?;
        }
    }
    Ok(())
}
