//! The sums over whole tensors that LARS and LAMB need, where shards of many ranks lie on devices:
//! nothing waits for the host.
//!
//! ```text
//! leaves of this rank, in rows ─► all-reduce ─► chunks ─► tensors, with every update
//! ```
//! A row has the sums of up to eight leaves that lie in one rank's part, so that every row is one
//! rank's. All others have zeros there, and adding up over ranks changes no bit of a sum.

use fusestep_collective::{Operation, ReduceOp};
use fusestep_launch::{DeviceBackend, FoldLeaves, GroupValues};
use fusestep_tensor::DType;

use crate::error::Result;
use crate::plan::settings::TableKind;
use crate::plan::value::Plan;
use crate::run::comms::bytes::CallKind;
use crate::run::memory::device_sums::{DeviceTrust, Leaves, OwnSums};
use crate::run::memory::state::State;
use crate::run::run::Run;
use crate::run::stages::{gather, launches, reduce};

/// Enqueues stage `trust` on devices; returns whether the stage runs there.
pub(crate) fn sum_tensors(run: &mut Run<'_, '_>) -> Result<bool> {
    let Some(mut own) = run.state.exchange.trust_on_device.take() else {
        return Ok(false);
    };
    own.filled = false;
    let device = run.comms.device_of(run.backend);
    let done = device.map_or(Ok(()), |device| fill_sums(run, device, &mut own));
    let filled = own.filled;
    run.state.exchange.trust_on_device = Some(own);
    done.map(|()| filled)
}

/// Builds the stage's tables before it is recorded. From now on updates read the sums on the
/// device.
pub(crate) fn build_tables(
    plan: &Plan,
    state: &mut State,
    device: &dyn DeviceBackend,
) -> Result<()> {
    let Some(mut own) = state.exchange.trust_on_device.take() else {
        return Ok(());
    };
    own.filled = true;
    let built = own_leaves(plan, state, device, &mut own, Leaves::Tables);
    state.exchange.trust_on_device = Some(own);
    built
}

/// Takes the sums of this rank's leaves.
fn own_leaves(
    plan: &Plan,
    state: &mut State,
    device: &dyn DeviceBackend,
    own: &mut DeviceTrust,
    leaves: Leaves,
) -> Result<()> {
    let mut parts: Vec<OwnSums> = match own.own.take() {
        Some(parts) => parts,
        None => {
            let parts = state.exchange.trust.iter();
            parts.map(|part| own.own_sums(plan, part)).collect::<Result<_, _>>()?
        }
    };
    let resident = state.tables.kind == TableKind::Resident;
    let rows = &mut own.rows;
    for OwnSums { stage, runs } in parts.iter_mut().filter(|part| !part.runs.is_empty()) {
        let rule = state.storages[stage.storage].spec.rule;
        let values: Vec<GroupValues> = launches::group_values(state, rule).collect();
        reduce::with_gradients(plan, state, stage.bucket, |state| {
            for run in runs {
                let Some(launch) = launches::with_batches(plan, state, stage, &run.batches) else {
                    continue;
                };
                if resident && run.table.is_none() {
                    let table =
                        device.place_leaf_sums(&launch, &values, rows.as_ref(), run.first)?;
                    run.table = Some(table);
                }
                match &run.table {
                    _ if leaves == Leaves::Tables => {}
                    Some(table) => device.leaf_sums_of_table(&launch, table.as_ref())?,
                    None => device.leaf_sums_into(&launch, rows.as_mut(), run.first)?,
                }
            }
            Ok(())
        })?;
    }
    own.own = Some(parts);
    Ok(())
}

fn fill_sums(
    run: &mut Run<'_, '_>,
    device: &dyn DeviceBackend,
    own: &mut DeviceTrust,
) -> Result<()> {
    device.zero(own.rows.as_mut())?;
    own_leaves(run.plan, run.state, device, own, Leaves::Sums)?;
    let kind = CallKind::even(Operation::AllReduce(ReduceOp::Sum), DType::F64);
    let all = 0..own.rows.len_bytes();
    gather::on_device(device, run.comms, &mut own.rows, all, kind)?;
    device.fold_leaves(FoldLeaves {
        leaves: own.rows.as_ref(),
        index: Some(own.index.as_ref()),
        places: own.places.as_ref(),
        partials: own.sums.as_mut(),
    })?;
    own.filled = true;
    Ok(())
}
