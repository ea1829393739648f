//! Values of single ranks in a checkpoint: the sums of a gradient accumulation that is under way,
//! and a LocalSGD run between averages.
//!
//! ```text
//! <name>@window#<rank>   sums of a rank's own gradients, if ranks reduce once per window
//! <name>@window          sums of gradients that ranks have reduced in every micro-step
//! <name>@lanes<a>-<b>    sum of lanes a to b − 1 of a window that has begun
//! <name>@lanes<a>+<n>    sum of the first n micro-batches of lane a
//! @progress#<rank>       counts of a rank: 64-bit words, see `RunCounts`
//! ```

use std::path::Path;

#[cfg(doc)]
use fusestep_planner::PlanError;
use fusestep_planner::{MAX_STEPS, OpenLanes, ReducedWhen, RunCounts, RunImage, Topology};
use fusestep_tensor::{DType, Shape, counted};

use crate::manifest::{Manifest, TensorSpec};
use crate::open_run::{OpenRun, OpenWindow};
use crate::refusal::{OR_ELSEWHERE, refuse};
use crate::values::WholeTensors;
use crate::{Result, counts};

/// Name of a rank's counts in a checkpoint, before the rank.
pub(crate) const PROGRESS: &str = "@progress";

/// The open accumulation, averages and slices, for which ranks have values of their own. `None` if
/// the checkpoint is the same for any number of ranks.
pub(crate) fn open_run(image: &RunImage) -> Option<OpenRun> {
    let has_sums = image.counts.micro_steps > 0 && image.lanes.is_none();
    let merge = image.accumulation.filter(|_| has_sums);
    let window = merge.map(|merge| OpenWindow {
        micro_steps: image.counts.micro_steps as u32,
        every: merge.every.get(),
        reduced: merge.reduced,
    });
    let every = image.averaging.map(|rule| rule.every.get());
    let slices = slices(image).map(str::to_owned).collect();
    let mut open = OpenRun::new(image.topology.world, window, every, slices);
    open.lanes = image.counts.lanes.clone();
    (open.window.is_some() || open.averages() || open.lanes.is_some()).then_some(open)
}

/// Parameters of which each rank has a slice of its own.
fn slices(image: &RunImage) -> impl Iterator<Item = &str> {
    let slices = image.params.iter().filter(|param| param.distributed);
    slices.map(|param| param.name.as_str())
}

/// Name of a parameter's sums in a checkpoint.
pub(crate) fn window_key(image: &RunImage, param: usize, rank: usize) -> String {
    let own = image.params[param].own;
    let name = &image.params[param].name;
    if image.reduces_each() && !own {
        format!("{name}@window")
    } else {
        format!("{name}@window#{rank}")
    }
}

/// Name of a part of a window of lanes in a checkpoint.
pub(crate) fn lanes_key(image: &RunImage, param: usize, lanes: &OpenLanes, part: usize) -> String {
    format!("{}@lanes{}", image.params[param].name, lanes.part_name(part))
}

/// Tensors that a checkpoint has beside parameters and state.
pub(crate) fn open_tensors(image: &RunImage, open: &OpenRun) -> Result<Vec<(String, TensorSpec)>> {
    let mut tensors = Vec::new();
    for rank in 0..open.ranks {
        let len_bytes = counts::len_bytes(image.params.len(), open.lanes.as_ref()) as u64;
        let spec = TensorSpec { dtype: DType::U8, shape: Shape::new([len_bytes])? };
        tensors.push((progress_key(rank), spec));
        if open.window.is_none() {
            continue;
        }
        for param in 0..image.params.len() {
            let shape = image.shape_on(rank, param).clone();
            let spec = TensorSpec { dtype: image.params[param].sums, shape };
            tensors.push((window_key(image, param, rank), spec));
        }
    }
    if let Some(lanes) = &open.lanes {
        for (param, desc) in image.params.iter().enumerate() {
            for part in 0..lanes.parts() {
                let spec = TensorSpec { dtype: desc.sums, shape: desc.shape.clone() };
                tensors.push((lanes_key(image, param, lanes, part), spec));
            }
        }
    }
    Ok(tensors)
}

/// Refuses a checkpoint of ranks that average differently, or of another gradient accumulation than
/// the plan's.
pub(crate) fn check_open(image: &RunImage, manifest: &Manifest, folder: &Path) -> Result<()> {
    let own = image.averaging.map(|rule| rule.every.get());
    let found = manifest.open.as_ref();
    let averages = found.and_then(|open| open.every());
    if own.is_some() != averages.is_some() {
        let text = |every: Option<u64>| match every {
            Some(every) => format!("averages every {}", counted(every, "step")),
            None => "no averages of parameters".to_owned(),
        };
        let found = text(averages) + OR_ELSEWHERE;
        return Err(refuse(folder, RunImage::AVERAGES, text(own), found));
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
    if let Some(lanes) = &open.lanes {
        check_lanes(image, lanes, folder)?;
    }
    let Some(window) = open.window else {
        return Ok(());
    };
    let merge = image.accumulation;
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
    let micro_steps = counted(window.micro_steps.into(), "micro-step");
    let found = format!("{micro_steps} of {found}{OR_ELSEWHERE}");
    Err(refuse(folder, RunImage::ACCUMULATION, &expected, found))
}

/// Refuses a window of other lanes than the plan's, and one that is none.
fn check_lanes(image: &RunImage, lanes: &OpenLanes, folder: &Path) -> Result<()> {
    let text = |count: u64, of_lane: u64| {
        format!("{} of {}", counted(count, "lane"), counted(of_lane, "micro-batch"))
    };
    let of_lane = image.accumulation.map_or(1, |rule| rule.every.get());
    let expected = match image.lanes {
        Some(own) => text(own.count.get().into(), of_lane.into()),
        None => "no lanes".to_owned(),
    };
    let found = text(lanes.count.into(), lanes.of_lane.into());
    if expected != found {
        return Err(refuse(folder, RunImage::LANES, expected, found + OR_ELSEWHERE));
    }
    if lanes.is_valid() {
        return Ok(());
    }
    let expected = "parts of one tree that do not overlap";
    Err(refuse(folder, RunImage::LANES, expected, "others, so the manifest is damaged"))
}

/// The rank whose values this rank takes over: its own number, or 0 if another number of ranks has
/// saved and all had the same values.
///
/// # Errors
/// [`PlanError::Checkpoint`] naming the tensor or count in which ranks differ.
pub(crate) fn source_rank(
    image: &RunImage,
    manifest: &Manifest,
    whole: &WholeTensors,
    folder: &Path,
) -> Result<usize> {
    let Topology { rank, world, .. } = image.topology;
    let open = manifest.open.as_ref().filter(|open| open.ranks != world && open.lanes.is_none());
    let Some(open) = open else {
        return Ok(rank);
    };
    let different = match (open.slices.first(), slices(image).next()) {
        (Some(name), _) => Some(name.clone()),
        (_, Some(name)) => Some(name.to_owned()),
        (None, None) => manifest.difference(whole),
    };
    let Some(different) = different else {
        return Ok(0);
    };
    let (what, whose) = match (open.every(), open.window) {
        (Some(_), _) => (RunImage::AVERAGES, "parameters and state of their own"),
        _ => (RunImage::ACCUMULATION, "a merge window under way"),
    };
    let sliced = !open.slices.is_empty() || slices(image).next().is_some();
    let way = match (sliced, open.every()) {
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
    image: &RunImage,
    manifest: &Manifest,
    from: usize,
    whole: &WholeTensors,
    folder: &Path,
) -> Result<RunCounts> {
    let Some(open) = &manifest.open else {
        return Ok(counts::of_all(image, manifest));
    };
    let key = progress_key(from);
    let bytes = |key: &str| whole.get(key).map_or(&[][..], Vec::as_slice);
    let params = image.params.len();
    let lanes = open.lanes.as_ref();
    let right_len = |key: &str| bytes(key).len() == counts::len_bytes(params, lanes);
    let progress = if let Some(lanes) = lanes {
        let keys: Vec<String> = (0..open.ranks).map(progress_key).collect();
        let all: Vec<&[u8]> = keys.iter().map(|key| bytes(key)).collect();
        counts::of_lanes(&all, params, lanes)
    } else if open.ranks == image.topology.world {
        counts::from_bytes(bytes(&key), params, None)
    } else {
        // Only all ranks together know which gradients were given.
        let keys: Vec<String> = (0..open.ranks).map(progress_key).collect();
        let all: Vec<&[u8]> = keys.iter().map(|key| bytes(key)).collect();
        let right = keys.iter().all(|key| right_len(key));
        right.then(|| counts::together(&all).ok()).flatten()
    };
    let micro_steps = match lanes {
        Some(lanes) => lanes.all_micro_batches(),
        None => open.window.map_or(0, |window| u64::from(window.micro_steps)),
    };
    let right = |progress: &RunCounts| {
        (progress.micro_steps == micro_steps
            || lanes.is_some() && progress.micro_steps < micro_steps)
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

pub(crate) fn progress_key(rank: usize) -> String {
    format!("{PROGRESS}#{rank}")
}
