//! Access to tensors of PyTorch through its stable C interface.
//!
//! Python's object of a tensor contains PyTorch's handle, always at the same distance, which the
//! value of `_cdata` tells. A look takes some 10 ns, so each tensor is looked at anew at every
//! step, and no address can be out of date. If the interface is missing, or if it contradicts the
//! methods of a few tensors, the methods are used instead.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

use fusestep::DType;
use libloading::Library;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyType;
use pyo3::{ffi, intern};

use crate::gradient::Direct;
use crate::openmp;
use crate::parameter::Parameter;
use crate::tensor::{Expected, Place, Seen, Told, Unfit, lie_as};

/// Most classes of tensors that are remembered.
const MOST_KNOWN: usize = 4;

/// Function that reads one property of a tensor; it returns 0 if it has written the value.
type Get<T> = unsafe extern "C" fn(*const c_void, *mut T) -> c_int;
type Code = unsafe extern "C" fn() -> c_int;

/// PyTorch's functions that describe a tensor, and the meanings of their numbers.
struct Interface {
    device: Get<c_int>,
    device_index: Get<i32>,
    /// `None` in PyTorch 2.6, where tensors that are not strided cannot tell strides.
    layout: Option<Get<c_int>>,
    dtype: Get<c_int>,
    dim: Get<i64>,
    sizes: Get<*const i64>,
    strides: Get<*const i64>,
    address: Get<*mut c_void>,
    cpu: Memory,
    /// Memory of the tensors that are stepped.
    own: Memory,
    strided: c_int,
    dtypes: [(c_int, DType); 7],
    /// Keeps the functions loaded.
    _library: Library,
}

/// Memory that a tensor may lie in, in PyTorch's numbers.
#[derive(Clone, Copy)]
struct Memory {
    device: c_int,
    /// Number of the device among those of its type; `None` if there is one of the type.
    index: Option<i32>,
}

/// The device of a library's tensors, by which PyTorch's functions and numbers are found.
struct OwnDevice {
    /// Type of the device, as in `cuda:0`.
    kind: String,
    index: Option<i32>,
}

impl OwnDevice {
    /// The device that the library says to have; the CPU, if it says none.
    fn of(library: &Bound<'_, PyAny>) -> PyResult<Self> {
        let kind = match library.getattr_opt("kind")? {
            Some(kind) => kind.extract()?,
            None => "cpu".to_owned(),
        };
        let index = library.getattr_opt("kind_index")?;
        Ok(Self { kind, index: index.map_or(Ok(None), |index| index.extract())? })
    }
}

impl Interface {
    /// The interface of the library in this file.
    fn load(file: &str, own: &OwnDevice) -> Result<Self, libloading::Error> {
        // SAFETY: the file is PyTorch's extension module, which the interpreter has loaded, and
        // these are functions of its libraries with the signatures that PyTorch keeps for good.
        unsafe {
            let library = Library::new(file)?;
            let code = |name: &str| Ok((*library.get::<Code>(name.as_bytes())?)());
            Ok(Self {
                device: *library.get(b"aoti_torch_get_device_type")?,
                device_index: *library.get(b"aoti_torch_get_device_index")?,
                layout: library.get(b"aoti_torch_get_layout").ok().map(|get| *get),
                dtype: *library.get(b"aoti_torch_get_dtype")?,
                dim: *library.get(b"aoti_torch_get_dim")?,
                sizes: *library.get(b"aoti_torch_get_sizes")?,
                strides: *library.get(b"aoti_torch_get_strides")?,
                address: *library.get(b"aoti_torch_get_data_ptr")?,
                cpu: Memory { device: code("aoti_torch_device_type_cpu")?, index: None },
                own: Memory {
                    device: code(&format!("aoti_torch_device_type_{}", own.kind))?,
                    index: own.index,
                },
                strided: code("aoti_torch_layout_strided")?,
                dtypes: [
                    (code("aoti_torch_dtype_float32")?, DType::F32),
                    (code("aoti_torch_dtype_float64")?, DType::F64),
                    (code("aoti_torch_dtype_float16")?, DType::F16),
                    (code("aoti_torch_dtype_bfloat16")?, DType::BF16),
                    // The remainders of bf16 parameters.
                    (code("aoti_torch_dtype_int16")?, DType::U16),
                    // Codes of state.
                    (code("aoti_torch_dtype_uint8")?, DType::U8),
                    // Remainders of a byte, which is signed.
                    (code("aoti_torch_dtype_int8")?, DType::U8),
                ],
                _library: library,
            })
        }
    }

    /// The place of a tensor's elements, if the tensor is as expected.
    ///
    /// # Safety
    /// `handle` is that of a tensor, which nobody changes meanwhile.
    #[inline]
    unsafe fn place(
        &self,
        handle: *const c_void,
        memory: Memory,
        expected: Expected<'_>,
    ) -> Result<Place, Unfit> {
        // SAFETY: as the caller promises.
        let seen = unsafe { self.look(handle, memory)? };
        let told = Told {
            dtype: seen.dtype,
            shape: seen.shape,
            is_in_order: lie_as(expected.strides, seen.shape, seen.strides),
            address: seen.address,
        };
        told.place(expected)
    }

    /// A tensor's properties, if it lies in this memory.
    ///
    /// # Safety
    /// `handle` is that of a tensor, which nobody changes as long as the result is used.
    #[inline(always)]
    unsafe fn look<'a>(&self, handle: *const c_void, memory: Memory) -> Result<Seen<'a>, Unfit> {
        // SAFETY: as the caller promises; the extents and strides that are told have `dim` numbers,
        // and stay until the tensor is changed.
        unsafe {
            if told(self.device, handle)? != memory.device {
                return Err(Unfit::Device);
            }
            if let Some(index) = memory.index
                && told(self.device_index, handle)? != index
            {
                return Err(Unfit::Device);
            }
            if let Some(layout) = self.layout
                && told(layout, handle)? != self.strided
            {
                return Err(no_memory("it is not strided"));
            }
            let dim = told(self.dim, handle)?;
            let dtype = told(self.dtype, handle)?;
            let dtype = self.dtypes.iter().find(|known| known.0 == dtype);
            Ok(Seen {
                dtype: dtype.map(|known| known.1),
                shape: extents(told(self.sizes, handle)?, dim),
                strides: extents(told(self.strides, handle)?, dim),
                address: told(self.address, handle)?.expose_provenance(),
            })
        }
    }
}

/// # Safety
/// `handle` is that of a tensor, which nobody changes meanwhile.
#[inline(always)]
unsafe fn told<T>(get: Get<T>, handle: *const c_void) -> Result<T, Unfit> {
    let mut value = MaybeUninit::uninit();
    // SAFETY: the caller's promise, and room for the value, which 0 says has been written.
    unsafe {
        match get(handle, value.as_mut_ptr()) {
            0 => Ok(value.assume_init()),
            _ => Err(no_memory("PyTorch does not tell where it lies")),
        }
    }
}

/// # Safety
/// `values` has `dim` elements, for as long as the result is used, or `dim` is 0.
#[inline(always)]
unsafe fn extents<'a>(values: *const i64, dim: i64) -> &'a [i64] {
    match usize::try_from(dim) {
        Ok(dim) if dim > 0 && !values.is_null() => {
            // SAFETY: as the caller promises.
            unsafe { std::slice::from_raw_parts(values, dim) }
        }
        _ => &[],
    }
}

fn no_memory(why: &'static str) -> Unfit {
    Unfit::NoMemory(PyTypeError::new_err(why))
}

/// The class of PyTorch's tensors, and the distance of the handle in its objects.
pub(crate) struct Handles {
    class: Py<PyType>,
    /// The class, and known classes derived from it; most tensors are of one of these.
    known: Vec<Py<PyType>>,
    /// Bytes from an object to the handle in it.
    distance: usize,
    interface: Interface,
    direct: Option<Direct>,
}

impl Handles {
    /// The handles of a library's tensors; `None` if its tensors cannot be looked at this way.
    pub(crate) fn of(library: &Bound<'_, PyAny>, file: &str) -> PyResult<Option<Self>> {
        let Ok(interface) = Interface::load(file, &OwnDevice::of(library)?) else {
            return Ok(None);
        };
        let class = library.getattr("Tensor")?.downcast_into::<PyType>()?;
        let probes: Vec<Bound<'_, PyAny>> = library.call_method0("probes")?.extract()?;
        let Some(distance) = distance(&class, &probes)? else {
            return Ok(None);
        };
        let handles = Self {
            known: vec![class.clone().unbind()],
            class: class.unbind(),
            distance,
            interface,
            direct: Direct::of(library, file, distance)?,
        };
        for probe in &probes {
            let shape: Vec<u64> = probe.getattr("shape")?.extract()?;
            let address: usize = probe.call_method0("data_ptr")?.extract()?;
            let dtype = crate::described::dtype_of(&probe.getattr("dtype")?.str()?.to_string())?;
            let shape = &shape;
            match handles.place(probe, Expected { dtype, shape, strides: None }) {
                Ok(place) if place.address == address => {}
                _ => return Ok(None),
            }
        }
        Ok(Some(handles))
    }

    /// The functions that stand in for the property `grad`.
    pub(crate) fn direct(&self) -> Option<&Direct> {
        self.direct.as_ref()
    }

    /// Whether `kind` is the class of tensors or derived from it.
    #[inline]
    fn fits(&self, kind: *mut ffi::PyTypeObject) -> bool {
        let mut known = self.known.iter();
        // SAFETY: both are live types.
        known.any(|known| known.as_ptr().cast() == kind)
            || unsafe { ffi::PyType_IsSubtype(kind, self.class.as_ptr().cast()) != 0 }
    }

    /// Remembers the class of this tensor, so that further tensors of the class are recognised at
    /// once.
    pub(crate) fn expect(&mut self, tensor: &Bound<'_, PyAny>) {
        let kind = tensor.get_type();
        let is_known = self.known.iter().any(|known| known.is(&kind));
        if !is_known && self.known.len() < MOST_KNOWN && self.fits(kind.as_type_ptr()) {
            self.known.push(kind.unbind());
        }
    }

    /// The place of the elements of `tensor`, if the tensor is as expected.
    #[inline]
    pub(crate) fn place(
        &self,
        tensor: &Bound<'_, PyAny>,
        expected: Expected<'_>,
    ) -> Result<Place, Unfit> {
        self.place_in(self.interface.own, tensor, expected)
    }

    /// The place of the elements of `tensor`, if the tensor is as expected and in host memory.
    #[inline]
    pub(crate) fn place_on_host(
        &self,
        tensor: &Bound<'_, PyAny>,
        expected: Expected<'_>,
    ) -> Result<Place, Unfit> {
        self.place_in(self.interface.cpu, tensor, expected)
    }

    /// The properties of `tensor`, if it is in host memory. They hold until somebody changes the
    /// tensor.
    #[inline]
    pub(crate) fn look_on_host<'a>(&self, tensor: &'a Bound<'_, PyAny>) -> Result<Seen<'a>, Unfit> {
        if !self.fits(tensor.get_type_ptr()) {
            return Err(no_memory("expected a tensor of PyTorch, found another object"));
        }
        // SAFETY: as in `place_in`; who looks uses the extents before the lock is given up.
        unsafe {
            let handle = tensor.as_ptr().byte_add(self.distance);
            self.interface.look(handle.cast(), self.interface.cpu)
        }
    }

    #[inline]
    fn place_in(
        &self,
        memory: Memory,
        tensor: &Bound<'_, PyAny>,
        expected: Expected<'_>,
    ) -> Result<Place, Unfit> {
        if !self.fits(tensor.get_type_ptr()) {
            return Err(no_memory("expected a tensor of PyTorch, found another object"));
        }
        // SAFETY: an object of a class whose objects have a handle at this distance, kept by
        // `tensor`; the interpreter's lock is held, without which nobody may change a tensor.
        let place = unsafe {
            let handle = tensor.as_ptr().byte_add(self.distance);
            self.interface.place(handle.cast(), memory, expected)?
        };
        if place.len_bytes == expected.dtype.len_bytes() && is_negated(tensor)? {
            return Err(Unfit::Negated);
        }
        Ok(place)
    }
}

/// Whether a tensor of one element is a negated view, the imaginary part of a conjugate. With more
/// than one element the view has strides and is copied because of them, so no other has to be
/// asked.
pub(crate) fn is_negated(tensor: &Bound<'_, PyAny>) -> Result<bool, Unfit> {
    let is_negated = tensor.call_method0(intern!(tensor.py(), "is_neg"));
    is_negated.and_then(|is_negated| is_negated.is_truthy()).map_err(Unfit::NoMemory)
}

/// The distance in objects of the class at which the value of their `_cdata` lies; `None` if there
/// is no such distance.
fn distance(class: &Bound<'_, PyType>, probes: &[Bound<'_, PyAny>]) -> PyResult<Option<usize>> {
    let len: usize = class.getattr("__basicsize__")?.extract()?;
    let handles = probes.iter().map(|probe| probe.getattr("_cdata")?.extract());
    let handles = handles.collect::<PyResult<Vec<usize>>>()?;
    let word = size_of::<usize>();
    let mut places = (size_of::<ffi::PyObject>()..=len.saturating_sub(word)).step_by(word);
    Ok(places.find(|&place| {
        probes.iter().zip(&handles).all(|(probe, &handle)| {
            // SAFETY: within a live object of the class, whose objects have so many bytes.
            unsafe { probe.as_ptr().byte_add(place).cast::<usize>().read() == handle }
        })
    }))
}

/// The access to the library's tensors, prepared for these parameters.
pub(crate) fn handles(
    library: &Bound<'_, PyAny>,
    parameters: &mut [Parameter],
) -> PyResult<Option<Handles>> {
    let file: Option<String> = library.getattr("file")?.extract()?;
    let Some(file) = file else {
        return Ok(None);
    };
    openmp::look_in(&file);
    let mut handles = Handles::of(library, &file)?;
    if let Some(handles) = &mut handles {
        look_at(library.py(), handles, parameters)?;
    }
    Ok(handles)
}

/// Prepares the access to the tensors of these parameters.
pub(crate) fn look_at(
    py: Python<'_>,
    handles: &mut Handles,
    parameters: &mut [Parameter],
) -> PyResult<()> {
    for own in parameters {
        let tensor = own.tensor.bind(py);
        handles.expect(tensor);
        if let Some(direct) = handles.direct() {
            own.known = direct.countable(tensor)?;
        }
    }
    Ok(())
}
