//! Sums over whole tensors that ranks tell each other, with the bits of one rank that has
//! everything.
//!
//! The fixed tree adds leaves of 1,024 elements, counted from a tensor's start. Parts of ranks end
//! with leaves wherever sums are taken, so every leaf is summed by one rank. Ranks add up vectors
//! of all leaves in which each has filled in its own: adding 0 to a sum of squares changes no bit.
//! Then all fold leaves into chunks, chunks into tensors and tensors into a total alike. Slices of
//! distributed parameters are gathered leaf by leaf and folded as the tensor that they make up.

use fusestep_launch::{CHUNK_LEAVES, MAX_SUMS, tree_sum};

use crate::error::Result;
use crate::plan::leaves::{chunk, leaves_in, leaves_of};
use crate::run::run::Run;
use crate::run::stages::norm::share;
use crate::run::stages::{launches, reduce};

/// Stage `trust` on the host: the sums over whole tensors that a layer-wise rule needs.
pub(crate) fn sum_tensors(run: &mut Run<'_, '_>) -> Result<()> {
    let mut told = vec![0.0; run.state.exchange.count() * MAX_SUMS];
    for index in 0..run.state.exchange.trust.len() {
        let (stage, batches) = run.state.exchange.trust[index].clone();
        if batches.is_empty() {
            continue;
        }
        let own = reduce::with_gradients(run.plan, run.state, stage.bucket, |state| {
            let records = batches.iter().flat_map(|batch| &batch.records);
            let count = records.map(|record| leaves_of(record.numel)).sum();
            let mut sums = vec![[0.0; MAX_SUMS]; count];
            if let Some(launch) = launches::with_batches(run.plan, state, &stage, &batches) {
                run.backend.leaf_sums(&launch, &mut sums)?;
            }
            Ok(sums)
        })?;
        let members = &run.plan.storages[stage.storage].members;
        let places = leaves_in(&batches, members, &run.state.exchange.leaves);
        for (place, sums) in places.flatten().zip(own) {
            told[place * MAX_SUMS..(place + 1) * MAX_SUMS].copy_from_slice(&sums);
        }
    }
    let slices = share(&run.state.exchange, run.comms, &mut told, MAX_SUMS)?;
    let exchange = &run.state.exchange;
    for storage in &mut run.state.storages {
        let Some(sums) = &mut storage.tensor_sums else {
            continue;
        };
        for (sums, &member) in sums.iter_mut().zip(&storage.spec.members) {
            let leaves = exchange.of_param(member as usize, MAX_SUMS, &told, slices.as_deref());
            let chunks: Vec<&[f64]> = leaves.chunks(CHUNK_LEAVES * MAX_SUMS).collect();
            *sums = tree_sum(chunks.len(), |at| {
                std::array::from_fn(|sum| {
                    let own = chunks[at].iter().copied().skip(sum).step_by(MAX_SUMS);
                    chunk(&own.collect::<Vec<f64>>())
                })
            });
        }
    }
    Ok(())
}
