//! Values of single ranks in a checkpoint: the sums of a gradient accumulation that is under way,
//! and a LocalSGD run between averages.
//!
//! ```text
//! <name>@window#<rank>   sums of a rank's own gradients, if ranks reduce once per window
//! <name>@window          sums of gradients that ranks have reduced in every micro-step
//! @progress#<rank>       counts of a rank: 64-bit words, see `Progress`
//! ```

use fusestep_coalesce::zeroed_bytes;
use std::path::Path;

use fusestep_launch::Backend;
use fusestep_tensor::{DType, Shape, counted};
use serde::{Deserialize, Serialize};

use super::counts::Progress;
use super::manifest::{Manifest, TensorSpec};
use super::refusal::refuse;
use super::values::WholeTensors;
use crate::MAX_STEPS;
use crate::plan::passes::rewrite::Rewrite;
use crate::plan::segments::sum_width;
use crate::plan::settings::{GradientAccumulation, LocalSgd, ReducedWhen};
use crate::{Extent, Plan, Result, State, Topology};

/// Name of a rank's counts in a checkpoint, before the rank.
pub(crate) const PROGRESS: &str = "@progress";

/// Values of a checkpoint that belong to single ranks. If all ranks have the same values, any
/// number of ranks can resume, and otherwise only as many. [`Manifest::average`] makes the values
/// the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenRun {
    /// The number of ranks.
    pub ranks: usize,
    /// The gradient accumulation that is under way, if there is one.
    pub window: Option<OpenWindow>,
    /// Steps between two averages as planned, if ranks average parameters.
    pub local_sgd: Option<u64>,
    /// Parameters of which each rank has a slice of its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub slices: Vec<String>,
}

impl OpenRun {
    /// Whether ranks average parameters.
    pub(super) fn averages(&self) -> bool {
        self.local_sgd.is_some()
    }
}

/// A gradient accumulation some of whose micro-steps are over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenWindow {
    /// Micro-steps that are over.
    pub micro_steps: u32,
    /// Micro-steps of the whole accumulation.
    pub every: u32,
    /// When gradients are reduced.
    pub reduced: ReducedWhen,
}

/// The open accumulation, averages and slices, for which ranks have values of their own. `None` if
/// the checkpoint is the same for any number of ranks.
pub(crate) fn open_run(plan: &Plan, state: &State) -> Option<OpenRun> {
    let merge = plan.accumulation().filter(|_| state.arena.micro_steps > 0);
    let open = OpenRun {
        ranks: plan.topology().world,
        window: merge.map(|merge| OpenWindow {
            micro_steps: state.arena.micro_steps,
            every: merge.every.get(),
            reduced: merge.reduced,
        }),
        local_sgd: plan.averaging().map(|rule| rule.every.get()),
        slices: slices(plan).map(str::to_owned).collect(),
    };
    (open.window.is_some() || open.averages()).then_some(open)
}

/// Parameters of which each rank has a slice of its own.
fn slices(plan: &Plan) -> impl Iterator<Item = &str> {
    let params = plan.params().iter().enumerate();
    let slices = params.filter(|(param, _)| plan.is_distributed(*param));
    slices.map(|(_, desc)| desc.name.as_str())
}

fn window_key(plan: &Plan, param: usize, rank: usize) -> String {
    let name = &plan.params()[param].name;
    if plan.reduces_each() && !plan.has_own(param) {
        format!("{name}@window")
    } else {
        format!("{name}@window#{rank}")
    }
}

/// The dtype of a parameter's sums: f32 for 16-bit gradients.
fn window_dtype(plan: &Plan, param: usize) -> DType {
    match plan.storages[plan.places[param].0].grad_dtype() {
        DType::F16 | DType::BF16 => DType::F32,
        dtype => dtype,
    }
}

/// Tensors that a checkpoint has beside parameters and state.
pub(crate) fn open_tensors(plan: &Plan, open: &OpenRun) -> Result<Vec<(String, TensorSpec)>> {
    let mut tensors = Vec::new();
    for rank in 0..open.ranks {
        let len_bytes = Progress::len_bytes(plan.params().len()) as u64;
        let spec = TensorSpec { dtype: DType::U8, shape: Shape::new([len_bytes])? };
        tensors.push((progress_key(rank), spec));
        if open.window.is_none() {
            continue;
        }
        for param in 0..plan.params().len() {
            let shape = plan.shape_on(rank, param).clone();
            let spec = TensorSpec { dtype: window_dtype(plan, param), shape };
            tensors.push((window_key(plan, param, rank), spec));
        }
    }
    Ok(tensors)
}

/// Hands over this rank's parts of [`open_tensors`]: tensor, dtype, first element and bytes.
pub(crate) fn open_parts(
    plan: &Plan,
    state: &State,
    backend: &dyn Backend,
    open: &OpenRun,
    mut save: impl FnMut(String, DType, u64, Vec<u8>),
) -> Result<()> {
    let rank = plan.topology().rank;
    save(progress_key(rank), DType::U8, 0, Progress::of(state).to_bytes());
    if open.window.is_none() {
        return Ok(());
    }
    for param in 0..plan.params().len() {
        let dtype = window_dtype(plan, param);
        let key = window_key(plan, param, rank);
        if !plan.reduces_each() {
            save(key, dtype, 0, state.sums_so_far(backend, param)?);
            continue;
        }
        if !plan.has_own(param) && !plan.saves_shared() {
            continue;
        }
        let (storage, tensor) = plan.places[param];
        let spec = &plan.storages[storage];
        let Some(sums) = &state.arena.reduced_sums[storage] else {
            continue;
        };
        for held in spec.held_of_shard(tensor, Extent::Shard) {
            let place = held.place(dtype.len_bytes());
            let mut bytes = zeroed_bytes(place.len())?;
            backend.read(sums.as_ref(), place.start, &mut bytes)?;
            save(key.clone(), dtype, held.elements.start, bytes);
        }
    }
    Ok(())
}

/// Refuses a checkpoint of ranks that average differently, or of another gradient accumulation than
/// the plan's.
pub(crate) fn check_open(plan: &Plan, manifest: &Manifest, folder: &Path) -> Result<()> {
    let own = plan.averaging().map(|rule| rule.every.get());
    let found = manifest.open.as_ref();
    let averages = found.and_then(|open| open.local_sgd);
    if own.is_some() != averages.is_some() {
        let text = |every: Option<u64>| match every {
            Some(every) => format!("averages every {}", counted(every, "step")),
            None => "no averages of parameters".to_owned(),
        };
        return Err(refuse(folder, LocalSgd::NAME, text(own), text(averages)));
    }
    let Some(open) = found else {
        return Ok(());
    };
    // Each rank has its counts among the tensors, so a damaged number cannot ask for more work
    // than the file is long.
    if !(1..=manifest.tensors.len()).contains(&open.ranks) {
        let found = counted(open.ranks as u64, "rank");
        return Err(refuse(folder, "ranks", "at least 1, and counts of each", found));
    }
    let Some(window) = open.window else {
        return Ok(());
    };
    let merge = plan.accumulation();
    let fits = merge.is_some_and(|merge| {
        (merge.every.get(), merge.reduced) == (window.every, window.reduced)
            && (1..window.every).contains(&window.micro_steps)
    });
    if fits {
        return Ok(());
    }
    let text = |every: u32, reduced: ReducedWhen| match reduced {
        ReducedWhen::PerWindow => {
            format!("windows of {every} micro-steps, reduced once per window")
        }
        ReducedWhen::PerMicroStep => {
            format!("windows of {every} micro-steps, reduced in every one")
        }
    };
    let expected = match merge {
        Some(merge) => text(merge.every.get(), merge.reduced),
        None => "no merge".to_owned(),
    };
    let found = text(window.every, window.reduced);
    let found = format!("{} of {found}", counted(window.micro_steps.into(), "micro-step"));
    Err(refuse(folder, GradientAccumulation::NAME, &expected, found))
}

/// The rank whose values this rank takes over: its own number, or 0 if another number of ranks has
/// saved and all had the same values.
///
/// # Errors
/// [`crate::PlanError::Checkpoint`] naming the tensor or count in which ranks differ.
pub(crate) fn source_rank(
    plan: &Plan,
    manifest: &Manifest,
    whole: &WholeTensors,
    folder: &Path,
) -> Result<usize> {
    let Topology { rank, world, .. } = plan.topology();
    let Some(open) = manifest.open.as_ref().filter(|open| open.ranks != world) else {
        return Ok(rank);
    };
    let different = match (open.slices.first(), slices(plan).next()) {
        (Some(name), _) => Some(name.clone()),
        (_, Some(name)) => Some(name.to_owned()),
        (None, None) => manifest.difference(whole),
    };
    let Some(different) = different else {
        return Ok(0);
    };
    let (what, whose) = match (&open.local_sgd, &open.window) {
        (Some(_), _) => (LocalSgd::NAME, "parameters and state of their own"),
        _ => (GradientAccumulation::NAME, "a merge window under way"),
    };
    let sliced = !open.slices.is_empty() || slices(plan).next().is_some();
    let way = match (sliced, &open.local_sgd) {
        (true, _) => "slices of a rank's own cannot be averaged",
        (false, Some(_)) => {
            "to go on with others, average them: `fusestep checkpoint reshard --average`, or \
             `Manifest::average`"
        }
        (false, None) => {
            "to go on with others, end the window on those ranks, or `flush` it, and save \
             then; or share its mean out by `fusestep checkpoint reshard --average`, or \
             `Manifest::average`"
        }
    };
    let found = format!("{} ranks with {whose}, which differ in {different}; {way}", open.ranks);
    let expected = format!("{}, as the plan has", counted(world as u64, "rank"));
    Err(refuse(folder, what, expected, found))
}

/// The counts of rank `from`, which this rank takes over, checked.
pub(crate) fn counts(
    plan: &Plan,
    manifest: &Manifest,
    from: usize,
    whole: &WholeTensors,
    folder: &Path,
) -> Result<Progress> {
    let Some(open) = &manifest.open else {
        return Ok(Progress::of_all(plan, manifest));
    };
    let key = progress_key(from);
    let bytes = |key: &str| whole.get(key).map_or(&[][..], Vec::as_slice);
    let params = plan.params().len();
    let right_len = |key: &str| bytes(key).len() == Progress::len_bytes(params);
    let progress = if open.ranks == plan.topology().world {
        Progress::from_bytes(bytes(&key), params)
    } else {
        // Only all ranks together know which gradients were given.
        let keys: Vec<String> = (0..open.ranks).map(progress_key).collect();
        let all: Vec<&[u8]> = keys.iter().map(|key| bytes(key)).collect();
        let right = keys.iter().all(|key| right_len(key));
        right.then(|| Progress::together(&all).ok()).flatten()
    };
    let micro_steps = open.window.map_or(0, |window| u64::from(window.micro_steps));
    let right = |progress: &Progress| {
        progress.micro_steps == micro_steps
            && progress.step <= MAX_STEPS
            && progress.skipped <= MAX_STEPS
            && progress.weights.is_finite()
            && progress.weights >= 0.0
            && progress.steps_of.iter().all(|&steps| steps <= progress.step)
            && progress.given.iter().all(|&given| given <= micro_steps)
    };
    progress.filter(right).ok_or_else(|| {
        let expected =
            format!("counts of {micro_steps} micro-steps and of steps that fit each other");
        refuse(folder, &key, &expected, "others")
    })
}

/// Restores the place of rank `from` in its gradient accumulation and between averages.
pub(crate) fn restore_open(
    plan: &Plan,
    state: &mut State,
    backend: &dyn Backend,
    progress: &Progress,
    from: usize,
    whole: &WholeTensors,
) -> Result<()> {
    let arena = &mut state.arena;
    arena.restore();
    arena.micro_steps = progress.micro_steps as u32;
    arena.weights = progress.weights;
    arena.weights_hash = progress.weights_hash;
    for (own, &given) in arena.given.iter_mut().zip(&progress.given) {
        *own = given as u32;
    }
    state.since_average = progress.since_average;
    state.adapting.loss = progress.loss;
    state.adapting.first = progress.first;
    state.adapting.every = progress.every;
    if progress.micro_steps == 0 {
        return Ok(());
    }
    for param in 0..plan.params().len() {
        let Some(bytes) = whole.get(&window_key(plan, param, from)) else {
            continue;
        };
        if !plan.reduces_each() {
            state.restore_sums(backend, param, bytes)?;
            continue;
        }
        let (storage, tensor) = plan.places[param];
        let spec = &plan.storages[storage];
        let width = sum_width(spec.grad_dtype());
        if let Some(sums) = &mut state.arena.reduced_sums[storage] {
            for held in spec.held_of_shard(tensor, Extent::Shard) {
                let own = &bytes[held.within(width)];
                backend.write(sums.as_mut(), held.place(width).start, own)?;
            }
        }
    }
    Ok(())
}

/// Restores steps, skipped steps and the loss scale.
pub(crate) fn restore_counts(
    plan: &Plan,
    state: &mut State,
    backend: &dyn Backend,
    progress: &Progress,
) -> Result<()> {
    state.set_step(progress.step);
    for (desc, &step) in plan.params().iter().zip(&progress.steps_of) {
        if step != progress.step {
            state.set_step_of(&desc.name, step)?;
        }
    }
    let scaled = state.scaled;
    let Some(norm) = &mut state.norm else {
        return Ok(());
    };
    let scale = norm.loss_scale();
    let scale = match progress.loss_scale.filter(|_| scaled) {
        // Checked before: a scale that does not fit the policy was refused.
        Some((value, good, bad)) => scale.restored(value, good, bad).unwrap_or(scale),
        None => scale,
    };
    norm.restore(backend, scale, progress.skipped)
}

pub(crate) fn progress_key(rank: usize) -> String {
    format!("{PROGRESS}#{rank}")
}
