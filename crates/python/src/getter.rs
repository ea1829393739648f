//! Reads of one attribute of thousands of objects of one class.

use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyType};

use crate::gradient::Direct;

/// Getter of an attribute of objects of one class. The attribute's function is looked up once, and
/// not for each object.
///
/// A getter is valid as long as nobody can have changed the class.
pub(crate) struct Getter<'a, 'py> {
    class: Bound<'py, PyType>,
    name: &'py Bound<'py, PyString>,
    /// Functions that stand in for the class's own property.
    direct: Option<&'a Direct>,
    /// The class's own property or slot; `None` if an object may have the attribute elsewhere.
    own: Option<(Bound<'py, PyAny>, ffi::descrgetfunc)>,
}

impl<'a, 'py> Getter<'a, 'py> {
    /// A getter for objects of the class of `like`.
    pub(crate) fn of(
        like: &Bound<'py, PyAny>,
        name: &'py Bound<'py, PyString>,
        direct: Option<&'a Direct>,
    ) -> Self {
        let class = like.get_type();
        let finds = slot(&class, ffi::Py_tp_getattro);
        let generic = ffi::PyObject_GenericGetAttr as *mut std::ffi::c_void;
        let own = class.getattr(name).ok().filter(|_| finds == generic);
        let own = own.and_then(|own| {
            let kind = own.get_type();
            // A property that can also be set comes before an attribute of the object itself.
            let (get, set) = (slot(&kind, ffi::Py_tp_descr_get), slot(&kind, ffi::Py_tp_descr_set));
            if get.is_null() || set.is_null() {
                return None;
            }
            // SAFETY: what is in this slot is a function of this type.
            let get = unsafe { std::mem::transmute::<*mut _, ffi::descrgetfunc>(get) };
            Some((own, get))
        });
        let direct =
            direct.filter(|direct| own.as_ref().is_some_and(|(own, _)| direct.fits(&class, own)));
        Self { class, name, direct, own }
    }

    /// The attribute of an object, whatever its class.
    #[inline]
    pub(crate) fn get(&self, object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        match &self.own {
            Some((own, get)) if object.get_type_ptr() == self.class.as_ptr().cast() => {
                if let Some(direct) = self.direct {
                    // SAFETY: `Getter::of` has found that it stands in for this class's.
                    return unsafe { direct.get(object) };
                }
                let class = self.class.as_ptr();
                // SAFETY: the function of `own`'s class, called as the interpreter would for an
                // object of `class`; all three are live and the interpreter's lock is held.
                let found = unsafe { get(own.as_ptr(), object.as_ptr(), class) };
                // SAFETY: a new reference, or null where an error is set.
                unsafe { Bound::from_owned_ptr_or_opt(object.py(), found) }.ok_or_else(|| {
                    PyErr::take(object.py())
                        .unwrap_or_else(|| PyRuntimeError::new_err("an attribute without a value"))
                })
            }
            _ => object.getattr(self.name),
        }
    }
}

/// The function in a slot of a class; null if the class has none, or if this version of Python does
/// not tell.
fn slot(class: &Bound<'_, PyType>, which: std::ffi::c_int) -> *mut std::ffi::c_void {
    // SAFETY: a live class and the number of a slot.
    let found = unsafe { ffi::PyType_GetSlot(class.as_ptr().cast(), which) };
    if found.is_null() {
        drop(PyErr::take(class.py()));
    }
    found
}
