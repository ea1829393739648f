//! Sums over tensors that a framework lends in parts: the others have parts of them, too.
//!
//! ```text
//! sums of this process's parts ─► Sharing::share ─► sums of whole parameters, on all alike
//! ```

use fusestep_launch::{Backend, Launch, LaunchReport, MAX_SUMS, SquareSum, TensorPartials};

use crate::error::Result;
use crate::plan::value::Plan;
use crate::run::executor::Executor;
use crate::run::memory::norm::NormState;
use crate::run::memory::state::State;
use crate::run::stages::launches;

/// Values for each parameter that stage `norm` shares: a sum of squares, and a count.
const NORM_WIDTH: usize = 2;

/// Writes the control block from the sums over whole parameters.
pub(crate) fn conclude(
    norm: &mut NormState,
    backend: &dyn Backend,
    told: &[f64],
) -> Result<LaunchReport> {
    let mut partials = Vec::with_capacity(told.len() / NORM_WIDTH);
    let mut places = Vec::with_capacity(partials.capacity());
    for values in told.chunks_exact(NORM_WIDTH) {
        places.push(TensorPartials { first: partials.len() as u64, count: 1 });
        partials.push(SquareSum { sum: values[0], non_finite: values[1] as u64 });
    }
    let mut sums = backend.allocate(size_of_val(partials.as_slice()))?;
    backend.write(sums.as_mut(), 0, bytemuck::cast_slice(&partials))?;
    let mut tensors = backend.allocate(size_of_val(places.as_slice()))?;
    backend.write(tensors.as_mut(), 0, bytemuck::cast_slice(&places))?;
    norm.conclude(backend, Some((sums.as_ref(), tensors.as_ref())))
}

/// Shares the sums of squares of this process's gradients; `None` if they are of whole tensors.
pub(crate) fn share_squares(
    norm: &NormState,
    executor: &mut Executor<'_>,
) -> Result<Option<Vec<f64>>> {
    if executor.sharing().is_none() {
        return Ok(None);
    }
    let own = norm.tensor_squares(executor.backend())?;
    let pairs = own.iter().map(|own| [own.sum, own.non_finite as f64]);
    let mut told: Vec<f64> = pairs.flatten().collect();
    if let Some(sharing) = executor.sharing() {
        sharing.share(&mut told, NORM_WIDTH)?;
    }
    Ok(Some(told))
}

/// Takes the sums over whole parameters that layer-wise rules need, before the first update.
pub(crate) fn sum_tensors(
    plan: &Plan,
    state: &mut State,
    executor: &mut Executor<'_>,
) -> Result<()> {
    let Some(sharing) = executor.sharing() else {
        return Ok(());
    };
    if state.storages.iter().all(|storage| storage.kernel.normed().is_none()) {
        return Ok(());
    }
    let mut told = vec![0.0; plan.params.len() * MAX_SUMS];
    for (update, stage) in plan.optimize_stages().enumerate() {
        let storage = &mut state.storages[stage.storage];
        if storage.kernel.normed().is_none() {
            continue;
        }
        storage.tensor_sums = None;
        let mut sums = vec![[0.0; MAX_SUMS]; storage.spec.members.len()];
        let Some(launch) = launches::of_stage(plan, state, stage, update) else {
            continue;
        };
        // Those of gradients are of whole parameters already.
        let launch = Launch { grad_sums: None, update_sums: None, ..launch };
        sharing.measure(&launch, &mut sums)?;
        // Other stages may update other tensors of the storage.
        for record in launch.batches.iter().flat_map(|batch| &batch.records) {
            let tensor = record.tensor as usize;
            let place = launch.members[tensor] as usize * MAX_SUMS;
            told[place..place + MAX_SUMS].copy_from_slice(&sums[tensor]);
        }
    }
    sharing.share(&mut told, MAX_SUMS)?;
    for storage in state.storages.iter_mut().filter(|own| own.kernel.normed().is_some()) {
        let members = storage.spec.members.iter().map(|&member| member as usize * MAX_SUMS);
        let sums = members.map(|place| std::array::from_fn(|sum| told[place + sum]));
        storage.tensor_sums = Some(sums.collect());
    }
    Ok(())
}
