//! A state's optimizer tensors as a file.
//!
//! The file is logical: tensors under their parameter's name, no padding, no plan. Any plan of the
//! same parameters loads it.
//!
//! ```text
//! <name>@<role>        a tensor; the metadata's xxh3@<name>@<role> is the checksum of its bytes
//! format, version      fusestep-state, 2; files of version 1 have neither these nor checksums and
//!                      are read without
//! step, step@<name>    steps run, and those of a parameter that has missed some
//! optimizer, objective the rule and the direction of its steps; optimizer@<name> of a parameter
//!                      with a rule of its own
//! beta1, …             settings under which the state would mean something else
//! set, set.…, built.…  all other settings that decide bits: module `settings`
//! non_finite@<name>@<role>  how many of that tensor's values are infinite or NaN, if any are
//! parameters_xxh3      of the parameters that the state belongs to, unless the caller keeps them
//! loss_scale, …        with the pass `loss_scaling`
//! xxh3                 of all other metadata
//! ```

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use fusestep_amp::LossScale;
use fusestep_coalesce::zeroed_bytes;
use fusestep_launch::Backend;
use fusestep_planner::{ListImage, MAX_STEPS, ParamImage, RunCounts, RunImage, State};
use fusestep_tensor::Quoted;
use fusestep_tensor_file::{TensorBytes, TensorFile, write_atomically};

use crate::fits;
use crate::names::{SUM, checksum, non_finite_key, sum_key, tensor_name};
use crate::refusal::refuse;
use crate::settings::{Difference, Rules};
use crate::state_sums::{
    FORMAT, FORMAT_KEY, PARAMETERS, VERSION, VERSION_KEY, check_format, check_values, is_old,
    sum_of,
};
use crate::values::SavedList;
use crate::{Result, values};

/// Metadata keys of the rule.
pub(crate) const OPTIMIZER: &str = "optimizer";
const OBJECTIVE: &str = "objective";

pub(crate) const STEP: &str = "step";

/// Metadata keys of the loss scale, its counters and the steps skipped.
const LOSS_SCALE: &str = "loss_scale";
const GOOD_STEPS: &str = "loss_scale_good_steps";
const BAD_STEPS: &str = "loss_scale_bad_steps";
const SKIPPED: &str = "skipped";

/// A state ready to be written.
#[derive(Clone, Debug)]
pub struct StateTensors {
    /// Tensors under their names in the file.
    pub tensors: Vec<(String, TensorBytes<'static>)>,
    /// Texts about the file.
    pub metadata: HashMap<String, String>,
}

impl StateTensors {
    /// The optimizer's tensors of a state as `<name>@moment1`, `<name>@moment2`, …, masters among
    /// them (`<name>@master`), and metadata: `step`, the steps run, and `step@<name>` for a
    /// parameter that has missed some; with pass `loss_scaling` also `loss_scale`, its counters and
    /// `skipped`. Parameters and gradients are left out.
    ///
    /// # Errors
    /// [`PlanError::Poisoned`]; [`PlanError::Unsettled`]; [`PlanError::Backend`];
    /// [`PlanError::Checkpoint`] naming state of a parameter that has taken no step, which no
    /// reader takes.
    ///
    /// [`PlanError::Backend`]: fusestep_planner::PlanError::Backend
    /// [`PlanError::Checkpoint`]: fusestep_planner::PlanError::Checkpoint
    /// [`PlanError::Poisoned`]: fusestep_planner::PlanError::Poisoned
    /// [`PlanError::Unsettled`]: fusestep_planner::PlanError::Unsettled
    pub fn of(state: &State, backend: &dyn Backend) -> Result<Self> {
        let image = RunImage::describe_saved(state)?;
        let mut metadata = metadata_of(&image);
        let parameters = state.parameters_xxh3(backend)?;
        metadata.extend(parameters.map(|sum| (PARAMETERS.to_owned(), sum)));
        let mut tensors = Vec::new();
        for (param, desc) in image.params.iter().enumerate() {
            for list in &desc.lists {
                let (ListImage { role, dtype }, shape) = (*list, list.shape(&desc.shape));
                let mut bytes = zeroed_bytes(shape.numel() as usize * dtype.len_bytes())?;
                state.read(backend, role, &desc.name, &mut bytes)?;
                let name = tensor_name(&desc.name, role);
                let saved = SavedList { param, role, dtype, bytes: &bytes };
                values::check_saved(&image, saved).map_err(|(expected, found)| {
                    refuse(Path::new("state"), &name, expected, found)
                })?;
                metadata.insert(sum_key(&name), checksum(&bytes));
                let count = values::non_finite_of(role, dtype, &bytes);
                if count > 0 {
                    metadata.insert(non_finite_key(&name), count.to_string());
                }
                let tensor = TensorBytes::of(dtype, &shape, Cow::Owned(bytes));
                tensors.push((name, tensor));
            }
        }
        let sum = sum_of(&metadata);
        metadata.insert(SUM.to_owned(), sum);
        Ok(Self { tensors, metadata })
    }

    /// Tensors with values that are infinite or NaN, in order.
    pub fn non_finite(&self) -> impl Iterator<Item = &str> {
        let names = self.tensors.iter().map(|(name, _)| name.as_str());
        names.filter(|name| self.metadata.contains_key(&non_finite_key(name)))
    }
}

/// Writes [`StateTensors::of`] as a file, all or nothing.
///
/// # Errors
/// As [`StateTensors::of`]; [`PlanError::File`], and an existing file is as it was.
///
/// [`PlanError::File`]: fusestep_planner::PlanError::File
pub fn save_state(state: &State, backend: &dyn Backend, path: &Path) -> Result<()> {
    let StateTensors { tensors, metadata } = StateTensors::of(state, backend)?;
    Ok(write_atomically(path, &tensors, metadata)?)
}

/// Reads what [`save_state`] wrote; returns the [`State::parameters_xxh3`] that it was saved with,
/// if the file says so.
///
/// # Errors
/// [`PlanError::File`]; [`PlanError::Checkpoint`] naming the first tensor that is missing, extra,
/// damaged, of another shape, dtype or rule, or that no run can have: a negative mean of squares,
/// or values that are not finite where the file does not say so. The whole file is checked before
/// anything changes.
///
/// [`PlanError::Checkpoint`]: fusestep_planner::PlanError::Checkpoint
/// [`PlanError::File`]: fusestep_planner::PlanError::File
pub fn load_state(state: &mut State, backend: &dyn Backend, path: &Path) -> Result<Option<String>> {
    let file = TensorFile::read(path)?;
    check_format(&file)?;
    let image = RunImage::describe_state(state)?;
    let mut counts = check(&image, &file)?;
    check_rules(&image, &file)?;
    let scale = check_loss_scale(&image, &file)?;
    counts.skipped = scale.map_or(0, |found| found.skipped);
    let scale = scale.map(|found| found.scale);
    image.restore_state(state, backend, &counts, scale, |param, role| {
        file.bytes(&tensor_name(&image.params[param].name, role)).unwrap_or_default()
    })?;
    Ok(file.metadata().get(PARAMETERS).cloned())
}

/// Metadata of a state but for its checksums.
fn metadata_of(image: &RunImage) -> HashMap<String, String> {
    let counts = &image.counts;
    let mut metadata = HashMap::from([
        (FORMAT_KEY.to_owned(), FORMAT.to_owned()),
        (VERSION_KEY.to_owned(), VERSION.to_string()),
        (STEP.to_owned(), counts.step.to_string()),
    ]);
    metadata.extend(rules_in_file(image));
    metadata.extend(Rules(&image.rules).settings());
    if let Some((scale, good, bad)) = counts.loss_scale {
        metadata.insert(LOSS_SCALE.to_owned(), scale.to_string());
        metadata.insert(GOOD_STEPS.to_owned(), good.to_string());
        metadata.insert(BAD_STEPS.to_owned(), bad.to_string());
        metadata.insert(SKIPPED.to_owned(), counts.skipped.to_string());
    }
    for (param, &step) in image.params.iter().zip(&counts.steps_of) {
        if step != counts.step {
            metadata.insert(step_key(param), step.to_string());
        }
    }
    metadata
}

/// Metadata of the rules in a file: the first rule's name and direction, and the names of other
/// parameters' rules.
fn rules_in_file(image: &RunImage) -> BTreeMap<String, String> {
    let own = image.rules.own.iter();
    let mut all: BTreeMap<_, _> =
        own.map(|(param, name)| (format!("{OPTIMIZER}@{param}"), name.clone())).collect();
    all.insert(OPTIMIZER.to_owned(), image.rules.first.clone());
    let objective = image.rules.objective.iter();
    all.extend(objective.map(|objective| (OBJECTIVE.to_owned(), objective.clone())));
    all
}

/// Compares a file's tensors and step counts with those of a state; returns the counts of steps.
fn check(image: &RunImage, file: &TensorFile) -> Result<RunCounts> {
    let mut known = 0;
    for param in &image.params {
        for &list in &param.lists {
            check_tensor(image, file, param, list)?;
            check_values(file, &tensor_name(&param.name, list.role), list.role, list.dtype)?;
            known += 1;
        }
    }
    if known != file.entries().len() {
        let extra = file.entries().keys().find(|name| !keeps(image, name));
        let name = extra.map_or("", String::as_str);
        let param = name.rsplit_once('@').map_or("", |(param, _)| param);
        let found = if image.params.iter().any(|own| own.name == param) {
            "one of a parameter whose rule and settings keep other tensors here"
        } else {
            "a tensor of no parameter given"
        };
        return Err(refuse(file.path(), name, "no such tensor", found));
    }
    let text = file.metadata().get(STEP);
    let text = text.ok_or_else(|| {
        refuse(file.path(), STEP, "the steps run, as metadata", "no such metadata")
    })?;
    let all = count(file, STEP, text)?;
    let mut steps_of = Vec::with_capacity(image.params.len());
    for param in &image.params {
        let key = step_key(param);
        let step = match file.metadata().get(&key) {
            Some(text) => count(file, &key, text)?,
            None => all,
        };
        if step > all {
            let expected = format!("at most the state's step {all}");
            return Err(refuse(file.path(), &key, expected, step));
        }
        steps_of.push(step);
    }
    let counts = RunCounts { step: all, steps_of, ..RunCounts::default() };
    check_begun(image, file, &counts)?;
    Ok(counts)
}

/// Refuses state of parameters that have taken no step, and codes that no step leaves.
fn check_begun(image: &RunImage, file: &TensorFile, counts: &RunCounts) -> Result<()> {
    // Averages over ranks bring state to ranks that have taken no step themselves.
    let averaged = counts.step > 0 && image.averages;
    let params = image.params.iter().zip(&counts.steps_of);
    for (param, &step) in params.filter(|(_, step)| **step > 0 || !averaged) {
        let check = if step > 0 { values::check_taken } else { values::check_begun };
        for &ListImage { role, dtype } in &param.lists {
            let name = tensor_name(&param.name, role);
            let bytes = file.bytes(&name).unwrap_or_default();
            check(role, dtype, bytes)
                .map_err(|(expected, found)| refuse(file.path(), &name, expected, found))?;
        }
    }
    Ok(())
}

/// Compares the rules, since state of another rule may have the same shapes and another meaning.
/// Old files may not name theirs.
fn check_rules(image: &RunImage, file: &TensorFile) -> Result<()> {
    let own = rules_in_file(image);
    let of_rules = |key: &&String| {
        let of_param = key.strip_prefix(OPTIMIZER);
        **key == OBJECTIVE || of_param.is_some_and(|rest| rest.is_empty() || rest.starts_with('@'))
    };
    // The rule itself first: what else differs follows from it.
    let first = OPTIMIZER.to_owned();
    let all = own.keys().chain(file.metadata().keys().filter(of_rules));
    for key in std::iter::once(&first).chain(all) {
        let (expected, found) = (own.get(key), file.metadata().get(key));
        // Every version says which rule it is of.
        let may_lack = is_old(file) && *key != first;
        if expected == found || (found.is_none() && may_lack) {
            continue;
        }
        let text = |value: Option<&String>| {
            let value = value.map_or("none", String::as_str);
            Quoted(value).to_string()
        };
        let found = format!("{}; run the rule that has saved it, or start without it", text(found));
        return Err(refuse(file.path(), key, text(expected), found));
    }
    // The rules are alike here, so only files from before there were such entries lack any. So are
    // the tensors.
    let or_without = "; go on with that, or start without the state";
    match Rules(&image.rules).difference(file.metadata().iter(), or_without, true) {
        None => Ok(()),
        Some(Difference { what, expected, found }) => {
            Err(refuse(file.path(), &what, expected, found))
        }
    }
}

/// Loss scale of a file, and the steps that it has skipped.
#[derive(Clone, Copy)]
struct FoundScale {
    scale: LossScale,
    skipped: u64,
}

/// The loss scale of a file and its skipped steps, if both file and state have a loss scale. A plan
/// with a fixed scale keeps its own.
fn check_loss_scale(image: &RunImage, file: &TensorFile) -> Result<Option<FoundScale>> {
    let text = |key| file.metadata().get(key);
    let (Some(own), Some(found)) = (image.loss_scale, text(LOSS_SCALE)) else {
        return Ok(None);
    };
    let number = |key| text(key).map_or(Ok(0), |found| count(file, key, found));
    let steps = |key| -> Result<u32> {
        // A counter beyond 32 bits is beyond every interval, and so is the largest one.
        Ok(u32::try_from(number(key)?).unwrap_or(u32::MAX))
    };
    let (good, bad, skipped) = (steps(GOOD_STEPS)?, steps(BAD_STEPS)?, number(SKIPPED)?);
    let policy = own.policy();
    let scale = found.parse().unwrap_or(f64::NAN);
    let scale = own.restored(scale, good, bad).map_err(|_| {
        let expected = format!("a power of two from {} to {:e}", policy.floor, policy.ceiling);
        refuse(file.path(), LOSS_SCALE, expected, Quoted(found))
    })?;
    Ok(Some(FoundScale { scale, skipped }))
}

fn keeps(image: &RunImage, tensor: &str) -> bool {
    let Some((name, suffix)) = tensor.rsplit_once('@') else {
        return false;
    };
    let own = image.params.iter().find(|param| param.name == name);
    own.is_some_and(|param| param.lists.iter().any(|list| list.role.name() == suffix))
}

fn step_key(param: &ParamImage) -> String {
    format!("{STEP}@{}", param.name)
}

fn check_tensor(
    image: &RunImage,
    file: &TensorFile,
    param: &ParamImage,
    list: ListImage,
) -> Result<()> {
    let name = tensor_name(&param.name, list.role);
    let shape = list.shape(&param.shape);
    let expected = || format!("{} {shape}", list.dtype);
    let Some(entry) = file.entries().get(&name) else {
        return Err(refuse(file.path(), &name, expected(), "no such tensor"));
    };
    let other = entry.element_type().filter(|_| values::CHECKED.contains(&list.role));
    if let (Some(own), Some(found)) = (fits::name_of(list.dtype), other.and_then(fits::name_of))
        && own != found
    {
        let found = format!(
            "state in {found}; give `state_dtype` {found}, or convert it by `fusestep checkpoint \
             convert {}`",
            fits::converted_to(image, own)
        );
        return Err(refuse(file.path(), &name, format_args!("state in {own}"), found));
    }
    if entry.element_type() != Some(list.dtype) || entry.shape != shape {
        let found = format!("{} {}", entry.dtype_name(), entry.shape);
        return Err(refuse(file.path(), &name, expected(), Quoted(&found)));
    }
    Ok(())
}

/// A count of steps in the metadata.
pub(crate) fn count(file: &TensorFile, key: &str, text: &str) -> Result<u64> {
    let count = text.parse().ok().filter(|&count| count <= MAX_STEPS);
    count.ok_or_else(|| {
        refuse(
            file.path(),
            key,
            format_args!("a count of steps, {MAX_STEPS} at most"),
            Quoted(text),
        )
    })
}
