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
    /// The tensor's elements do not lie one behind the other in the order of their indices.
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

/// Properties that a tensor must have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expected<'a> {
    pub(crate) dtype: DType,
    pub(crate) shape: &'a [u64],
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
