//! Methods that run a plan: allocate its memory, take gradients, make steps.
//!
//! A method that is long calls a function of the module that it names.

use fusestep_collective::Communicator;
use fusestep_launch::Backend;
use fusestep_tensor::Role;

use crate::error::{PlanError, Result};
use crate::plan::settings::TableKind;
use crate::plan::value::Plan;
use crate::run::comms::calls::Comms;
use crate::run::executor::{Executor, Lender};
use crate::run::graph::{AloneCall, RankGraph, StepGraph};
use crate::run::memory::segment_state::Given;
use crate::run::memory::state::State;
use crate::run::micro_step::Pending;
use crate::run::rank_step::RankStep;
use crate::run::report::{MicroStepReport, StepReport};
use crate::run::stages::{average, give, optimize, reduce};
use crate::run::{allocate, graph, micro_step, rank_step, step};

impl Plan {
    /// Allocates zeroed tensors on `backend`; parameters are zero until written.
    ///
    /// # Errors
    /// [`PlanError::Backend`] if memory cannot be had, or the backend cannot do what a stage needs.
    pub fn allocate(&self, backend: &dyn Backend) -> Result<State> {
        allocate::allocate_from(self, backend, None)
    }

    /// Allocates as [`Plan::allocate`], with the communicator's memory for arenas that calls move.
    ///
    /// Ranks of one machine then see each other's arenas, and their calls need no copies.
    ///
    /// # Errors
    /// As [`Plan::allocate`]; [`PlanError::Collective`] if the communicator has not so much memory.
    pub fn allocate_on(&self, backend: &dyn Backend, comm: &mut dyn Communicator) -> Result<State> {
        allocate::allocate_from(self, backend, Some(comm))
    }

    /// Takes the gradient of parameter `name` for the micro-step under way, in one pass that copies
    /// or adds it into the arena.
    ///
    /// `bytes` are all elements of the gradient. A segment whose gradients are all given is full.
    /// With communication streams in `comms`, the call starts to reduce every full segment. Without
    /// streams it reduces them itself and waits for the other ranks, where
    /// [`Plan::calls_while_given`] says so.
    ///
    /// A gradient that is not given before the step is run counts as zero if another rank or
    /// micro-step has given it. Else the step leaves the parameter out.
    ///
    /// # Errors
    /// [`PlanError::UnknownName`], [`PlanError::LenBytes`], [`PlanError::GradientTwice`],
    /// [`PlanError::ForeignState`]; [`PlanError::Collective`], and the state refuses further steps
    /// then.
    pub fn push_grad(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        name: &str,
        bytes: &[u8],
    ) -> Result<()> {
        give::push_grad(&mut RankStep { plan: self, state, backend, comms }, name, bytes)
    }

    /// Says that the gradient of parameter `name` is complete in its view ([`State::grad_mut`],
    /// [`State::grad_on_device`]).
    ///
    /// Nothing is copied, and full segments are reduced as by [`Plan::push_grad`]. Write all of the
    /// view first: values of an earlier gradient count where nothing has been written. The view may
    /// be written again once the step has been run. With several micro-steps to an update, the
    /// gradient is added when the micro-step ends.
    ///
    /// # Errors
    /// As [`Plan::push_grad`]; [`PlanError::NotOnHost`].
    pub fn give_view(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        name: &str,
    ) -> Result<()> {
        give::give_view(&mut RankStep { plan: self, state, backend, comms }, name)
    }

    /// Whether giving gradients makes calls at once and waits for the other ranks: where updates
    /// run in backward, and where `comms` reduces segments when they are full. From the first
    /// gradient of a micro-step until [`Plan::step`] ranks make no other calls then.
    pub fn calls_while_given(&self, comms: &Comms<'_>) -> bool {
        self.in_backward || give::reduces_when_full(self, comms)
    }

    /// Takes this rank's part out of the next segments whose reduction is done, without waiting.
    ///
    /// Segments that come later use their memory. Giving a gradient does so too. Returns how many
    /// segments have been started and not been taken.
    ///
    /// Below ZeRO stage 2 segments keep their memory, so nothing is taken. With shard groups
    /// nothing is taken either, since segments go on across groups when the step is run.
    ///
    /// # Errors
    /// [`PlanError::Collective`], and the state refuses further steps then.
    pub fn take_reduced(&self, state: &mut State, backend: &dyn Backend) -> Result<usize> {
        reduce::take_reduced(self, state, backend)
    }

    /// Ends a micro-step, and at the last one reduces, updates and gathers: the stages of the plan,
    /// in order.
    ///
    /// All ranks call it, whether they have given gradients or not. Sums across ranks are formed in
    /// rank order and norms in the fixed tree, so parameters get the same bits at every ZeRO
    /// stage and with any buckets, streams and fused stages. A parameter that no rank has given
    /// a gradient, by [`Plan::push_grad`] or [`State::grad_mut`], is left out of the step.
    ///
    /// # Errors
    /// [`PlanError::ForeignState`], [`PlanError::Topology`]: nothing has been written.
    /// [`PlanError::Collective`], [`PlanError::Backend`]: the state refuses further steps
    /// ([`PlanError::Poisoned`]).
    pub fn step(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
    ) -> Result<MicroStepReport> {
        rank_step::check_comms(self, state, comms)?;
        let weight = state.arena.weight.unwrap_or(1.0);
        let last = state.arena.micro_steps + 1 == self.micro_steps();
        let step = &mut RankStep { plan: self, state, backend, comms };
        let done = if last {
            let divisor = give::divisor(self, step.state, weight);
            micro_step::update(step, divisor, Pending::MicroStep)
        } else {
            micro_step::end_micro_step(step, weight).map(|()| MicroStepReport::default())
        };
        state.arena.weight = None;
        state.or_poison(done)
    }

    /// Makes an update from fewer micro-steps than planned, such as those left over at an epoch's
    /// end.
    ///
    /// The update takes the gradients of all micro-steps that ended since the last update. If there
    /// are none, the call does nothing. End a micro-step under way by [`Plan::step`] first.
    ///
    /// # Errors
    /// As [`Plan::step`]; [`PlanError::StepUnderWay`].
    pub fn flush(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
    ) -> Result<MicroStepReport> {
        rank_step::check_comms(self, state, comms)?;
        state.check_between_steps("flush")?;
        if state.arena.micro_steps == 0 {
            return Ok(MicroStepReport::default());
        }
        let divisor = give::divisor(self, state, 0.0);
        let step = &mut RankStep { plan: self, state, backend, comms };
        let done = micro_step::update(step, divisor, Pending::Nothing);
        state.or_poison(done)
    }

    /// Averages parameters, and state if [`crate::LocalSgd`] says so, across all ranks.
    ///
    /// # Errors
    /// As [`Self::step`].
    pub fn average_now(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
    ) -> Result<()> {
        average::average_now(&mut RankStep { plan: self, state, backend, comms })
    }

    /// Runs one step on a state that keeps parameters and gradients.
    ///
    /// Allocates nothing while the same tensors take part as in the step before.
    ///
    /// # Errors
    /// [`PlanError::ForeignState`], [`PlanError::NoSuchList`] if the plan's tensors are borrowed;
    /// nothing has been written then. [`PlanError::Backend`] if the device fails half-way; the
    /// state refuses further steps then ([`PlanError::Poisoned`]).
    /// # Cost
    /// [`Plan::traffic_bytes`] of memory traffic in [`Plan::launches`] launches.
    pub fn run(&self, state: &mut State, backend: &dyn Backend) -> Result<StepReport> {
        if self.tensors.are_borrowed() {
            return Err(PlanError::NoSuchList {
                role: Role::Param,
                name: self.params.first().map_or(String::new(), |p| p.name.clone()),
                hint: "its tensors are borrowed; use `run_borrowed`",
            });
        }
        step::run_stages(self, state, Executor::Backend(backend))
    }

    /// Runs one step on parameters and gradients that `lender` lends.
    ///
    /// # Errors
    /// As [`Plan::run`].
    pub fn run_borrowed(&self, state: &mut State, lender: &mut dyn Lender) -> Result<StepReport> {
        step::run_stages(self, state, Executor::Lender(lender))
    }

    /// Enqueues one step and, but for two cases, waits for nothing.
    ///
    /// [`State::step`], the loss scale and the count of skipped steps are as before until
    /// [`State::settle`] reads what the device has decided. Without a stage that reads the
    /// gradients nothing is left to read.
    ///
    /// In a plan that reads gradients, a step in which parameters have no gradient is waited for.
    /// The next step's table depends on whether this one was skipped. While a schedule still
    /// changes the rate, the step before this one is waited for.
    ///
    /// # Errors
    /// As [`Plan::run`]; [`PlanError::NotCapturable`] for a plan that reads gradients and whose
    /// tables are in arguments. The host has to know such a step before it can write the next one's
    /// tables.
    /// # Cost
    /// Launches whose arguments are equal at every step, on a device: nothing of the host's work
    /// grows with the tensors.
    pub fn enqueue(&self, state: &mut State, backend: &dyn Backend) -> Result<()> {
        graph::check(self, state, AloneCall::Enqueue)?;
        if state.norm.is_some() && state.tables.kind != TableKind::Resident {
            return Err(graph::not_capturable("its tables are in arguments"));
        }
        if !optimize::prepare(self, state, backend)? {
            return self.run(state, backend).map(|_| ());
        }
        let mut report = StepReport::default();
        let done =
            step::each_stage(self, state, &mut Executor::Backend(backend), None, &mut report);
        state.or_poison(done)?;
        graph::count_enqueued(state, backend)
    }

    /// Records a step as a graph; the step is not run. Every [`Plan::replay`] is then one call of
    /// the driver.
    ///
    /// # Errors
    /// [`PlanError::NotCapturable`] if the tables are in arguments or parameters are without
    /// gradient; [`PlanError::Backend`] on a backend that records no launches.
    pub fn capture(&self, state: &mut State, backend: &dyn Backend) -> Result<StepGraph> {
        graph::check(self, state, AloneCall::Capture)?;
        graph::check_capturable(state)?;
        optimize::prepare(self, state, backend)?;
        graph::record(self, state, backend, None)
    }

    /// Enqueues the recorded step once more, as [`Plan::enqueue`] would. A learning rate set since
    /// is written first.
    ///
    /// # Errors
    /// [`PlanError::StaleGraph`] if the state's tables have been built anew since, because
    /// parameters were without gradient, the rule was changed, or steps were set or loaded; as
    /// [`Plan::run`].
    pub fn replay(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        graph: &StepGraph,
    ) -> Result<()> {
        graph::check(self, state, AloneCall::Replay)?;
        graph::replay_recorded(state, backend, graph)
    }

    /// Records the step of a rank on a device as a graph, its calls among the ranks included. The
    /// step is not run.
    ///
    /// All ranks call it, and compare their calls while they record them. Replays are compared no
    /// more.
    ///
    /// Gradients are written where [`State::grad_on_device`] says, or pushed, before each
    /// [`Plan::replay_on`]. For a parameter that was given none, the values in its memory count as
    /// its gradient. Gradients given before this call are the first replay's.
    ///
    /// # Errors
    /// [`PlanError::NotCapturable`] with tables in arguments ([`crate::TableKind`]). ZeRO stages 2
    /// and 3 have them there, since their gradients have no memory that stays. Likewise with
    /// several micro-steps, LocalSGD, shard groups, communication streams, or an engine that works
    /// on the host. [`PlanError::Collective`]; [`PlanError::Backend`].
    pub fn capture_on<'a>(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'a>,
    ) -> Result<RankGraph<'a>> {
        graph::capture_on(self, state, backend, comms)
    }

    /// Enqueues the recorded step once more, on all ranks, and waits for nothing.
    ///
    /// [`State::step`], loss scale and count of skipped steps are as before until
    /// [`Plan::settle_on`]. A learning rate set since is written first.
    ///
    /// Ranks compare nothing here. A rank that replays less often than others, or is gone, keeps
    /// them waiting on their devices. [`Plan::settle_on`] notices that after the engine's deadline.
    ///
    /// # Errors
    /// As [`Plan::replay`]; [`PlanError::Collective`] once the communicator has failed.
    pub fn replay_on<'a>(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'a>,
        graph: &RankGraph<'a>,
    ) -> Result<()> {
        rank_step::check_comms(self, state, comms)?;
        state.check_between_steps("replay_on")?;
        comms.check()?;
        for param in 0..self.params.len() {
            if state.arena.now[param] == Given::Viewed {
                state.take_view_back(backend, param)?;
            }
        }
        state.arena.clear();
        graph::replay_recorded(state, backend, &graph.graph)
    }

    /// Waits until all ranks have done the steps that they have enqueued, and reads what the device
    /// has decided in them, as [`State::settle`]. All ranks call it.
    ///
    /// # Errors
    /// [`PlanError::Collective`] if ranks do not come before the engine's deadline;
    /// [`PlanError::Backend`].
    pub fn settle_on<'a>(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'a>,
        graph: &mut RankGraph<'a>,
    ) -> Result<()> {
        rank_step::check_comms(self, state, comms)?;
        if self.topology.world > 1 {
            comms.set_plan(self.hash());
            graph.meet(backend, comms)?;
        }
        state.settle(backend)
    }
}
