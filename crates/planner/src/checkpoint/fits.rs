//! Whether a checkpoint is one of a plan: of its rules, its tensors and its ranks.

use std::collections::BTreeMap;
use std::path::Path;

use fusestep_schedule::Schedule;
use fusestep_tensor::Quoted;

use super::manifest::{Manifest, TensorSpec, refuse};
use super::settings::Rules;
use super::shards::WholeTensors;
use super::values::{self, NonFinite};
use super::{progress, save, settings};
use crate::{Plan, Result, State};

/// Tensors that a refusal names.
const MOST_NAMED: usize = 9;

/// Steps in which schedules are compared; of schedules as long as may be, a few seconds of work.
const MOST_COMPARED: u64 = 1 << 22;

pub(super) fn check_manifest(
    plan: &Plan,
    state: &State,
    manifest: &Manifest,
    folder: &Path,
) -> Result<()> {
    let rules = Rules::of(state);
    let own = rules.first.name();
    if manifest.optimizer != own {
        return Err(refuse(folder, "optimizer", own, Quoted(&manifest.optimizer)));
    }
    if manifest.has_checksum() {
        check_rules(&rules, manifest, folder)?;
    }
    check_schedule(plan, manifest, folder)?;
    progress::check_open(plan, manifest, folder)?;
    let differences = differences(plan, manifest)?;
    let Some((name, expected, found)) = differences.first() else {
        return check_steps(plan, manifest, folder);
    };
    let mut found = Quoted(found).to_string();
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
    Err(refuse(folder, name, expected, found))
}

/// State of another rule may have the same shapes and mean something else.
fn check_rules(rules: &Rules<'_>, manifest: &Manifest, folder: &Path) -> Result<()> {
    let none = "none of its own";
    let (own, found) = (rules.objective(), &manifest.objective);
    if own != *found {
        let expected = own.as_deref().unwrap_or(none);
        let found = Quoted(found.as_deref().unwrap_or(none));
        return Err(refuse(folder, "objective", expected, found));
    }
    let (own, found) = (rules.own_names(), &manifest.optimizer_of);
    for name in own.keys().chain(found.keys()) {
        if own.get(name) != found.get(name) {
            let text = |rules: &BTreeMap<String, String>| {
                Quoted(rules.get(name).map_or(none, String::as_str)).to_string()
            };
            let what = format!("optimizer of `{}`", Quoted(name));
            return Err(refuse(folder, &what, text(&own), text(found)));
        }
    }
    let found = |key: &str| manifest.settings.get(key);
    match settings::difference(rules.settings(), found) {
        None => Ok(()),
        Some((key, own, found)) => Err(refuse(folder, &key, &own, found)),
    }
}

/// Refuses a checkpoint whose schedule had another factor at a step that was taken. The steps
/// that are left may differ, so that a run can be made longer.
fn check_schedule(plan: &Plan, manifest: &Manifest, folder: &Path) -> Result<()> {
    let own = plan.schedule().map(ToString::to_string);
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
        taken.filter(|&step| factor(plan.schedule(), step) != factor(saved.as_ref(), step));
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
    Err(refuse(folder, "schedule", &expected, format_args!("`{}`: {differs}", Quoted(found))))
}

/// Tensors that the plan and a checkpoint have not alike: name, expected, found.
fn differences(plan: &Plan, manifest: &Manifest) -> Result<Vec<(String, String, String)>> {
    let own = save::tensors_of_checkpoint(plan, manifest.open.as_ref())?;
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

/// Refuses state that no run leaves behind, of the rank whose values this one takes over.
pub(super) fn check_values(
    plan: &Plan,
    (whole, noted, from): (&WholeTensors, &NonFinite, usize),
    folder: &Path,
) -> Result<()> {
    for param in 0..plan.params().len() {
        for (role, dtype) in save::saved_lists(plan, param)? {
            let key = save::key(plan, param, role, from);
            values::check_tensor((folder, &key), (role, dtype), (whole, noted))?;
        }
    }
    Ok(())
}

fn check_steps(plan: &Plan, manifest: &Manifest, folder: &Path) -> Result<()> {
    for (name, &step) in &manifest.steps_of {
        let what = format!("steps of `{}`", Quoted(name));
        if !plan.params.iter().any(|param| param.name == *name) {
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
