//! State in codes from and to state in f32, for state dicts of another type of state.

use fusestep::fused_adam::{CodedState, Coding, Dither, decode, encode, units_of};
use fusestep::{DType, Role};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::refused;
use crate::listed::{Form, Listed, Looks, Role as ListRole};

/// Roles of state that may lie in codes.
const CODED: [Role; 6] =
    [Role::Moment1, Role::Moment2, Role::MaxMoment2, Role::Velocity, Role::MaxGrad, Role::Sum];

/// State in codes from and to f32, in tensors of a library.
#[pyclass(module = "fusestep._fusestep", frozen)]
pub(crate) struct Codes {
    looks: Looks,
}

/// The three lists of a conversion.
struct Lists {
    codes: Listed,
    units: Listed,
    values: Listed,
}

#[pymethods]
impl Codes {
    /// Looks at tensors of this library from now on.
    #[new]
    fn new(library: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(Self { looks: Looks::of(library)? })
    }

    /// Writes what codes and their units read as into f32 values. `role` says what the codes mean,
    /// `name` is the tensor's in errors.
    #[pyo3(signature = (role, name, codes, units, values))]
    fn decode(
        &self,
        role: &str,
        name: &Bound<'_, PyAny>,
        codes: &Bound<'_, PyAny>,
        units: &Bound<'_, PyAny>,
        values: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let coding = coding_of(role)?;
        let lists = self.lists(name, codes, units, values)?;
        // SAFETY: the tensors were found in this call, and their objects are kept by the caller;
        // the interpreter's lock is held. Everything is copied before anything is written.
        let (codes, units) = unsafe { (lists.codes.bytes().to_vec(), floats(lists.units)) };
        let mut decoded = vec![0.0; codes.len()];
        decode(coding, &codes, &units, &mut decoded).map_err(refused)?;
        // SAFETY: as above; no other slice is left.
        unsafe { write_floats(lists.values, &decoded) };
        Ok(())
    }

    /// Writes f32 values as codes, rounded to nearest, and their units.
    #[pyo3(signature = (role, name, values, codes, units))]
    fn encode(
        &self,
        role: &str,
        name: &Bound<'_, PyAny>,
        values: &Bound<'_, PyAny>,
        codes: &Bound<'_, PyAny>,
        units: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let coding = coding_of(role)?;
        let lists = self.lists(name, codes, units, values)?;
        // SAFETY: as in `decode`.
        let values = unsafe { floats(lists.values) };
        let (mut codes, mut units) = (vec![0; values.len()], vec![0.0; units_of(values.len())]);
        let coded = CodedState { codes: &mut codes, units: &mut units };
        encode(coding, &values, coded, &Dither::NEAREST).map_err(refused)?;
        // SAFETY: as in `decode`, one list behind the other.
        unsafe {
            lists.codes.bytes_mut().copy_from_slice(&codes);
            write_floats(lists.units, &units);
        }
        Ok(())
    }
}

impl Codes {
    fn lists(
        &self,
        name: &Bound<'_, PyAny>,
        codes: &Bound<'_, PyAny>,
        units: &Bound<'_, PyAny>,
        values: &Bound<'_, PyAny>,
    ) -> PyResult<Lists> {
        let mut form = Form::default();
        let role = |list, dtypes| ListRole { list, name, dtypes };
        let codes = self.looks.param(role("codes", &[DType::U8]), codes, &mut form)?;
        let values = self.looks.beside(role("values", &[DType::F32]), values, &form)?;
        let units = self.looks.units(role("units", &[DType::F32]), units, &form)?;
        Ok(Lists { codes, units, values })
    }
}

/// The coding of a role by its name.
fn coding_of(role: &str) -> PyResult<Coding> {
    let found = CODED.into_iter().find(|own| own.name() == role).and_then(Coding::of);
    found.ok_or_else(|| {
        PyValueError::new_err(format!("role: expected state that has codes, found {role}"))
    })
}

/// The elements of a list of f32.
///
/// # Safety
/// As for [`Listed::bytes`], during the call.
unsafe fn floats(list: Listed) -> Vec<f32> {
    // SAFETY: as the caller promises.
    let bytes = unsafe { list.bytes() };
    let (values, _) = bytes.as_chunks::<4>();
    values.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect()
}

/// Writes the elements of a list of f32.
///
/// # Safety
/// As for [`Listed::bytes_mut`], during the call.
unsafe fn write_floats(list: Listed, values: &[f32]) {
    // SAFETY: as the caller promises.
    let (own, _) = unsafe { list.bytes_mut() }.as_chunks_mut::<4>();
    for (own, value) in own.iter_mut().zip(values) {
        *own = value.to_ne_bytes();
    }
}
