//! From variables and settings to an optimizer, of one process and of one rank.

use std::num::NonZeroUsize;

use fusestep::{Borrowed, Session, SharedBackend, StepOptions};
use fusestep_collective::Communicator;
use fusestep_cpu::CpuBackend;
use fusestep_planner::{Reach, Topology};

use crate::fused::Tensors;
use crate::gradients::Addresses;
use crate::group::GroupRules;
use crate::memory::Memory;
use crate::slices::with_slices;
use crate::variables::Variables;
use crate::{AdapterError, Fused, IntoVariables, Options, Params, memory};

impl<P: Params> Fused<'_, P> {
    /// An optimizer of these variables on the threads of rayon's pool, in which candle works, too.
    ///
    /// # Errors
    /// An [`AdapterError`] inside candle's error: a hyper-parameter out of range, a variable of
    /// another dtype than f32, f64, f16 or bf16, or that is neither on the CPU nor, with the
    /// feature `cuda`, on the CUDA device of the others, or one given twice; no variables at all.
    pub fn new(vars: impl IntoVariables, params: P) -> candle_core::Result<Self> {
        Self::with_options(vars, params, &Options::default())
    }

    /// [`Fused::new`] with the other hyper-parameters at their defaults.
    ///
    /// # Errors
    /// As [`Fused::new`].
    pub fn new_lr(vars: impl IntoVariables, learning_rate: f64) -> candle_core::Result<Self>
    where
        P: Default,
    {
        let mut params = P::default();
        params.set_lr(learning_rate);
        Self::new(vars, params)
    }

    /// [`Fused::new`] on the caller's thread and at most `threads − 1` of rayon's; the bits do not
    /// depend on it.
    ///
    /// # Errors
    /// As [`Fused::new`].
    pub fn with_threads(
        vars: impl IntoVariables,
        params: P,
        threads: NonZeroUsize,
    ) -> candle_core::Result<Self> {
        let options = Options { threads: Some(threads.get()), ..Options::default() };
        Self::with_options(vars, params, &options)
    }

    /// An optimizer without any pass: one launch per variable. The oracle of the fused one.
    ///
    /// # Errors
    /// As [`Fused::new`].
    pub fn naive(
        vars: impl IntoVariables,
        params: P,
        threads: NonZeroUsize,
    ) -> candle_core::Result<Self> {
        let threads = Some(threads.get());
        let options = Options { threads, naive: true, ..Options::default() };
        Self::with_options(vars, params, &options)
    }

    /// [`Fused::new`] with clipping, loss scaling, 16-bit variables and their masters, and the rest
    /// of [`Options`].
    ///
    /// Steps update the variables where candle has them. Sums over micro-steps, updates in backward
    /// and resident tables take copies of variables on the CPU, and gradients of the optimizer's
    /// own.
    ///
    /// # Errors
    /// As [`Fused::new`], and for an option out of range, a precision that a variable cannot have,
    /// and a text of [`Options::exclude`] or [`Options::groups`] that is in no variable's name.
    pub fn with_options(
        vars: impl IntoVariables,
        params: P,
        options: &Options,
    ) -> candle_core::Result<Self> {
        let variables = vars.into_variables().floating_point();
        let made = Self::of(variables, params, options)?;
        Ok(made)
    }

    fn of(variables: Variables, params: P, options: &Options) -> Result<Self, AdapterError> {
        let memory = Memory::of(&variables.vars, options)?;
        let descriptors = variables.descriptors(&memory)?;
        let options = Options { rule: params.rule(), ..options.clone() };
        options.check(1)?;
        // Names that are known to be slices change nothing of a rank's own step.
        let alone = StepOptions { distributed: Vec::new(), ..options.clone() };
        let needs_own = alone.check_borrowed().err();
        let backend = Box::new(memory.backend());
        let is_kept = needs_own.is_some() && memory.is_host() && alone.check_alone().is_ok();
        let (session, tensors) = if is_kept {
            (Session::unjoined(&alone, &descriptors, backend)?, Tensors::Kept)
        } else {
            let borrowed = Borrowed::Params;
            let session = Session::borrowing(&alone.borrowing(), &descriptors, backend, borrowed)?;
            (session, Tensors::Borrowed { memory, needs_ranks: needs_own })
        };
        let Variables { vars, names } = variables;
        let mut optimizer = Self {
            addresses: Addresses::of(&vars),
            vars,
            names,
            params,
            group_rules: GroupRules::of(&options.groups, session.state().rules()),
            options,
            session,
            tensors,
        };
        optimizer.follow()?;
        Ok(optimizer)
    }

    /// This optimizer as one rank of `comm`, before its first step. Ranks compare their options
    /// and, unless [`Options::initial`] says otherwise, take over the variables of rank 0. All
    /// ranks call it.
    ///
    /// Slices of layers that are split over these ranks ([`crate::parallel`]) stay each rank's own,
    /// and so do variables that [`Options::distributed`] names: no rank gets another's values or
    /// gradients of them, and norms are those of the whole tensors.
    ///
    /// # Errors
    /// An [`AdapterError`]: options out of range or that contradict each other, ranks that differ
    /// in them, memory that cannot be had, an optimizer that has been used.
    /// # Cost
    /// Memory for a copy of the variables and for gradients, less what [`Options::zero`] shares
    /// out.
    pub fn on(self, comm: &mut dyn Communicator) -> candle_core::Result<Fused<'_, P>> {
        Ok(self.joined(comm)?)
    }

    fn joined(mut self, comm: &mut dyn Communicator) -> Result<Fused<'_, P>, AdapterError> {
        let steps = self.state().step();
        if steps > 0 || self.session.is_saving() || self.state().has_gradients() {
            return Err(AdapterError::InUse { steps });
        }
        memory::check_host(&self.vars)?;
        let topology = Topology::of(comm);
        // The rule as it was given: rules that have become equal since stay two.
        let rule = *self.plan().optimizer();
        let options = Options { rule, ..with_slices(&self.options, &self.vars, topology.world)? };
        let backend: SharedBackend =
            std::sync::Arc::new(CpuBackend::new(threads(&options, topology)));
        let params = self.plan().params();
        let mut session = Session::on(&options, params, Box::new(backend), comm)?;
        for (rule, now) in self.state().rules().iter().enumerate().skip(1) {
            session.state_mut().set_lr_of(rule, now.lr())?;
        }
        session.state_mut().set_optimizer(self.params.rule())?;
        if self.state().takes_any_settings() {
            session.state_mut().any_settings();
        }
        session.take_checkpoints_of(&mut self.session);
        let mut ranked = Fused {
            vars: self.vars,
            names: self.names,
            addresses: self.addresses,
            params: self.params,
            group_rules: self.group_rules,
            session,
            tensors: Tensors::OnRanks { slices: options.distributed.iter().cloned().collect() },
            options,
        };
        ranked.follow()?;
        if ranked.session.bring_first()? {
            ranked.set_variables()?;
        } else {
            ranked.session.compare_settings()?;
        }
        Ok(ranked)
    }
}

/// Threads of a rank: its share of the machine where ranks are on one.
fn threads(options: &Options, topology: Topology) -> NonZeroUsize {
    let sharing = match topology.reach {
        Reach::SharedMemory => topology.world,
        Reach::Calls => 1,
    };
    let all = memory::threads(options);
    NonZeroUsize::new(all.div_ceil(sharing.max(1))).unwrap_or(NonZeroUsize::MIN)
}
