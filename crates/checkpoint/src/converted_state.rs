//! State files whose state is converted to another type.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use fusestep_tensor::{ParamDesc, Quoted, Role, Shape};
use fusestep_tensor_file::{TensorBytes, TensorFile, write_atomically};

use crate::converted::{KeptState, Saved};
use crate::manifest::TensorSpec;
use crate::names::{SUM, checksum, non_finite_key, sum_key, tensor_name};
use crate::refusal::refuse;
use crate::state_file::{OPTIMIZER, STEP, count};
use crate::state_sums::{check_format, check_values, is_old, sum_of};
use crate::values::{CHECKED, SavedTensors, WholeTensors, noted_in};
use crate::{Result, WholeSpecs};

/// Writes a state file whose state is kept in another type, as [`crate::convert`] does with
/// checkpoints: what is in `params` says of which types the parameters are that it belongs to.
/// Returns the types and shapes of the tensors before and after.
///
/// # Errors
/// [`PlanError::File`]; [`PlanError::Checkpoint`] naming a tensor that is damaged, of no parameter
/// or of another shape, that no run can have or that has no such type, or if there is nothing to
/// convert. `to` is as it was then.
///
/// [`PlanError::Checkpoint`]: fusestep_planner::PlanError::Checkpoint
/// [`PlanError::File`]: fusestep_planner::PlanError::File
pub fn convert_state(
    from: &Path,
    to: &Path,
    params: &[ParamDesc],
    state: KeptState<'_>,
) -> Result<[WholeSpecs; 2]> {
    let file = TensorFile::read(from)?;
    check_format(&file)?;
    let rules = Texts::of(&file)?;
    let (specs, tensors) = tensors_of(&file, params)?;
    let saved = Saved {
        optimizer: &rules.optimizer,
        optimizer_of: &rules.optimizer_of,
        step: rules.step,
        steps_of: &rules.steps_of,
        settings: file.metadata().clone().into_iter().collect(),
        specs: specs.clone(),
        tensors,
    };
    let Saved { settings: mut metadata, specs: now, tensors, .. } = saved.converted(from, state)?;
    metadata.remove(SUM);
    for name in specs.keys() {
        metadata.remove(&sum_key(name));
        metadata.remove(&non_finite_key(name));
    }
    let of_params: Vec<String> = params.iter().map(|own| param_key(&own.name)).collect();
    let mut written = Vec::new();
    for (name, spec) in now.iter().filter(|(name, _)| !of_params.contains(name)) {
        let bytes = tensors.bytes(name);
        if !is_old(&file) {
            metadata.insert(sum_key(name), checksum(bytes));
        }
        if let Some(noted) = tensors.non_finite.get(name) {
            metadata.insert(non_finite_key(name), noted.to_string());
        }
        let bytes = TensorBytes::of(spec.dtype, &spec.shape, Cow::Borrowed(bytes));
        written.push((name.clone(), bytes));
    }
    let mut metadata = metadata.into_iter().collect();
    if !is_old(&file) {
        let sum = sum_of(&metadata);
        metadata.insert(SUM.to_owned(), sum);
    }
    write_atomically(to, &written, metadata)?;
    let state_of = |mut specs: WholeSpecs| {
        specs.retain(|name, _| !of_params.contains(name));
        specs
    };
    Ok([specs, now].map(state_of))
}

/// Rules and counts of a state file.
struct Texts {
    optimizer: String,
    optimizer_of: BTreeMap<String, String>,
    step: u64,
    steps_of: BTreeMap<String, u64>,
}

impl Texts {
    fn of(file: &TensorFile) -> Result<Self> {
        let metadata = file.metadata();
        let text = |key: &str| {
            let none = || refuse(file.path(), key, "metadata of a state", "none under this key");
            metadata.get(key).cloned().ok_or_else(none)
        };
        let of_params = |key: &str| {
            let mark = format!("{key}@");
            let own = metadata.iter().filter_map(move |(key, value)| {
                Some((key.strip_prefix(&mark)?.to_owned(), value.clone()))
            });
            own.collect::<BTreeMap<_, _>>()
        };
        let steps_of = of_params(STEP).into_iter();
        let steps_of = steps_of.map(|(name, text)| {
            let steps = count(file, &format!("{STEP}@{name}"), &text)?;
            Ok((name, steps))
        });
        Ok(Self {
            optimizer: text(OPTIMIZER)?,
            optimizer_of: of_params(OPTIMIZER),
            step: count(file, STEP, &text(STEP)?)?,
            steps_of: steps_of.collect::<Result<_>>()?,
        })
    }
}

fn param_key(name: &str) -> String {
    tensor_name(name, Role::Param)
}

/// Types, shapes and values of a file's tensors, and types and shapes of the parameters.
fn tensors_of(file: &TensorFile, params: &[ParamDesc]) -> Result<(WholeSpecs, SavedTensors)> {
    let of_param = |own: &ParamDesc| {
        (param_key(&own.name), TensorSpec { dtype: own.dtype, shape: own.shape.clone() })
    };
    let mut specs: WholeSpecs = params.iter().map(of_param).collect();
    let (mut whole, mut non_finite) = (WholeTensors::new(), BTreeMap::new());
    for (name, entry) in file.entries() {
        let refuse = |expected: &str, found: &str| {
            Err(refuse(file.path(), name, expected, Quoted(found).to_string()))
        };
        let Some((own, role)) = name.rsplit_once('@').and_then(|(param, role)| {
            let own = params.iter().find(|own| own.name == param)?;
            Some((own, role_of(role)?))
        }) else {
            return refuse("state of the parameters given", "state of no such parameter");
        };
        let Some(dtype) = entry.element_type() else {
            return refuse("a type that state is kept in", &entry.dtype_name());
        };
        let shape = match role.unit_of() {
            Some(_) => Shape::new([role.entries(own.numel())])?,
            None => own.shape.clone(),
        };
        if entry.shape != shape {
            return refuse(&format!("shape {shape}"), &entry.shape.to_string());
        }
        check_values(file, name, role, dtype)?;
        if let Some(noted) = noted_in(file, name)? {
            non_finite.insert(name.clone(), noted);
        }
        specs.insert(name.clone(), TensorSpec { dtype, shape });
        whole.insert(name.clone(), file.bytes(name).unwrap_or_default().to_vec());
    }
    Ok((specs, SavedTensors { whole, non_finite }))
}

/// The role of a list of a state file by its name.
pub(crate) fn role_of(name: &str) -> Option<Role> {
    let units = CHECKED.into_iter().filter_map(Role::units);
    let mut all = CHECKED.into_iter().chain(units).chain([Role::Master, Role::Remainder]);
    all.find(|role| role.name() == name)
}
