//! One of many ranks, on a thread of its own: the thread has the communicator and runs Python's
//! tasks.
//!
//! Python waits for the thread in short pauses, so that Ctrl-C ends the wait for a call to which
//! other ranks do not come.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};

use fusestep::coalesce::HostMemory;
use fusestep::collective::Aborter;
use fusestep::planner::{
    GatheredParams, Initial, MicroStepReport, Optimizer, Plan, PlanError, State, ZeroStage,
};
use fusestep::tensor::{Element, ParamDesc, Role};
use fusestep::{Communicator, CpuBackend, DType, Error, Report, Session};
use half::{bf16, f16};

use crate::cuda::OnCuda;
use crate::device::{Device, InContext};
use crate::engine::join;
use crate::setup::Setup;
use crate::tensor::Place;

/// Task for the rank's thread.
pub(crate) type Task = Box<dyn FnOnce(&mut Rank<'_>) + Send>;

/// Facts about a rank, sent once it is set up.
pub(crate) struct Ready {
    pub(crate) rank: usize,
    pub(crate) world: usize,
    pub(crate) plan: String,
    pub(crate) aborter: Aborter,
    /// Memory of which Python has views; it comes when the thread ends, also by a panic.
    pub(crate) kept: Receiver<Kept>,
    pub(crate) places: Vec<Borrowed>,
    /// Whether parameters are updated while gradients come.
    pub(crate) is_in_backward: bool,
    /// Whether ranks average parameters instead of gradients.
    pub(crate) averages: bool,
    /// Whether gradients are added along lanes.
    pub(crate) has_lanes: bool,
    /// Whether gradients of 16-bit parameters are added up in f32, and taken in it.
    pub(crate) adds_in_f32: bool,
    /// Whether each rank has a part of the parameters alone.
    pub(crate) shares_parameters: bool,
}

/// Addresses of a parameter in the rank's own memory, and of its gradient.
pub(crate) struct Borrowed {
    /// `None` if the rank has a part of it alone.
    pub(crate) param: Option<usize>,
    /// `None` if gradients move while they are reduced.
    pub(crate) grad: Option<usize>,
    /// Bytes of the parameter, and of its gradient.
    pub(crate) len_bytes: usize,
}

/// Memory of which Python has views, kept as long as any of these views.
pub(crate) type Kept = Box<dyn Any + Send>;

/// Kind of checkpoint that a rank goes on from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Resumed {
    SameSettings,
    AnySettings,
}

/// The rank, as its thread has it.
pub(crate) struct Rank<'c> {
    session: Session<'c>,
    /// Parameters as the plan has them.
    params: Vec<ParamDesc>,
    initial: Initial,
}

/// Joins the other ranks, sends the outcome, and runs tasks until nobody can send more. `_ended` is
/// dropped last.
pub(crate) fn serve(
    setup: Setup,
    ready: &Sender<Result<Ready, Error>>,
    tasks: &Receiver<Task>,
    _ended: Sender<()>,
) {
    let mut comm = match join(&setup) {
        Ok(comm) => comm,
        Err(error) => return drop(ready.send(Err(error))),
    };
    let (keep, kept) = channel();
    let made = Rank::new(&setup, comm.as_mut()).and_then(|(mut rank, shared)| {
        let first = rank.ready(&setup, kept)?;
        Ok((rank, shared, first))
    });
    let (mut rank, shared) = match made {
        Ok((rank, shared, first)) => match ready.send(Ok(first)) {
            Ok(()) => (rank, shared),
            Err(_) => return,
        },
        Err(error) => return drop(ready.send(Err(error))),
    };
    let ran = catch_unwind(AssertUnwindSafe(|| tasks.iter().for_each(|task| task(&mut rank))));
    if ran.is_err() {
        rank.session.fail(&"a task has panicked");
    }
    // Nobody has views where nobody takes it.
    let _ = keep.send(Box::new(InContext::new((rank.session.into_state(), shared))));
    if let Err(panic) = ran {
        resume_unwind(panic);
    }
}

impl<'c> Rank<'c> {
    /// The rank, and memory that keeps what the engine shares with other processes, even after
    /// failed calls have lost theirs.
    fn new(setup: &Setup, comm: &'c mut dyn Communicator) -> Result<(Self, HostMemory), Error> {
        let device: Box<dyn fusestep::Device> = match &setup.device {
            Device::Host => Box::new(CpuBackend::new(setup.threads)),
            Device::Cuda(on) => Box::new(on.backend()),
        };
        let mut session = Session::on(&setup.step, &setup.params, device, comm)?;
        let shared = session.communicator().allocate(1)?;
        session.compare_settings()?;
        let params = session.plan().params().to_vec();
        Ok((Self { session, params, initial: setup.step.initial }, shared))
    }

    /// Facts about this rank.
    fn ready(&mut self, setup: &Setup, kept: Receiver<Kept>) -> Result<Ready, Error> {
        let topology = self.plan().topology();
        let comm = self.session.communicator();
        // Views need memory that calls leave at its place, and that outlives failed calls.
        let lends = setup.lends_gradients() && (comm.shares_memory() || topology.world == 1);
        let aborter = comm.aborter();
        Ok(Ready {
            rank: topology.rank,
            world: topology.world,
            plan: self.plan().to_string(),
            aborter,
            kept,
            places: match &setup.device {
                _ if self.shares_parameters() => self.no_places(),
                Device::Host => self.places(lends)?,
                Device::Cuda(on) => self.places_on(on)?,
            },
            is_in_backward: setup.is_in_backward,
            averages: self.plan().averaging().is_some(),
            has_lanes: self.plan().lanes().is_some(),
            adds_in_f32: self.adds_in_f32(),
            shares_parameters: self.shares_parameters(),
        })
    }

    fn plan(&self) -> &Plan {
        self.session.plan()
    }

    fn adds_in_f32(&self) -> bool {
        let plan = self.plan();
        let mut all = self.params.iter().enumerate();
        all.any(|(param, desc)| plan.grad_dtype(param) != desc.dtype)
    }

    /// Whether no rank has whole parameters, at ZeRO stage 3.
    fn shares_parameters(&self) -> bool {
        let plan = self.plan();
        plan.zero() == ZeroStage::Three && plan.topology().world > 1
    }

    /// Places where nothing of a parameter is that others may read.
    fn no_places(&self) -> Vec<Borrowed> {
        let bytes = self.params.iter().map(|desc| desc.numel() as usize * desc.dtype.len_bytes());
        bytes.map(|len_bytes| Borrowed { param: None, grad: None, len_bytes }).collect()
    }

    fn places(&mut self, lends: bool) -> Result<Vec<Borrowed>, Error> {
        let plan = self.session.plan();
        let all = self.params.iter().enumerate();
        let as_given: Vec<bool> =
            all.map(|(param, desc)| plan.grad_dtype(param) == desc.dtype).collect();
        let state = self.session.state_mut();
        let mut places = Vec::with_capacity(self.params.len());
        for (desc, as_given) in self.params.iter().zip(as_given) {
            // A parameter without elements has no memory to lend, and most programs write no
            // gradient of another type than its parameter's.
            let borrowed = lends && desc.numel() > 0 && as_given;
            places.push(Borrowed {
                param: Some(param_address(state, desc)?),
                grad: borrowed.then(|| grad_address(state, desc)).transpose()?,
                len_bytes: desc.numel() as usize * desc.dtype.len_bytes(),
            });
        }
        Ok(places)
    }

    /// Places on a device, where gradients are copied to memory that moves.
    fn places_on(&mut self, on: &OnCuda) -> Result<Vec<Borrowed>, Error> {
        let state = self.session.state_mut();
        let place = |desc: &ParamDesc| {
            let param = state.param_on_device(on.as_backend(), &desc.name)?;
            let (param, len_bytes) = (param.address() as usize, param.len_bytes());
            Ok(Borrowed { param: Some(param), grad: None, len_bytes })
        };
        self.params.iter().map(place).collect()
    }

    /// Runs `work`, unless an earlier task has failed, and remembers a failure.
    ///
    /// # Errors
    /// The error of `work`, or one that names the earlier failure.
    pub(crate) fn attempt<T>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<T, PlanError>,
    ) -> Result<T, Error> {
        if let Some(failed) = self.session.failure() {
            return Err(format!("expected ranks that are well, found: {failed}").into());
        }
        let done = work(self);
        if let Err(error) = &done
            && !error.is_of_checkpoint()
        {
            self.session.fail(error);
        }
        Ok(done?)
    }

    /// Takes the parameters of rank 0, which Python has written to its memory, unless each rank has
    /// its own. Then compares all settings and values that decide the bits of the run.
    pub(crate) fn begin(&mut self) -> Result<(), PlanError> {
        if self.session.backend().device().is_some() && !self.shares_parameters() {
            self.follow_own()?;
        }
        self.session.begin_anew()
    }

    /// Makes masters on a device follow parameters that no other rank brings. Those that are
    /// brought do it by themselves.
    fn follow_own(&mut self) -> Result<(), PlanError> {
        let plan = self.session.plan();
        let brings = self.initial == Initial::OfRankZero && plan.topology().world > 1;
        let storages = plan.storages().iter().filter(|spec| !brings || spec.distributed);
        let own: Vec<u32> = storages.flat_map(|spec| spec.members.iter().copied()).collect();
        for param in own {
            let desc = &self.params[param as usize];
            let mut bytes = vec![0; desc.numel() as usize * desc.dtype.len_bytes()];
            self.session.read_param(&desc.name, &mut bytes)?;
            self.session.write_param(&desc.name, &bytes)?;
        }
        Ok(())
    }

    /// Marks a parameter's gradient as complete in its view.
    pub(crate) fn given(&mut self, param: usize) -> Result<(), PlanError> {
        self.session.give_view(&self.params[param].name)
    }

    /// Copies a parameter's gradient from `bytes`.
    pub(crate) fn push(&mut self, param: usize, bytes: &[u8]) -> Result<(), PlanError> {
        self.session.push_grad_bytes(&self.params[param].name, bytes)
    }

    /// Takes a whole parameter's values, of which the rank keeps its part.
    pub(crate) fn write(&mut self, param: usize, bytes: &[u8]) -> Result<(), PlanError> {
        self.session.write_param(&self.params[param].name, bytes)
    }

    /// Whole parameters, by calls of all ranks.
    pub(crate) fn gather(&mut self, params: &[usize]) -> Result<GatheredParams, PlanError> {
        let names: Vec<&str> = params.iter().map(|at| self.params[*at].name.as_str()).collect();
        self.session.gather(&names)
    }

    /// Copies a parameter's gradient from a place of the device.
    pub(crate) fn push_on(
        &mut self,
        on: &OnCuda,
        param: usize,
        place: Place,
    ) -> Result<(), PlanError> {
        let name = &self.params[param].name;
        let to = self.session.grad_on_device(name)?;
        if to.len_bytes() != place.len_bytes {
            let (expected, found) = (to.len_bytes(), place.len_bytes);
            return Err(PlanError::LenBytes {
                role: Role::Grad,
                name: name.clone(),
                expected,
                found,
            });
        }
        on.copy(place, to)?;
        self.session.give_view(name)
    }

    /// Ends a micro-step with these rules, which have the planner's numbers.
    pub(crate) fn step(&mut self, rules: &[(usize, Optimizer)]) -> Result<Stepped, PlanError> {
        self.take(rules)?;
        let report = self.session.step()?;
        self.stepped(report)
    }

    /// Takes these rules, which have the planner's numbers, for updates that begin with gradients.
    pub(crate) fn take(&mut self, rules: &[(usize, Optimizer)]) -> Result<(), PlanError> {
        rules.iter().try_for_each(|(number, rule)| self.session.set_rule(*number, *rule))
    }

    /// The number, within the update's global batch, of this rank's next micro-batch.
    pub(crate) fn micro_batch(&self) -> Option<u64> {
        self.session.state().micro_batch()
    }

    /// Says that the next update is of so many micro-batches only.
    pub(crate) fn set_micro_batches(&mut self, count: u64) -> Result<(), PlanError> {
        self.session.state_mut().set_micro_batches(count)
    }

    /// Weighs the micro-batch under way.
    pub(crate) fn set_weight(&mut self, weight: f64) -> Result<(), PlanError> {
        self.session.state_mut().set_weight(weight)
    }

    /// Measures the seconds of every step's parts from here on.
    pub(crate) fn time_steps(&mut self) {
        self.session.time_steps();
    }

    /// Takes the loss of the step under way, for its report and for an interval between averages
    /// that follows it.
    pub(crate) fn set_loss(&mut self, loss: f64) {
        self.session.set_loss(loss);
    }

    /// Averages parameters over all ranks.
    pub(crate) fn average(&mut self) -> Result<(), PlanError> {
        self.session.average_now()
    }

    /// Updates from fewer micro-steps than the plan accumulates.
    pub(crate) fn flush(&mut self, rules: &[(usize, Optimizer)]) -> Result<Stepped, PlanError> {
        self.take(rules)?;
        let report = self.session.flush()?;
        self.stepped(report)
    }

    fn stepped(&self, report: MicroStepReport) -> Result<Stepped, PlanError> {
        Ok(Stepped {
            told: report.update.and(self.session.report().copied()),
            averaged: report.averaged,
            loss_scale: self.loss_scale(),
            update_norms: self.session.state().update_norms(self.session.backend())?,
        })
    }

    /// Makes masters follow parameters that are about to be written through their views. On a
    /// device [`Self::begin`] does.
    pub(crate) fn touch(&mut self) -> Result<(), PlanError> {
        if self.session.backend().device().is_some() || self.shares_parameters() {
            return Ok(());
        }
        let state = self.session.state_mut();
        self.params.iter().try_for_each(|desc| param_address(state, desc).map(drop))
    }

    pub(crate) fn loss_scale(&self) -> f64 {
        self.session.loss_scale()
    }

    /// Goes on from a checkpoint and returns the number of steps that were done; `None` without a
    /// checkpoint.
    pub(crate) fn resume(
        &mut self,
        folder: &Path,
        settings: Resumed,
    ) -> Result<Option<usize>, PlanError> {
        match settings {
            Resumed::SameSettings => self.session.state_mut().same_settings(),
            Resumed::AnySettings => self.session.state_mut().any_settings(),
        }
        let resumed = self.session.resume_if_any(folder)?;
        if resumed.is_some() {
            self.session.meet()?;
        }
        Ok(resumed)
    }

    /// Begins a checkpoint, which is written in the background during the next steps.
    pub(crate) fn save(&mut self, folder: &Path, steps: usize) -> Result<(), PlanError> {
        self.session.begin_save(folder, steps)
    }

    /// Waits for the checkpoint that is being written.
    pub(crate) fn finish_saves(&mut self) -> Result<(), PlanError> {
        self.session.finish_saves()
    }
}

/// Results of the end of a micro-step.
pub(crate) struct Stepped {
    /// The report of the update, if the micro-step has made one.
    pub(crate) told: Option<Report>,
    /// Whether parameters were averaged over ranks.
    pub(crate) averaged: bool,
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
