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

use fusestep_coalesce::zeroed_bytes;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use fusestep_amp::LossScale;
use fusestep_launch::Backend;
use fusestep_tensor::{DType, ParamDesc, Quoted, Role};
use fusestep_tensor_file::{TensorBytes, TensorFile};

use super::file_sums::{
    FORMAT, FORMAT_KEY, PARAMETERS, VERSION, VERSION_KEY, check_format, check_values, is_old,
    sum_of,
};
use super::names::{SUM, checksum, non_finite_key, sum_key, tensor_name};
use super::refusal::refuse;
use super::settings::{Difference, Rules};
use super::values;
use crate::MAX_STEPS;
use crate::run::units::forget;
use crate::{PlanError, Result, State};

/// Metadata keys of the rule.
const OPTIMIZER: &str = "optimizer";
const OBJECTIVE: &str = "objective";

const STEP: &str = "step";

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
    /// Tensors with values that are infinite or NaN, in order.
    pub fn non_finite(&self) -> impl Iterator<Item = &str> {
        let names = self.tensors.iter().map(|(name, _)| name.as_str());
        names.filter(|name| self.metadata.contains_key(&non_finite_key(name)))
    }
}

pub(crate) fn to_tensors(state: &State, backend: &dyn Backend) -> Result<StateTensors> {
    if let Some(step) = state.poisoned {
        return Err(PlanError::Poisoned { step });
    }
    state.tables.check_settled()?;
    state.check_between_steps("saving")?;
    state.check_counts()?;
    let mut metadata = HashMap::from([
        (FORMAT_KEY.to_owned(), FORMAT.to_owned()),
        (VERSION_KEY.to_owned(), VERSION.to_string()),
        (STEP.to_owned(), state.step.to_string()),
    ]);
    let parameters = state.parameters_xxh3(backend)?;
    metadata.extend(parameters.map(|sum| (PARAMETERS.to_owned(), sum)));
    let rules = Rules::of(state);
    metadata.extend(rules_in_file(&rules));
    metadata.extend(rules.settings());
    if let Some(scale) = state.loss_scale() {
        let [good, bad] = [scale.good_steps(), scale.bad_steps()];
        metadata.insert(LOSS_SCALE.to_owned(), scale.scale().to_string());
        metadata.insert(GOOD_STEPS.to_owned(), good.to_string());
        metadata.insert(BAD_STEPS.to_owned(), bad.to_string());
        metadata.insert(SKIPPED.to_owned(), state.skipped().to_string());
    }
    let mut tensors = Vec::new();
    for (index, param) in state.params.iter().enumerate() {
        let step = state.step_of(&param.name)?;
        if step != state.step {
            metadata.insert(step_key(param), step.to_string());
        }
        for role in state_roles(state, param)? {
            let dtype = state.dtype(role, &param.name)?;
            let mut bytes = zeroed_bytes(param.numel() as usize * dtype.len_bytes())?;
            state.read(backend, role, &param.name, &mut bytes)?;
            let name = tensor_name(param, role);
            values::check_saved(state, index, role, dtype, &bytes)
                .map_err(|(expected, found)| refuse(Path::new("state"), &name, expected, found))?;
            metadata.insert(sum_key(&name), checksum(&bytes));
            let count = values::non_finite_of(role, dtype, &bytes);
            if count > 0 {
                metadata.insert(non_finite_key(&name), count.to_string());
            }
            let tensor = TensorBytes::of(dtype, &param.shape, Cow::Owned(bytes));
            tensors.push((name, tensor));
        }
    }
    let sum = sum_of(&metadata);
    metadata.insert(SUM.to_owned(), sum);
    Ok(StateTensors { tensors, metadata })
}

pub(crate) fn load(
    state: &mut State,
    backend: &dyn Backend,
    path: &Path,
) -> Result<Option<String>> {
    let file = TensorFile::read(path)?;
    check_format(&file)?;
    let steps = check(state, &file)?;
    check_rules(state, &file)?;
    let scale = check_loss_scale(state, &file)?;
    state.settle(backend)?;
    for param in state.params.clone().iter() {
        for role in state_roles(state, param)? {
            let bytes = file.bytes(&tensor_name(param, role)).unwrap_or_default();
            state.write(backend, role, &param.name, bytes)?;
        }
    }
    state.set_step(steps.all);
    for (name, step) in steps.exceptions {
        state.set_step_of(&name, step)?;
    }
    if let (Some(norm), Some((scale, skipped))) = (&mut state.norm, scale) {
        norm.restore(backend, scale, skipped)?;
    }
    forget(state);
    state.poisoned = None;
    Ok(file.metadata().get(PARAMETERS).cloned())
}

/// Metadata of the rules in a file: the first rule's name and direction, and the names of other
/// parameters' rules.
fn rules_in_file(rules: &Rules<'_>) -> BTreeMap<String, String> {
    let own = rules.own_names().into_iter();
    let mut all: BTreeMap<_, _> =
        own.map(|(param, name)| (format!("{OPTIMIZER}@{param}"), name)).collect();
    all.insert(OPTIMIZER.to_owned(), rules.first.name().to_owned());
    all.extend(rules.objective().map(|objective| (OBJECTIVE.to_owned(), objective)));
    all
}

fn state_roles(state: &State, param: &ParamDesc) -> Result<Vec<Role>> {
    let mut roles = state.roles(&param.name)?;
    roles.retain(|role| role.is_state());
    Ok(roles)
}

/// Compares a file's tensors and step counts with those of this state.
fn check(state: &State, file: &TensorFile) -> Result<Steps> {
    let mut known = 0;
    for param in state.params.iter() {
        for role in state_roles(state, param)? {
            let dtype = state.dtype(role, &param.name)?;
            check_tensor(file, param, role, dtype)?;
            check_values(file, param, role, dtype)?;
            known += 1;
        }
    }
    if known != file.entries().len() {
        let extra = file.entries().keys().find(|name| !keeps(state, name));
        let name = extra.map_or("", String::as_str);
        let param = name.rsplit_once('@').map_or("", |(param, _)| param);
        let found = match state.find(param) {
            Ok(_) => "one of a parameter whose rule and settings keep other tensors here",
            Err(_) => "a tensor of no parameter given",
        };
        return Err(refuse(file.path(), name, "no such tensor", found));
    }
    let text = file.metadata().get(STEP);
    let text = text.ok_or_else(|| {
        refuse(file.path(), STEP, "the steps run, as metadata", "no such metadata")
    })?;
    let all = count(file, STEP, text)?;
    let mut exceptions = Vec::new();
    for param in state.params.iter() {
        let key = step_key(param);
        if let Some(text) = file.metadata().get(&key) {
            let step = count(file, &key, text)?;
            if step > all {
                let expected = format!("at most the state's step {all}");
                return Err(refuse(file.path(), &key, expected, step));
            }
            exceptions.push((param.name.clone(), step));
        }
    }
    let steps = Steps { all, exceptions };
    check_begun(state, file, &steps)?;
    Ok(steps)
}

/// Refuses state of parameters that have taken no step.
fn check_begun(state: &State, file: &TensorFile, steps: &Steps) -> Result<()> {
    // Averages over ranks bring state to ranks that have taken no step themselves.
    if steps.all > 0 && state.averages_ranks {
        return Ok(());
    }
    let behind: HashMap<&str, u64> =
        steps.exceptions.iter().map(|(name, step)| (name.as_str(), *step)).collect();
    for param in state.params.iter() {
        if behind.get(param.name.as_str()).copied().unwrap_or(steps.all) > 0 {
            continue;
        }
        for role in state_roles(state, param)? {
            let (name, dtype) = (tensor_name(param, role), state.dtype(role, &param.name)?);
            let bytes = file.bytes(&name).unwrap_or_default();
            values::check_begun(role, dtype, bytes)
                .map_err(|(expected, found)| refuse(file.path(), &name, expected, found))?;
        }
    }
    Ok(())
}

/// Compares the rules, since state of another rule may have the same shapes and another meaning.
/// Old files may not name theirs.
fn check_rules(state: &State, file: &TensorFile) -> Result<()> {
    let rules = Rules::of(state);
    let own = rules_in_file(&rules);
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
    // The rules are alike here, so only files from before there were such entries lack any.
    match rules.difference(file.metadata().iter()) {
        None => Ok(()),
        Some(Difference { what, expected, found }) => {
            Err(refuse(file.path(), &what, expected, found))
        }
    }
}

/// The loss scale of a file and its skipped steps, if both file and plan have a loss scale. A plan
/// with a fixed scale keeps its own.
fn check_loss_scale(state: &State, file: &TensorFile) -> Result<Option<(LossScale, u64)>> {
    let text = |key| file.metadata().get(key);
    let (Some(own), Some(found)) = (state.loss_scale(), text(LOSS_SCALE)) else {
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
    Ok(Some((scale, skipped)))
}

fn keeps(state: &State, tensor_name: &str) -> bool {
    let Some((name, suffix)) = tensor_name.rsplit_once('@') else {
        return false;
    };
    let roles = state.roles(name).unwrap_or_default();
    roles.iter().any(|role| role.is_state() && role.name() == suffix)
}

struct Steps {
    all: u64,
    exceptions: Vec<(String, u64)>,
}

fn step_key(param: &ParamDesc) -> String {
    format!("{STEP}@{}", param.name)
}

fn check_tensor(file: &TensorFile, param: &ParamDesc, role: Role, dtype: DType) -> Result<()> {
    let name = tensor_name(param, role);
    let expected = || format!("{dtype} {}", param.shape);
    let Some(entry) = file.entries().get(&name) else {
        return Err(refuse(file.path(), &name, expected(), "no such tensor"));
    };
    if entry.element_type() != Some(dtype) || entry.shape != param.shape {
        let found = format!("{} {}", entry.dtype_name(), entry.shape);
        return Err(refuse(file.path(), &name, expected(), Quoted(&found)));
    }
    Ok(())
}

fn count(file: &TensorFile, key: &str, text: &str) -> Result<u64> {
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
