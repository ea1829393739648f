//! Methods for a whole run: comparing its ranks and gathering parameters.

use fusestep_launch::Backend;
use fusestep_tensor::Role;

#[cfg(doc)]
use crate::PlanError;
use crate::error::Result;
use crate::plan::value::Plan;
use crate::run::comms::calls::Comms;
use crate::run::comms::handshake;
use crate::run::memory::device_params::DeviceParams;
use crate::run::memory::evaluated::Values;
use crate::run::memory::state::State;
use crate::run::prefetch::PendingGather;
use crate::run::stages::gather;
use crate::run::stages::gather::GatheredParams;
use crate::run::{gather_on_device, prefetch};

impl Plan {
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
    pub fn handshake(
        &self,
        state: &State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        caller: &[(&str, String)],
    ) -> Result<()> {
        if self.topology.world == 1 {
            return Ok(());
        }
        let mut fields = handshake::settings(self, state);
        fields.extend(caller.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
        fields.extend(handshake::values(self, state, backend, |role| role != Role::Grad)?);
        handshake::compare(comms, &fields)
    }

    /// The part of [`Plan::handshake`] that needs no values: for ranks that are about to be given
    /// those of one of them.
    ///
    /// # Errors
    /// As [`Plan::handshake`].
    pub fn compare_settings(&self, state: &State, comms: &mut Comms<'_>) -> Result<()> {
        if self.topology.world == 1 {
            return Ok(());
        }
        handshake::compare(comms, &handshake::settings(self, state))
    }

    /// Compares parameters over all ranks by hash: those that all hold alike, and at ZeRO stage 3
    /// what each rank has written since the last step. Not between averages of LocalSGD, nor slices
    /// of a rank's own.
    ///
    /// # Errors
    /// As [`Plan::handshake`].
    pub fn compare_parameters(
        &self,
        state: &State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
    ) -> Result<()> {
        if self.topology.world == 1 {
            return Ok(());
        }
        let values = handshake::values(self, state, backend, |role| role == Role::Param)?;
        handshake::compare(comms, &values)
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
    pub fn broadcast_parameters(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        root: usize,
    ) -> Result<()> {
        gather::broadcast_parameters(self, state, backend, comms, root)
    }

    /// Gathers parameters just before they are used; dropping the result frees its memory. At ZeRO
    /// stage 3 parameters come from all ranks, in one call for each bucket, and all ranks ask for
    /// the same. At other stages they are copied. [`Self::prefetch`] asks ahead.
    ///
    /// # Errors
    /// [`PlanError::UnknownName`], [`PlanError::Backend`]; [`PlanError::Collective`].
    pub fn gather(
        &self,
        state: &State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        names: &[&str],
    ) -> Result<GatheredParams> {
        gather::gather_values(self, state, backend, comms, names, Values::Params)
    }

    /// Values that a model is evaluated with, whole on every rank and at any ZeRO stage, for as
    /// long as the result lives: [`State::read_average`] of each parameter. The ranks that keep
    /// their state compute the elements. All ranks ask for the same.
    ///
    /// # Errors
    /// As [`Plan::gather`].
    pub fn gather_averages(
        &self,
        state: &State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        names: &[&str],
    ) -> Result<GatheredParams> {
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
    ) -> Result<PendingGather> {
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
    ) -> Result<DeviceParams> {
        gather_on_device::gather_on_device(self, state, backend, comms, names)
    }
}
