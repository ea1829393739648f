//! Checks that a checkpoint fits a plan: its rules, its tensors and its ranks.

use std::collections::BTreeMap;
use std::path::Path;

use fusestep_launch::StateDType;
use fusestep_planner::{ListImage, RunCounts, RunImage};
use fusestep_schedule::Schedule;
use fusestep_tensor::{DType, Quoted};

use crate::lists;
use crate::manifest::{Manifest, TensorSpec};
use crate::refusal::{OR_ELSEWHERE, refuse};
use crate::settings::{Difference, Rules};
use crate::values::{self, CHECKED, SavedTensors};
use crate::verified::check_tensor;
use crate::{Result, own_values};

/// Most tensors that a refusal names.
const MOST_NAMED: usize = 9;

/// Advice where the run's own tensors are others than the saved ones.
const AS_SAVED: &str = "; go on with the model, rule and precision that it was saved with";

/// Most steps in which schedules are compared; comparing so many takes a few seconds.
const MOST_COMPARED: u64 = 1 << 22;

pub(crate) fn check_manifest(image: &RunImage, manifest: &Manifest, folder: &Path) -> Result<()> {
    let rules = Rules(&image.rules);
    let own = &image.rules.first;
    if manifest.optimizer != *own {
        let found =
            format!("{}, which it was saved with{OR_ELSEWHERE}", Quoted(&manifest.optimizer));
        return Err(refuse(folder, "optimizer", own, found));
    }
    check_state(image, manifest, folder)?;
    if manifest.has_checksum() {
        let has_tensors = differences(image, manifest)?.is_empty();
        check_rules(&rules, manifest, folder, has_tensors)?;
    }
    check_schedule(image, manifest, folder)?;
    own_values::check_open(image, manifest, folder)?;
    let differences = differences(image, manifest)?;
    let Some((name, expected, found)) = differences.first() else {
        return check_steps(image, manifest, folder);
    };
    let mut found = Quoted(found).to_string();
    if let Some(slices) = other_slices(image, manifest) {
        return Err(refuse(folder, name, expected, format!("{found}; {slices}")));
    }
    if differences.len() > 1 {
        let others = differences[1..].iter();
        let others = others.map(|(name, ..)| Quoted(name).to_string());
        let others: Vec<String> = others.take(MOST_NAMED).collect();
        let differ = match differences.len() - 1 {
            1 => "1 other differs".to_owned(),
            more => format!("{more} others differ"),
        };
        found += &format!("; {differ} too: {}", others.join(", "));
    }
    found += AS_SAVED;
    Err(refuse(folder, name, expected, found))
}

/// Refuses state that is kept in another type, which is more than a setting: it can be converted.
fn check_state(image: &RunImage, manifest: &Manifest, folder: &Path) -> Result<()> {
    for (param, desc) in image.params.iter().enumerate() {
        for list in desc.lists.iter().filter(|list| CHECKED.contains(&list.role)) {
            let key = lists::key(image, param, list.role, image.topology.rank);
            let found = manifest.tensors.get(&key).map(|spec| name_of(spec.dtype));
            let (Some(own), Some(Some(found))) = (name_of(list.dtype), found) else { continue };
            if own != found {
                let found = format!(
                    "state in {found}; go on with that, or convert it by `fusestep checkpoint \
                     convert {}`",
                    converted_to(image, own)
                );
                return Err(refuse(folder, &key, format_args!("state in {own}"), found));
            }
        }
    }
    Ok(())
}

/// The flags by which a checkpoint is converted to the plan's state, of which a list is `own`:
/// beside codes some parameters have theirs in f32.
pub(crate) fn converted_to(image: &RunImage, own: &str) -> String {
    let mut lists = image.params.iter().flat_map(|desc| &desc.lists);
    if !lists.any(|list| list.dtype == DType::U8 && CHECKED.contains(&list.role)) {
        return format!("--state-dtype {own}");
    }
    let kept = image.rules.of_plan.get("keep_f32").map_or("", String::as_str);
    let kept = kept.split(", ").filter(|name| !name.is_empty());
    let kept: String = kept.map(|name| format!(" --keep-f32 {}", Quoted(name))).collect();
    format!("--state-dtype {}{kept}", StateDType::Int8.name())
}

/// The type of state as settings call it; `None` of a type that state of no other is converted to.
pub(crate) fn name_of(dtype: DType) -> Option<&'static str> {
    match dtype {
        DType::F32 => Some(StateDType::Compute.name()),
        DType::BF16 => Some(StateDType::Bf16.name()),
        DType::U8 => Some(StateDType::Int8.name()),
        _ => None,
    }
}

/// Explains the first parameter that the checkpoint and the plan cut into different slices, or that
/// only one of them cuts.
fn other_slices(image: &RunImage, manifest: &Manifest) -> Option<String> {
    let averages = image.averaging.is_some();
    for desc in image.params.iter().filter(|_| !averages) {
        let slice = |rank: usize| format!("{}@param#{rank}", desc.name);
        let found = (0..).map_while(|rank| manifest.tensors.get(&slice(rank)));
        let found: Vec<String> = found.map(|spec| spec.shape.to_string()).collect();
        let own: Vec<String> = desc.slices.iter().map(ToString::to_string).collect();
        if found == own {
            continue;
        }
        let text = |slices: &[String]| match slices {
            [] => "whole".to_owned(),
            slices => format!("in slices {}", slices.join(", ")),
        };
        return Some(format!(
            "`{}` is {} there and {} here; slices cannot be cut anew, so go on with as many ranks \
             and the same split",
            Quoted(&desc.name),
            text(&found),
            text(&own)
        ));
    }
    None
}

/// Compares the rules, since state of another rule may have the same shapes and mean something
/// else.
fn check_rules(
    rules: &Rules<'_>,
    manifest: &Manifest,
    folder: &Path,
    has_tensors: bool,
) -> Result<()> {
    let none = "none of its own";
    let (own, found) = (&rules.0.objective, &manifest.objective);
    if own != found {
        let expected = own.as_deref().unwrap_or(none);
        let found = Quoted(found.as_deref().unwrap_or(none)).to_string() + OR_ELSEWHERE;
        return Err(refuse(folder, "objective", expected, found));
    }
    let (own, found) = (&rules.0.own, &manifest.optimizer_of);
    for name in own.keys().chain(found.keys()) {
        if own.get(name) != found.get(name) {
            let text = |rules: &BTreeMap<String, String>| {
                Quoted(rules.get(name).map_or(none, String::as_str)).to_string()
            };
            let what = format!("optimizer of `{}`", Quoted(name));
            return Err(refuse(folder, &what, text(own), text(found)));
        }
    }
    match rules.difference(manifest.settings.iter(), OR_ELSEWHERE, has_tensors) {
        None => Ok(()),
        Some(Difference { what, expected, found }) => Err(refuse(folder, &what, expected, found)),
    }
}

/// Refuses a checkpoint whose schedule had another factor at a step that was taken. The steps
/// that are left may differ, so that a run can be made longer.
fn check_schedule(image: &RunImage, manifest: &Manifest, folder: &Path) -> Result<()> {
    let own = image.schedule.as_ref().map(ToString::to_string);
    if own == manifest.schedule {
        return Ok(());
    }
    let none = "none";
    let found = manifest.schedule.as_deref().unwrap_or(none);
    let saved: Option<Schedule> = manifest.schedule.as_ref().and_then(|_| found.parse().ok());
    let factor =
        |schedule: Option<&Schedule>, step| schedule.map_or(1.0, |schedule| schedule.factor(step));
    let readable = saved.is_some() == manifest.schedule.is_some();
    let taken = 0..manifest.step.min(MOST_COMPARED);
    let mut taken =
        taken.filter(|&step| factor(image.schedule.as_ref(), step) != factor(saved.as_ref(), step));
    let differs = match taken.next() {
        Some(step) => format!("another rate at step {}", step + 1),
        None if !readable => "no schedule of this version".to_owned(),
        None if manifest.step > MOST_COMPARED => "too many steps to compare".to_owned(),
        None => return Ok(()),
    };
    let expected = format!(
        "`{}`, or one that is the same in the steps taken",
        Quoted(own.as_deref().unwrap_or(none))
    );
    Err(refuse(
        folder,
        "schedule",
        &expected,
        format_args!("`{}`: {differs}{OR_ELSEWHERE}", Quoted(found)),
    ))
}

/// Tensors in which the plan and a checkpoint differ: name, expected, found.
fn differences(image: &RunImage, manifest: &Manifest) -> Result<Vec<(String, String, String)>> {
    let own = lists::tensors_of_checkpoint(image, manifest.open.as_ref())?;
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

/// Refuses values that no run produces, in the state of rank `from`, which this rank takes over.
pub(crate) fn check_values(
    image: &RunImage,
    tensors: &SavedTensors,
    from: usize,
    progress: &RunCounts,
    folder: &Path,
) -> Result<()> {
    // Averages over ranks bring state to ranks that have taken no step themselves.
    let averaged = image.averaging.is_some() && progress.step > 0;
    for (param, desc) in image.params.iter().enumerate() {
        for &ListImage { role, dtype } in &desc.lists {
            let key = lists::key(image, param, role, from);
            check_tensor(folder, tensors, &key, role, dtype)?;
            if progress.steps_of[param] == 0 && !averaged {
                values::check_begun(role, dtype, tensors.bytes(&key))
                    .map_err(|(expected, found)| refuse(folder, &key, expected, found))?;
            } else if progress.steps_of[param] > 0 {
                values::check_taken(role, dtype, tensors.bytes(&key))
                    .map_err(|(expected, found)| refuse(folder, &key, expected, found))?;
            }
        }
    }
    Ok(())
}

fn check_steps(image: &RunImage, manifest: &Manifest, folder: &Path) -> Result<()> {
    for (name, &step) in &manifest.steps_of {
        let what = format!("steps of `{}`", Quoted(name));
        if !image.params.iter().any(|param| param.name == *name) {
            let found = "one of no parameter of the plan".to_owned();
            return Err(refuse(folder, &what, "a parameter of the plan", found));
        }
        if step > manifest.step {
            let expected = format!("at most the {} of the run", manifest.step);
            return Err(refuse(folder, &what, &expected, step));
        }
    }
    Ok(())
}
