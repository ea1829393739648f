//! Pass `distributed`: parameters of which every rank has a slice of its own.

use fusestep_coalesce::{FlatLayout, LayoutOptions};
use fusestep_tensor::counted_are;

use super::{ActsOn, Pass, refuse_twice};
use crate::stage::Optimize;
use crate::{Plan, PlanError, Result, Stage, StorageSpec, Verdict, bucket};

/// Says that these parameters are slices of a layer that is spread over the ranks, another on each:
/// the last layer of a classifier with millions of classes, for example. All ranks name them alike,
/// and slices have one shape.
///
/// Their gradients are not reduced, their values neither broadcast nor averaged, and their state is
/// not sharded. Norms are those of the tensor that the slices make up in the order of ranks: the
/// norm of all gradients, and those that LARS and LAMB take of each parameter. They have the bits
/// of one rank with the whole tensor if slices end with leaves of the fixed tree (their elements
/// are a multiple of 1,024), and otherwise differ from them by rounding, a relative 2⁻⁵³ for each
/// addition. Norms of updates are those of each rank's own slice, and their total counts each once.
///
/// Checkpoints keep every rank's slice, for as many ranks. With [`crate::Shard::group`] too no two
/// ranks have the same slice: groups share out the other parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Distributed {
    names: Vec<String>,
}

impl Distributed {
    /// The parameters of these names.
    pub fn params(names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self { names: names.into_iter().map(Into::into).collect() }
    }
}

impl Pass for Distributed {
    const NAME: &'static str = "distributed";
    const ACTS_ON: ActsOn = ActsOn::Distributed;

    fn apply(&self, plan: &mut Plan) -> Result<()> {
        refuse_twice(Self::NAME, plan.storages.iter().any(|spec| spec.distributed))?;
        let mut marked = vec![false; plan.params.len()];
        for name in &self.names {
            let at = plan.params.iter().position(|param| param.name == *name);
            let Some(at) = at else {
                return Err(PlanError::UnknownName {
                    name: name.clone(),
                    parameters: plan.params.len(),
                });
            };
            marked[at] = true;
        }
        let count = marked.iter().filter(|&&marked| marked).count();
        if plan.topology.world == 1 {
            let reason = "a world of 1 rank has every slice";
            plan.note(Self::NAME, Verdict::Skipped, reason);
            return Ok(());
        }
        take_out(plan, &marked)?;
        bucket::make(plan)?;
        let count = counted_are(count as u64, "parameter");
        let reason = format!("{count} in slices that each rank has for itself");
        plan.note(Self::NAME, Verdict::Applied, reason);
        Ok(())
    }
}

/// Moves marked parameters to storages of their own, behind those they were in; stages follow.
fn take_out(plan: &mut Plan, marked: &[bool]) -> Result<()> {
    let mut stages = Vec::new();
    for storage in 0..plan.storages.len() {
        let spec = &plan.storages[storage];
        let is_marked = |member: &u32| marked[*member as usize];
        let (own, kept): (Vec<u32>, Vec<u32>) = spec.members.iter().partition(|m| is_marked(m));
        if own.is_empty() {
            continue;
        }
        if kept.is_empty() {
            plan.storages[storage].distributed = true;
            continue;
        }
        let with = |members: Vec<u32>, distributed| -> Result<StorageSpec> {
            let numels = members.iter().map(|&m| plan.params[m as usize].numel());
            let unit = spec.layout.options().unit_bytes as usize;
            Ok(StorageSpec {
                layout: FlatLayout::new(numels, LayoutOptions::new(unit))?,
                members,
                distributed,
                ..spec.clone()
            })
        };
        let (own, kept) = (with(own, true)?, with(kept, false)?);
        stages.push((storage, plan.storages.len()));
        plan.storages[storage] = kept;
        plan.storages.push(own);
    }
    let before = plan.places.clone();
    plan.index_places();
    let mut added = Vec::new();
    for stage in plan.stages.iter_mut() {
        let Stage::Optimize(optimize) = stage else {
            continue;
        };
        let Some(&(_, new)) = stages.iter().find(|(old, _)| *old == optimize.storage) else {
            continue;
        };
        let (mut stay, mut go) = (Vec::new(), Vec::new());
        for &tensor in &optimize.tensors {
            let old = (optimize.storage, tensor as usize);
            let param = before.iter().position(|place| *place == old);
            let (storage, position) = param.map_or(old, |param| plan.places[param]);
            if storage == new {
                go.push(position as u32);
            } else {
                stay.push(position as u32);
            }
        }
        optimize.tensors = stay;
        if !go.is_empty() {
            added.push(Stage::Optimize(Optimize {
                storage: new,
                tensors: go,
                batches: Vec::new(),
                ..optimize.clone()
            }));
        }
    }
    plan.stages.extend(added);
    Ok(())
}
