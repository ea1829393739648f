//! From settings to a session, of one rank or of many, and what ranks compare before they train.

use fusestep_checkpoint::Checkpoints;
use fusestep_collective::{Communicator, require_alone};
#[cfg(doc)]
use fusestep_planner::Run;
use fusestep_planner::{Comms, Initial, PlanError, Reach, State, Tensors, Topology};
use fusestep_tensor::ParamDesc;

use super::report::Reports;
use super::saving::Saving;
use super::{Borrowed, Session, SessionError};
use crate::{Device, SharedBackend, StepOptions};

impl<'c> Session<'c> {
    /// The session of a process that trains alone. Parameters are zero until
    /// [`Session::set_param`].
    ///
    /// # Errors
    /// Settings or descriptors out of range, a pattern that no name contains, settings of many
    /// ranks, and whatever else the planner refuses; memory or threads that cannot be had. In a
    /// process of a launcher that has joined none of the others
    /// [`SessionError::TakenForWhole`]: FUSESTEP_ALONE=1 says that each is to run alone, or that
    /// the program brings gradients together itself.
    pub fn new(
        options: &StepOptions,
        params: &[ParamDesc],
        device: Box<dyn Device>,
    ) -> Result<Self, SessionError> {
        require_alone()?;
        Self::unjoined(options, params, device)
    }

    /// [`Session::new`] for a program that may make a session of many ranks in its place. Before
    /// the first step the program asks itself whether this process was started to be one of many
    /// ([`require_alone`]).
    ///
    /// # Errors
    /// As [`Session::new`], but for [`SessionError::TakenForWhole`].
    pub fn unjoined(
        options: &StepOptions,
        params: &[ParamDesc],
        device: Box<dyn Device>,
    ) -> Result<Self, SessionError> {
        if params.is_empty() {
            return Err(SessionError::NoParameters);
        }
        options.check_alone()?;
        Self::of_one(options, params, device, Tensors::Kept)
    }

    /// The session of a process whose tensors stay where a framework has them;
    /// [`Session::step_borrowed`] updates them there. There may be no parameter.
    ///
    /// Before the first step the program asks itself whether this process was started to be one of
    /// many ([`require_alone`](fusestep_collective::require_alone)).
    ///
    /// # Errors
    /// As [`Session::new`], but for [`SessionError::TakenForWhole`]; a setting that takes tensors
    /// of the session's own ([`StepOptions::check_borrowed`]).
    pub fn borrowing(
        options: &StepOptions,
        params: &[ParamDesc],
        device: Box<dyn Device>,
        borrowed: Borrowed,
    ) -> Result<Self, SessionError> {
        options.check_borrowed()?;
        let tensors = match borrowed {
            Borrowed::Params => Tensors::Borrowed,
            Borrowed::ParamsAndState => Tensors::BorrowedWithState,
        };
        Self::of_one(options, params, device, tensors)
    }

    /// The session of one rank without others.
    fn of_one(
        options: &StepOptions,
        params: &[ParamDesc],
        mut device: Box<dyn Device>,
        tensors: Tensors,
    ) -> Result<Self, SessionError> {
        let params = described(options, params)?;
        let mut chosen = options.chosen(&params, Topology::SOLO, device.limits())?;
        chosen.note(options.figures.as_ref().and_then(|figures| device.choose(figures)));
        let planner = chosen.planner(&params, Topology::SOLO, device.limits())?.tensors(tensors);
        let plan = planner.plan_for(&params, Topology::SOLO)?;
        let backend = device.open(1).map_err(SessionError::Device)?;
        let state = plan.allocate(backend.as_ref())?;
        let saving = Saving::new(plan, Comms::alone(), Checkpoints::default());
        Ok(Self::of(options, saving, state, backend))
    }

    /// The session of one rank of `comm`. Ranks that see each other's memory reduce and update in
    /// it. All ranks call it together; they compare what decides their first calls, and tell each
    /// other the slices of parameters that are distributed.
    ///
    /// # Errors
    /// As [`Session::new`]; what the planner refuses for so many ranks; ranks whose settings
    /// differ; a call that fails.
    pub fn on(
        options: &StepOptions,
        params: &[ParamDesc],
        mut device: Box<dyn Device>,
        comm: &'c mut dyn Communicator,
    ) -> Result<Self, SessionError> {
        if params.is_empty() {
            return Err(SessionError::NoParameters);
        }
        let params = described(options, params)?;
        let topology = Topology::of(comm);
        options.check(topology.world)?;
        let mut chosen = options.agreed(&params, device.limits(), comm)?;
        chosen.note(options.figures.as_ref().and_then(|figures| device.choose(figures)));
        let mut planner = chosen.planner(&params, topology, device.limits())?;
        let options = &chosen.options;
        options.compare(comm)?;
        if let Some(slices) = options.slices(&params, comm)? {
            planner = planner.with(slices);
        }
        let plan = planner.plan_for(&params, topology)?;
        let sharing = match topology.reach {
            Reach::SharedMemory => topology.world,
            Reach::Calls => 1,
        };
        let backend = device.open(sharing).map_err(SessionError::Device)?;
        let state = plan.allocate_on(backend.as_ref(), comm)?;
        let saving = Saving::new(plan, options.comms(comm)?, Checkpoints::default());
        Ok(Self::of(options, saving, state, backend))
    }

    fn of(options: &StepOptions, saving: Saving<'c>, state: State, backend: SharedBackend) -> Self {
        Self {
            saving,
            state,
            backend,
            met: false,
            initial: options.initial,
            brings: options.initial,
            compared: Vec::new(),
            begun: false,
            enqueued: None,
            reports: Reports::default(),
        }
    }

    /// Compares the settings that decide the bits of the run, without values.
    ///
    /// # Errors
    /// As [`Run::compare_settings`].
    pub fn compare_settings(&mut self) -> Result<(), PlanError> {
        self.attempt(|run| run.compare_settings())
    }

    /// Compares parameters over all ranks by hash.
    ///
    /// # Errors
    /// As [`Run::compare_parameters`].
    pub fn compare_parameters(&mut self) -> Result<(), PlanError> {
        self.attempt(|run| run.compare_parameters())
    }

    /// Brings the parameters of rank `root` to all ranks, before the first step; those of rank 0
    /// come by themselves ([`StepOptions::initial`]).
    ///
    /// # Errors
    /// As [`Run::broadcast_parameters`].
    pub fn broadcast_parameters(&mut self, root: usize) -> Result<(), PlanError> {
        self.attempt(|run| run.broadcast_parameters(root))?;
        self.brings = Initial::OwnAndEqual;
        Ok(())
    }

    /// Brings the first parameters of rank 0 to all ranks, once, unless each has its own; returns
    /// whether it has. Settings are compared before. [`Session::meet`] does it; a program that
    /// reads parameters before may call it by itself.
    ///
    /// # Errors
    /// As [`Session::compare_settings`]; as [`Session::broadcast_parameters`].
    pub fn bring_first(&mut self) -> Result<bool, PlanError> {
        if self.brings == Initial::OwnAndEqual || self.plan().topology().world == 1 {
            return Ok(false);
        }
        // What has failed is done again by the next call.
        self.compare_settings()?;
        let begins = self.state.step() == 0;
        if begins {
            self.broadcast_parameters(0)?;
        }
        self.brings = Initial::OwnAndEqual;
        Ok(begins)
    }

    /// Brings the first parameters of rank 0 to all ranks, and compares what decides the bits of a
    /// run over all of them; once, and again behind [`Session::resume`] and
    /// [`Session::meet_again`].
    ///
    /// # Errors
    /// As [`Session::bring_first`]; as [`Run::handshake`].
    pub fn meet(&mut self) -> Result<(), PlanError> {
        if self.met {
            return Ok(());
        }
        self.bring_first()?;
        let fields: Vec<_> =
            self.compared.iter().map(|(name, value)| (*name, value.clone())).collect();
        self.attempt(|run| run.handshake(&fields))?;
        self.met = true;
        if self.reports.last.is_none() {
            // What ranks tell each other before they train is no step's.
            let now = self.calls_so_far();
            self.reports.count_from(&now);
        }
        Ok(())
    }

    /// Lets ranks begin anew with parameters that were written outside of a step, as at first: with
    /// those of rank 0, unless the options say that each has its own. All ranks call it.
    ///
    /// # Errors
    /// As [`Session::broadcast_parameters`]; as [`Session::meet`].
    pub fn begin_anew(&mut self) -> Result<(), PlanError> {
        self.met = false;
        if self.initial == Initial::OfRankZero && self.plan().topology().world > 1 {
            self.broadcast_parameters(0)?;
        }
        self.meet()
    }

    /// Lets ranks compare once more what decides their bits, since one of them may have written
    /// parameters.
    pub fn meet_again(&mut self) {
        self.met = false;
    }
}

/// The parameters with the settings that options have for single ones.
fn described(options: &StepOptions, params: &[ParamDesc]) -> Result<Vec<ParamDesc>, SessionError> {
    let mut params = params.to_vec();
    options.describe(&mut params)?;
    Ok(params)
}
