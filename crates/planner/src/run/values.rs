//! Methods of a run that compare, bring and gather values of all ranks.

use fusestep_tensor::Role;

use crate::error::Result;
use crate::run::clock::StepPart;
use crate::run::comms::handshake;
use crate::run::memory::device_params::DeviceParams;
use crate::run::memory::evaluated::Values;
use crate::run::prefetch::PendingGather;
use crate::run::run::Run;
use crate::run::stages::gather;
use crate::run::stages::gather::GatheredParams;
use crate::run::{gather_on_device, prefetch};
#[cfg(doc)]
use crate::{PlanError, State};

impl Run<'_, '_> {
    /// Compares what decides the bits of a run over all ranks: rules and all their settings,
    /// settings of parameters, passes, dtypes, steps and learning rates, by hash the parameters and
    /// the optimizer's tensors that all ranks hold alike, of those they share out what each has
    /// written since the last step, and `caller`'s own fields, such as the seed and the size of
    /// batches. All ranks call it before the first step and after a checkpoint has been loaded.
    ///
    /// # Errors
    /// [`PlanError::RanksDiffer`] naming the field and both values, on all ranks;
    /// [`PlanError::Collective`], [`PlanError::Backend`].
    /// # Cost
    /// One read of the parameters, and of the state that is not shared out; three small calls.
    pub fn handshake(&mut self, caller: &[(&str, String)]) -> Result<()> {
        if self.plan.topology.world == 1 {
            return Ok(());
        }
        #[cfg(feature = "tracing")]
        let _span = tracing::info_span!(target: "fusestep", "handshake").entered();
        let mut fields = handshake::settings(self.plan, self.state);
        fields.extend(caller.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
        let asked = |role| role != Role::Grad;
        fields.extend(handshake::values(self.plan, self.state, self.backend, asked)?);
        handshake::compare(self.comms, &fields)?;
        // With lanes ranks differ in micro-steps, so no later call says it on all of them at once.
        self.comms.set_plan(self.plan.hash());
        Ok(())
    }

    /// The part of [`Run::handshake`] that needs no values: for ranks that are about to be given
    /// those of one of them.
    ///
    /// # Errors
    /// As [`Run::handshake`].
    pub fn compare_settings(&mut self) -> Result<()> {
        handshake::compare_settings(self)
    }

    /// Compares parameters over all ranks by hash: those that all hold alike, and at ZeRO stage 3
    /// what each rank has written since the last step. Not between averages of LocalSGD, nor slices
    /// of a rank's own.
    ///
    /// # Errors
    /// As [`Run::handshake`].
    pub fn compare_parameters(&mut self) -> Result<()> {
        if self.plan.topology.world == 1 {
            return Ok(());
        }
        let asked = |role| role == Role::Param;
        let values = handshake::values(self.plan, self.state, self.backend, asked)?;
        handshake::compare(self.comms, &values)
    }

    /// Brings the parameters of rank `root` to all ranks, before the first step: many in one call,
    /// as many bytes at once as a bucket has. At ZeRO stage 3, where no rank has them whole, these
    /// are the parameters that `root` has written since the last step ([`State::write`]). Slices of
    /// a rank's own stay.
    ///
    /// # Errors
    /// [`PlanError::Collective`]; [`PlanError::Backend`].
    /// # Cost
    /// One broadcast of every storage that has a parameter to bring, and host memory for the
    /// largest of them, one at a time.
    pub fn broadcast_parameters(&mut self, root: usize) -> Result<()> {
        gather::broadcast_parameters(self, root)
    }

    /// Gathers parameters just before they are used; dropping the result frees its memory. At ZeRO
    /// stage 3 parameters come from all ranks, in one call for each bucket, and all ranks ask for
    /// the same. At other stages they are copied. [`Run::prefetch`] asks ahead.
    ///
    /// # Errors
    /// [`PlanError::UnknownName`], [`PlanError::Backend`]; [`PlanError::Collective`].
    pub fn gather(&mut self, names: &[&str]) -> Result<GatheredParams> {
        let begun = self.state.clock.begin(StepPart::Gather);
        let gathered = gather::gather_values(self, names, Values::Params);
        self.state.clock.end(begun);
        gathered
    }

    /// Values that a model is evaluated with, whole on every rank and at any ZeRO stage, for as
    /// long as the result lives: [`State::read_average`] of each parameter. The ranks that keep
    /// their state compute the elements. All ranks ask for the same.
    ///
    /// # Errors
    /// As [`Run::gather`].
    pub fn gather_averages(&mut self, names: &[&str]) -> Result<GatheredParams> {
        gather::gather_values(self, names, Values::Averages)
    }

    /// Asks for parameters ahead of their use; they come while the caller goes on, if the run's
    /// calls have communication streams, else at once. All ranks ask for the same in one order,
    /// whatever else they do in between.
    ///
    /// This rank's part is copied before anything is sent, so nothing borrows the state: gradients
    /// can be given meanwhile. The values are those of this moment, the same bits as
    /// [`Run::gather`]'s. Buckets and these calls have streams of their own: a rank may start
    /// its buckets earlier or later than others do.
    ///
    /// # Errors
    /// As [`Run::gather`]; [`PlanError::ForeignState`], [`PlanError::Poisoned`].
    /// # Cost
    /// The parameters' memory from now on; one more thread for each rank, started with the first
    /// call.
    pub fn prefetch(&mut self, names: &[&str]) -> Result<PendingGather> {
        prefetch::prefetch(self, names)
    }

    /// [`Run::gather`] into memory of the device, without the host: at ZeRO stage 3 what a forward
    /// or backward pass there reads. It returns when all of it is enqueued.
    ///
    /// # Errors
    /// As [`Run::gather`]; [`PlanError::NotOnDevice`] where the backend or the communicator works
    /// in host memory.
    /// # Cost
    /// One call for each bucket that has some of them; a copy of this rank's part.
    pub fn gather_on_device(&mut self, names: &[&str]) -> Result<DeviceParams> {
        gather_on_device::gather_on_device(self, names)
    }
}
