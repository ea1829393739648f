//! A step of several ranks on devices, recorded once and enqueued by one call of the driver.

use std::marker::PhantomData;

use fusestep_collective::{Operation, ReduceOp};
use fusestep_launch::{Backend, Buffer};
use fusestep_tensor::DType;

use crate::arena::{Given, keeps_segments};
use crate::comms::Comms;
use crate::in_backward::check_between_steps;
use crate::table::not_capturable;
use crate::{Plan, PlanError, Stage, State, StepGraph};

/// A step recorded by [`Plan::capture_on`], of which every rank has one. It works on the
/// communicator's memory, which therefore outlives it:
///
/// ```compile_fail,E0597
/// # fn program(plan: fusestep_planner::Plan, mut state: fusestep_planner::State,
/// #     backend: &dyn fusestep_launch::Backend) {
/// use fusestep_collective::Solo;
/// use fusestep_planner::Comms;
///
/// let graph;
/// {
///     let mut comm = Solo::new();
///     let mut comms = Comms::direct(&mut comm);
///     graph = plan.capture_on(&mut state, backend, &mut comms).unwrap();
/// }
/// drop(graph);
/// # }
/// ```
#[derive(Debug)]
pub struct RankGraph<'a> {
    graph: StepGraph,
    /// What ranks add up to hear that all have come so far.
    token: Box<dyn Buffer>,
    communicator: PhantomData<&'a ()>,
}

impl Plan {
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
        self.check_comms(state, comms)?;
        check_between_steps(state, "capture_on")?;
        state.check_capturable()?;
        if self.topology.world > 1 {
            self.check_recorded_calls(state, backend, comms)?;
        }
        let token = backend.allocate(size_of::<f64>())?;
        comms.set_plan(self.hash());
        state.settle(backend)?;
        state.prepare(self, backend)?;
        // A recording cannot wait for what is written to tables.
        self.build_trust_tables(state, backend)?;
        for (update, stage) in self.optimize_stages().enumerate() {
            self.with_gradients(state, stage.bucket, |state| {
                state.build_table(self, (stage, update), backend)
            })?;
        }
        let calls = (self.topology.world > 1).then_some(&mut *comms);
        let graph = self.record(state, backend, calls);
        // Nothing has run: what counts as reduced is to be reduced still.
        state.arena.settle(keeps_segments(self));
        state.arena.clear();
        comms.finish_on_device()?;
        Ok(RankGraph {
            graph: graph?,
            token,
            communicator: PhantomData,
        })
    }

    /// Refuses calls that a graph cannot have.
    fn check_recorded_calls(
        &self,
        state: &State,
        backend: &dyn Backend,
        comms: &Comms<'_>,
    ) -> Result<(), PlanError> {
        let against = if self.micro_steps() > 1 {
            "it adds up micro-steps"
        } else if !self.reduces() {
            "ranks update on their own, and average every few steps"
        } else if self.shard_group < self.topology.world {
            "shards lie in groups of ranks"
        } else if !comms.is_on_device_of(backend) {
            "its calls are made on the host"
        } else if state.norm.is_some() && state.exchange.norm_on_device.is_none()
            || self.stages.contains(&Stage::Trust) && state.exchange.trust_on_device.is_none()
        {
            "norms are formed on the host"
        } else if comms.has_streams() {
            "communication streams make its calls; take `Comms::direct`"
        } else {
            return Ok(());
        };
        Err(not_capturable(against))
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
        self.check_comms(state, comms)?;
        check_between_steps(state, "replay_on")?;
        comms.check()?;
        for param in 0..self.params.len() {
            if state.arena.now[param] == Given::Viewed {
                state.take_view_back(backend, param)?;
            }
        }
        state.arena.clear();
        self.replay_recorded(state, backend, &graph.graph)
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
        self.check_comms(state, comms)?;
        if self.topology.world > 1 {
            comms.set_plan(self.hash());
            backend.hand_over(graph.token.as_mut())?;
            let call = (Operation::AllReduce(ReduceOp::Max), DType::F64, None);
            let all = 0..graph.token.len_bytes();
            comms.on_device(&mut graph.token, all, call)?;
            comms.finish_on_device()?;
            backend.take_back(graph.token.as_mut())?;
        }
        state.settle(backend)
    }
}
