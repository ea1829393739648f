//! Where the tensors of other libraries lie, and whether they are what is expected.

use fusestep::DType;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

/// What is wrong with a tensor.
#[derive(Debug)]
pub(crate) enum Unfit {
    /// It is no tensor of the library, or one that has no memory of its own.
    NoMemory(PyErr),
    /// It lies elsewhere.
    Device,
    /// It has another dtype, `None` for one that no kernel takes.
    DType(Option<DType>),
    /// It has other extents.
    Shape(Vec<i64>),
    /// Its elements do not lie one behind the other in the order of their indices.
    Strides,
    /// Its address is no multiple of the size of its elements.
    Alignment,
    /// Its values are those in memory with the sign turned.
    Negated,
}

/// Where a tensor's elements lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) address: usize,
    pub(crate) len_bytes: usize,
}

/// What a tensor has to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expected<'a> {
    pub(crate) dtype: DType,
    pub(crate) shape: &'a [u64],
}

/// What the library tells of a tensor in host memory.
pub(crate) struct Told<'a> {
    pub(crate) dtype: Option<DType>,
    pub(crate) shape: &'a [i64],
    pub(crate) is_in_order: bool,
    pub(crate) address: usize,
}

impl Told<'_> {
    /// Where the tensor lies, if it is as expected.
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
        // Some libraries keep no elements for a tensor of nothing but zeros.
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
