//! Means over ranks of a checkpoint's lists, as ranks that average form them.

use std::collections::BTreeMap;

use bytemuck::cast_slice;
use fusestep_collective::{ReduceOp, reduce_slices};
use fusestep_elementwise::coded::{CodedState, Coding, Dither, decode, encode, units_of};
use fusestep_simd::{
    Level, join_bf16, join_bf16_24, narrow_bf16, narrow_f16, split_bf16, split_bf16_24,
};
use fusestep_tensor::{DType, Role};

use crate::converted_state::role_of;
use crate::names::tensor_name;

/// Lists that each rank has for itself, by their names without the rank.
pub(crate) struct ListsOfRanks<'a> {
    lists: BTreeMap<&'a str, ListOfRanks<'a>>,
}

/// A list of all ranks.
pub(crate) struct ListOfRanks<'a> {
    pub(crate) dtype: DType,
    /// Bytes of each rank, in their order.
    pub(crate) ranks: Vec<&'a [u8]>,
}

/// Lists that have one mean.
///
/// Two lists that say one value together are decoded, averaged and split again: a mean of each by
/// itself would be of another value, and codes have none.
enum Kind<'a> {
    /// A list of floats.
    Floats,
    /// Codes, and their units under this name.
    Coded { coding: Coding, units: &'a str },
    /// A 16-bit parameter, and its master under this name.
    WithMaster(&'a str),
    /// A parameter of bf16, and the bits it lacks under this name.
    WithRemainder(&'a str),
    /// A list whose mean comes with that of another.
    Second,
}

/// Reason for which lists have no mean.
pub(crate) struct NoMean {
    pub(crate) expected: &'static str,
    pub(crate) found: String,
}

impl NoMean {
    fn new(expected: &'static str, found: impl Into<String>) -> Self {
        Self { expected, found: found.into() }
    }
}

impl<'a> ListsOfRanks<'a> {
    pub(crate) fn new(lists: BTreeMap<&'a str, ListOfRanks<'a>>) -> Self {
        Self { lists }
    }

    /// Means of a list and of those that go with it, by name; none of a list that goes with
    /// another.
    pub(crate) fn means(&self, name: &'a str) -> Result<Vec<(&'a str, Vec<u8>)>, NoMean> {
        match self.kind(name) {
            Kind::Floats => Ok(vec![(name, self.floats(name)?)]),
            Kind::Coded { coding, units } => {
                let [codes, of_groups] = self.coded(name, units, coding)?;
                Ok(vec![(name, codes), (units, of_groups)])
            }
            Kind::WithMaster(master) => {
                let mean = self.floats(master)?;
                Ok(vec![(name, self.narrowed(name, &mean)?), (master, mean)])
            }
            Kind::WithRemainder(remainder) => {
                let [params, remainders] = self.split(name, remainder)?;
                Ok(vec![(name, params), (remainder, remainders)])
            }
            Kind::Second => Ok(Vec::new()),
        }
    }

    fn kind(&self, name: &str) -> Kind<'a> {
        let Some((param, role)) = name.rsplit_once('@') else {
            return Kind::Floats;
        };
        let other = |role: Role| {
            let name = tensor_name(param, role);
            self.lists.get_key_value(name.as_str()).map(|(name, _)| *name)
        };
        if role == Role::Param.name() {
            if let Some(master) = other(Role::Master) {
                return Kind::WithMaster(master);
            }
            return other(Role::Remainder).map_or(Kind::Floats, Kind::WithRemainder);
        }
        let Some(role) = role_of(role) else {
            return Kind::Floats;
        };
        let first = match role {
            Role::Master | Role::Remainder => Some(Role::Param),
            _ => role.unit_of(),
        };
        if first.and_then(other).is_some() {
            return Kind::Second;
        }
        match (Coding::of(role), role.units().and_then(other)) {
            (Some(coding), Some(units)) => Kind::Coded { coding, units },
            _ => Kind::Floats,
        }
    }

    /// Lists of one length and this type.
    fn all(&self, name: &str, dtype: DType) -> Result<&[&'a [u8]], NoMean> {
        let Some(list) = self.lists.get(name) else {
            return Err(NoMean::new("a list of every rank", "none"));
        };
        if list.dtype != dtype {
            return Err(NoMean::new(dtype.name(), list.dtype.name()));
        }
        let lengths: Vec<usize> = list.ranks.iter().map(|bytes| bytes.len()).collect();
        if lengths.iter().any(|len| *len != lengths[0]) {
            return Err(NoMean::new("as many bytes on every rank", format!("{lengths:?}")));
        }
        Ok(&list.ranks)
    }

    fn floats(&self, name: &str) -> Result<Vec<u8>, NoMean> {
        let dtype = self.lists.get(name).map_or(DType::F32, |list| list.dtype);
        if !matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64) {
            return Err(NoMean::new("floating-point elements", dtype.name()));
        }
        Ok(mean(dtype, self.all(name, dtype)?))
    }

    /// Codes and units of the mean of what codes read as, rounded to nearest: no step dithers it.
    fn coded(&self, name: &str, units: &str, coding: Coding) -> Result<[Vec<u8>; 2], NoMean> {
        let (codes, units) = (self.all(name, DType::U8)?, self.all(units, DType::F32)?);
        // State begins with zeros, and a root of 0 has the code 1.
        if codes.iter().all(|codes| codes.iter().all(|code| *code == 0)) {
            return Ok([vec![0; codes[0].len()], vec![0; units[0].len()]]);
        }
        let mut values = Vec::new();
        for (codes, units) in codes.iter().zip(units) {
            let units = floats(units);
            let mut read = vec![0.0; codes.len()];
            decode(coding, codes, &units, &mut read)
                .map_err(|error| NoMean::new("codes with their units", error.to_string()))?;
            values.push(read);
        }
        let values: Vec<&[u8]> = values.iter().map(|values| cast_slice(values)).collect();
        let mean = floats(&mean(DType::F32, &values));
        let (mut codes, mut units) = (vec![0; mean.len()], vec![0.0; units_of(mean.len())]);
        let list = CodedState { codes: &mut codes, units: &mut units };
        encode(coding, &mean, list, &Dither::NEAREST).expect("lists of these values");
        Ok([codes, cast_slice(&units).to_vec()])
    }

    /// Parameters of their masters' mean, rounded to nearest even.
    fn narrowed(&self, name: &str, masters: &[u8]) -> Result<Vec<u8>, NoMean> {
        let dtype = self.lists.get(name).map_or(DType::BF16, |list| list.dtype);
        let narrow = match dtype {
            DType::F16 => narrow_f16,
            DType::BF16 => narrow_bf16,
            other => return Err(NoMean::new("f16 or bf16 beside a master", other.name())),
        };
        let found = self.all(name, dtype)?[0].len();
        if 2 * found != masters.len() {
            let found = format!("{found} bytes beside {} of masters", masters.len());
            return Err(NoMean::new("a master of every element", found));
        }
        let params: Vec<u16> = floats(masters).into_iter().map(narrow).collect();
        Ok(cast_slice(&params).to_vec())
    }

    /// Parameters and remainders of the mean of the values that they say together.
    fn split(&self, name: &str, remainder: &str) -> Result<[Vec<u8>; 2], NoMean> {
        let of_8_bits = self.lists.get(remainder).is_some_and(|list| list.dtype == DType::U8);
        let dtype = if of_8_bits { DType::U8 } else { DType::U16 };
        let (params, remainders) = (self.all(name, DType::BF16)?, self.all(remainder, dtype)?);
        let (found, bytes) = (remainders[0].len(), if of_8_bits { 1 } else { 2 });
        if params[0].len() / 2 != found / bytes {
            let found = format!("{} and {}", params[0].len() / 2, found / bytes);
            return Err(NoMean::new("as many remainders as elements", found));
        }
        let mut values: Vec<Vec<f32>> = Vec::new();
        for (params, remainders) in params.iter().zip(remainders) {
            let params = words(params);
            values.push(if of_8_bits {
                params.zip(*remainders).map(|(p, q)| join_bf16_24(p, *q as i8)).collect()
            } else {
                params.zip(words(remainders)).map(|(p, q)| join_bf16(p, q)).collect()
            });
        }
        let values: Vec<&[u8]> = values.iter().map(|values| cast_slice(values)).collect();
        let mean = floats(&mean(DType::F32, &values));
        let mut written = [vec![0_u8; 2 * mean.len()], vec![0_u8; bytes * mean.len()]];
        let [params, remainders] = &mut written;
        let places = params.chunks_exact_mut(2).zip(remainders.chunks_exact_mut(bytes));
        for ((param, remainder), value) in places.zip(mean) {
            if of_8_bits {
                let (high, low) = split_bf16_24(value);
                param.copy_from_slice(&high.to_le_bytes());
                remainder.copy_from_slice(&low.to_le_bytes());
            } else {
                let (high, low) = split_bf16(value);
                param.copy_from_slice(&high.to_le_bytes());
                remainder.copy_from_slice(&low.to_le_bytes());
            }
        }
        Ok(written)
    }
}

/// The mean of lists of one length, added in the order of the ranks.
fn mean(dtype: DType, inputs: &[&[u8]]) -> Vec<u8> {
    let mut mean = vec![0; inputs[0].len()];
    reduce_slices(Level::detect(), dtype, ReduceOp::Average, inputs, &mut mean);
    mean
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|four| f32::from_le_bytes(*four)).collect()
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u16> {
    bytes.as_chunks().0.iter().map(|two| u16::from_le_bytes(*two))
}
