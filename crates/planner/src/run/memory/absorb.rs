//! Gradient accumulation: gradients of one micro-step are added to the sums.

use std::ops::Range;

use bytemuck::Pod;
use fusestep_collective::Divisor;
use fusestep_launch::Accumulation;
use fusestep_simd::{Level, copy_bytes, narrow_bf16, narrow_f16, widen_bf16, widen_f16};
use fusestep_tensor::DType;
use smallvec::{SmallVec, smallvec};

use crate::plan::lanes::LaneEnd;

/// Elements that are added at a time, in the nearest cache.
pub(crate) const BLOCK: usize = 1024;

/// Way in which a given gradient is added to the sums.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Absorb {
    /// Whether the gradient is the first since the last update.
    pub(crate) first: bool,
    /// Factor that the gradient is multiplied with.
    pub(crate) weight: Option<f64>,
    /// Divisor of the sum, if the gradient is the last before the next update.
    pub(crate) last: Option<Divisor>,
}

impl Absorb {
    /// Work on a device: a gradient that is there is added, and the divisor follows behind the
    /// last.
    pub(crate) fn on_device<E>(
        self,
        addend: &Addend<'_>,
        mut run: impl FnMut(Accumulation) -> Result<(), E>,
    ) -> Result<(), E> {
        let weight = self.weight.unwrap_or(1.0);
        if !matches!(addend, Addend::Missing) {
            run(if self.first {
                Accumulation::First { weight }
            } else {
                Accumulation::Add { weight }
            })?;
        }
        match self.last {
            Some(divisor) => run(Accumulation::Mean { divisor: divisor.value() }),
            None => Ok(()),
        }
    }
}

/// Adds `grad` to `sums`, or writes it there if it is the first, and puts what the sums come to
/// into `out` if it is the last. Sums of 16-bit gradients are f32, others of the gradients' own
/// type; without `sums` they are formed in `out` itself.
///
/// `grad` is `None` for a tensor without a gradient in this micro-step.
pub(crate) fn absorb(
    dtype: DType,
    out: &mut [u8],
    sums: Option<&mut [u8]>,
    grad: Option<&[u8]>,
    how: Absorb,
) {
    let is_summed = sums.is_some() || dtype == sum_dtype(dtype);
    let is_float = matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64);
    if !is_float || !is_summed {
        if let Some(grad) = grad {
            out.copy_from_slice(grad);
        }
        return;
    }
    let mut memory = match sums {
        Some(sums) => SumMemory { out: Some(out), slots: smallvec![sums] },
        None => SumMemory { out: None, slots: smallvec![out] },
    };
    let begins = how.first && grad.is_some();
    let how = Addition { weight: how.weight, slot: 0, begins, ends: None, last: how.last };
    memory.absorb(dtype, grad.map_or(Addend::Missing, Addend::Given), how);
}

/// A gradient on its way to a sum.
pub(crate) enum Addend<'a> {
    Given(&'a [u8]),
    /// In the place where the gradient of the update will be.
    InPlace,
    /// None in this micro-batch, which leaves sums as they are.
    Missing,
}

/// Memory of one parameter's sums.
pub(crate) struct SumMemory<'a> {
    /// The gradient's own place, if it is not that of the first sum.
    pub(crate) out: Option<&'a mut [u8]>,
    /// The sums.
    pub(crate) slots: SmallVec<[&'a mut [u8]; 8]>,
}

impl SumMemory<'_> {
    /// Adds a gradient. With a divisor the result, divided, is the gradient of the update.
    pub(crate) fn absorb(&mut self, dtype: DType, grad: Addend<'_>, how: Addition<'_>) {
        match dtype {
            DType::F64 => absorb_as::<f64, f64>(self, grad, how, |value| value, |value| value),
            DType::F16 | DType::BF16 => {
                let widen = |bits| widened(dtype, bits);
                absorb_as::<f32, u16>(self, grad, how, widen, |value| narrowed(dtype, value));
            }
            _ => absorb_as::<f32, f32>(self, grad, how, |value| value, |value| value),
        }
    }

    /// Writes what leaves a sum as it is to all sums: −0, since x + (−0) = x for every x.
    pub(crate) fn clear(&mut self, dtype: DType) {
        for slot in &mut self.slots {
            clear(sum_dtype(dtype), slot);
        }
    }
}

/// The type of sums of gradients of a type.
pub(crate) fn sum_dtype(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 => DType::F32,
        dtype => dtype,
    }
}

/// Fills memory with −0.
pub(crate) fn clear(dtype: DType, bytes: &mut [u8]) {
    match dtype {
        DType::F64 => fill::<f64>(bytes),
        DType::F32 => fill::<f32>(bytes),
        DType::F16 | DType::BF16 => bytemuck::cast_slice_mut(bytes).fill(0x8000u16),
        _ => bytes.fill(0),
    }
}

/// Addition of a gradient to the sums of a parameter.
#[derive(Clone, Copy)]
pub(crate) struct Addition<'a> {
    /// Factor that the gradient is multiplied with.
    pub(crate) weight: Option<f64>,
    /// The sum that it is added to.
    pub(crate) slot: usize,
    /// Whether the sum begins with it.
    pub(crate) begins: bool,
    /// Further sums that are added behind it.
    pub(crate) ends: Option<&'a LaneEnd>,
    /// Divisor of the sum, if the gradient is the last before the next update.
    pub(crate) last: Option<Divisor>,
}

/// Number that sums are formed in.
pub(crate) trait Wide: Pod + PartialEq {
    const IDENTITY: Self;
    fn of(value: f64) -> Self;
    fn plus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    fn over(self, other: Self) -> Self;
}

macro_rules! wide {
    ($($float:ty),*) => {$(
        impl Wide for $float {
            const IDENTITY: Self = -0.0;
            fn of(value: f64) -> Self {
                value as $float
            }
            fn plus(self, other: Self) -> Self {
                self + other
            }
            fn times(self, other: Self) -> Self {
                self * other
            }
            fn over(self, other: Self) -> Self {
                self / other
            }
        }
    )*};
}

wide!(f32, f64);

fn fill<W: Wide>(bytes: &mut [u8]) {
    bytemuck::cast_slice_mut(bytes).fill(W::IDENTITY);
}

/// Adds a gradient that nothing follows: a pass over its sum alone, which small models have in a
/// cache.
fn absorb_alone<W: Wide, T: Pod>(
    memory: &mut SumMemory<'_>,
    grad: Addend<'_>,
    how: Addition<'_>,
    widen: impl Fn(T) -> W,
) {
    let sums = &mut *memory.slots[how.slot];
    let given = match grad {
        Addend::Given(bytes) => bytes,
        Addend::InPlace => memory.out.as_deref().unwrap_or_default(),
        Addend::Missing if how.begins => return fill::<W>(sums),
        Addend::Missing => return,
    };
    if how.begins && how.weight.is_none() && size_of::<T>() == size_of::<W>() {
        return copy_bytes(Level::detect(), sums, given);
    }
    let weight = how.weight.map(W::of);
    let sums = bytemuck::cast_slice_mut::<u8, W>(sums);
    for (sum, grad) in sums.iter_mut().zip(given.chunks_exact(size_of::<T>())) {
        let grad = widen(bytemuck::pod_read_unaligned(grad));
        let grad = weight.map_or(grad, |weight| grad.times(weight));
        *sum = if how.begins { grad } else { sum.plus(grad) };
    }
}

fn absorb_as<W: Wide, T: Pod>(
    memory: &mut SumMemory<'_>,
    grad: Addend<'_>,
    how: Addition<'_>,
    widen: impl Fn(T) -> W,
    narrow: impl Fn(W) -> T,
) {
    let ends_alone = |end: &LaneEnd| end.adds.is_empty() && end.into == how.slot;
    if how.last.is_none() && how.ends.is_none_or(ends_alone) {
        return absorb_alone(memory, grad, how, widen);
    }
    let (adds, into) = match how.ends {
        Some(end) => (&end.adds[..], end.into),
        None => (&[][..], how.slot),
    };
    let numel = memory.slots.first().map_or(0, |slot| slot.len()) / size_of::<W>();
    let sum = std::mem::take(&mut memory.slots[into]);
    let out = memory.out.as_deref_mut();
    let own = (!how.begins).then_some(how.slot);
    let slots = &memory.slots;
    let of_slot = |&at: &usize| (at != into).then(|| bytemuck::cast_slice(&*slots[at]));
    let held = own.iter().chain(adds).map(of_slot);
    let mut lane = Lane::<W> {
        grad,
        weight: how.weight.map(W::of),
        held: held.collect(),
        sum: bytemuck::cast_slice_mut(&mut *sum),
        divisor: how.last.map(|last| W::of(last.value())),
        out,
    };
    Level::detect().run(
        #[inline(always)]
        || {
            let whole = numel / STRIP * STRIP;
            for first in (0..whole).step_by(STRIP) {
                lane.add::<T, true>(first..first + STRIP, &widen, &narrow);
            }
            if whole < numel {
                lane.add::<T, false>(whole..numel, &widen, &narrow);
            }
        },
    );
    drop(lane);
    memory.slots[into] = sum;
}

/// Elements that are added in registers.
const STRIP: usize = 64;

/// The last gradient of a lane, and all that is added to it: one pass, whatever is added.
struct Lane<'a, W> {
    grad: Addend<'a>,
    weight: Option<W>,
    /// Sums to the left of the gradient, the nearest first; none is the one that is written.
    held: SmallVec<[Option<&'a [W]>; 8]>,
    /// The sum that the result is written to, unless that goes to `out`.
    sum: &'a mut [W],
    divisor: Option<W>,
    /// The gradient's own place, which gets a result that is divided.
    out: Option<&'a mut [u8]>,
}

impl<W: Wide> Lane<'_, W> {
    /// Adds elements, which are [`STRIP`] if they are `WHOLE`.
    #[inline(always)]
    fn add<T: Pod, const WHOLE: bool>(
        &mut self,
        elements: Range<usize>,
        widen: &impl Fn(T) -> W,
        narrow: &impl Fn(W) -> T,
    ) {
        let bytes = elements.start * size_of::<T>()..elements.end * size_of::<T>();
        let given = match &self.grad {
            Addend::Given(given) => Some(&given[bytes.clone()]),
            Addend::InPlace => self.out.as_deref().map(|out| &out[bytes.clone()]),
            Addend::Missing => None,
        };
        let mut sums = [W::IDENTITY; STRIP];
        if let Some(given) = given {
            let mut narrows = [T::zeroed(); STRIP];
            load::<u8, WHOLE>(bytemuck::cast_slice_mut(&mut narrows), given);
            for (sum, grad) in sums.iter_mut().zip(narrows) {
                *sum = widen(grad);
            }
            if let Some(weight) = self.weight {
                sums.iter_mut().for_each(|sum| *sum = sum.times(weight));
            }
        }
        for held in &self.held {
            let mut left = [W::IDENTITY; STRIP];
            load::<W, WHOLE>(&mut left, &held.unwrap_or(&*self.sum)[elements.clone()]);
            for (sum, left) in sums.iter_mut().zip(left) {
                *sum = left.plus(*sum);
            }
        }
        let Some(divisor) = self.divisor else {
            return store::<W, WHOLE>(&mut self.sum[elements], &sums);
        };
        if divisor != W::of(1.0) {
            sums.iter_mut().for_each(|sum| *sum = sum.over(divisor));
        }
        match &mut self.out {
            Some(out) => {
                let narrows = sums.map(narrow);
                store::<u8, WHOLE>(&mut out[bytes], bytemuck::cast_slice(&narrows));
            }
            None => store::<W, WHOLE>(&mut self.sum[elements], &sums),
        }
    }
}

/// Reads the elements of a strip, all of them if they are `WHOLE`.
#[inline(always)]
fn load<E: Copy, const WHOLE: bool>(strip: &mut [E], from: &[E]) {
    if WHOLE {
        strip.copy_from_slice(from);
    } else {
        strip[..from.len()].copy_from_slice(from);
    }
}

/// Writes the elements of a strip, all of them if they are `WHOLE`.
#[inline(always)]
fn store<E: Copy, const WHOLE: bool>(to: &mut [E], strip: &[E]) {
    if WHOLE {
        to.copy_from_slice(strip);
    } else {
        let len = to.len();
        to.copy_from_slice(&strip[..len]);
    }
}

/// The value of an f16, or else of a bf16.
pub(crate) fn widened(dtype: DType, bits: u16) -> f32 {
    match dtype {
        DType::F16 => widen_f16(bits),
        _ => widen_bf16(bits),
    }
}

/// Writes elements of 16 bits as f32, which holds each of them exactly.
pub(crate) fn widen_all(dtype: DType, bytes: &[u8], wide: &mut [u8]) {
    for (narrow, wide) in bytes.chunks_exact(2).zip(wide.chunks_exact_mut(4)) {
        let value = widened(dtype, bytemuck::pod_read_unaligned(narrow));
        wide.copy_from_slice(&value.to_le_bytes());
    }
}

/// The f16, or else the bf16, that is nearest.
pub(crate) fn narrowed(dtype: DType, value: f32) -> u16 {
    match dtype {
        DType::F16 => narrow_f16(value),
        _ => narrow_bf16(value),
    }
}
