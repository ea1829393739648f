//! The plan of one rank.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hasher;
use std::num::NonZeroUsize;

use fusestep_tensor::{DType, ParamDesc, Role, Shape};
use xxhash_rust::xxh3::Xxh3;

use super::broadcast_groups::{BroadcastGroup, broadcast_groups};
use super::bucket::{Bucket, buckets};
use super::{Flat, Held, Ownership, Piece, Topology};
use crate::passes::{ActsOn, FuseAllReduce, GradientMerge, LocalSgd, Zero};
use crate::{Note, Plan, PlanError, Planner, Verdict};

/// What passes say about ranks.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct RankOptions {
    pub(crate) topology: Topology,
    pub(crate) zero: Zero,
    pub(crate) ownership: Ownership,
    /// Ranks that share shards; `None` for all.
    pub(crate) shard_group: Option<NonZeroUsize>,
    pub(crate) fuse: Option<FuseAllReduce>,
    pub(crate) merge: Option<GradientMerge>,
    pub(crate) local_sgd: Option<LocalSgd>,
    pub(crate) broadcast_cap_bytes: Option<u64>,
    /// For each parameter whether it is a slice of this rank's own; empty if none is.
    pub(crate) distributed: Vec<bool>,
}

impl RankOptions {
    /// This rank among those that share shards, and their number.
    pub(crate) fn shard_place(&self) -> Topology {
        let Topology { rank, world } = self.topology;
        let group = self.shard_group.map_or(world, NonZeroUsize::get);
        Topology {
            rank: rank % group,
            world: group,
        }
    }
}

/// A training step's tail as one rank of several runs it.
///
/// Made by [`Planner::plan_for`]. Ranks of one world that plan the same parameters with the same passes have equal hashes, and
/// their calls fit together.
#[derive(Clone, Debug)]
pub struct RankPlan {
    pub(crate) whole: Plan,
    pub(crate) local: Plan,
    pub(crate) flats: Vec<Flat>,
    pub(crate) buckets: Vec<Bucket>,
    /// So many of them, the first, are reduced.
    pub(crate) reduced: usize,
    pub(crate) broadcasts: Vec<BroadcastGroup>,
    /// For each line the pieces that this rank updates; entry `i` of all of them together is parameter `i` of the local plan.
    pub(crate) pieces: Vec<Vec<Piece>>,
    /// For each parameter its spans: bucket and position there.
    pub(crate) spans_of: Vec<Vec<(u32, u32)>>,
    pub(crate) index: HashMap<String, usize>,
    /// For each parameter its line and first element there; `None` for empty ones too.
    pub(crate) places: Vec<(usize, u64)>,
    notes: Vec<Note>,
    hash: u64,
}

impl Planner {
    /// Plans what the rank `topology` names does.
    ///
    /// # Errors
    /// As [`Planner::plan`]; [`PlanError::Topology`]; [`PlanError::Conflict`] naming two passes that contradict each other.
    /// # Cost
    /// Linear in the number of parameters, buckets times ranks, and pieces of this rank.
    pub fn plan_for(
        &self,
        params: &[ParamDesc],
        topology: Topology,
    ) -> Result<RankPlan, PlanError> {
        topology.validate()?;
        let mut whole = self.plan_with(params, topology, |_| true)?;
        check_conflicts(&whole)?;
        let flats = flats(&mut whole)?;
        let options = &whole.ranks;
        let buckets = buckets(&whole.params, &flats, options.fuse.as_ref());
        let (broadcasts, note) = broadcast_groups(&flats, options);
        let pieces: Vec<Vec<Piece>> = flats
            .iter()
            .map(|flat| {
                flat.pieces(flat.own(options.zero, options.shard_place().rank))
                    .collect()
            })
            .collect();
        let launches = |params: &[ParamDesc]| {
            self.plan_with(params, Topology::SOLO, |acts| acts == ActsOn::Launches)
        };
        let local = match options.zero {
            Zero::Zero0 if norm_across(&whole) => launches(params)?,
            Zero::Zero0 => whole.clone(),
            _ => {
                let descs = pieces.iter().flatten().map(|piece| describe(params, piece));
                let descs = descs.collect::<Result<Vec<_>, _>>()?;
                let mut local = launches(&descs)?;
                // What is rounded at random must not depend on who rounds it.
                local.origins = pieces
                    .iter()
                    .flatten()
                    .map(|p| (p.param, p.first))
                    .collect();
                local
            }
        };
        let mut spans_of = vec![Vec::new(); params.len()];
        for (bucket, spec) in buckets.iter().enumerate() {
            for (position, span) in spec.spans.iter().enumerate() {
                spans_of[span.param as usize].push((bucket as u32, position as u32));
            }
        }
        let mut places = vec![(0, 0); params.len()];
        for (index, flat) in flats.iter().enumerate() {
            for (&member, &start) in flat.members.iter().zip(&flat.starts) {
                places[member as usize] = (index, start);
            }
        }
        let names = params.iter().enumerate();
        let mut plan = RankPlan {
            index: names.map(|(i, param)| (param.name.clone(), i)).collect(),
            notes: whole.notes.iter().cloned().chain(note).collect(),
            hash: hash(&whole, &flats, &buckets, &broadcasts),
            whole,
            local,
            reduced: buckets.partition_point(|bucket| flats[bucket.flat].held == Held::Together),
            buckets,
            flats,
            broadcasts,
            pieces,
            spans_of,
            places,
        };
        plan.explain_buckets();
        Ok(plan)
    }
}

impl RankPlan {
    /// The parameters, in plan order.
    pub fn params(&self) -> &[ParamDesc] {
        &self.whole.params
    }

    /// This rank.
    pub fn topology(&self) -> Topology {
        self.whole.ranks.topology
    }

    /// This rank within the group whose ranks share shards, and the size of that group: the world, unless pass `shard` says other.
    pub fn shard_place(&self) -> Topology {
        self.whole.ranks.shard_place()
    }

    /// What is shared out.
    pub fn zero(&self) -> Zero {
        self.whole.ranks.zero
    }

    /// What this rank launches: an ordinary plan of the tensors, or pieces of tensors, that it updates.
    pub fn local(&self) -> &Plan {
        &self.local
    }

    /// The elements of each dtype and their shards.
    pub fn flats(&self) -> &[Flat] {
        &self.flats
    }

    /// The buckets, in the order they are reduced.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// The calls that bring updated parameters to all ranks, if pass `fuse_broadcast` applies.
    pub fn broadcasts(&self) -> &[BroadcastGroup] {
        &self.broadcasts
    }

    /// What the passes did and why.
    pub fn explain(&self) -> &[Note] {
        &self.notes
    }

    /// Equal on all ranks whose calls fit together.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// Micro-steps of an update.
    pub fn micro_steps(&self) -> u32 {
        self.whole.ranks.merge.map_or(1, |merge| merge.every.get())
    }

    /// Bytes of optimizer state on this rank, padding included.
    pub fn state_bytes(&self) -> u64 {
        self.local.state_bytes()
    }

    pub(crate) fn find(&self, name: &str) -> Result<usize, PlanError> {
        let found = self.index.get(name).copied();
        found.ok_or_else(|| PlanError::UnknownName {
            name: name.to_owned(),
            parameters: self.whole.params.len(),
        })
    }

    /// Whether gradients are reduced across ranks.
    pub(crate) fn reduces(&self) -> bool {
        self.topology().world > 1 && self.whole.ranks.local_sgd.is_none()
    }

    /// Whether the norm of all gradients is formed across ranks, because no rank has all of them.
    pub(crate) fn norm_across(&self) -> bool {
        self.zero() != Zero::Zero0 || norm_across(&self.whole)
    }

    /// Tensors whose gradients are reduced.
    pub(crate) fn reduced_tensors(&self) -> usize {
        let numel = |member: &&u32| self.params()[**member as usize].numel() > 0;
        let together = self.flats.iter().filter(|flat| flat.held == Held::Together);
        together
            .map(|flat| flat.members.iter().filter(numel).count())
            .sum()
    }

    fn explain_buckets(&mut self) {
        let options = &self.whole.ranks;
        if options.topology.world == 1 || options.fuse.is_none() {
            return;
        }
        let buckets = &self.buckets[..self.reduced];
        let spans: usize = buckets.iter().map(|bucket| bucket.spans.len()).sum();
        let tensors = self.reduced_tensors();
        let reason = format!(
            "{tensors} gradients are reduced in {} calls ({} cut by the cap)",
            buckets.len(),
            spans - tensors,
        );
        let note = Note::new("fuse_all_reduce", Verdict::Applied, reason);
        self.notes.push(note);
    }
}

/// One line for each dtype.
/// The lines; notes where their shards end if not where they would.
fn flats(whole: &mut Plan) -> Result<Vec<Flat>, PlanError> {
    if whole.update_norms && whole.ranks.zero != Zero::Zero0 {
        let reason =
            "shards begin and end with chunks of 65536 elements, so that one rank measures each";
        let note = Note::new("update_norms", Verdict::Split, reason.to_owned());
        whole.notes.push(note);
    }
    let mut by_dtype: BTreeMap<(Held, DType), Vec<u32>> = BTreeMap::new();
    for (index, param) in whole.params.iter().enumerate() {
        let held = match whole.ranks.distributed.get(index) {
            Some(true) => Held::Apart,
            _ => Held::Together,
        };
        let line = by_dtype.entry((held, param.dtype)).or_default();
        line.push(index as u32);
    }
    let options = &whole.ranks;
    let world = options.shard_place().world;
    let ownership = match options.ownership {
        Ownership::Elements if whole.update_norms => Ownership::Chunks,
        other => other,
    };
    let lines = by_dtype.into_iter().map(|((held, dtype), members)| {
        let kernel = whole.kernel_of(members[0])?;
        let grads = kernel.lists().iter().find(|list| list.role == Role::Grad);
        let dtypes = (dtype, grads.map_or(dtype, |list| list.dtype));
        Ok(Flat::new(
            (dtypes, held),
            members,
            &whole.params,
            ownership,
            world,
        ))
    });
    lines.collect()
}

/// The piece as a parameter of its own.
fn describe(params: &[ParamDesc], piece: &Piece) -> Result<ParamDesc, PlanError> {
    let param = &params[piece.param as usize];
    if piece.numel == param.numel() {
        return Ok(param.clone());
    }
    Ok(ParamDesc {
        name: format!(
            "{}[{}..{}]",
            param.name,
            piece.first,
            piece.first + piece.numel
        ),
        shape: Shape::new([piece.numel])?,
        ..param.clone()
    })
}

/// Whether ranks have slices of their own and something needs the norm of all gradients.
fn norm_across(whole: &Plan) -> bool {
    !whole.ranks.distributed.is_empty() && whole.gradients.rule().is_some()
}

fn check_conflicts(whole: &Plan) -> Result<(), PlanError> {
    let options = &whole.ranks;
    let conflict = |second: &str, why| PlanError::Conflict {
        first: "distributed".to_owned(),
        second: second.to_owned(),
        why,
    };
    if norm_across(whole) && options.local_sgd.is_some() {
        let why = "leave no gradients of which ranks could form one norm";
        return Err(conflict("local_sgd with clipping or loss scaling", why));
    }
    for (param, _) in options
        .distributed
        .iter()
        .enumerate()
        .filter(|(_, marked)| **marked)
    {
        if whole.kernel_of(param as u32)?.normed().is_some() {
            let why = "do not go together, since a trust ratio takes the norm of all slices";
            return Err(conflict(whole.optimizer.name(), why));
        }
    }
    let zero = format!("zero stage {}", options.zero.number());
    if options.zero == Zero::Zero0 {
        return Ok(());
    }
    if options.local_sgd.is_some() {
        return Err(PlanError::Conflict {
            first: zero,
            second: "local_sgd".to_owned(),
            why: "both decide how gradients are reduced",
        });
    }
    Ok(())
}

fn hash(whole: &Plan, flats: &[Flat], buckets: &[Bucket], broadcasts: &[BroadcastGroup]) -> u64 {
    let options = &whole.ranks;
    let mut hasher = Xxh3::new();
    hasher.write_u64(whole.hash());
    hasher.write_usize(options.topology.world);
    hasher.write_usize(options.shard_place().world);
    hasher.write_u8(options.zero.number());
    hasher.write_u32(options.merge.map_or(0, |merge| merge.every.get()));
    hasher.write_u64(options.local_sgd.map_or(0, |rule| rule.every.get()));
    hasher.write_u8(options.local_sgd.map_or(0, |rule| rule.interval as u8));
    hasher.write_u8(options.merge.map_or(0, |merge| merge.reduced as u8));
    for group in broadcasts {
        hasher.write_u64(group.elements.end);
    }
    for flat in flats {
        hasher.write_u8(flat.held as u8);
        for &member in &flat.members {
            hasher.write_u32(member);
        }
        for &bound in &flat.bounds {
            hasher.write_u64(bound);
        }
    }
    for bucket in buckets {
        for span in &bucket.spans {
            hasher.write_u32(span.param);
            hasher.write_u64(span.first);
            hasher.write_u64(span.numel);
        }
    }
    hasher.finish()
}
