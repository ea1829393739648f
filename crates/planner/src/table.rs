//! Where the argument tables of a plan's launches lie.

use std::sync::atomic::{AtomicU64, Ordering};

use fusestep_launch::{Backend, GroupValues, Launch, LaunchReport, ResidentTable, TensorSums};
use fusestep_tensor::Role;
use serde::Serialize;

use crate::arena::keeps_segments;
use crate::run::Executor;
use crate::{Optimize, Plan, PlanError, Result, Stage, State, Verdict, batches, launches};

/// Where a launch's table of tensors lies. It changes launches and what the host does for them,
/// never a bit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TableKind {
    /// In the launch's arguments: as many tensors as fit, and the host derives the scalars of every
    /// step.
    #[default]
    Arguments,
    /// In the device's memory, built once: any number of tensors in a launch. The device counts
    /// steps and derives the scalars, so that a step can be recorded in a graph.
    Resident,
    /// In arguments where each stage fits into one launch, else resident.
    Auto,
}

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
        TableKind::Arguments if plan.in_backward => return Ok(()),
        _ if plan.in_backward => {
            Some("updates of a step begin before it is known whose gradients it lacks")
        }
        // Devices have entries that measure for tables in memory only, and would otherwise need
        // twice as many.
        TableKind::Arguments | TableKind::Auto if plan.update_norms && !borrowed => None,
        TableKind::Arguments => return Ok(()),
        TableKind::Resident if borrowed => return Err(PlanError::BorrowedTable),
        TableKind::Auto if borrowed => Some("the caller lends tensors anew at every step"),
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

/// Why tables of several ranks cannot lie in memory; `None` if they can.
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

/// A state's tables in its backend's memory.
#[derive(Default)]
pub(crate) struct Tables {
    pub(crate) kind: TableKind,
    /// One for each stage that updates; none for a stage without batches.
    pub(crate) updates: Vec<Option<Box<dyn ResidentTable>>>,
    /// One for each storage whose gradients are read.
    pub(crate) reads: Vec<Option<Box<dyn ResidentTable>>>,
    /// Which tables these are among all that were built; 0 before the first.
    pub(crate) generation: u64,
    /// The bits of the learning rates that they derive step scalars from, of each rule.
    rates: Vec<u64>,
    /// Steps enqueued whose outcome the host does not know.
    pub(crate) pending: u64,
    /// The steps pending were counted before the state's step was set from outside.
    pub(crate) superseded: bool,
}

impl Tables {
    pub(crate) fn of(plan: &Plan) -> Self {
        Self { kind: plan.table, ..Self::default() }
    }

    /// An error if a step's outcome is not known.
    pub(crate) fn check_settled(&self) -> Result<()> {
        match self.pending {
            0 => Ok(()),
            pending => Err(PlanError::Unsettled { pending }),
        }
    }
}

/// How many of the steps pending were applied; those before the step was set from outside do
/// not count.
pub(crate) fn read_applied(state: &mut State, backend: &dyn Backend) -> Result<u64> {
    let pending = std::mem::take(&mut state.tables.pending);
    let Some(norm) = state.norm.as_mut().filter(|_| pending > 0) else {
        return Ok(0);
    };
    let before = norm.block.applied;
    norm.settle(backend, pending)?;
    let applied = norm.block.applied.saturating_sub(before);
    if std::mem::take(&mut state.tables.superseded) { Ok(0) } else { Ok(applied) }
}

/// Makes batches and tables ready for a step; whether the backend derives the step scalars itself.
pub(crate) fn prepare(plan: &Plan, state: &mut State, backend: &dyn Backend) -> Result<bool> {
    if state.schedule.stale {
        state.settle(backend)?;
        state.tables.generation = 0;
    }
    batches::refresh(plan, state)?;
    if state.tables.kind != TableKind::Resident {
        return Ok(false);
    }
    if state.tables.generation == 0 {
        build_tables(plan, state, backend)?;
    }
    publish_lr(state, backend)?;
    // Those of several ranks are built with the first launch of each stage, and not for all.
    let mut all = state.tables.updates.iter().zip(&state.schedule.batches);
    let has_all = all.all(|(table, batches)| table.is_some() || batches.is_empty());
    Ok(plan.topology.world == 1 && has_all)
}

pub(crate) fn publish_lr(state: &mut State, backend: &dyn Backend) -> Result<()> {
    let unsettled = state.tables.pending > 0 && state.rate_may_change();
    if unsettled {
        // The rate follows from how many steps were applied.
        state.settle(backend)?;
    }
    let rates = || (0..state.rules.len()).map(|rule| state.rate(rule).to_bits());
    if !rates().eq(state.tables.rates.iter().copied()) {
        state.tables.rates = rates().collect();
        let tables = state.tables.updates.iter_mut().zip(&state.updated);
        for (table, &storage) in tables {
            let rule = state.storages[storage].spec.rule;
            if let Some(table) = table {
                let lr = f64::from_bits(state.tables.rates[rule]);
                backend.set_table_lr(table.as_mut(), lr)?;
            }
        }
        if let Some(trust) = &mut state.exchange.trust_on_device {
            let (rates, storages) = (&state.tables.rates, &state.storages);
            trust.set_lr(backend, |stage| {
                f64::from_bits(rates[storages[stage.storage].spec.rule])
            })?;
        }
    }
    Ok(())
}

fn build_tables(plan: &Plan, state: &mut State, backend: &dyn Backend) -> Result<()> {
    // Numbers of no meaning but to be different, so that a graph is not taken for one of
    // another state.
    static GENERATIONS: AtomicU64 = AtomicU64::new(1);
    state.tables.updates.clear();
    state.tables.reads.clear();
    for (update, stage) in plan.optimize_stages().enumerate() {
        let table = match plan.topology.world {
            1 => place_update(plan, state, (stage, update), backend)?,
            _ => None,
        };
        state.tables.updates.push(table);
    }
    if plan.topology.world == 1 {
        build_reads(plan, state, backend)?;
    }
    let rates = (0..state.rules.len()).map(|rule| state.rate(rule).to_bits());
    state.tables.rates = rates.collect();
    state.tables.generation = GENERATIONS.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

/// The table of a stage that updates, whose gradients are where the launch reads them.
pub(crate) fn place_update(
    plan: &Plan,
    state: &mut State,
    (stage, update): (&Optimize, usize),
    backend: &dyn Backend,
) -> Result<Option<Box<dyn ResidentTable>>> {
    let rule = state.storages[stage.storage].spec.rule;
    let values: Vec<GroupValues> = launches::group_values(state, rule).collect();
    Ok(match launches::of_stage(plan, state, stage, update) {
        // Sums that the host has go with arguments.
        Some(Launch { tensor_sums: Some(TensorSums::Host(_)), .. }) | None => None,
        Some(launch) => backend.place_table(&launch, &values)?,
    })
}

fn build_reads(plan: &Plan, state: &mut State, backend: &dyn Backend) -> Result<()> {
    let Some(norm) = &mut state.norm else {
        return Ok(());
    };
    norm.place(plan, &state.schedule.norm, backend)?;
    let mut first_partial = 0;
    for (index, batches) in state.schedule.norm.iter().enumerate() {
        let storage = &state.storages[index];
        let list = storage.spec.list(Role::Grad).filter(|_| !batches.is_empty());
        let table = match list.map(|_| norm.reduce((index, storage), batches, first_partial)) {
            Some(reduce) => backend.place_reduction(&reduce)?,
            None => None,
        };
        state.tables.reads.push(table);
        first_partial += batches.iter().map(|b| u64::from(b.chunks)).sum::<u64>();
    }
    Ok(())
}

/// Builds the table of a stage of several ranks, whose gradients are where the launch reads
/// them, unless there is one.
pub(crate) fn build_table(
    plan: &Plan,
    state: &mut State,
    (stage, update): (&Optimize, usize),
    backend: &dyn Backend,
) -> Result<()> {
    let is_missing = matches!(state.tables.updates.get(update), Some(None));
    if is_missing && plan.topology.world > 1 && backend.device().is_some() {
        let table = place_update(plan, state, (stage, update), backend)?;
        state.tables.updates[update] = table;
    }
    Ok(())
}

/// Runs a stage that updates, from its table if it has one.
pub(crate) fn run_update(
    plan: &Plan,
    state: &mut State,
    (stage, update): (&Optimize, usize),
    executor: &mut Executor<'_>,
) -> Result<LaunchReport> {
    if let Executor::Backend(backend) = executor {
        build_table(plan, state, (stage, update), *backend)?;
    }
    // Taken out, so that the launch can borrow the rest of the state.
    let place = state.tables.updates.get_mut(update);
    let table = place.and_then(Option::take);
    let done = match (launches::of_stage(plan, state, stage, update), &table, executor) {
        (None, ..) => Ok(LaunchReport::default()),
        (Some(launch), Some(table), Executor::Backend(backend)) => {
            backend.launch_table(launch, table.as_ref())
        }
        (Some(launch), _, executor) => executor.launch(launch),
    };
    if let Some(place) = state.tables.updates.get_mut(update) {
        *place = table;
    }
    Ok(done?)
}
