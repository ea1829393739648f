//! A run of many ranks saved and resumed, on as many ranks or others.

use std::collections::BTreeMap;
use std::path::Path;

use fusestep_collective::{Operation, ReduceOp};
use fusestep_launch::Backend;
use fusestep_tensor::{DType, Quoted, Role, Shape};

use super::generation::{Generation, shard_file};
use super::manifest::{Manifest, ShardSpec, TensorSpec, refuse};
use super::shards::{PieceBytes, write_shard};
use super::{CheckpointFolder, OpenRun};
use crate::arena::Given;
use crate::comms::Comms;
use crate::{Plan, PlanError, State, ZeroStage};

/// Bytes that each rank says about its file: outcome, length and checksum.
const WORD_BYTES: usize = 24;

/// Bytes of an error that a rank tells the others.
const TOLD_BYTES: usize = 512;

/// Tensors that a refusal names, beside the first.
const MOST_NAMED: usize = 8;

impl Plan {
    /// Saves parameters, optimizer state and counts, and texts of the caller's own; all ranks call
    /// it, between micro-steps.
    ///
    /// Every rank writes what it updates; in the middle of a merge window also its sums, and under
    /// LocalSGD everything, because ranks differ ([`OpenRun`]). Rank 0 then writes the
    /// manifest, and only then removes the checkpoint before: a run that is killed at any
    /// instant leaves the old one or the new one.
    ///
    /// # Errors
    /// [`PlanError::Checkpoint`], [`PlanError::File`] of any rank, on that rank;
    /// [`PlanError::Topology`] on the others. The checkpoint before is as it was.
    /// [`PlanError::Conflict`] between the gradients of a micro-step.
    pub fn save<'a>(
        &self,
        state: &State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        folder: impl Into<CheckpointFolder<'a>>,
        caller: BTreeMap<String, String>,
    ) -> Result<(), PlanError> {
        let folder = folder.into();
        self.check_state(state)?;
        let rank = self.topology().rank;
        comms.set_plan(self.hash());
        let generation = self.agree_on_generation(state, comms, folder)?;
        let name = generation.name();
        let written = self
            .check_between(state)
            .and_then(|()| generation.check_seen(folder))
            .and_then(|()| self.pieces_to_save(state, backend))
            .and_then(|pieces| {
                if self.saves(state) {
                    write_shard(folder, &name, rank, &pieces).map(Some)
                } else {
                    Ok(None)
                }
            });
        let shards = self.agree_on_shards(comms, written)?;
        let committed = match rank {
            0 => self
                .manifest(state, caller, &generation, shards)
                .and_then(|manifest| {
                    manifest.check_shards_seen(folder)?;
                    manifest.commit(folder).map(drop)
                }),
            _ => Ok(()),
        };
        self.agree(comms, committed)
    }

    /// Rank 0 finds a place, so that all write to one. Under LocalSGD ranks may have taken
    /// different steps.
    fn agree_on_generation(
        &self,
        state: &State,
        comms: &mut Comms<'_>,
        folder: CheckpointFolder<'_>,
    ) -> Result<Generation, PlanError> {
        let begun = match self.topology().rank {
            0 => Generation::begin(folder, state.step()).map(Some),
            _ => Ok(None),
        };
        let mut words = [0u8; 3 * 8];
        if let Ok(Some(own)) = &begun {
            let own = [own.checkpoint, own.step, own.turn as u64];
            words.copy_from_slice(&own.map(u64::to_le_bytes).concat());
        }
        self.agree(comms, begun.map(drop))?;
        let broadcast = Operation::Broadcast { root: 0 };
        comms.in_place(broadcast, DType::U8, None, &mut words)?;
        Ok(Generation {
            checkpoint: number(&words, 0),
            step: number(&words, 1),
            turn: usize::from(number(&words, 2) > 0),
        })
    }

    /// Goes on from a checkpoint, of however many ranks; returns the texts that were saved with it.
    /// All ranks call it.
    ///
    /// What was saved in the middle of a merge window or under LocalSGD ([`OpenRun`]) takes as many
    /// ranks as it was saved on, at any ZeRO stage and with any buckets, unless all ranks were
    /// alike: at an average whose state is averaged too or empty, in a window whose gradients
    /// are reduced in every micro-step, or after [`Manifest::average`].
    ///
    /// # Errors
    /// [`PlanError::Checkpoint`] naming what is missing, damaged or of another model or optimizer.
    /// Everything is checked before anything is written.
    pub fn load<'a>(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        folder: impl Into<CheckpointFolder<'a>>,
    ) -> Result<BTreeMap<String, String>, PlanError> {
        let place = folder.into();
        let folder = place.path;
        // What does not fit is refused before anything long is read; a run may save meanwhile.
        self.check_manifest(&Manifest::read(place)?, folder)?;
        let (manifest, whole) = Manifest::read_whole(place)?;
        self.check_manifest(&manifest, folder)?;
        let from = self.source_rank(&manifest, &whole, folder)?;
        let progress = self.progress((&manifest, from), &whole, folder)?;
        if let (Some(norm), Some((scale, good, bad))) = (&state.norm, progress.loss_scale)
            && state.scaled
        {
            norm.loss_scale()
                .restored(scale, good, bad)
                .map_err(|error| {
                    let expected = "one of the plan's policy";
                    refuse(folder, "loss scale", expected, error.to_string())
                })?;
        }
        for (param, desc) in self.params().iter().enumerate() {
            // Parameters first: a master that is written after its parameter keeps its own bits.
            for role in self.roles(param)? {
                let bytes = whole
                    .get(&self.key(param, role, from))
                    .map_or(&[][..], Vec::as_slice);
                state.write(backend, role, &desc.name, bytes)?;
            }
        }
        self.restore_counts(state, backend, &progress)?;
        self.restore_open(state, backend, (&progress, from), &whole)?;
        state.poisoned = None;
        Ok(manifest.caller)
    }

    fn check_between(&self, state: &State) -> Result<(), PlanError> {
        let given = |given: &Given| *given != Given::No;
        if !state.arena.now.iter().any(given) {
            return Ok(());
        }
        Err(PlanError::Conflict {
            first: "a checkpoint".to_owned(),
            second: "gradients of a micro-step under way".to_owned(),
            why: "do not go together; end the micro-step by `step` before saving",
        })
    }

    /// A tensor's name in a checkpoint; that of values of a rank's own has the rank.
    fn key(&self, param: usize, role: Role, rank: usize) -> String {
        let name = &self.params()[param].name;
        if self.has_own(param) {
            format!("{name}@{}#{rank}", role.name())
        } else {
            format!("{name}@{}", role.name())
        }
    }

    /// Whether this rank has anything that others have not.
    fn saves(&self, state: &State) -> bool {
        let distributed = self.storages.iter().any(|spec| spec.distributed);
        let alike = !distributed && self.open_run(state).is_none();
        !alike || self.saves_shared()
    }

    /// Whether this rank saves what others have as well: without shards rank 0, with them the first
    /// group of ranks.
    pub(crate) fn saves_shared(&self) -> bool {
        let rank = self.topology().rank;
        match self.zero() {
            ZeroStage::None => rank == 0,
            _ => rank < self.shard_group,
        }
    }

    /// Roles that are saved: all but the gradient's, the parameter's first.
    fn roles(&self, param: usize) -> Result<Vec<Role>, PlanError> {
        let kernel = self.kernel_of(param as u32)?;
        let mut roles: Vec<Role> = kernel.lists().iter().map(|list| list.role).collect();
        roles.retain(|role| role.is_state() || *role == Role::Param);
        roles.sort_by_key(|role| *role != Role::Param);
        Ok(roles)
    }

    fn role_dtype(&self, param: usize, role: Role) -> Result<DType, PlanError> {
        let kernel = self.kernel_of(param as u32)?;
        let list = kernel.lists().iter().find(|list| list.role == role);
        Ok(list.map_or(self.params()[param].dtype, |list| list.dtype))
    }

    fn pieces_to_save(
        &self,
        state: &State,
        backend: &dyn Backend,
    ) -> Result<Vec<PieceBytes>, PlanError> {
        let mut pieces = Vec::new();
        if !self.saves(state) {
            return Ok(pieces);
        }
        let rank = self.topology().rank;
        for param in 0..self.params().len() {
            // What all ranks have alike is saved once.
            if !self.has_own(param) && !self.saves_shared() {
                continue;
            }
            for role in self.roles(param)? {
                let dtype = self.role_dtype(param, role)?;
                state.read_shard(backend, role, param, |held, bytes| {
                    pieces.push(PieceBytes {
                        tensor: self.key(param, role, rank),
                        dtype,
                        first: held.elements.start,
                        bytes,
                    });
                })?;
            }
        }
        if let Some(open) = self.open_run(state) {
            pieces.extend(self.open_pieces(state, &open));
        }
        Ok(pieces)
    }

    /// Tells all ranks what each has written; if one could not, all fail.
    fn agree_on_shards(
        &self,
        comms: &mut Comms<'_>,
        written: Result<Option<ShardSpec>, PlanError>,
    ) -> Result<Vec<ShardSpec>, PlanError> {
        let (rank, world) = (self.topology().rank, self.topology().world);
        let mut words = vec![0u8; WORD_BYTES * world];
        if let Ok(Some(spec)) = &written {
            let sum = u64::from_str_radix(&spec.xxh3, 16).unwrap_or_default();
            let own = [1u64, spec.len_bytes, sum].map(u64::to_le_bytes).concat();
            words[WORD_BYTES * rank..WORD_BYTES * (rank + 1)].copy_from_slice(&own);
        }
        let outcome = written.map(|_| ());
        comms.in_place(
            Operation::AllGather,
            DType::U8,
            Some(&vec![WORD_BYTES; world]),
            &mut words,
        )?;
        self.agree(comms, outcome)?;
        let word = |rank: usize, at: usize| number(&words[WORD_BYTES * rank..], at);
        let wrote = (0..world).filter(|&rank| word(rank, 0) == 1);
        let spec = |rank| ShardSpec {
            file: shard_file(rank),
            len_bytes: word(rank, 1),
            xxh3: format!("{:016x}", word(rank, 2)),
        };
        Ok(wrote.map(spec).collect())
    }

    /// Fails on all ranks if it failed on one, with that rank's own error: the lowest such rank's,
    /// which the others name.
    fn agree(
        &self,
        comms: &mut Comms<'_>,
        outcome: Result<(), PlanError>,
    ) -> Result<(), PlanError> {
        let (rank, world) = (self.topology().rank, self.topology().world);
        let mut failed = [u8::from(outcome.is_err())];
        let max = Operation::AllReduce(ReduceOp::Max);
        comms.in_place(max, DType::U8, None, &mut failed)?;
        if failed[0] == 0 {
            return outcome;
        }
        let mut told = vec![0u8; TOLD_BYTES * world];
        if let Err(error) = &outcome {
            let text = error.to_string();
            let fits = |len: &usize| text.is_char_boundary(*len);
            let most = text.len().min(TOLD_BYTES - 1);
            let len = (0..=most).rev().find(fits).unwrap_or(0);
            let own = &mut told[TOLD_BYTES * rank..][..TOLD_BYTES];
            own[0] = 1;
            own[1..=len].copy_from_slice(&text.as_bytes()[..len]);
        }
        let counts = vec![TOLD_BYTES; world];
        comms.in_place(Operation::AllGather, DType::U8, Some(&counts), &mut told)?;
        outcome?;
        let mut ranks = told.chunks_exact(TOLD_BYTES).enumerate();
        let first = ranks.find(|(_, told)| told[0] == 1);
        let (rank, text) = first.map_or((0, &[][..]), |(rank, told)| (rank, &told[1..]));
        Err(PlanError::OtherRank {
            rank,
            reason: String::from_utf8_lossy(text)
                .trim_end_matches('\0')
                .to_owned(),
        })
    }

    fn manifest(
        &self,
        state: &State,
        caller: BTreeMap<String, String>,
        generation: &Generation,
        shards: Vec<ShardSpec>,
    ) -> Result<Manifest, PlanError> {
        let mut manifest = Manifest::new(self.optimizer().name().to_owned(), state.step());
        manifest.objective = self.objective();
        manifest.optimizer_of = self.own_rules();
        manifest.skipped = state.skipped();
        manifest.loss_scale = state
            .loss_scale()
            .map(|scale| (scale.scale(), scale.good_steps(), scale.bad_steps()));
        manifest.caller = caller;
        for (param, desc) in self.params().iter().enumerate() {
            let step = state.step - state.steps_behind[param];
            if step != state.step() && desc.numel() > 0 {
                manifest.steps_of.insert(desc.name.clone(), step);
            }
        }
        manifest.open = self.open_run(state);
        manifest.tensors = self.tensors_of_checkpoint(manifest.open.as_ref())?;
        manifest.generation = generation.name();
        manifest.checkpoint = generation.checkpoint();
        manifest.shards = shards;
        Ok(manifest)
    }

    fn tensors_of_checkpoint(
        &self,
        open: Option<&OpenRun>,
    ) -> Result<BTreeMap<String, TensorSpec>, PlanError> {
        let mut tensors = BTreeMap::new();
        if let Some(open) = open {
            tensors.extend(self.open_tensors(open)?);
        }
        for (param, desc) in self.params().iter().enumerate() {
            for role in self.roles(param)? {
                let shape: Shape = desc.shape.clone();
                let dtype = self.role_dtype(param, role)?;
                let ranks = match (self.has_own(param), open) {
                    (false, _) => 0..1,
                    (true, Some(open)) => 0..open.ranks,
                    (true, None) => 0..self.topology().world,
                };
                for rank in ranks {
                    let (dtype, shape) = (dtype, shape.clone());
                    let key = self.key(param, role, rank);
                    tensors.insert(key, TensorSpec { dtype, shape });
                }
            }
        }
        Ok(tensors)
    }

    fn check_manifest(&self, manifest: &Manifest, folder: &Path) -> Result<(), PlanError> {
        let own = self.optimizer().name();
        if manifest.optimizer != own {
            let found = Quoted(&manifest.optimizer).to_string();
            return Err(refuse(folder, "optimizer", own, found));
        }
        if manifest.says_objective() {
            self.check_rules(manifest, folder)?;
        }
        self.check_open(manifest, folder)?;
        let differences = self.differences(manifest)?;
        let Some((name, expected, found)) = differences.first() else {
            return self.check_steps(manifest, folder);
        };
        let mut found = found.clone();
        if differences.len() > 1 {
            let others = differences[1..].iter().map(|(name, ..)| name.as_str());
            let others: Vec<&str> = others.take(MOST_NAMED).collect();
            found += &format!(
                "; {} others differ too: {}",
                differences.len() - 1,
                others.join(", ")
            );
        }
        Err(refuse(folder, name, expected, found))
    }

    /// The direction of steps, where the rule offers both.
    fn objective(&self) -> Option<String> {
        let objective = self.optimizer().objective()?;
        Some(objective.name().to_owned())
    }

    /// Rules of parameters that have one of their own.
    fn own_rules(&self) -> BTreeMap<String, String> {
        let rules = self.params().iter().zip(self.rule_of.iter());
        let own = rules.filter(|(_, rule)| **rule != 0);
        let name = |rule: u32| self.rules[rule as usize].name().to_owned();
        own.map(|(param, &rule)| (param.name.clone(), name(rule)))
            .collect()
    }

    /// State of another rule may have the same shapes and mean something else.
    fn check_rules(&self, manifest: &Manifest, folder: &Path) -> Result<(), PlanError> {
        let none = "none of its own";
        let (own, found) = (self.objective(), &manifest.objective);
        if own != *found {
            let expected = own.as_deref().unwrap_or(none);
            let found = Quoted(found.as_deref().unwrap_or(none)).to_string();
            return Err(refuse(folder, "objective", expected, found));
        }
        let (own, found) = (self.own_rules(), &manifest.optimizer_of);
        for name in own.keys().chain(found.keys()) {
            if own.get(name) != found.get(name) {
                let text = |rules: &BTreeMap<String, String>| {
                    Quoted(rules.get(name).map_or(none, String::as_str)).to_string()
                };
                let what = format!("optimizer of `{}`", Quoted(name));
                return Err(refuse(folder, &what, &text(&own), text(found)));
            }
        }
        Ok(())
    }

    /// Tensors that the plan and a checkpoint have not alike: name, expected, found.
    fn differences(&self, manifest: &Manifest) -> Result<Vec<(String, String, String)>, PlanError> {
        let own = self.tensors_of_checkpoint(manifest.open.as_ref())?;
        let none = || "no such tensor".to_owned();
        let text = |spec: &TensorSpec| format!("{} {}", spec.dtype, spec.shape);
        let mut differences = Vec::new();
        for (name, spec) in &own {
            let found = manifest.tensors.get(name);
            if found != Some(spec) {
                differences.push((name.clone(), text(spec), found.map_or_else(none, text)));
            }
        }
        for (name, spec) in &manifest.tensors {
            if !own.contains_key(name) {
                differences.push((name.clone(), none(), text(spec)));
            }
        }
        Ok(differences)
    }

    fn check_steps(&self, manifest: &Manifest, folder: &Path) -> Result<(), PlanError> {
        for (name, &step) in &manifest.steps_of {
            let what = format!("steps of `{name}`");
            if !self.params.iter().any(|param| param.name == *name) {
                let found = "one of no parameter of the plan".to_owned();
                return Err(refuse(folder, &what, "a parameter of the plan", found));
            }
            if step > manifest.step {
                let expected = format!("at most the {} of the run", manifest.step);
                return Err(refuse(folder, &what, &expected, step.to_string()));
            }
        }
        Ok(())
    }
}

/// One of the 64-bit words that ranks tell each other.
fn number(words: &[u8], at: usize) -> u64 {
    let bytes = &words[8 * at..8 * (at + 1)];
    let digits = bytes.iter().rev();
    digits.fold(0, |number, &byte| number << 8 | u64::from(byte))
}
