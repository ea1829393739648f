//! What each rank has for itself in a checkpoint: the sums of a merge window that is open, and a LocalSGD run between averages.
//!
//! ```text
//! <name>@window#<rank>   sums of a rank's own gradients, if ranks reduce once per window
//! <name>@window          sums of gradients that ranks have reduced in every micro-step
//! @progress#<rank>       counts of a rank: 64-bit words, see `Progress`
//! ```

use std::num::NonZeroU64;
use std::ops::Range;
use std::path::Path;

use fusestep_launch::Backend;
use fusestep_tensor::{DType, Shape};
use serde::{Deserialize, Serialize};

use super::folder::{Manifest, PieceBytes, TensorSpec, WholeTensors, refuse};
use super::ready::Slot;
use super::words::Words;
use super::{Held, RankPlan, RankState};
use crate::PlanError;
use crate::passes::Reduced;

/// Words of [`Progress`] that do not depend on the parameters.
const FIXED_WORDS: usize = 16;

/// What a checkpoint holds that belongs to single ranks, so that only as many can go on from it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenRun {
    /// The number of ranks.
    pub ranks: usize,
    /// The merge window that is open, if one is.
    pub window: Option<OpenWindow>,
    /// Steps between two averages as planned, if ranks average parameters and have state of their own.
    pub local_sgd: Option<u64>,
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

/// A rank's counts.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Progress {
    pub(crate) step: u64,
    pub(crate) skipped: u64,
    /// Scale, good steps, bad steps.
    pub(crate) loss_scale: Option<(f64, u32, u32)>,
    micro_steps: u64,
    weights: f64,
    weights_hash: u64,
    since_average: u64,
    loss: Option<f64>,
    first: Option<(f64, f64)>,
    every: Option<NonZeroU64>,
    /// For each parameter.
    pub(crate) steps_of: Vec<u64>,
    given: Vec<u64>,
}

impl Progress {
    fn of(state: &RankState) -> Self {
        let local = &state.local;
        Self {
            step: local.step(),
            skipped: local.skipped(),
            loss_scale: local
                .loss_scale()
                .map(|scale| (scale.scale(), scale.good_steps(), scale.bad_steps())),
            micro_steps: u64::from(state.micro_steps),
            weights: state.weights,
            weights_hash: state.weights_hash,
            since_average: state.since_average,
            loss: state.adapting.loss,
            first: state.adapting.first,
            every: state.adapting.every,
            steps_of: state.steps_of.clone(),
            given: state.given.iter().map(|&given| u64::from(given)).collect(),
        }
    }

    /// The counts of a checkpoint that is the same for all ranks.
    fn of_all(plan: &RankPlan, manifest: &Manifest) -> Self {
        let steps = |name: &String| manifest.steps_of.get(name).copied();
        let params = plan.params().iter();
        Self {
            step: manifest.step,
            skipped: manifest.skipped,
            loss_scale: manifest.loss_scale,
            steps_of: params
                .map(|param| steps(&param.name).unwrap_or(manifest.step))
                .collect(),
            given: vec![0; plan.params().len()],
            ..Self::default()
        }
    }

    fn len_bytes(params: usize) -> usize {
        8 * (FIXED_WORDS + 2 * params)
    }

    fn to_bytes(&self) -> Vec<u8> {
        let (scale, good, bad) = self.loss_scale.unwrap_or_default();
        let (first_loss, first_lr) = self.first.unwrap_or_default();
        let fixed: [u64; FIXED_WORDS] = [
            self.step,
            self.skipped,
            u64::from(self.loss_scale.is_some()),
            scale.to_bits(),
            u64::from(good),
            u64::from(bad),
            self.micro_steps,
            self.weights.to_bits(),
            self.weights_hash,
            self.since_average,
            u64::from(self.loss.is_some()),
            self.loss.unwrap_or_default().to_bits(),
            u64::from(self.first.is_some()),
            first_loss.to_bits(),
            first_lr.to_bits(),
            self.every.map_or(0, NonZeroU64::get),
        ];
        let words = fixed.iter().chain(&self.steps_of).chain(&self.given);
        words.flat_map(|word| word.to_le_bytes()).collect()
    }

    /// `None` if the bytes are not those of so many parameters.
    fn from_bytes(bytes: &[u8], params: usize) -> Option<Self> {
        if bytes.len() != Self::len_bytes(params) {
            return None;
        }
        let word = |bytes: &[u8]| Some(u64::from_le_bytes(bytes.try_into().ok()?));
        let words: Vec<u64> = bytes.chunks_exact(8).map(word).collect::<Option<_>>()?;
        let float = |at: usize| f64::from_bits(words[at]);
        let (good, bad) = (words[4].try_into().ok()?, words[5].try_into().ok()?);
        let (steps_of, given) = words[FIXED_WORDS..].split_at(params);
        Some(Self {
            step: words[0],
            skipped: words[1],
            loss_scale: (words[2] > 0).then_some((float(3), good, bad)),
            micro_steps: words[6],
            weights: float(7),
            weights_hash: words[8],
            since_average: words[9],
            loss: (words[10] > 0).then_some(float(11)),
            first: (words[12] > 0).then_some((float(13), float(14))),
            every: NonZeroU64::new(words[15]),
            steps_of: steps_of.to_vec(),
            given: given.to_vec(),
        })
    }
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
        };
        (open.window.is_some() || open.local_sgd.is_some()).then_some(open)
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
            let part: &[u8] = match (&state.slots[bucket as usize], sums.is_empty()) {
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
        let world = self.topology().world;
        if open.ranks != world {
            let (what, way) = match (&open.local_sgd, &open.window) {
                (Some(_), _) => (
                    "local_sgd",
                    "parameters and state of their own; to go on with others, average them on those ranks and write the \
                     parameters into a new run",
                ),
                _ => (
                    "gradient_merge",
                    "a merge window under way; to go on with others, end the window on those ranks, or `flush` it, and save then",
                ),
            };
            let expected = format!("{world} ranks, as the plan has");
            return Err(refuse(
                folder,
                what,
                &expected,
                format!("{} ranks with {way}", open.ranks),
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

    /// This rank's counts, checked.
    pub(crate) fn progress(
        &self,
        manifest: &Manifest,
        whole: &WholeTensors,
        folder: &Path,
    ) -> Result<Progress, PlanError> {
        let Some(open) = &manifest.open else {
            return Ok(Progress::of_all(self, manifest));
        };
        let key = progress_key(self.topology().rank);
        let bytes = whole.get(&key).map_or(&[][..], Vec::as_slice);
        let micro_steps = open
            .window
            .map_or(0, |window| u64::from(window.micro_steps));
        let progress = Progress::from_bytes(bytes, self.params().len());
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
        progress: &Progress,
        whole: &WholeTensors,
    ) {
        for slot in &mut state.slots {
            // A call that has failed has kept the memory.
            if !matches!(slot, Slot::Filling(_)) {
                *slot = Slot::Filling(Words::default());
            }
        }
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
            let key = self.window_key(param, self.topology().rank);
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
            if let Some(words) = state.slots[bucket as usize].filling(len_bytes) {
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

fn progress_key(rank: usize) -> String {
    format!("@progress#{rank}")
}
