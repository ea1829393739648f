//! What is run with a plan: its memory, the gradients that are given, the step and what follows it.
//!
//! Each method of more than a few lines is a function of the module that it names.

use fusestep_collective::Communicator;
use fusestep_launch::Backend;

use crate::averages::Values;
use crate::comms::Comms;
use crate::run::Executor;
use crate::step::RankStep;
use crate::{
    DeviceParams, GatheredParams, Lender, MicroStepReport, PendingGather, Plan, PlanError,
    RankGraph, State, StepGraph, StepReport, allocate, average, device_params, enqueue, gather,
    gradients, prefetch, rank_graph, reduce, run, step,
};

impl Plan {
    /// Allocates zeroed tensors on `backend`; parameters are zero until written.
    ///
    /// # Errors
    /// [`PlanError::Backend`] if memory cannot be had, or the backend cannot do what a stage needs.
    pub fn allocate(&self, backend: &dyn Backend) -> Result<State, PlanError> {
        allocate::allocate_from(self, backend, None)
    }

    /// [`Plan::allocate`], with arenas that calls move from the communicator: ranks of one machine
    /// then see each other's, and nothing is copied on the way.
    ///
    /// # Errors
    /// As [`Plan::allocate`]; [`PlanError::Collective`] if the communicator has not so much memory.
    pub fn allocate_on(
        &self,
        backend: &dyn Backend,
        comm: &mut dyn Communicator,
    ) -> Result<State, PlanError> {
        allocate::allocate_from(self, backend, Some(comm))
    }

    /// Takes the gradient of one parameter for the micro-step under way, in one pass that copies or
    /// adds it into the arena, and starts reducing every segment that is full, if `comms` has
    /// communication streams. Without them it reduces such segments itself, and waits for the other
    /// ranks, where [`Plan::calls_while_given`] says so.
    ///
    /// A parameter whose gradient is not given before the step is run counts as zero if another
    /// rank, or another micro-step, has given it, else it is left out of the step.
    ///
    /// # Errors
    /// [`PlanError::UnknownName`], [`PlanError::LenBytes`], [`PlanError::GradientTwice`],
    /// [`PlanError::ForeignState`]; [`PlanError::Collective`], and the state refuses further
    /// steps then.
    pub fn push_grad(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        name: &str,
        bytes: &[u8],
    ) -> Result<(), PlanError> {
        gradients::push_grad(&mut RankStep::new(self, state, backend, comms), name, bytes)
    }

    /// Says that the gradient of one parameter is whole where its view lies ([`State::grad_mut`],
    /// [`State::grad_on_device`]): nothing is copied, and every segment that is full is reduced as
    /// by [`Plan::push_grad`]. The view may be written again once the step has been run. With
    /// several micro-steps to an update it counts as given, and is added when the micro-step ends.
    ///
    /// # Errors
    /// As [`Plan::push_grad`]; [`PlanError::NotOnHost`].
    pub fn give_view(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        name: &str,
    ) -> Result<(), PlanError> {
        gradients::give_view(&mut RankStep::new(self, state, backend, comms), name)
    }

    /// Whether giving gradients makes calls at once and waits for the other ranks: where updates
    /// run in backward, and where `comms` reduces segments when they are full. From the first
    /// gradient of a micro-step until [`Plan::step`] ranks make no other calls then.
    pub fn calls_while_given(&self, comms: &Comms<'_>) -> bool {
        self.in_backward || gradients::reduces_when_full(self, comms)
    }

    /// Takes this rank's part out of the next segments that are through, without waiting, so that
    /// those that come use their memory. Giving a gradient does so too. Returns how many have
    /// been started and not been taken.
    ///
    /// Below ZeRO stage 2 segments keep their memory, and with shard groups they go on across
    /// groups when the step is run: nothing is taken then.
    ///
    /// # Errors
    /// [`PlanError::Collective`], and the state refuses further steps then.
    pub fn take_reduced(
        &self,
        state: &mut State,
        backend: &dyn Backend,
    ) -> Result<usize, PlanError> {
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
    ) -> Result<MicroStepReport, PlanError> {
        step::step(&mut RankStep::new(self, state, backend, comms))
    }

    /// Updates from fewer micro-steps than planned: what the last ones before an epoch's end have
    /// added. Does nothing if there are none; gradients of a micro-step under way have to be
    /// ended by [`Plan::step`] first.
    ///
    /// # Errors
    /// As [`Plan::step`]; [`PlanError::StepUnderWay`].
    pub fn flush(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
    ) -> Result<MicroStepReport, PlanError> {
        step::flush(&mut RankStep::new(self, state, backend, comms))
    }

    /// Averages parameters, and state if pass `local_sgd` says so, across all ranks.
    ///
    /// # Errors
    /// As [`Self::step`].
    pub fn average_now(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
    ) -> Result<(), PlanError> {
        average::average_now(&mut RankStep::new(self, state, backend, comms))
    }

    /// Parameters just before they are used; dropping them releases their memory. Under ZeRO stage
    /// 3 they come from all ranks, in one call for each bucket, and all ranks ask for the same;
    /// at other stages they are copied. [`Self::prefetch`] asks ahead.
    ///
    /// # Errors
    /// [`PlanError::UnknownName`], [`PlanError::Backend`]; [`PlanError::Collective`].
    pub fn gather(
        &self,
        state: &State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        names: &[&str],
    ) -> Result<GatheredParams, PlanError> {
        gather::gather_values(self, state, backend, comms, names, Values::Params)
    }

    /// What a model is evaluated with, whole on every rank and at any ZeRO stage, for as long as
    /// the result lives: [`State::read_average`] of each parameter, its elements computed by the
    /// ranks that keep their state. All ranks ask for the same.
    ///
    /// # Errors
    /// As [`Plan::gather`].
    pub fn gather_averages(
        &self,
        state: &State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        names: &[&str],
    ) -> Result<GatheredParams, PlanError> {
        gather::gather_values(self, state, backend, comms, names, Values::Averages)
    }

    /// Asks for parameters ahead of their use; they come while the caller goes on, if `comms` has
    /// communication streams, else at once. All ranks ask for the same in one order, whatever
    /// else they do in between.
    ///
    /// This rank's part is copied before anything is sent, so nothing borrows the state: gradients
    /// can be given meanwhile. The values are those of this moment, the same bits as
    /// [`Self::gather`]'s. Buckets and these calls have streams of their own: a rank may start
    /// its buckets earlier or later than others do.
    ///
    /// # Errors
    /// As [`Self::gather`]; [`PlanError::ForeignState`], [`PlanError::Poisoned`].
    /// # Cost
    /// The parameters' memory from now on; one more thread for each rank, started with the first
    /// call.
    pub fn prefetch(
        &self,
        state: &State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        names: &[&str],
    ) -> Result<PendingGather, PlanError> {
        prefetch::prefetch(self, state, backend, comms, names)
    }

    /// [`Plan::gather`] into memory of the device, without the host: at ZeRO stage 3 what a forward
    /// or backward pass there reads. It returns when all of it is enqueued.
    ///
    /// # Errors
    /// As [`Plan::gather`]; [`PlanError::NotOnDevice`] where the backend or the communicator works
    /// in host memory.
    /// # Cost
    /// One call for each bucket that has some of them; a copy of this rank's part.
    pub fn gather_on_device(
        &self,
        state: &State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        names: &[&str],
    ) -> Result<DeviceParams, PlanError> {
        device_params::gather_on_device(self, state, backend, comms, names)
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
    pub fn run(&self, state: &mut State, backend: &dyn Backend) -> Result<StepReport, PlanError> {
        run::run(self, state, backend)
    }

    /// Runs one step on parameters and gradients that `lender` lends.
    ///
    /// # Errors
    /// As [`Plan::run`].
    pub fn run_borrowed(
        &self,
        state: &mut State,
        lender: &mut dyn Lender,
    ) -> Result<StepReport, PlanError> {
        run::run_stages(self, state, Executor::Lender(lender))
    }

    /// Enqueues one step and waits for nothing. [`State::step`], the loss scale and the count of
    /// skipped steps are as they were until [`State::settle`] reads what the device has
    /// decided; without a stage that reads the gradients nothing is left to read.
    ///
    /// The step of a plan that reads gradients is waited for nevertheless if parameters are without
    /// gradient in it, because the next step's table depends on whether this one was skipped. So
    /// is the step before this one while a schedule still changes the rate.
    ///
    /// # Errors
    /// As [`Plan::run`]; [`PlanError::NotCapturable`] for a plan that reads gradients and whose
    /// tables are in arguments: the host has to know the step before it can write the next
    /// one's.
    /// # Cost
    /// Launches whose arguments are equal at every step, on a device: nothing of the host's work
    /// grows with the tensors.
    pub fn enqueue(&self, state: &mut State, backend: &dyn Backend) -> Result<(), PlanError> {
        enqueue::enqueue(self, state, backend)
    }

    /// Records a step as a graph; the step is not run. Every [`Plan::replay`] is then one call of
    /// the driver.
    ///
    /// # Errors
    /// [`PlanError::NotCapturable`] if the tables are in arguments or parameters are without
    /// gradient; [`PlanError::Backend`] on a backend that records no launches.
    pub fn capture(
        &self,
        state: &mut State,
        backend: &dyn Backend,
    ) -> Result<StepGraph, PlanError> {
        enqueue::capture(self, state, backend)
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
    ) -> Result<(), PlanError> {
        enqueue::replay(self, state, backend, graph)
    }

    /// Records the step of a rank on a device, its calls among the other ranks included; nothing is
    /// run. All ranks call it, and compare their calls while they record them; what is replayed
    /// is compared no more.
    ///
    /// Gradients are written where [`State::grad_on_device`] says, or pushed, before each
    /// [`Plan::replay_on`]; what is there of a parameter that was given none counts as its
    /// gradient. Those given before this call are the first replay's.
    ///
    /// # Errors
    /// [`PlanError::NotCapturable`]: with tables in arguments ([`crate::TableKind`]; at ZeRO stages
    /// 2 and 3 they are, whose gradients have no memory that stays), with several micro-steps or
    /// LocalSGD, shard groups, communication streams, or an engine that works on the host.
    /// [`PlanError::Collective`]; [`PlanError::Backend`].
    pub fn capture_on<'a>(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'a>,
    ) -> Result<RankGraph<'a>, PlanError> {
        rank_graph::capture_on(self, state, backend, comms)
    }

    /// Enqueues the recorded step once more, on all ranks, and waits for nothing:
    /// [`State::step`], loss scale and count of skipped steps are as they were until
    /// [`Plan::settle_on`]. A learning rate set since is written first.
    ///
    /// Ranks compare nothing here. One that replays less often than others, or is gone, keeps them
    /// waiting on their devices, which [`Plan::settle_on`] notices after the engine's deadline.
    ///
    /// # Errors
    /// As [`Plan::replay`]; [`PlanError::Collective`] once the communicator has failed.
    pub fn replay_on<'a>(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'a>,
        graph: &RankGraph<'a>,
    ) -> Result<(), PlanError> {
        rank_graph::replay_on(self, state, backend, comms, graph)
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
    ) -> Result<(), PlanError> {
        rank_graph::settle_on(self, state, backend, comms, graph)
    }
}
