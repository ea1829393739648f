//! Settings of a run that its checkpoint keeps as texts, and that a run which goes on has alike.

use std::collections::BTreeMap;
use std::path::Path;

use fusestep::StepOptions;
use fusestep_planner::PlanError;
use fusestep_tensor::Quoted;

use crate::planning::flag_of;
use crate::settings::{MICRO_STEPS, micro_steps};
use crate::train::args::TrainArgs;

/// A setting, as text.
pub(super) struct Saved {
    /// Name of the flag, without dashes.
    name: &'static str,
    text: String,
    /// Whether --any-settings allows another.
    may_change: bool,
}

/// The text of a setting that is not given.
const NONE: &str = "none";

/// The name of a setting that every checkpoint of `train` has.
const SEED: &str = "seed";

/// Settings that decide the model and which samples an update has, and factors on rates.
pub(super) fn saved_as(args: &TrainArgs, options: &StepOptions) -> Vec<Saved> {
    let factors = options.lr_scale.iter().map(|of| format!("{}={}", of.pattern, of.value));
    let factors: Vec<String> = factors.collect();
    let factors = if factors.is_empty() { NONE.to_owned() } else { factors.join(", ") };
    let mut all = args.task.texts();
    all.extend([
        (SEED, args.seed.to_string()),
        ("batch", args.batch.to_string()),
        (MICRO_STEPS, micro_steps(options).to_string()),
        ("dtype", args.dtype.to_string()),
    ]);
    let fixed = all.into_iter().map(|(name, text)| Saved { name, text, may_change: false });
    fixed.chain([Saved { name: "lr_scale", text: factors, may_change: true }]).collect()
}

/// Puts the settings among the texts of a checkpoint.
pub(super) fn keep(all: Vec<Saved>, texts: &mut BTreeMap<String, String>) {
    texts.extend(all.into_iter().map(|own| (own.name.to_owned(), own.text)));
}

/// Refuses a checkpoint of another program, and one of other settings; `any` lets those differ that
/// may change.
pub(super) fn check(
    folder: &Path,
    all: &[Saved],
    texts: &BTreeMap<String, String>,
    any: bool,
) -> Result<(), PlanError> {
    let refused = |what: String, expected: &str, found: String| PlanError::Checkpoint {
        path: folder.display().to_string(),
        what,
        expected: expected.to_owned(),
        found,
    };
    if !texts.contains_key(SEED) {
        let found = "that of another program; give the --checkpoint of a run of `train`".to_owned();
        return Err(refused("run".to_owned(), "one of `fusestep train`", found));
    }
    for own in all.iter().filter(|own| !(any && own.may_change)) {
        // Runs of earlier versions do not say all of this.
        let Some(found) = texts.get(own.name).filter(|found| **found != own.text) else {
            continue;
        };
        let (flag, found) = (flag_of(own.name), Quoted(found));
        let given: Vec<String> =
            found.0.split(", ").map(|text| format!("{flag} {}", Quoted(text))).collect();
        let cure = if found.0 == NONE {
            format!("leave {flag} out to go on")
        } else {
            format!("give {} to go on", given.join(" "))
        };
        let other = if own.may_change {
            "allow other settings by --any-settings"
        } else {
            "another --checkpoint and no --resume to begin anew"
        };
        let found = format!("{found} in the checkpoint; {cure}, or {other}");
        return Err(refused(flag, &own.text, found));
    }
    Ok(())
}
