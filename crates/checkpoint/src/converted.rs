//! Checkpoints whose optimizer state is converted to another type, for runs that keep it so.

use std::collections::BTreeMap;
use std::path::Path;

use bytemuck::{Pod, cast_slice, pod_read_unaligned};
use fusestep_elementwise::coded::{CodedState, Coding, Dither, decode, encode, units_of};
use fusestep_launch::{Format, Master, Precision, Rounding, StateDType};
use fusestep_planner::keeps_f32;
use fusestep_tensor::{DType, ParamDesc, Quoted, Role, Shape};
use half::bf16;

use crate::manifest::{Manifest, TensorSpec};
use crate::names::is_shard;
use crate::refusal::refuse;
use crate::settings::{KEPT, MARK, PRECISION};
use crate::values::{CHECKED, SavedTensors};
use crate::verified::check_state;
use crate::{CheckpointFolder, Result};

/// The way to keep optimizer state that a checkpoint is converted to.
#[derive(Clone, Copy, Debug)]
pub struct KeptState<'a> {
    /// Type of the state.
    pub dtype: StateDType,
    /// Parts of the names of parameters whose state stays in f32 where others' is in int8.
    pub keep_f32: &'a [String],
}

/// Writes a checkpoint whose optimizer state is kept in another type, in as many files. A run that
/// keeps its state so goes on with it.
///
/// ```text
/// f32       the values of bf16, and what codes of int8 read as: nothing is lost
/// bf16      each value rounded to nearest even
/// int8      codes rounded to nearest, without a dither; zeros where no step has been taken
/// ```
///
/// State of f64 parameters, and that of f16, stay as they are: they are kept in no other type. With
/// state in int8 that of small tensors stays in f32. A remainder of 8 bits becomes one of 16 where
/// state leaves int8; both are one value.
///
/// # Errors
/// As [`Manifest::verify`] and [`Manifest::reshard`]; [`PlanError::Checkpoint`] naming a list that
/// has no such type, or if there is nothing to convert.
/// # Cost
/// The whole checkpoint in memory, and the state once more.
///
/// [`PlanError::Checkpoint`]: fusestep_planner::PlanError::Checkpoint
pub fn convert<'a>(
    from: impl Into<CheckpointFolder<'a>>,
    to: impl Into<CheckpointFolder<'a>>,
    state: KeptState<'_>,
) -> Result<Manifest> {
    let from = from.into();
    let (read, tensors) = Manifest::read(from)?.read_newest(from)?;
    check_state(from.path, &read, &tensors)?;
    let Manifest { optimizer, optimizer_of, step, steps_of, .. } = &read;
    let saved = Saved {
        optimizer,
        optimizer_of,
        step: *step,
        steps_of,
        settings: read.settings.clone(),
        specs: read.tensors.clone(),
        tensors,
    };
    let Saved { settings, specs, tensors, .. } = saved.converted(from.path, state)?;
    let count = read.shards.iter().filter(|shard| is_shard(&shard.file)).count();
    let manifest = Manifest { settings, tensors: specs, ..read.clone() };
    manifest.write_whole(&tensors, to.into(), count.max(1))
}

/// The name of a tensor, taken apart: parameter, role, and the rank with its mark if ranks have
/// values of their own.
#[derive(Clone, Copy)]
struct ListKey<'a> {
    param: &'a str,
    role: Role,
    rank: &'a str,
}

impl<'a> ListKey<'a> {
    /// The parts of the name of state, or of a remainder; `None` for any other tensor.
    fn of(name: &'a str) -> Option<Self> {
        let (param, rest) = name.rsplit_once('@')?;
        let (own, rank) = rest.split_at(rest.find('#').unwrap_or(rest.len()));
        let mut roles = CHECKED.into_iter().chain([Role::Remainder]);
        let role = roles.find(|role| role.name() == own)?;
        Some(Self { param, role, rank })
    }

    /// The name of another list of the parameter.
    fn name_of(self, role: Role) -> String {
        format!("{}@{role}{}", self.param, self.rank)
    }
}

/// State that was saved, as far as its type follows from it or decides it.
pub(crate) struct Saved<'a> {
    pub(crate) optimizer: &'a str,
    /// Rules of parameters with one of their own.
    pub(crate) optimizer_of: &'a BTreeMap<String, String>,
    pub(crate) step: u64,
    /// Steps of parameters that have missed some.
    pub(crate) steps_of: &'a BTreeMap<String, u64>,
    pub(crate) settings: BTreeMap<String, String>,
    /// Types and shapes by name, those of parameters among them.
    pub(crate) specs: BTreeMap<String, TensorSpec>,
    pub(crate) tensors: SavedTensors,
}

impl Saved<'_> {
    /// State in another type, and settings that say so.
    ///
    /// # Errors
    /// [`PlanError::Checkpoint`] naming a list that has no such type, or if there is nothing to
    /// convert.
    ///
    /// [`PlanError::Checkpoint`]: fusestep_planner::PlanError::Checkpoint
    pub(crate) fn converted(self, path: &Path, state: KeptState<'_>) -> Result<Self> {
        let before = self.specs.clone();
        let mut conversion = Conversion { saved: self, state };
        for name in before.keys() {
            let Some(list) = ListKey::of(name) else { continue };
            conversion.list(path, list)?;
        }
        if conversion.saved.specs == before {
            let dtype = state.dtype.name();
            let expected = format!("state that {dtype} is another type of");
            let found = format!(
                "none: it is {dtype} already, of small tensors, of names that stay in f32, or of \
                 parameters whose state has no other type"
            );
            return Err(refuse(path, "state", expected, found));
        }
        conversion.settings();
        Ok(conversion.saved)
    }
}

/// State on its way to another type.
struct Conversion<'a, 'b> {
    saved: Saved<'a>,
    state: KeptState<'b>,
}

impl Conversion<'_, '_> {
    /// Converts one list of a parameter.
    fn list(&mut self, path: &Path, list: ListKey<'_>) -> Result<()> {
        let refuse =
            |what: &str, expected: &str, found: String| refuse(path, what, expected, found);
        let (name, of_param) = (list.name_of(list.role), list.name_of(Role::Param));
        let Some(param) = self.saved.specs.get(&of_param).cloned() else {
            return Err(refuse(&of_param, "the parameter of a list", "no such tensor".to_owned()));
        };
        let target = self.target(list, &param);
        if list.role == Role::Remainder {
            if target != DType::U8 {
                self.widen_remainder(&name);
            }
            return Ok(());
        }
        let Some(found) = self.saved.specs.get(&name).map(|spec| spec.dtype) else {
            return Ok(());
        };
        if found == target || !matches!(param.dtype, DType::F32 | DType::BF16) {
            return Ok(());
        }
        let coding = self.coding(list);
        let values: Vec<f32> = match (found, coding) {
            (DType::F32, _) => values(self.saved.tensors.bytes(&name)),
            (DType::BF16, _) => {
                let values: Vec<bf16> = values(self.saved.tensors.bytes(&name));
                values.into_iter().map(bf16::to_f32).collect()
            }
            (DType::U8, Some(coding)) => self.decoded(list, coding).map_err(|error| {
                refuse(&name, "codes with their units", Quoted(&error).to_string())
            })?,
            (other, _) => return Err(refuse(&name, "f32, bf16 or codes", other.to_string())),
        };
        let is_noted = self.is_noted(list);
        for role in [Some(list.role), list.role.units()].into_iter().flatten() {
            let name = list.name_of(role);
            self.saved.tensors.non_finite.remove(&name);
            if role != list.role {
                self.saved.tensors.whole.remove(&name);
                self.saved.specs.remove(&name);
            }
        }
        let lists = match (target, coding) {
            (DType::U8, Some(coding)) => self.encoded(list, coding, &values),
            (DType::U8, None) => {
                return Err(refuse(&name, "a list that int8 has codes for", found.to_string()));
            }
            (DType::BF16, _) => {
                let narrow: Vec<bf16> = values.iter().copied().map(bf16::from_f32).collect();
                vec![(list.role, target, cast_slice(&narrow).to_vec())]
            }
            _ => vec![(list.role, target, cast_slice(&values).to_vec())],
        };
        for (role, dtype, bytes) in lists {
            self.put(
                list.name_of(role),
                TensorSpec { dtype, shape: shape_of(role, &param) },
                bytes,
            );
            let name = list.name_of(role);
            let count = dtype.non_finite(self.saved.tensors.bytes(&name));
            if is_noted && count > 0 {
                self.saved.tensors.non_finite.insert(name, count);
            }
        }
        Ok(())
    }

    /// The type that a list is to have.
    fn target(&self, list: ListKey<'_>, param: &TensorSpec) -> DType {
        match self.state.dtype {
            StateDType::Compute => DType::F32,
            StateDType::Bf16 => DType::BF16,
            StateDType::Int8 => {
                let desc = ParamDesc::new(list.param, param.shape.clone(), param.dtype);
                if keeps_f32(&desc, self.state.keep_f32) { DType::F32 } else { DType::U8 }
            }
        }
    }

    /// The coding of a list; `None` if its rule keeps it in no codes.
    fn coding(&self, list: ListKey<'_>) -> Option<Coding> {
        let own = self.saved.optimizer_of.get(list.param);
        let rule = own.map_or(self.saved.optimizer, String::as_str);
        // Centered: a difference of both moments, which codes of each would not leave positive.
        let is_centered = |list: ListKey<'_>| {
            rule == "rmsprop" && self.saved.specs.contains_key(&list.name_of(Role::Moment1))
        };
        Coding::of(list.role).filter(|_| !is_centered(list))
    }

    /// Whether the writers have noted all values of a list that are not finite.
    fn is_noted(&self, list: ListKey<'_>) -> bool {
        let lists = [Some(list.role), list.role.units()].into_iter().flatten();
        lists.map(|role| list.name_of(role)).all(|name| {
            let dtype = self.saved.specs.get(&name).map(|spec| spec.dtype);
            let count = dtype.map_or(0, |dtype| dtype.non_finite(self.saved.tensors.bytes(&name)));
            count == self.saved.tensors.noted(&name)
        })
    }

    fn decoded(&self, list: ListKey<'_>, coding: Coding) -> Result<Vec<f32>, String> {
        let codes = self.saved.tensors.bytes(&list.name_of(list.role));
        let units = list.role.units().map(|role| list.name_of(role)).unwrap_or_default();
        let units: Vec<f32> = values(self.saved.tensors.bytes(&units));
        let mut values = vec![0.0; codes.len()];
        decode(coding, codes, &units, &mut values).map_err(|error| error.to_string())?;
        Ok(values)
    }

    /// Codes and units of values.
    fn encoded(
        &self,
        list: ListKey<'_>,
        coding: Coding,
        values: &[f32],
    ) -> Vec<(Role, DType, Vec<u8>)> {
        let (mut codes, mut units) = (vec![0; values.len()], vec![0.0; units_of(values.len())]);
        let steps = self.saved.steps_of.get(list.param).unwrap_or(&self.saved.step);
        // State begins with zeros, and a root of 0 has the code 1.
        if *steps > 0 {
            let lists = CodedState { codes: &mut codes, units: &mut units };
            encode(coding, values, lists, &Dither::NEAREST).expect("lists of these values");
        }
        let codes = (list.role, DType::U8, codes);
        let units = list.role.units().map(|role| (role, DType::F32, cast_slice(&units).to_vec()));
        std::iter::once(codes).chain(units).collect()
    }

    /// Makes a remainder of 8 bits one of 16 bits.
    fn widen_remainder(&mut self, name: &str) {
        let Some(spec) = self.saved.specs.get(name).filter(|spec| spec.dtype == DType::U8) else {
            return;
        };
        let shape = spec.shape.clone();
        let bytes = self.saved.tensors.bytes(name).iter();
        // The value is the parameter's bits and these, both signed, at their place.
        let wide: Vec<u16> = bytes.map(|byte| u16::from(*byte) << 8).collect();
        let spec = TensorSpec { dtype: DType::U16, shape };
        self.put(name.to_owned(), spec, cast_slice(&wide).to_vec());
    }

    fn put(&mut self, name: String, spec: TensorSpec, bytes: Vec<u8>) {
        self.saved.tensors.whole.insert(name.clone(), bytes);
        self.saved.specs.insert(name, spec);
    }

    /// Writes down how the state is kept now, as a run does that keeps it so.
    fn settings(&mut self) {
        let Saved { settings, specs, .. } = &mut self.saved;
        // Files from before there were such entries are compared without them.
        if !settings.contains_key(MARK) {
            return;
        }
        settings.remove(KEPT);
        let mut is_int8 = false;
        for dtype in [DType::F32, DType::BF16] {
            let mut all = specs.iter().filter(|(_, spec)| spec.dtype == dtype);
            if !all.any(|(name, _)| is_param(name)) {
                continue;
            }
            let key = format!("{PRECISION}{dtype}");
            let saved = settings.remove(&key).and_then(|text| Precision::from_text(&text));
            let precision = kept(dtype, saved.unwrap_or_default(), self.state.dtype);
            is_int8 |= precision.state == StateDType::Int8;
            if precision != Precision::default() {
                settings.insert(key, precision.to_string());
            }
        }
        if is_int8 && !self.state.keep_f32.is_empty() {
            settings.insert(KEPT.to_owned(), self.state.keep_f32.join(", "));
        }
    }
}

/// The elements of a tensor.
fn values<T: Pod>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(pod_read_unaligned).collect()
}

/// Whether a tensor is a parameter.
fn is_param(name: &str) -> bool {
    let role = name.rsplit_once('@').map(|(_, rest)| rest.split('#').next().unwrap_or(rest));
    role == Some(Role::Param.name())
}

/// The precision of a run that keeps the state of parameters of a type in a type.
fn kept(param: DType, precision: Precision, state: StateDType) -> Precision {
    let master = match precision.master {
        Master::Remainder8 if state != StateDType::Int8 => Master::Remainder,
        other => other,
    };
    let kept = Precision { state, master, ..precision };
    // Rounding at random is refused where nothing is left that is rounded so.
    match Format::new("state", param, kept) {
        Ok(_) => kept,
        Err(_) => Precision { rounding: Rounding::Nearest, ..kept },
    }
}

/// The shape of a parameter's list.
fn shape_of(role: Role, param: &TensorSpec) -> Shape {
    fusestep_planner::ListImage { role, dtype: param.dtype }.shape(&param.shape)
}
