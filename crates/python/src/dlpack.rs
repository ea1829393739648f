//! Where the tensors of other libraries lie, and whether they are what is expected.
//!
//! A tensor is described by DLPack. PyTorch from 2.10 on fills in a description without making an
//! object (`__dlpack_c_exchange_api__`), some 20 ns a tensor, so that every address is asked for
//! anew at every step and none can be out of date; that of state nobody else has is kept.

use std::ffi::{CStr, c_int, c_void};

use fusestep::DType;
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyType;

const ON_CPU: c_int = 1;
const FLOAT: u8 = 2;
const BFLOAT: u8 = 4;
const MAJOR: u32 = 1;
/// Classes of tensors that are remembered.
const MOST_KNOWN: usize = 4;
const EXCHANGE: &CStr = c"dlpack_exchange_api";

/// `DLTensor` of dlpack.h.
#[repr(C)]
struct Described {
    data: *mut c_void,
    device_type: c_int,
    device_id: c_int,
    ndim: c_int,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// `DLPackExchangeAPI`, whose first two members are those of its header.
#[repr(C)]
struct ExchangeApi {
    major: u32,
    minor: u32,
    previous: *const ExchangeApi,
    allocate: *const c_void,
    to_managed: *const c_void,
    from_managed: *const c_void,
    describe: Option<unsafe extern "C" fn(*mut c_void, *mut Described) -> c_int>,
    stream: *const c_void,
}

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

/// A class of tensors that describes its own without making an object.
pub(crate) struct Exchange {
    class: Py<PyType>,
    /// The class and what is known to be derived from it, of which most tensors are.
    known: Vec<Py<PyType>>,
    describe: unsafe extern "C" fn(*mut c_void, *mut Described) -> c_int,
    /// Whether a tensor is negated, which no description says; `None` in libraries without that.
    is_negated: Option<Py<PyAny>>,
    /// Keeps the table of functions.
    _capsule: Py<PyAny>,
}

impl Exchange {
    /// That of `class`; `None` if it has none of this version.
    pub(crate) fn of(class: &Bound<'_, PyType>) -> PyResult<Option<Self>> {
        let Ok(capsule) = class.getattr("__dlpack_c_exchange_api__") else {
            return Ok(None);
        };
        // SAFETY: `capsule` is a live object; a wrong type or name gives null and an error.
        let mut api = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), EXCHANGE.as_ptr()) }
            .cast::<ExchangeApi>()
            .cast_const();
        if api.is_null() {
            drop(PyErr::take(class.py()));
            return Ok(None);
        }
        // SAFETY: a capsule of this name holds a table that lives as long as the process, whose
        // first members are the same in all versions; `previous` is another such table or null.
        let describe = unsafe {
            while !api.is_null() && (*api).major != MAJOR {
                api = (*api).previous;
            }
            api.as_ref().and_then(|api| api.describe)
        };
        Ok(describe.map(|describe| Self {
            class: class.clone().unbind(),
            known: vec![class.clone().unbind()],
            describe,
            is_negated: class.getattr("is_neg").ok().map(Bound::unbind),
            _capsule: capsule.unbind(),
        }))
    }

    /// Whether `kind` is the class of tensors or derived from it.
    #[inline]
    fn fits(&self, kind: *mut ffi::PyTypeObject) -> bool {
        let mut known = self.known.iter();
        // SAFETY: both are live types.
        known.any(|known| known.as_ptr().cast() == kind)
            || unsafe { ffi::PyType_IsSubtype(kind, self.class.as_ptr().cast()) != 0 }
    }

    /// Has further tensors of the class of this one known at once.
    pub(crate) fn expect(&mut self, tensor: &Bound<'_, PyAny>) {
        let kind = tensor.get_type();
        let is_known = self.known.iter().any(|known| known.is(&kind));
        if !is_known && self.known.len() < MOST_KNOWN && self.fits(kind.as_type_ptr()) {
            self.known.push(kind.unbind());
        }
    }

    /// Where the elements of `tensor` lie, if it is as expected.
    pub(crate) fn place(
        &self,
        tensor: &Bound<'_, PyAny>,
        expected: Expected<'_>,
    ) -> Result<Place, Unfit> {
        let py = tensor.py();
        if !self.fits(tensor.get_type_ptr()) {
            let error = PyTypeError::new_err("expected a tensor of PyTorch, found another object");
            return Err(Unfit::NoMemory(error));
        }
        let mut described = std::mem::MaybeUninit::<Described>::uninit();
        // SAFETY: `tensor` is an object of the class that the function belongs to, checked above,
        // and there is room for a description; 0 says that it has been written whole.
        let described = unsafe {
            if (self.describe)(tensor.as_ptr().cast(), described.as_mut_ptr()) != 0 {
                let error = PyErr::take(py);
                let error = error.unwrap_or_else(|| PyTypeError::new_err("no memory"));
                return Err(Unfit::NoMemory(error));
            }
            described.assume_init_ref()
        };
        // SAFETY: it has just been written, and `tensor` keeps its extents and strides until it is
        // changed, which takes the interpreter.
        unsafe { described.place(expected) }
    }
}

impl Exchange {
    /// Whether the values of a tensor are those in memory with the sign turned.
    ///
    /// Such a view is the imaginary part of a conjugate. With more than one element it has strides
    /// and is copied for these, so only those of one element have to be asked.
    pub(crate) fn is_negated(&self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        let Some(is_negated) = &self.is_negated else {
            return Ok(false);
        };
        is_negated.bind(tensor.py()).call1((tensor,))?.is_truthy()
    }
}

impl Described {
    /// Checks it.
    ///
    /// # Safety
    /// `shape` and `strides` have `ndim` elements, or are null.
    unsafe fn place(&self, expected: Expected<'_>) -> Result<Place, Unfit> {
        if self.device_type != ON_CPU {
            return Err(Unfit::Device);
        }
        let dtype = self.dtype();
        if dtype != Some(expected.dtype) {
            return Err(Unfit::DType(dtype));
        }
        // SAFETY: as the caller promises.
        let (shape, strides) = unsafe { (self.extents(self.shape), self.extents(self.strides)) };
        let same = shape.len() == expected.shape.len()
            && shape.iter().zip(expected.shape).all(|(&found, &expected)| {
                u64::try_from(found).is_ok_and(|found| found == expected)
            });
        if !same {
            return Err(Unfit::Shape(shape.to_vec()));
        }
        let numel: u64 = expected.shape.iter().product();
        if numel > 1 && !self.strides.is_null() && !in_order(shape, strides) {
            return Err(Unfit::Strides);
        }
        if self.data.is_null() && numel > 0 {
            return Err(no_memory());
        }
        let address = self.data.expose_provenance() + self.byte_offset as usize;
        if !is_aligned(address, expected.dtype) {
            return Err(Unfit::Alignment);
        }
        Ok(Place {
            address,
            // A tensor in host memory has no more bytes than a usize counts.
            len_bytes: numel as usize * expected.dtype.len_bytes(),
        })
    }

    /// # Safety
    /// `values` has `ndim` elements or is null.
    unsafe fn extents<'a>(&self, values: *const i64) -> &'a [i64] {
        if values.is_null() || self.ndim <= 0 {
            return &[];
        }
        // SAFETY: as the caller promises.
        unsafe { std::slice::from_raw_parts(values, self.ndim as usize) }
    }

    fn dtype(&self) -> Option<DType> {
        match (self.code, self.bits, self.lanes) {
            (FLOAT, 64, 1) => Some(DType::F64),
            (FLOAT, 32, 1) => Some(DType::F32),
            (FLOAT, 16, 1) => Some(DType::F16),
            (BFLOAT, 16, 1) => Some(DType::BF16),
            _ => None,
        }
    }
}

/// That of a tensor whose library keeps no elements for it, such as one of nothing but zeros.
fn no_memory() -> Unfit {
    Unfit::NoMemory(PyTypeError::new_err("its address is null"))
}

/// Whether an address is a multiple of the size of its elements, a power of two.
fn is_aligned(address: usize, dtype: DType) -> bool {
    address & (dtype.len_bytes() - 1) == 0
}

/// Whether elements lie one behind the other, the last index fastest; strides of extents of 1 say
/// nothing.
fn in_order(shape: &[i64], strides: &[i64]) -> bool {
    let mut expected = 1;
    shape.iter().zip(strides).rev().all(|(&extent, &stride)| {
        let fits = extent == 1 || stride == expected;
        expected *= extent;
        fits
    })
}

impl Place {
    /// The place of a tensor of these extents at an address that its library has told.
    pub(crate) fn told(address: usize, expected: Expected<'_>) -> Result<Self, Unfit> {
        let numel: u64 = expected.shape.iter().product();
        if address == 0 && numel > 0 {
            return Err(no_memory());
        }
        if !is_aligned(address, expected.dtype) {
            return Err(Unfit::Alignment);
        }
        Ok(Self {
            address,
            len_bytes: numel as usize * expected.dtype.len_bytes(),
        })
    }
}
