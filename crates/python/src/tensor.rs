//! Places of other libraries' tensors, and checks that they are as expected.

use fusestep::DType;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

/// Reason why a tensor does not fit.
#[derive(Debug)]
pub(crate) enum Unfit {
    /// The object is no tensor of the library, or a tensor without memory of its own.
    NoMemory(PyErr),
    /// The tensor is on another device.
    Device,
    /// The tensor has another dtype; `None` for a dtype that no kernel takes.
    DType(Option<DType>),
    /// The tensor has other extents.
    Shape(Vec<i64>),
    /// The tensor's elements do not lie one behind the other in the expected order.
    Strides,
    /// The tensor's address is no multiple of the size of its elements.
    Alignment,
    /// The tensor's values are those in memory with the sign turned.
    Negated,
}

/// Place of a tensor's elements in host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) address: usize,
    pub(crate) len_bytes: usize,
}

/// Properties of a tensor in memory that nobody has asked it to have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen<'a> {
    /// `None` for a dtype that no kernel takes.
    pub(crate) dtype: Option<DType>,
    pub(crate) shape: &'a [i64],
    pub(crate) strides: &'a [i64],
    pub(crate) address: usize,
}

/// Properties that a tensor must have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expected<'a> {
    pub(crate) dtype: DType,
    pub(crate) shape: &'a [u64],
    /// Strides of a dense order of elements; `None` for that in which the last index is fastest.
    pub(crate) strides: Option<&'a [i64]>,
}

/// Order of a tensor's elements in memory, as a library tells it.
#[derive(FromPyObject)]
pub(crate) enum Order {
    /// Whether elements lie one behind the other, the last index fastest.
    InOrder(bool),
    /// The strides.
    Strides(Vec<i64>),
}

impl Order {
    /// Whether elements lie as expected.
    pub(crate) fn fits(&self, shape: &[i64], expected: Option<&[i64]>) -> bool {
        match self {
            Self::InOrder(in_order) => *in_order && expected.is_none(),
            Self::Strides(strides) => lie_as(expected, shape, strides),
        }
    }
}

/// Whether elements lie as `expected`. Strides of extents of 1 say nothing, nor do strides of a
/// tensor without elements.
#[inline(always)]
pub(crate) fn lie_as(expected: Option<&[i64]>, shape: &[i64], strides: &[i64]) -> bool {
    match expected {
        None => is_in_order(shape, strides),
        Some(expected) => {
            let same = expected.len() == strides.len()
                && shape
                    .iter()
                    .zip(strides.iter().zip(expected))
                    .all(|(&extent, (stride, expected))| extent == 1 || stride == expected);
            same || shape.contains(&0)
        }
    }
}

/// Whether elements lie one behind the other, the last index fastest.
#[inline(always)]
fn is_in_order(shape: &[i64], strides: &[i64]) -> bool {
    let mut expected = 1;
    let mut extents = shape.iter().zip(strides).rev();
    extents.all(|(&extent, &stride)| {
        let fits = extent == 1 || stride == expected;
        expected *= extent;
        fits
    }) || shape.contains(&0)
}

/// Whether strides put each element of a tensor at a place of its own, without gaps.
pub(crate) fn is_dense(shape: &[u64], strides: &[i64]) -> bool {
    let extents = shape.iter().zip(strides).filter(|(extent, _)| **extent != 1);
    let mut extents: Vec<(i64, u64)> = extents.map(|(&extent, &stride)| (stride, extent)).collect();
    extents.sort_unstable();
    let mut next = Some(1);
    let lie_close = extents.iter().all(|&(stride, extent)| {
        let fits = next.is_some_and(|next| u64::try_from(stride) == Ok(next));
        next = next.and_then(|next: u64| next.checked_mul(extent));
        fits
    });
    shape.len() == strides.len() && (lie_close || shape.contains(&0))
}

/// Properties that the library tells of a tensor in host memory.
pub(crate) struct Told<'a> {
    pub(crate) dtype: Option<DType>,
    pub(crate) shape: &'a [i64],
    pub(crate) is_in_order: bool,
    pub(crate) address: usize,
}

impl Told<'_> {
    /// The place of the tensor, if the tensor is as expected.
    #[inline]
    pub(crate) fn place(&self, expected: Expected<'_>) -> Result<Place, Unfit> {
        if self.dtype != Some(expected.dtype) {
            return Err(Unfit::DType(self.dtype));
        }
        let same = self.shape.len() == expected.shape.len()
            && self.shape.iter().zip(expected.shape).all(|(&found, &expected)| {
                u64::try_from(found).is_ok_and(|found| found == expected)
            });
        if !same {
            return Err(Unfit::Shape(self.shape.to_vec()));
        }
        if !self.is_in_order {
            return Err(Unfit::Strides);
        }
        let numel: u64 = expected.shape.iter().product();
        // Some libraries keep no elements for a tensor that is all zeros.
        if self.address == 0 && numel > 0 {
            let error = PyTypeError::new_err("its address is null");
            return Err(Unfit::NoMemory(error));
        }
        // The size of an element is a power of two.
        if self.address & (expected.dtype.len_bytes() - 1) != 0 {
            return Err(Unfit::Alignment);
        }
        Ok(Place {
            address: self.address,
            // A tensor in host memory has no more bytes than a usize counts.
            len_bytes: numel as usize * expected.dtype.len_bytes(),
        })
    }
}
