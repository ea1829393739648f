//! What each rank has for itself in a checkpoint: the sums of a merge window that is open, and a LocalSGD run between averages.
//!
//! ```text
//! <name>@window#<rank>   sums of a rank's own gradients, if ranks reduce once per window
//! <name>@window          sums of gradients that ranks have reduced in every micro-step
//! @progress#<rank>       counts of a rank: 64-bit words, see `Progress`
//! ```

use std::ops::Range;
use std::path::Path;

use fusestep_launch::Backend;
use fusestep_tensor::{DType, Shape};
use serde::{Deserialize, Serialize};

use super::counts::Progress;
use super::folder::{Manifest, PieceBytes, TensorSpec, WholeTensors, refuse};
use super::slots::Slot;
use super::{Held, RankPlan, RankState, Topology};
use crate::PlanError;
use crate::passes::Reduced;

/// What counts are called, before the rank.
pub(crate) const PROGRESS: &str = "@progress";

/// What a checkpoint holds that belongs to single ranks. If it is the same for all of them, any number of ranks can go on from it, else
/// as many; [`Manifest::average`] makes it the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenRun {
    /// The number of ranks.
    pub ranks: usize,
    /// The merge window that is open, if one is.
    pub window: Option<OpenWindow>,
    /// Steps between two averages as planned, if ranks average parameters and have state of their own.
    pub local_sgd: Option<u64>,
    /// Parameters of which each rank has a slice of its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub slices: Vec<String>,
}

/// A merge window some of whose micro-steps are over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenWindow {
    /// Micro-steps that are over.
    pub micro_steps: u32,
    /// Micro-steps of the whole window.
    pub every: u32,
    /// When gradients are reduced.
    pub reduced: Reduced,
}

impl RankPlan {
    /// What of a state belongs to this rank alone; `None` if a checkpoint of it is the same for any number of ranks.
    pub(crate) fn open_run(&self, state: &RankState) -> Option<OpenRun> {
        let merge = self.whole.ranks.merge.filter(|_| state.micro_steps > 0);
        let open = OpenRun {
            ranks: self.topology().world,
            window: merge.map(|merge| OpenWindow {
                micro_steps: state.micro_steps,
                every: merge.every.get(),
                reduced: merge.reduced,
            }),
            local_sgd: self.whole.ranks.local_sgd.map(|rule| rule.every.get()),
            slices: self.slices().map(str::to_owned).collect(),
        };
        (open.window.is_some() || open.local_sgd.is_some()).then_some(open)
    }

    /// Parameters of which each rank has a slice of its own.
    fn slices(&self) -> impl Iterator<Item = &str> {
        let marked = self.whole.ranks.distributed.iter();
        let marked = self.params().iter().zip(marked);
        marked.filter_map(|(param, &marked)| marked.then_some(param.name.as_str()))
    }

    /// Whether every rank has its own values of a parameter and of its state.
    pub(crate) fn has_own(&self, param: usize) -> bool {
        let held = self.flats[self.places[param].0].held;
        held == Held::Apart || self.whole.ranks.local_sgd.is_some()
    }

    fn window_key(&self, param: usize, rank: usize) -> String {
        let name = &self.params()[param].name;
        match self.reduces_each() && !self.has_own(param) {
            true => format!("{name}@window"),
            false => format!("{name}@window#{rank}"),
        }
    }

    /// Sums of 16-bit gradients are f32.
    fn window_dtype(&self, param: usize) -> DType {
        match self.flats[self.places[param].0].grad_dtype {
            DType::F16 | DType::BF16 => DType::F32,
            dtype => dtype,
        }
    }

    /// Tensors that a checkpoint has beside parameters and state.
    pub(crate) fn open_tensors(
        &self,
        open: &OpenRun,
    ) -> Result<Vec<(String, TensorSpec)>, PlanError> {
        let mut tensors = Vec::new();
        for rank in 0..open.ranks {
            let len_bytes = Progress::len_bytes(self.params().len()) as u64;
            let spec = TensorSpec {
                dtype: DType::U8,
                shape: Shape::new([len_bytes])?,
            };
            tensors.push((progress_key(rank), spec));
            if open.window.is_none() {
                continue;
            }
            for (param, desc) in self.params().iter().enumerate() {
                let spec = TensorSpec {
                    dtype: self.window_dtype(param),
                    shape: desc.shape.clone(),
                };
                tensors.push((self.window_key(param, rank), spec));
            }
        }
        Ok(tensors)
    }

    /// What this rank saves of them.
    pub(crate) fn open_pieces(&self, state: &RankState, open: &OpenRun) -> Vec<PieceBytes> {
        let rank = self.topology().rank;
        let mut pieces = vec![PieceBytes {
            tensor: progress_key(rank),
            dtype: DType::U8,
            first: 0,
            bytes: Progress::of(state).to_bytes(),
        }];
        if open.window.is_none() {
            return pieces;
        }
        for param in 0..self.params().len() {
            let dtype = self.window_dtype(param);
            let mut add = |first: u64, bytes: Vec<u8>| {
                pieces.push(PieceBytes {
                    tensor: self.window_key(param, rank),
                    dtype,
                    first,
                    bytes,
                });
            };
            if !self.reduces_each() {
                add(0, self.own_sums(state, param));
                continue;
            }
            if !self.has_own(param) && !self.saves_shared() {
                continue;
            }
            let sums = state.shard_sums[self.places[param].0].bytes();
            for (piece, _) in self.pieces_of(param) {
                let (at, numel) = (piece.at as usize, piece.numel as usize);
                let width = dtype.len_bytes();
                add(piece.first, sums[at * width..(at + numel) * width].to_vec());
            }
        }
        pieces
    }

    /// The sums of a rank's own gradients of one parameter; zeros if none has been given.
    fn own_sums(&self, state: &RankState, param: usize) -> Vec<u8> {
        let width = self.window_dtype(param).len_bytes();
        let mut whole = vec![0; self.params()[param].numel() as usize * width];
        if state.given[param] == 0 {
            return whole;
        }
        for &(bucket, position) in &self.spans_of[param] {
            let (tensor, at) = self.span_ranges(bucket, position);
            let sums = &state.sums[bucket as usize];
            let part: &[u8] = match (state.slots.get(bucket as usize), sums.is_empty()) {
                (_, false) => bytemuck::cast_slice(&sums[at]),
                (Slot::Filling(words), true) => &words.bytes()[at.start * width..at.end * width],
                _ => continue,
            };
            whole[tensor.start * width..tensor.end * width].copy_from_slice(part);
        }
        whole
    }

    /// Elements of a span within its tensor and within its bucket.
    fn span_ranges(&self, bucket: u32, position: u32) -> (Range<usize>, Range<usize>) {
        let span = &self.buckets[bucket as usize].spans[position as usize];
        let range = |first: u64| first as usize..(first + span.numel) as usize;
        (range(span.first), range(span.at))
    }

    /// Refuses what only other ranks or another plan could go on from.
    pub(crate) fn check_open(&self, manifest: &Manifest, folder: &Path) -> Result<(), PlanError> {
        let own = self.whole.ranks.local_sgd.map(|rule| rule.every.get());
        let found = manifest.open.as_ref();
        let averages = found.and_then(|open| open.local_sgd);
        if own.is_some() != averages.is_some() {
            let text = |every: Option<u64>| match every {
                Some(every) => format!("averages every {every} steps"),
                None => "no averages of parameters".to_owned(),
            };
            return Err(refuse(folder, "local_sgd", &text(own), text(averages)));
        }
        let Some(open) = found else {
            return Ok(());
        };
        // Each rank has its counts among the tensors, so a damaged number cannot ask for more work than the file is long.
        if !(1..=manifest.tensors.len()).contains(&open.ranks) {
            let found = format!("{} ranks", open.ranks);
            return Err(refuse(
                folder,
                "ranks",
                "at least 1, and counts of each",
                found,
            ));
        }
        let Some(window) = open.window else {
            return Ok(());
        };
        let merge = self.whole.ranks.merge;
        let fits = merge.is_some_and(|merge| {
            (merge.every.get(), merge.reduced) == (window.every, window.reduced)
                && (1..window.every).contains(&window.micro_steps)
        });
        if fits {
            return Ok(());
        }
        let text = |every: u32, reduced: Reduced| match reduced {
            Reduced::PerWindow => {
                format!("windows of {every} micro-steps, reduced once per window")
            }
            Reduced::PerMicroStep => {
                format!("windows of {every} micro-steps, reduced in every one")
            }
        };
        let expected = match merge {
            Some(merge) => text(merge.every.get(), merge.reduced),
            None => "no merge".to_owned(),
        };
        let found = text(window.every, window.reduced);
        let found = format!("{} micro-steps of {found}", window.micro_steps);
        Err(refuse(folder, "gradient_merge", &expected, found))
    }

    /// The rank whose values this one takes over: its own number, or 0 if the checkpoint is one of other ranks that were all alike.
    ///
    /// # Errors
    /// [`PlanError::Checkpoint`] naming what is not alike.
    pub(crate) fn source_rank(
        &self,
        manifest: &Manifest,
        whole: &WholeTensors,
        folder: &Path,
    ) -> Result<usize, PlanError> {
        let Topology { rank, world } = self.topology();
        let Some(open) = manifest.open.as_ref().filter(|open| open.ranks != world) else {
            return Ok(rank);
        };
        let different = match (open.slices.first(), self.slices().next()) {
            (Some(name), _) => Some(name.clone()),
            (_, Some(name)) => Some(name.to_owned()),
            (None, None) => manifest.difference(whole),
        };
        let Some(different) = different else {
            return Ok(0);
        };
        let (what, whose) = match (&open.local_sgd, &open.window) {
            (Some(_), _) => ("local_sgd", "parameters and state of their own"),
            _ => ("gradient_merge", "a merge window under way"),
        };
        let sliced = !open.slices.is_empty() || self.slices().next().is_some();
        let way = match (sliced, &open.local_sgd) {
            (true, _) => "slices of a rank's own cannot be averaged",
            (false, Some(_)) => {
                "to go on with others, average them: `fusestep checkpoint reshard --average`, or `Manifest::average`"
            }
            (false, None) => {
                "to go on with others, end the window on those ranks, or `flush` it, and save then; or share its mean out by `fusestep \
                 checkpoint reshard --average`, or `Manifest::average`"
            }
        };
        let found = format!(
            "{} ranks with {whose}, which differ in {different}; {way}",
            open.ranks
        );
        let expected = format!("{world} ranks, as the plan has");
        Err(refuse(folder, what, &expected, found))
    }

    /// This rank's counts, checked.
    pub(crate) fn progress(
        &self,
        (manifest, from): (&Manifest, usize),
        whole: &WholeTensors,
        folder: &Path,
    ) -> Result<Progress, PlanError> {
        let Some(open) = &manifest.open else {
            return Ok(Progress::of_all(self, manifest));
        };
        let key = progress_key(from);
        let bytes = |key: &str| whole.get(key).map_or(&[][..], Vec::as_slice);
        let params = self.params().len();
        let right_len = |key: &str| bytes(key).len() == Progress::len_bytes(params);
        let progress = match open.ranks == self.topology().world {
            true => Progress::from_bytes(bytes(&key), params),
            // Which gradients there are is known to all of them together.
            false => {
                let keys: Vec<String> = (0..open.ranks).map(progress_key).collect();
                let all: Vec<&[u8]> = keys.iter().map(|key| bytes(key)).collect();
                let right = keys.iter().all(|key| right_len(key));
                right.then(|| Progress::together(&all).ok()).flatten()
            }
        };
        let micro_steps = open
            .window
            .map_or(0, |window| u64::from(window.micro_steps));
        let right = |progress: &Progress| {
            progress.micro_steps == micro_steps
                && progress
                    .steps_of
                    .iter()
                    .all(|&steps| steps <= progress.step)
                && progress.given.iter().all(|&given| given <= micro_steps)
        };
        progress.filter(right).ok_or_else(|| {
            let expected =
                format!("counts of {micro_steps} micro-steps and of steps that fit each other");
            refuse(folder, &key, &expected, "others".to_owned())
        })
    }

    /// Puts a rank back where it was in its window and between averages.
    pub(crate) fn restore_open(
        &self,
        state: &mut RankState,
        (progress, from): (&Progress, usize),
        whole: &WholeTensors,
    ) {
        state.slots.restore();
        state.ready.again();
        state.given_now.fill(false);
        state.weight = None;
        state.micro_steps = progress.micro_steps as u32;
        state.weights = progress.weights;
        state.weights_hash = progress.weights_hash;
        state.since_average = progress.since_average;
        state.adapting.loss = progress.loss;
        state.adapting.first = progress.first;
        state.adapting.every = progress.every;
        for (own, &given) in state.given.iter_mut().zip(&progress.given) {
            *own = given as u32;
        }
        if progress.micro_steps == 0 {
            return;
        }
        for param in 0..self.params().len() {
            let key = self.window_key(param, from);
            if let Some(bytes) = whole.get(&key) {
                self.restore_sums(state, param, bytes);
            }
        }
    }

    fn restore_sums(&self, state: &mut RankState, param: usize, bytes: &[u8]) {
        let width = self.window_dtype(param).len_bytes();
        if self.reduces_each() {
            let sums = state.shard_sums[self.places[param].0].bytes_mut();
            for (piece, _) in self.pieces_of(param) {
                let (at, first, numel) = (
                    piece.at as usize,
                    piece.first as usize,
                    piece.numel as usize,
                );
                let part = &bytes[first * width..(first + numel) * width];
                sums[at * width..(at + numel) * width].copy_from_slice(part);
            }
            return;
        }
        for &(bucket, position) in &self.spans_of[param] {
            let (tensor, at) = self.span_ranges(bucket, position);
            let part = &bytes[tensor.start * width..tensor.end * width];
            let sums = &mut state.sums[bucket as usize];
            if !sums.is_empty() {
                bytemuck::cast_slice_mut(&mut sums[at]).copy_from_slice(part);
                continue;
            }
            let len_bytes = self.len_bytes_of(&self.buckets[bucket as usize]);
            if let Some(words) = state.slots.filling(bucket as usize, len_bytes) {
                words.bytes_mut()[at.start * width..at.end * width].copy_from_slice(part);
            }
        }
    }

    /// Puts steps, skipped steps and the loss scale back.
    pub(crate) fn restore_counts(
        &self,
        state: &mut RankState,
        backend: &dyn Backend,
        progress: &Progress,
    ) -> Result<(), PlanError> {
        state.local.set_step(progress.step);
        state.steps_of.clone_from(&progress.steps_of);
        for (param, &step) in progress.steps_of.iter().enumerate() {
            if step == progress.step {
                continue;
            }
            for (_, local) in self.pieces_of(param) {
                let local = self.local.params()[local].name.clone();
                state.local.set_step_of(&local, step)?;
            }
        }
        let Some(norm) = &mut state.local.norm else {
            return Ok(());
        };
        let scale = norm.loss_scale();
        let scale = match progress.loss_scale.filter(|_| state.local.scaled) {
            // Checked before: a scale that does not fit the policy was refused.
            Some((value, good, bad)) => scale.restored(value, good, bad).unwrap_or(scale),
            None => scale,
        };
        norm.restore(backend, scale, progress.skipped)
    }
}

/// The name of a rank's counts.
pub(crate) fn progress_key(rank: usize) -> String {
    format!("{PROGRESS}#{rank}")
}
