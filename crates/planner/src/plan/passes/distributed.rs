//! Pass `distributed`: parameters of which every rank has a slice of its own.

use std::collections::BTreeSet;

use fusestep_coalesce::{FlatLayout, LayoutOptions};
use fusestep_tensor::{ParamDesc, Shape, counted, counted_are};

use crate::error::{PlanError, Result};
use crate::plan::note::Verdict;
use crate::plan::passes::buckets;
use crate::plan::passes::rewrite::{ActsOn, Rewrite, refuse_twice};
use crate::plan::stage::{Optimize, Stage};
use crate::plan::storage::StorageSpec;
use crate::plan::value::Plan;

/// Says that these parameters are slices of a layer that is spread over the ranks, another on each:
/// the last layer of a classifier with millions of classes, for example. All ranks name them alike.
/// Slices have one shape, or those that [`Distributed::with_shapes`] says.
///
/// Their gradients are not reduced, their values neither broadcast nor averaged, and their state is
/// not sharded. Norms are those of the tensor that the slices make up in the order of ranks: the
/// norm of all gradients, and those that LARS and LAMB take of each parameter. They have the bits
/// of one rank with the whole tensor if slices are rows of it and end with leaves of the fixed tree
/// (their elements are a multiple of 1,024), and otherwise differ from them by rounding, a relative
/// 2⁻⁵³ for each addition. Norms of updates are those of each rank's own slice, and their total
/// counts each once.
///
/// Checkpoints keep every rank's slice, for as many ranks with the same slices. With
/// [`crate::Shard::group`] too no two ranks have the same slice: groups share out the other
/// parameters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Distributed {
    slices: Vec<Slices>,
}

/// Slices of one name.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Slices {
    name: String,
    /// Shape of each rank's slice; `None` where all have the same.
    shapes: Option<Vec<Shape>>,
}

impl Distributed {
    /// The parameters of these names, whose slices have one shape on all ranks.
    pub fn params(names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let slices = names.into_iter().map(|name| Slices { name: name.into(), shapes: None });
        Self { slices: slices.collect() }
    }

    /// Adds a parameter with the shape of each rank's slice, in rank order; a slice may be empty.
    pub fn with_shapes(mut self, name: impl Into<String>, shapes: impl Into<Vec<Shape>>) -> Self {
        self.slices.push(Slices { name: name.into(), shapes: Some(shapes.into()) });
        self
    }

    /// Name under which ranks compare the parameters' names.
    pub const FIELD: &str = "distributed parameters";

    /// The names as ranks compare them.
    pub fn told(names: &BTreeSet<String>) -> String {
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        if names.is_empty() { "none".to_owned() } else { names.join(", ") }
    }
}

/// The position of the parameter of this name.
pub(crate) fn find(name: &str, params: &[ParamDesc]) -> Result<usize> {
    let at = params.iter().position(|param| param.name == *name);
    at.ok_or_else(|| PlanError::UnknownName { name: name.to_owned(), parameters: params.len() })
}

impl Rewrite for Distributed {
    const NAME: &'static str = "distributed";
    const ACTS_ON: ActsOn = ActsOn::Distributed;

    fn apply(&self, plan: &mut Plan) -> Result<()> {
        refuse_twice(Self::NAME, plan.storages.iter().any(|spec| spec.distributed))?;
        let mut marked = vec![false; plan.params.len()];
        let (rank, world) = (plan.topology.rank, plan.topology.world);
        for Slices { name, shapes } in &self.slices {
            let param = find(name, &plan.params)?;
            marked[param] = true;
            let own = &plan.params[param].shape;
            let shapes = shapes.clone().unwrap_or_else(|| vec![own.clone(); world]);
            if shapes.get(rank) != Some(own) || shapes.len() != world {
                let texts: Vec<String> = shapes.iter().map(ToString::to_string).collect();
                return Err(PlanError::Slices {
                    name: name.clone(),
                    expected: format!(
                        "a shape for each of {}, of rank {rank} {own}",
                        counted(world as u64, "rank")
                    ),
                    found: texts.join(", "),
                });
            }
            plan.slices.insert(param, shapes);
        }
        if plan.topology.world == 1 {
            plan.slices.clear();
            let reason = "a world of 1 rank has every slice";
            plan.note(Self::NAME, Verdict::Skipped, reason);
            return Ok(());
        }
        take_out(plan, &marked)?;
        buckets::make(plan)?;
        let count = counted_are(plan.slices.len() as u64, "parameter");
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
        let (own, kept) = spec.members.iter().partition::<Vec<u32>, _>(|m| is_marked(m));
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
