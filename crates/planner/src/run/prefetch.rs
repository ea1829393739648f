//! Prefetch of parameters from their shards, ahead of their use.

use fusestep_collective::{
    Buffers, Call, CallContext, CollectiveError, Communicator, Operation, Pending,
};

use crate::error::{PlanError, Result};
use crate::run::memory::evaluated::Values;
use crate::run::memory::state::State;
use crate::run::run::Run;
use crate::run::stages::gather;
use crate::run::stages::gather::GatheredParams;

/// Parameters on their way, started by [`Run::prefetch`].
///
/// Wait for every one: dropping it while its call is under way closes the stream that carries it,
/// on all ranks, with an error that names this one.
#[must_use = "dropping parameters on their way closes their stream; call `wait`"]
#[derive(Debug)]
pub struct PendingGather {
    way: Way,
    len_bytes: usize,
    plan_hash: u64,
    version: u64,
}

#[derive(Debug)]
enum Way {
    Here(GatheredParams),
    Stream(Pending<GatheredParams>),
}

pub(crate) fn prefetch(run: &mut Run<'_, '_>, names: &[&str]) -> Result<PendingGather> {
    let backend = run.backend;
    let Run { plan, state, comms, .. } = run;
    state.check_plan(plan)?;
    let mut params = gather::own_parts(plan, state, backend, names, Values::Params)?;
    let len_bytes = params.len_bytes();
    for buffer in &params.buffers {
        for (range, _) in &buffer.calls {
            comms.count_in_group(Operation::AllGather, range.len());
        }
    }
    let context = CallContext { plan_hash: plan.hash(), bucket: None };
    let calls = params.buffers.iter().any(|buffer| !buffer.calls.is_empty());
    let way = match comms.stream_ahead()? {
        Some(stream) if calls => {
            let work = move |comm: &mut dyn Communicator, params: &mut GatheredParams| {
                comm.set_context(context);
                make_calls(comm, params)
            };
            Way::Stream(stream.start("prefetch", params, work))
        }
        _ => {
            make_calls(comms.within_group(), &mut params)?;
            Way::Here(params)
        }
    };
    Ok(PendingGather { way, len_bytes, plan_hash: plan.hash(), version: state.params_version })
}

fn make_calls(
    comm: &mut dyn Communicator,
    params: &mut GatheredParams,
) -> Result<(), CollectiveError> {
    for buffer in &mut params.buffers {
        for (range, counts) in &buffer.calls {
            comm.execute(Call {
                operation: Operation::AllGather,
                dtype: buffer.dtype,
                counts: Some(counts),
                buffers: Buffers::InPlace(&mut buffer.memory.bytes_mut()[range.clone()]),
            })?;
        }
    }
    Ok(())
}

impl PendingGather {
    /// Bytes of the parameters, held from the moment they were asked for.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Waits until all parts have arrived. `state` must be the state that was asked, and its
    /// parameters must not have changed since.
    ///
    /// # Errors
    /// [`PlanError::StaleParams`] if they have been updated, averaged or written since,
    /// [`PlanError::ForeignState`] if it is another one: the call is through then, and the
    /// stream goes on. [`PlanError::Collective`].
    pub fn wait(self, state: &State) -> Result<GatheredParams> {
        let params = match self.way {
            Way::Here(params) => params,
            Way::Stream(pending) => pending.wait()?,
        };
        if state.plan_hash != self.plan_hash {
            return Err(PlanError::ForeignState {
                expected: self.plan_hash,
                found: state.plan_hash,
            });
        }
        if state.params_version != self.version {
            return Err(PlanError::StaleParams {
                changes: state.params_version.abs_diff(self.version),
            });
        }
        Ok(params)
    }
}
