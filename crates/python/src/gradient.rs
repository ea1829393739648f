//! Gradients of PyTorch's parameters, read without their property `grad`.
//!
//! The property `grad` takes 45 ns a tensor. Most of it goes into looking for subclasses, modes and
//! warnings that thousands of plain parameters do not have. The property calls two functions of
//! PyTorch's C++ libraries, which take half of that time. They are no part of the stable interface,
//! but their mangled names tell their arguments. The property is asked if a function is missing, or
//! if it gives another result than the property for a few tensors.

use std::ffi::c_void;

use libloading::Library;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyType;

/// `const at::Tensor& c10::TensorImpl::grad() const`
const GRAD: &[u8] = b"_ZNK3c1010TensorImpl4gradEv";
/// `PyObject* THPVariable_Wrap(const at::TensorBase&)`, a new reference.
const WRAP: &[u8] = b"_Z16THPVariable_WrapRKN2at10TensorBaseE";
/// `void torch::autograd::impl::bump_version(const at::Tensor&)`, which throws for an inference
/// tensor outside of inference mode.
const BUMP: &[u8] = b"_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE";

/// Functions behind the property `grad`, and the objects for which they stand in.
pub(crate) struct Direct {
    grad: unsafe extern "C-unwind" fn(*const c_void) -> *const c_void,
    wrap: unsafe extern "C-unwind" fn(*const c_void) -> *mut ffi::PyObject,
    bump: unsafe extern "C-unwind" fn(*const c_void),
    /// Bytes from an object to PyTorch's tensor in it.
    distance: usize,
    /// The property that the functions stand in for.
    property: Py<PyAny>,
    /// Classes whose objects have no override of the property.
    plain: Vec<Py<PyType>>,
    /// Python function that returns the number of modes that may override the property for all
    /// objects.
    modes: Py<PyAny>,
    /// Keeps the functions loaded.
    _library: Library,
}

impl Direct {
    /// The functions of the library in `file`; `None` if their results differ from the property's.
    pub(crate) fn of(
        library: &Bound<'_, PyAny>,
        file: &str,
        distance: usize,
    ) -> PyResult<Option<Self>> {
        // SAFETY: the file is PyTorch's extension module, which the interpreter has loaded, and
        // these names are those of functions with these arguments; what they give is compared with
        // the property below.
        let found = unsafe {
            Library::new(file).and_then(|library| {
                let (grad, wrap) = (*library.get(GRAD)?, *library.get(WRAP)?);
                Ok((grad, wrap, *library.get(BUMP)?, library))
            })
        };
        let Ok((grad, wrap, bump, loaded)) = found else {
            return Ok(None);
        };
        let direct = Self {
            grad,
            wrap,
            bump,
            distance,
            property: library.getattr("gradient")?.unbind(),
            plain: library.getattr("plain")?.extract()?,
            modes: library.getattr("modes")?.unbind(),
            _library: loaded,
        };
        let probes: Vec<Bound<'_, PyAny>> = library.call_method0("parameters")?.extract()?;
        for probe in probes {
            // SAFETY: a tensor of a plain class, with PyTorch's tensor at this distance.
            let found = unsafe { direct.get(&probe)? };
            let version: u64 = probe.getattr("_version")?.extract()?;
            let counted = direct.countable(&probe)?.is_some_and(|known| {
                // SAFETY: as above, found just now.
                unsafe { direct.count(&probe, known) }
            });
            let now: u64 = probe.getattr("_version")?.extract()?;
            if !found.is(&probe.getattr("grad")?) || !counted || now != version + 1 {
                return Ok(None);
            }
        }
        Ok(Some(direct))
    }

    /// Whether the functions stand in for the property `own` of objects of this class.
    pub(crate) fn fits(&self, class: &Bound<'_, PyType>, own: &Bound<'_, PyAny>) -> bool {
        let modes = || self.modes.bind(class.py()).call0()?.is_truthy();
        own.is(&self.property)
            && self.plain.iter().any(|plain| plain.is(class))
            && modes().is_ok_and(|any| !any)
    }

    /// The gradient of a tensor, or `None`.
    ///
    /// # Safety
    /// `tensor` is of a class that [`Direct::fits`].
    #[inline]
    pub(crate) unsafe fn get<'py>(
        &self,
        tensor: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        // SAFETY: the object's own tensor, kept by `tensor` while the interpreter's lock is held;
        // what `grad` gives stays as long, and `wrap` gives a new reference, or null and an error.
        unsafe {
            let found = (self.wrap)((self.grad)(self.handle(tensor).read()));
            Bound::from_owned_ptr_or_err(tensor.py(), found)
        }
    }

    /// PyTorch's tensor in an object, if its versions are counted; [`Direct::count`] counts them.
    pub(crate) fn countable(&self, tensor: &Bound<'_, PyAny>) -> PyResult<Option<Known>> {
        let class = tensor.get_type();
        let is_plain = self.plain.iter().any(|plain| plain.is(&class));
        if !is_plain || tensor.call_method0("is_inference")?.is_truthy()? {
            return Ok(None);
        }
        // SAFETY: an object of a class whose objects have PyTorch's tensor at this distance.
        Ok(Some(Known(unsafe { self.handle(tensor).read() }.addr())))
    }

    /// Counts a version of a tensor, unless the object now has another tensor than `known`.
    ///
    /// # Safety
    /// `known` is the answer of [`Direct::countable`] for this object.
    #[inline]
    pub(crate) unsafe fn count(&self, tensor: &Bound<'_, PyAny>, known: Known) -> bool {
        // SAFETY: an object of a plain class, kept by `tensor` while the interpreter's lock is
        // held; a tensor that is no inference tensor has versions to count.
        unsafe {
            let handle = self.handle(tensor);
            let is_known = handle.read().addr() == known.0;
            if is_known {
                (self.bump)(handle.cast());
            }
            is_known
        }
    }

    /// # Safety
    /// `tensor` is of a plain class.
    #[inline]
    unsafe fn handle(&self, tensor: &Bound<'_, PyAny>) -> *const *const c_void {
        // SAFETY: objects of plain classes have PyTorch's tensor at this distance.
        unsafe { tensor.as_ptr().byte_add(self.distance).cast_const().cast() }
    }
}

/// Address of a tensor of PyTorch whose versions are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Known(usize);
