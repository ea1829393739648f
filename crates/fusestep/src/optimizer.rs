//! A plan, its memory and its ranks in one object.

mod saves;

use fusestep_collective::{Communicator, Solo, require_alone};
use fusestep_launch::Backend;
use fusestep_planner::{
    Checkpoints, Comms, DeviceParams, GatheredParams, GradMut, Initial, MicroStepReport, Plan,
    PlanError, Reach, State, Topology,
};
use fusestep_tensor::{DeviceSliceMut, Element, ParamDesc, Role};

use crate::{Device, Error, StepOptions};

/// The optimizer of one rank: gradients go in, [`FusedOptimizer::step`] updates parameters.
///
/// All ranks make the same calls. Without [`on`](FusedOptimizer::on) it is the whole of a run, so
/// its first use is refused in a process of a launcher that has joined none of the others:
/// FUSESTEP_ALONE=1 says that each is to run alone, or that the program brings gradients together
/// itself. It is a thin face of [`Plan`] and [`State`], which stay public
/// for programs that want more.
pub struct FusedOptimizer<'c> {
    options: StepOptions,
    plan: Plan,
    device: Option<Box<dyn Device>>,
    ranks: Ranks<'c>,
    running: Option<Running>,
    /// Whether ranks have compared what decides their bits.
    met: bool,
    /// Parameters that ranks begin with, until they have begun.
    brings: Initial,
    checkpoints: Checkpoints,
    /// Error of a save, heard of behind a step.
    untold: Option<Error>,
    /// Whether a call has failed that other ranks may not know of.
    failed: bool,
}

/// Optimizers may be built on one thread and stepped on another.
const _: () = {
    const fn is_send<T: Send>() {}
    is_send::<FusedOptimizer<'static>>();
};

/// The other ranks.
enum Ranks<'c> {
    Alone(Solo),
    /// Not asked for memory yet.
    Waiting(&'c mut dyn Communicator),
    Many(Comms<'c>),
    /// Setting up has failed.
    Lost,
}

/// State and backend, from the first use on.
struct Running {
    backend: Box<dyn Backend + Send>,
    state: State,
}

impl std::fmt::Debug for FusedOptimizer<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FusedOptimizer")
            .field("rule", &self.options.rule)
            .field("topology", &self.plan.topology())
            .finish_non_exhaustive()
    }
}

impl FusedOptimizer<'static> {
    pub(crate) fn new(
        options: StepOptions,
        params: &[ParamDesc],
        device: Box<dyn Device>,
    ) -> Result<Self, Error> {
        if params.is_empty() {
            return Err("build: expected a parameter at least, found none".into());
        }
        let topology = Topology::SOLO;
        if let Some(threads) = options.threads {
            let told = "expected none, since the device brings its own, found";
            return Err(format!("threads: {told} {threads}; use `Cpu::with_threads`").into());
        }
        let mut params = params.to_vec();
        options.describe(&mut params)?;
        let planner = options.planner(&params, topology, device.limits())?;
        Ok(Self {
            plan: planner.plan_for(&params, topology)?,
            device: Some(device),
            ranks: Ranks::Alone(Solo::new()),
            running: None,
            met: false,
            brings: options.initial,
            options,
            checkpoints: Checkpoints::default(),
            untold: None,
            failed: false,
        })
    }
}

impl<'c> FusedOptimizer<'c> {
    /// This optimizer as one rank of `comm`, before its first use. Ranks that see each other's
    /// memory reduce and update in it. With
    /// [`Builder::distributed`](crate::Builder::distributed) all ranks call it together.
    ///
    /// # Errors
    /// What the planner refuses for so many ranks; an optimizer that has been used; ranks that name
    /// other slices.
    pub fn on<'d>(mut self, comm: &'d mut dyn Communicator) -> Result<FusedOptimizer<'d>, Error> {
        let topology = Topology::of(comm);
        let Some(device) = self.device.take() else {
            return Err("on: expected an optimizer before its first use, found one in use".into());
        };
        let mut planner = self.options.planner(self.plan.params(), topology, device.limits())?;
        if !self.options.distributed.is_empty() {
            self.options.compare(comm)?;
        }
        if let Some(slices) = self.options.slices(self.plan.params(), comm)? {
            planner = planner.with(slices);
        }
        Ok(FusedOptimizer {
            plan: planner.plan_for(self.plan.params(), topology)?,
            options: std::mem::take(&mut self.options),
            device: Some(device),
            ranks: Ranks::Waiting(comm),
            running: None,
            met: false,
            brings: self.brings,
            checkpoints: std::mem::take(&mut self.checkpoints),
            untold: None,
            failed: false,
        })
    }

    /// The plan of every step; print it.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The memory of this rank.
    ///
    /// # Errors
    /// That memory, threads or streams cannot be had.
    pub fn state(&mut self) -> Result<&mut State, Error> {
        self.start()?;
        let running = self.running.as_mut();
        running
            .map(|running| &mut running.state)
            .ok_or_else(|| "state: expected an optimizer that could be set up".into())
    }

    /// Sets a parameter; all ranks set the same. Before ranks meet rank 0 may set it alone: its
    /// values come to all ranks ([`Builder::initial`](crate::Builder::initial)).
    ///
    /// # Errors
    /// [`PlanError::UnknownName`], [`PlanError::WrongDType`], [`PlanError::LenBytes`].
    pub fn set_param<T: Element>(&mut self, name: &str, values: &[T]) -> Result<(), Error> {
        self.with(|_, state, backend, _| {
            check_dtype::<T>(state, Role::Param, name)?;
            state.write(backend, Role::Param, name, bytemuck::cast_slice(values))
        })
    }

    /// A parameter that this rank has whole, which is any below ZeRO stage 3. Before ranks meet
    /// ([`Builder::initial`](crate::Builder::initial)) it is the value of this rank alone.
    ///
    /// # Errors
    /// As [`State::param`].
    pub fn param<T: Element>(&mut self, name: &str) -> Result<&[T], Error> {
        Ok(self.state()?.param(name)?)
    }

    /// Whole parameters at any ZeRO stage, for as long as the result lives; all ranks ask for the
    /// same. Ranks that have not met do so first, so that what they get is what they train.
    ///
    /// # Errors
    /// As [`Plan::gather`]; as [`Plan::handshake`].
    pub fn gather(&mut self, names: &[&str]) -> Result<GatheredParams, Error> {
        self.meet()?;
        self.with(|plan, state, backend, comms| plan.gather(state, backend, comms, names))
    }

    /// [`FusedOptimizer::gather`] into memory of the device, without the host;
    /// [`FusedOptimizer::use_again`] takes it back once it has been read.
    ///
    /// # Errors
    /// As [`Plan::gather_on_device`]; as [`Plan::handshake`].
    pub fn gather_on_device(&mut self, names: &[&str]) -> Result<DeviceParams, Error> {
        self.meet()?;
        self.with(|plan, state, backend, comms| plan.gather_on_device(state, backend, comms, names))
    }

    /// Keeps the memory of parameters that are no longer read, for those that are gathered next.
    ///
    /// # Errors
    /// As [`FusedOptimizer::state`].
    pub fn use_again(&mut self, params: DeviceParams) -> Result<(), Error> {
        self.with(|_, _, _, comms| {
            comms.use_again(params);
            Ok(())
        })
    }

    /// Values that a model is evaluated with: averages under a rule that keeps them
    /// (Schedule-Free), else the parameters; training goes on with its bits. All ranks ask for the
    /// same.
    ///
    /// # Errors
    /// As [`Plan::gather_averages`]; as [`Plan::handshake`].
    pub fn gather_averages(&mut self, names: &[&str]) -> Result<GatheredParams, Error> {
        self.meet()?;
        self.with(|plan, state, backend, comms| plan.gather_averages(state, backend, comms, names))
    }

    /// A gradient, to be written where the step reads it; it counts as given, and is zero until it
    /// is written.
    ///
    /// # Errors
    /// As [`State::grad_mut`].
    pub fn grad_mut<T: Element>(&mut self, name: &str) -> Result<GradMut<'_, T>, Error> {
        self.start()?;
        let running = self.running.as_mut();
        let running = running.ok_or("grad_mut: expected an optimizer that could be set up")?;
        let view = running.state.grad_mut(name);
        self.failed |= view.is_err();
        Ok(view?)
    }

    /// A gradient on a device, to be written there where the step reads it, in the order of events;
    /// it counts as given, and is not set to zero: write all of it.
    ///
    /// # Errors
    /// As [`State::grad_on_device`].
    pub fn grad_on_device(&mut self, name: &str) -> Result<DeviceSliceMut<'_>, Error> {
        self.meet()?;
        self.start()?;
        let running = self.running.as_mut();
        let running =
            running.ok_or("grad_on_device: expected an optimizer that could be set up")?;
        let view = running.state.grad_on_device(running.backend.as_ref(), name);
        self.failed |= view.is_err();
        Ok(view?)
    }

    /// Gives a gradient; with communication streams its bucket is reduced as soon as it is full,
    /// and updated, too, where the builder was told that backward passes allow it.
    ///
    /// # Errors
    /// As [`Plan::push_grad`]; [`PlanError::WrongDType`].
    pub fn push_grad<T: Element>(&mut self, name: &str, grad: &[T]) -> Result<(), Error> {
        self.meet()?;
        self.with(|plan, state, backend, comms| {
            check_dtype::<T>(state, Role::Grad, name)?;
            plan.push_grad(state, backend, comms, name, bytemuck::cast_slice(grad))
        })
    }

    /// The factor to multiply the next loss with; 1 unless the loss is scaled.
    ///
    /// # Errors
    /// As [`FusedOptimizer::state`].
    pub fn loss_scale(&mut self) -> Result<f64, Error> {
        let scale = self.state()?.loss_scale();
        Ok(scale.map_or(1.0, |scale| scale.scale()))
    }

    /// Ends a micro-step, and at the last one reduces, updates and gathers. Before the first
    /// gradient of many ranks, and behind a checkpoint that was loaded, they compare what
    /// decides the bits of the run.
    ///
    /// # Errors
    /// As [`Plan::step`]; as [`Plan::handshake`]; that of a save, before the step: call it again.
    pub fn step(&mut self) -> Result<MicroStepReport, Error> {
        // Other ranks may be within calls of the step already, and saves are polled by calls of all
        // ranks.
        let first = match &self.ranks {
            Ranks::Many(comms) => !self.plan.calls_while_given(comms),
            _ => true,
        };
        self.tell_of_save()?;
        if first {
            self.look_after_saves()?;
        }
        self.meet()?;
        let report = self.with(|plan, state, backend, comms| plan.step(state, backend, comms))?;
        if !first {
            // The step is done: an error that is no step's waits for the next call.
            self.untold = self.look_after_saves().err();
        }
        Ok(report)
    }

    /// Updates from fewer micro-steps than asked for, at an epoch's end; ranks compare first what a
    /// step compares.
    ///
    /// # Errors
    /// As [`Plan::flush`]; as [`Plan::handshake`].
    pub fn flush(&mut self) -> Result<MicroStepReport, Error> {
        self.meet()?;
        self.with(|plan, state, backend, comms| plan.flush(state, backend, comms))
    }

    /// Tells the loss of the step under way, for an adaptive interval of LocalSGD. A step without
    /// one is followed by an average.
    ///
    /// # Errors
    /// That memory, threads or streams cannot be had.
    pub fn set_loss(&mut self, loss: f64) -> Result<(), Error> {
        self.state()?.set_loss(loss);
        Ok(())
    }

    /// Brings the parameters of rank `root` to all ranks, before the first step; those of rank 0
    /// come by themselves ([`Builder::initial`](crate::Builder::initial)).
    ///
    /// # Errors
    /// As [`Plan::broadcast_parameters`].
    pub fn broadcast_parameters(&mut self, root: usize) -> Result<(), Error> {
        self.with(|plan, state, backend, comms| {
            plan.broadcast_parameters(state, backend, comms, root)
        })?;
        self.brings = Initial::OwnAndEqual;
        Ok(())
    }

    /// Brings the first parameters of rank 0 to all ranks, and compares what decides the bits of a
    /// run over all of them; once.
    fn meet(&mut self) -> Result<(), Error> {
        if self.met {
            return Ok(());
        }
        let brings = self.brings;
        self.with(|plan, state, backend, comms| {
            if brings == Initial::OfRankZero && plan.topology().world > 1 {
                plan.compare_settings(state, comms)?;
                if state.step() == 0 {
                    plan.broadcast_parameters(state, backend, comms, 0)?;
                }
            }
            plan.handshake(state, backend, comms, &[])
        })?;
        (self.met, self.brings) = (true, Initial::OwnAndEqual);
        Ok(())
    }

    /// Does `work` with all that the planner asks for.
    fn with<R>(
        &mut self,
        work: impl FnOnce(&Plan, &mut State, &dyn Backend, &mut Comms<'_>) -> Result<R, PlanError>,
    ) -> Result<R, Error> {
        let done = self.start().and_then(|()| self.with_started(work));
        let harmless = |error: &Error| {
            let error = error.downcast_ref::<PlanError>();
            error.is_some_and(PlanError::is_of_checkpoint)
        };
        self.failed |= done.as_ref().is_err_and(|error| !harmless(error));
        done
    }

    fn with_started<R>(
        &mut self,
        work: impl FnOnce(&Plan, &mut State, &dyn Backend, &mut Comms<'_>) -> Result<R, PlanError>,
    ) -> Result<R, Error> {
        let lost = || Error::from("expected an optimizer that could be set up");
        let Running { backend, state } = self.running.as_mut().ok_or_else(lost)?;
        Ok(match &mut self.ranks {
            Ranks::Alone(solo) => {
                work(&self.plan, state, backend.as_ref(), &mut Comms::direct(solo))?
            }
            Ranks::Many(comms) => work(&self.plan, state, backend.as_ref(), comms)?,
            Ranks::Waiting(_) | Ranks::Lost => return Err(lost()),
        })
    }

    /// Opens the device and allocates, at the first use.
    fn start(&mut self) -> Result<(), Error> {
        if matches!(self.ranks, Ranks::Alone(_)) {
            require_alone()?;
            self.options.check_alone()?;
        }
        let Some(device) = self.device.take() else {
            return Ok(());
        };
        let topology = self.plan.topology();
        let sharing = match topology.reach {
            Reach::SharedMemory => topology.world,
            Reach::Calls => 1,
        };
        let backend = device.open(sharing)?;
        let state = match std::mem::replace(&mut self.ranks, Ranks::Lost) {
            Ranks::Waiting(comm) => {
                self.options.compare(comm)?;
                let state = self.plan.allocate_on(backend.as_ref(), comm)?;
                self.ranks = Ranks::Many(self.options.comms(comm)?);
                state
            }
            others => {
                self.ranks = others;
                self.plan.allocate(backend.as_ref())?
            }
        };
        self.running = Some(Running { backend, state });
        Ok(())
    }
}

fn check_dtype<T: Element>(state: &State, role: Role, name: &str) -> Result<(), PlanError> {
    let expected = state.dtype(role, name)?;
    if expected == T::DTYPE {
        return Ok(());
    }
    Err(PlanError::WrongDType { role, name: name.to_owned(), expected, found: T::DTYPE })
}
