//! Places of the launches' argument tables, decided once the plan's stages are known.

use crate::error::{PlanError, Result};
use crate::plan::batches;
use crate::plan::note::Verdict;
use crate::plan::segments::keeps_segments;
use crate::plan::settings::TableKind;
use crate::plan::stage::Stage;
use crate::plan::value::Plan;

/// Decides where the tables lie and makes the batches for it.
pub(crate) fn place(plan: &mut Plan, asked: TableKind) -> Result<()> {
    let most = plan.stages.iter().map(|stage| match stage {
        Stage::Norm(norm) => norm.launches() - 1,
        Stage::Optimize(optimize) => optimize.batches.len(),
        _ => 0,
    });
    let most = most.max().unwrap_or(0);
    let borrowed = plan.tensors.are_borrowed();
    let of_ranks = plan.topology.world > 1;
    let refusal = match asked {
        TableKind::Arguments | TableKind::Auto if of_ranks => return Ok(()),
        _ if of_ranks && no_tables_of_ranks(plan).is_some() => no_tables_of_ranks(plan),
        TableKind::Arguments | TableKind::Auto if plan.in_backward => return Ok(()),
        _ if plan.in_backward => {
            Some("updates of a step begin before it is known whose gradients it lacks")
        }
        // Devices have entries that measure for tables in memory only, and would otherwise need
        // twice as many.
        TableKind::Arguments | TableKind::Auto if plan.update_norms && !borrowed => None,
        TableKind::Arguments => return Ok(()),
        TableKind::Resident if borrowed => return Err(PlanError::BorrowedTable),
        // Their launches choose by themselves, at every step.
        TableKind::Auto if borrowed => return Ok(()),
        TableKind::Auto if most <= 1 => Some("every stage fits into one launch"),
        TableKind::Resident | TableKind::Auto => None,
    };
    if let Some(reason) = refusal {
        plan.note("table", Verdict::Refused, format!("arguments: {reason}"));
        return Ok(());
    }
    let why = match asked {
        _ if plan.update_norms => "for pass `update_norms`".to_owned(),
        TableKind::Resident => "as asked for".to_owned(),
        _ => format!("a stage would take {most} launches with tables in arguments"),
    };
    plan.table = TableKind::Resident;
    batches::make_anew(plan)?;
    let reason = format!(
        "resident, {why}: built once in the device's memory, and the device derives the \
         scalars; the cpu backend runs the same batches without a table"
    );
    plan.note("table", Verdict::Applied, reason);
    Ok(())
}

/// The reason why tables of several ranks cannot lie in device memory; `None` if they can.
fn no_tables_of_ranks(plan: &Plan) -> Option<&'static str> {
    if !keeps_segments(plan) {
        Some("gradients of several ranks change their place in memory from ZeRO stage 2 on")
    } else if plan.is_fused() {
        Some("ranks reduce and update in one pass")
    } else if plan.update_norms {
        Some("norms of updates of several ranks are not measured on devices")
    } else {
        None
    }
}
