//! Lists of a tensor, each with a dtype of its own.

use bytemuck::{Pod, cast_slice, cast_slice_mut};
use fusestep_simd::{Level, StreamingCopies};
use fusestep_tensor::DType;
use half::{bf16, f16};

use crate::Storage;
use crate::coded::{CodedState, GROUP, units_of};

/// Elements of f32, bf16 or f16 that are only read.
#[derive(Clone, Copy, Debug)]
pub struct Floats<'a> {
    dtype: DType,
    bytes: &'a [u8],
}

/// Elements of f32, bf16 or f16 that are written, too.
#[derive(Debug)]
pub struct FloatsMut<'a> {
    dtype: DType,
    bytes: &'a mut [u8],
}

/// A list of the optimizer's own: f32, bf16, f16, or codes of 8 bits with a unit for each 32
/// elements.
#[derive(Debug)]
pub struct StateMut<'a> {
    pub(super) list: FloatsMut<'a>,
    /// The units of codes; empty for floating-point state.
    pub(super) units: &'a mut [f32],
}

impl<'a, S: Storage<f32>> From<&'a [S]> for Floats<'a> {
    fn from(list: &'a [S]) -> Self {
        Self { dtype: S::DTYPE, bytes: cast_slice(list) }
    }
}

impl<'a, S: Storage<f32>> From<&'a mut [S]> for FloatsMut<'a> {
    fn from(list: &'a mut [S]) -> Self {
        Self { dtype: S::DTYPE, bytes: cast_slice_mut(list) }
    }
}

impl<'a, S: Storage<f32>> From<&'a mut [S]> for StateMut<'a> {
    fn from(list: &'a mut [S]) -> Self {
        Self { list: list.into(), units: &mut [] }
    }
}

impl<'a> From<CodedState<'a>> for StateMut<'a> {
    fn from(state: CodedState<'a>) -> Self {
        let list = FloatsMut { dtype: DType::U8, bytes: state.codes };
        Self { list, units: state.units }
    }
}

/// Whether bytes are elements of one of these dtypes, at an address for them.
fn are_elements(dtype: DType, bytes: &[u8]) -> bool {
    match dtype {
        DType::F32 => bytemuck::try_cast_slice::<u8, f32>(bytes).is_ok(),
        DType::BF16 | DType::F16 => bytemuck::try_cast_slice::<u8, u16>(bytes).is_ok(),
        _ => false,
    }
}

impl<'a> Floats<'a> {
    /// Elements of a dtype that is known at run time; `None` unless it is f32, bf16 or f16 and the
    /// bytes are whole elements at an address for them.
    pub fn of_bytes(dtype: DType, bytes: &'a [u8]) -> Option<Self> {
        are_elements(dtype, bytes).then_some(Self { dtype, bytes })
    }

    /// The dtype of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The element count.
    pub fn numel(&self) -> usize {
        self.bytes.len() / self.dtype.len_bytes()
    }

    pub(super) fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The elements as a slice of their type.
    pub(super) fn elements<T: Pod>(&self) -> &'a [T] {
        cast_slice(self.bytes)
    }

    pub(super) fn split_at(self, middle: usize) -> (Self, Self) {
        let (bytes, rest) = self.bytes.split_at(middle * self.dtype.len_bytes());
        (Self { bytes, ..self }, Self { bytes: rest, ..self })
    }

    /// Writes the values, one for each element.
    pub(super) fn widen(&self, level: Level, values: &mut [f32]) {
        match self.dtype {
            DType::BF16 => widen::<bf16>(level, self.elements(), values),
            DType::F16 => widen::<f16>(level, self.elements(), values),
            _ => values.copy_from_slice(self.elements()),
        }
    }
}

impl<'a> FloatsMut<'a> {
    /// Elements of a dtype that is known at run time; `None` as in [`Floats::of_bytes`].
    pub fn of_bytes(dtype: DType, bytes: &'a mut [u8]) -> Option<Self> {
        are_elements(dtype, bytes).then_some(Self { dtype, bytes })
    }

    /// The dtype of the elements; u8 for codes.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The element count.
    pub fn numel(&self) -> usize {
        self.bytes.len() / self.dtype.len_bytes()
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes
    }

    pub(super) fn read(&self) -> Floats<'_> {
        Floats { dtype: self.dtype, bytes: self.bytes }
    }

    pub(super) fn split_at(self, middle: usize) -> (Self, Self) {
        let dtype = self.dtype;
        let (bytes, rest) = self.bytes.split_at_mut(middle * dtype.len_bytes());
        (Self { dtype, bytes }, Self { dtype, bytes: rest })
    }

    /// Takes bytes of as many elements, past the caches if there are copies that go there.
    pub(super) fn copy_from(&mut self, bytes: &[u8], past: Option<&StreamingCopies>) {
        match past {
            Some(past) => past.copy(self.bytes, bytes),
            None => self.bytes.copy_from_slice(bytes),
        }
    }

    /// Takes the values, rounded to nearest even, past the caches if there are copies that go
    /// there. `room` has as many f32.
    pub(super) fn narrow_past(
        &mut self,
        level: Level,
        values: &[f32],
        room: &mut [f32],
        past: Option<&StreamingCopies>,
    ) {
        let Some(past) = past else {
            return self.narrow(level, values);
        };
        let bytes = &mut cast_slice_mut(room)[..self.bytes.len()];
        let mut rounded = FloatsMut { dtype: self.dtype, bytes };
        rounded.narrow(level, values);
        past.copy(self.bytes, rounded.bytes);
    }

    /// Takes the values, rounded to nearest even.
    pub(super) fn narrow(&mut self, level: Level, values: &[f32]) {
        match self.dtype {
            DType::BF16 => narrow::<bf16>(level, values, cast_slice_mut(self.bytes)),
            DType::F16 => narrow::<f16>(level, values, cast_slice_mut(self.bytes)),
            _ => self.bytes.copy_from_slice(cast_slice(values)),
        }
    }
}

impl<'a> StateMut<'a> {
    /// State of a dtype that is known at run time, without units; `None` as in
    /// [`Floats::of_bytes`].
    pub fn of_bytes(dtype: DType, bytes: &'a mut [u8]) -> Option<Self> {
        FloatsMut::of_bytes(dtype, bytes).map(|list| Self { list, units: &mut [] })
    }

    /// The dtype of the elements; u8 for codes.
    pub fn dtype(&self) -> DType {
        self.list.dtype
    }

    /// The element count.
    pub fn numel(&self) -> usize {
        self.list.numel()
    }

    /// Units that the list has, and units that it needs.
    pub(super) fn units(&self) -> Units {
        let needed = if self.dtype() == DType::U8 { units_of(self.numel()) } else { 0 };
        Units { needed, found: self.units.len() }
    }

    /// Cuts at an element, of codes at a multiple of [`GROUP`].
    pub(super) fn split_at(self, middle: usize) -> (Self, Self) {
        let (list, rest) = self.list.split_at(middle);
        let (units, units_rest) = self.units.split_at_mut((middle / GROUP).min(self.units.len()));
        (Self { list, units }, Self { list: rest, units: units_rest })
    }
}

/// Numbers of units of a list.
pub(super) struct Units {
    pub(super) needed: usize,
    pub(super) found: usize,
}

fn widen<S: Storage<f32>>(level: Level, list: &[S], values: &mut [f32]) {
    level.run(
        #[inline(always)]
        || {
            for (value, element) in values.iter_mut().zip(list) {
                *value = element.widen();
            }
        },
    );
}

fn narrow<S: Storage<f32>>(level: Level, values: &[f32], list: &mut [S]) {
    level.run(
        #[inline(always)]
        || {
            for (element, &value) in list.iter_mut().zip(values) {
                *element = S::narrow(value);
            }
        },
    );
}
