//! A state's optimizer tensors as a file.
//!
//! The file is logical: tensors under their parameter's name, no padding, no plan. Any plan of the same parameters loads it.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;

use fusestep_amp::LossScale;
use fusestep_launch::Backend;
use fusestep_tensor::{DType, ParamDesc, Role};
use fusestep_tensor_file::{TensorBytes, TensorFile, write_atomically};

use crate::{PlanError, State};

/// Metadata key of the steps run.
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

impl State {
    /// The optimizer's tensors as `<name>@moment1`, `<name>@moment2`, …, masters among them (`<name>@master`), and metadata: `step`, the
    /// steps run, and `step@<name>` for a parameter that has missed some; with pass `loss_scaling` also `loss_scale`, its counters and
    /// `skipped`. Parameters and gradients are left out.
    ///
    /// # Errors
    /// [`PlanError::Poisoned`]; [`PlanError::Unsettled`]; [`PlanError::Backend`].
    pub fn to_tensors(&self, backend: &dyn Backend) -> Result<StateTensors, PlanError> {
        if let Some(step) = self.poisoned {
            return Err(PlanError::Poisoned { step });
        }
        self.tables.check_settled()?;
        let mut metadata = HashMap::from([
            (STEP.to_owned(), self.step.to_string()),
            ("optimizer".to_owned(), self.optimizer().name().to_owned()),
        ]);
        if let Some(scale) = self.loss_scale() {
            let [good, bad] = [scale.good_steps(), scale.bad_steps()];
            metadata.insert(LOSS_SCALE.to_owned(), scale.scale().to_string());
            metadata.insert(GOOD_STEPS.to_owned(), good.to_string());
            metadata.insert(BAD_STEPS.to_owned(), bad.to_string());
            metadata.insert(SKIPPED.to_owned(), self.skipped().to_string());
        }
        let mut tensors = Vec::new();
        for param in self.params.iter() {
            let step = self.step_of(&param.name)?;
            if step != self.step {
                metadata.insert(step_key(param), step.to_string());
            }
            for role in self.state_roles(param)? {
                let dtype = self.dtype(role, &param.name)?;
                let mut bytes = vec![0; param.numel() as usize * dtype.len_bytes()];
                self.read(backend, role, &param.name, &mut bytes)?;
                let tensor = TensorBytes::of(dtype, &param.shape, Cow::Owned(bytes));
                tensors.push((tensor_name(param, role), tensor));
            }
        }
        Ok(StateTensors { tensors, metadata })
    }

    /// Writes [`State::to_tensors`] as a file, all or nothing.
    ///
    /// # Errors
    /// As [`State::to_tensors`]; [`PlanError::File`], and an existing file is as it was.
    pub fn save(&self, backend: &dyn Backend, path: &Path) -> Result<(), PlanError> {
        let StateTensors { tensors, metadata } = self.to_tensors(backend)?;
        Ok(write_atomically(path, &tensors, metadata)?)
    }

    /// Reads what [`State::save`] wrote.
    ///
    /// # Errors
    /// [`PlanError::File`]; [`PlanError::StateFile`] naming the first tensor that is missing, extra or of another shape or dtype.
    /// The whole file is checked before anything changes.
    pub fn load(&mut self, backend: &dyn Backend, path: &Path) -> Result<(), PlanError> {
        let file = TensorFile::read(path)?;
        let steps = self.check(&file)?;
        let scale = self.check_loss_scale(&file)?;
        self.settle(backend)?;
        for param in self.params.clone().iter() {
            for role in self.state_roles(param)? {
                let bytes = file.bytes(&tensor_name(param, role)).unwrap_or_default();
                self.write(backend, role, &param.name, bytes)?;
            }
        }
        self.set_step(steps.all);
        for (name, step) in steps.apart {
            self.set_step_of(&name, step)?;
        }
        if let (Some(norm), Some((scale, skipped))) = (&mut self.norm, scale) {
            norm.restore(backend, scale, skipped)?;
        }
        self.poisoned = None;
        Ok(())
    }

    fn state_roles(&self, param: &ParamDesc) -> Result<Vec<Role>, PlanError> {
        let mut roles = self.roles(&param.name)?;
        roles.retain(|role| role.is_state());
        Ok(roles)
    }

    /// Compares a file with what this state keeps.
    fn check(&self, file: &TensorFile) -> Result<Steps, PlanError> {
        let mut known = 0;
        for param in self.params.iter() {
            for role in self.state_roles(param)? {
                check_tensor(file, param, role, self.dtype(role, &param.name)?)?;
                known += 1;
            }
        }
        if known != file.entries().len() {
            let extra = file.entries().keys().find(|name| !self.keeps(name));
            let name = extra.map_or("", String::as_str);
            let found = "a tensor of no parameter given".to_owned();
            return Err(refuse(file, name, "no such tensor".to_owned(), found));
        }
        let text = file.metadata().get(STEP);
        let text = text.ok_or_else(|| {
            let expected = "the steps run, as metadata".to_owned();
            refuse(file, STEP, expected, "no such metadata".to_owned())
        })?;
        let all = count(file, STEP, text)?;
        let mut apart = Vec::new();
        for param in self.params.iter() {
            let key = step_key(param);
            if let Some(text) = file.metadata().get(&key) {
                let step = count(file, &key, text)?;
                if step > all {
                    let expected = format!("at most the state's step {all}");
                    return Err(refuse(file, &key, expected, step.to_string()));
                }
                apart.push((param.name.clone(), step));
            }
        }
        Ok(Steps { all, apart })
    }

    /// The loss scale of a file and the steps skipped, if file and plan have one. A plan with a fixed scale keeps its own.
    fn check_loss_scale(&self, file: &TensorFile) -> Result<Option<(LossScale, u64)>, PlanError> {
        let text = |key| file.metadata().get(key);
        let (Some(own), Some(found)) = (self.loss_scale(), text(LOSS_SCALE)) else {
            return Ok(None);
        };
        let number = |key| text(key).map_or(Ok(0), |found| count(file, key, found));
        let steps = |key| -> Result<u32, PlanError> {
            // A counter beyond 32 bits is beyond every interval, and so is the largest one.
            Ok(u32::try_from(number(key)?).unwrap_or(u32::MAX))
        };
        let (good, bad, skipped) = (steps(GOOD_STEPS)?, steps(BAD_STEPS)?, number(SKIPPED)?);
        let policy = own.policy();
        if policy.growth == 1.0 && policy.backoff == 1.0 {
            return Ok(Some((own, skipped)));
        }
        let scale = found.parse().unwrap_or(f64::NAN);
        let scale = own.restored(scale, good, bad).map_err(|_| {
            let expected = format!(
                "a power of two from {} to {:e}",
                policy.floor, policy.ceiling
            );
            refuse(file, LOSS_SCALE, expected, format!("{found:?}"))
        })?;
        Ok(Some((scale, skipped)))
    }

    fn keeps(&self, tensor_name: &str) -> bool {
        let Some((name, suffix)) = tensor_name.rsplit_once('@') else {
            return false;
        };
        let roles = self.roles(name).unwrap_or_default();
        roles
            .iter()
            .any(|role| role.is_state() && role.name() == suffix)
    }
}

/// The step counts of a file.
struct Steps {
    all: u64,
    apart: Vec<(String, u64)>,
}

fn tensor_name(param: &ParamDesc, role: Role) -> String {
    format!("{}@{role}", param.name)
}

fn step_key(param: &ParamDesc) -> String {
    format!("{STEP}@{}", param.name)
}

fn check_tensor(
    file: &TensorFile,
    param: &ParamDesc,
    role: Role,
    dtype: DType,
) -> Result<(), PlanError> {
    let name = tensor_name(param, role);
    let expected = || format!("{dtype} {}", param.shape);
    let Some(entry) = file.entries().get(&name) else {
        return Err(refuse(file, &name, expected(), "no such tensor".to_owned()));
    };
    if entry.element_type() != Some(dtype) || entry.shape != param.shape {
        let found = format!("{} {}", entry.dtype_name(), entry.shape);
        return Err(refuse(file, &name, expected(), found));
    }
    Ok(())
}

fn count(file: &TensorFile, key: &str, text: &str) -> Result<u64, PlanError> {
    let expected = || "a count of steps".to_owned();
    text.parse()
        .map_err(|_| refuse(file, key, expected(), format!("{text:?}")))
}

fn refuse(file: &TensorFile, name: &str, expected: String, found: String) -> PlanError {
    PlanError::StateFile {
        path: file.path().display().to_string(),
        name: name.to_owned(),
        expected,
        found,
    }
}
