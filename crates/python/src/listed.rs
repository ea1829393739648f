//! Tensors of a call over lists: where they lie, and whether they fit their parameter.

use fusestep::DType;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;

use crate::described::dtype_of;
use crate::handle::{Handles, handles, is_negated};
use crate::tensor::{Order, Seen, Unfit, is_dense, lie_as};

/// Floating-point dtypes that lists may have.
pub(crate) const FLOATS: &[DType] = &[DType::F32, DType::BF16, DType::F16];

/// Dtypes of copies for a device.
pub(crate) const NARROW: &[DType] = &[DType::BF16, DType::F16];

/// Dtypes of state: floating point, and codes.
pub(crate) const STATE: &[DType] = &[DType::F32, DType::BF16, DType::F16, DType::U8];

/// Place and dtype of a tensor's elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Listed {
    pub(crate) dtype: DType,
    pub(crate) address: usize,
    pub(crate) len_bytes: usize,
}

impl Listed {
    /// A list without elements.
    pub(crate) const NONE: Self = Self { dtype: DType::F32, address: 0, len_bytes: 0 };

    /// The bytes, for reading.
    ///
    /// # Safety
    /// The tensor lies there as long as the result is used, and nobody writes to it meanwhile.
    pub(crate) unsafe fn bytes<'a>(self) -> &'a [u8] {
        if self.len_bytes == 0 {
            return no_list();
        }
        let start = std::ptr::with_exposed_provenance(self.address);
        // SAFETY: as the caller promises.
        unsafe { std::slice::from_raw_parts(start, self.len_bytes) }
    }

    /// The bytes, for writing.
    ///
    /// # Safety
    /// The tensor lies there as long as the result is used, and nobody else reads it or writes to
    /// it meanwhile.
    pub(crate) unsafe fn bytes_mut<'a>(self) -> &'a mut [u8] {
        if self.len_bytes == 0 {
            // SAFETY: no bytes, at an address for elements of any dtype.
            return unsafe { std::slice::from_raw_parts_mut(no_bytes(), 0) };
        }
        let start = std::ptr::with_exposed_provenance_mut(self.address);
        // SAFETY: as the caller promises.
        unsafe { std::slice::from_raw_parts_mut(start, self.len_bytes) }
    }
}

/// An address of no bytes that fits elements of any dtype.
fn no_bytes() -> *mut u8 {
    std::ptr::NonNull::<u64>::dangling().as_ptr().cast()
}

fn no_list<'a>() -> &'a [u8] {
    // SAFETY: no bytes, at an address for elements of any dtype.
    unsafe { std::slice::from_raw_parts(no_bytes(), 0) }
}

/// The extents of a parameter and the order of its elements, which its other lists have, too.
#[derive(Debug, Default)]
pub(crate) struct Form {
    shape: Vec<i64>,
    strides: Vec<i64>,
    is_in_order: bool,
    pub(crate) numel: usize,
}

impl Form {
    fn take(&mut self, seen: Seen<'_>) {
        self.shape.clear();
        self.shape.extend_from_slice(seen.shape);
        self.strides.clear();
        self.strides.extend_from_slice(seen.strides);
        self.is_in_order = lie_as(None, seen.shape, seen.strides);
        self.numel = numel_of(seen.shape);
    }

    fn is_dense(&self) -> bool {
        let extents = self.shape.iter().map(|&extent| extent.unsigned_abs());
        self.is_in_order || is_dense(&extents.collect::<Vec<_>>(), &self.strides)
    }

    fn strides(&self) -> Option<&[i64]> {
        (!self.is_in_order).then_some(&self.strides)
    }
}

fn numel_of(shape: &[i64]) -> usize {
    let numel: i64 = shape.iter().product();
    usize::try_from(numel).unwrap_or(0)
}

/// A list of a parameter, by the names that errors have for both.
#[derive(Clone, Copy)]
pub(crate) struct Role<'a, 'py> {
    pub(crate) list: &'static str,
    pub(crate) name: &'a Bound<'py, PyAny>,
    pub(crate) dtypes: &'static [DType],
}

impl Role<'_, '_> {
    fn text(&self) -> String {
        let name = self.name;
        match self.list {
            "parameter" => format!("parameter `{name}`"),
            list => format!("{list} of `{name}`"),
        }
    }
}

/// Look at tensors of a library.
pub(crate) struct Looks {
    /// Access through PyTorch's C interface; `None` if tensors cannot be looked at through it.
    handles: Option<Handles>,
    /// The library's Python side: `describe`, `in_order_of`, and `refuse_list(what, tensor)`.
    library: Py<PyAny>,
}

impl Looks {
    pub(crate) fn of(library: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(Self { handles: handles(library, &mut [])?, library: library.clone().unbind() })
    }

    /// Finds a parameter, whose form is kept for its other lists.
    pub(crate) fn param(
        &self,
        role: Role<'_, '_>,
        tensor: &Bound<'_, PyAny>,
        form: &mut Form,
    ) -> PyResult<Listed> {
        let listed = self.see(role, tensor, |seen| {
            form.take(seen);
            if form.is_dense() { Ok(()) } else { Err(Unfit::Strides) }
        });
        listed.map_err(|unfit| self.refuse(role, tensor, form, unfit))
    }

    /// Finds another list of a parameter, of its shape and order.
    pub(crate) fn beside(
        &self,
        role: Role<'_, '_>,
        tensor: &Bound<'_, PyAny>,
        form: &Form,
    ) -> PyResult<Listed> {
        let listed = self.see(role, tensor, |seen| fits(form, seen));
        listed.map_err(|unfit| self.refuse(role, tensor, form, unfit))
    }

    /// Finds a gradient, or makes a copy of one whose elements do not lie as the parameter's; the
    /// copy is put into `copies`.
    pub(crate) fn grad<'py>(
        &self,
        role: Role<'_, 'py>,
        param: &Bound<'py, PyAny>,
        tensor: &Bound<'py, PyAny>,
        form: &Form,
        copies: &mut Vec<Bound<'py, PyAny>>,
    ) -> PyResult<Listed> {
        match self.see(role, tensor, |seen| fits(form, seen)) {
            Ok(listed) => Ok(listed),
            Err(Unfit::Strides | Unfit::Alignment | Unfit::Negated) => {
                let library = self.library.bind(param.py());
                let copy = library.call_method1("in_order_of", (param, tensor))?;
                let listed = self.beside(role, &copy, form)?;
                copies.push(copy);
                Ok(listed)
            }
            Err(unfit) => Err(self.refuse(role, tensor, form, unfit)),
        }
    }

    /// Finds a gradient by itself, or makes a copy of one whose elements do not lie densely; the
    /// copy is put into `copies`.
    pub(crate) fn whole<'py>(
        &self,
        role: Role<'_, 'py>,
        tensor: &Bound<'py, PyAny>,
        form: &mut Form,
        copies: &mut Vec<Bound<'py, PyAny>>,
    ) -> PyResult<Listed> {
        let seen = self.see(role, tensor, |seen| {
            form.take(seen);
            if form.is_dense() { Ok(()) } else { Err(Unfit::Strides) }
        });
        match seen {
            Ok(listed) => Ok(listed),
            Err(Unfit::Strides | Unfit::Alignment | Unfit::Negated) => {
                let copy = tensor.call_method0("clone")?.call_method0("contiguous")?;
                let listed = self.param(role, &copy, form)?;
                copies.push(copy);
                Ok(listed)
            }
            Err(unfit) => Err(self.refuse(role, tensor, form, unfit)),
        }
    }

    /// Finds the units of codes: an f32 for each 32 elements.
    pub(crate) fn units(
        &self,
        role: Role<'_, '_>,
        tensor: &Bound<'_, PyAny>,
        form: &Form,
    ) -> PyResult<Listed> {
        let own = Form {
            shape: vec![form.numel.div_ceil(32) as i64],
            strides: vec![1],
            is_in_order: true,
            numel: form.numel.div_ceil(32),
        };
        self.beside(role, tensor, &own)
    }

    /// Looks at a tensor; `check` has the last word on what is seen.
    fn see(
        &self,
        role: Role<'_, '_>,
        tensor: &Bound<'_, PyAny>,
        check: impl FnOnce(Seen<'_>) -> Result<(), Unfit>,
    ) -> Result<Listed, Unfit> {
        let listed = match &self.handles {
            Some(handles) => listed(role, handles.look_on_host(tensor)?, check)?,
            None => {
                let (seen, shape, order) = self.described(tensor).map_err(Unfit::NoMemory)?;
                let strides = match order {
                    Order::Strides(strides) => strides,
                    Order::InOrder(true) => in_order(&shape),
                    Order::InOrder(false) => return Err(Unfit::Negated),
                };
                listed(role, Seen { shape: &shape, strides: &strides, ..seen }, check)?
            }
        };
        if listed.len_bytes == listed.dtype.len_bytes() && is_negated(tensor)? {
            return Err(Unfit::Negated);
        }
        Ok(listed)
    }

    /// Properties of a tensor by its own methods.
    fn described(&self, tensor: &Bound<'_, PyAny>) -> PyResult<(Seen<'static>, Vec<i64>, Order)> {
        let library = self.library.bind(tensor.py());
        let told = library.call_method1(intern!(tensor.py(), "describe"), (tensor,))?;
        let Described(address, dtype, shape, order) = told.extract()?;
        let dtype = dtype_of(&dtype).ok();
        Ok((Seen { dtype, shape: &[], strides: &[], address }, shape, order))
    }

    /// The error for a tensor that does not fit.
    fn refuse(
        &self,
        role: Role<'_, '_>,
        tensor: &Bound<'_, PyAny>,
        form: &Form,
        unfit: Unfit,
    ) -> PyErr {
        let what = role.text();
        // The Python side tells what stands in place of a dense tensor on the CPU.
        let library = self.library.bind(tensor.py());
        if let Err(error) = library.call_method1("refuse_list", (&what, tensor)) {
            return error;
        }
        let own = |name: &str| {
            let found = tensor.getattr(name).and_then(|own| own.str());
            found.map_or_else(|error| error.to_string(), |own| own.to_string())
        };
        match unfit {
            Unfit::DType(_) => {
                let names: Vec<&str> =
                    role.dtypes.iter().map(|dtype| python_name(*dtype)).collect();
                let (names, found) = (names.join(", "), own("dtype"));
                PyTypeError::new_err(format!("{what}: expected torch.{names}, found {found}"))
            }
            Unfit::Shape(found) => PyValueError::new_err(format!(
                "{what}: expected shape {:?}, found {found:?}",
                form.shape
            )),
            Unfit::Strides if role.list == "parameter" => PyValueError::new_err(format!(
                "{what}: expected elements that lie densely, in any order of the dimensions, found \
                 strides {:?} of shape {:?}; use `.clone()`",
                form.strides, form.shape
            )),
            Unfit::Strides => PyValueError::new_err(format!(
                "{what}: expected elements in the parameter's order, with strides {:?}, found \
                 others; use `torch.zeros_like(parameter)` for new ones",
                form.strides
            )),
            Unfit::Alignment => PyValueError::new_err(format!(
                "{what}: expected an address that is a multiple of its element's size, found \
                 another; use `.clone()`"
            )),
            Unfit::Negated => PyValueError::new_err(format!(
                "{what}: expected a tensor of its own values, found a negated view; use \
                 `.resolve_neg()`"
            )),
            Unfit::Device => PyValueError::new_err(format!("{what}: expected a tensor on the cpu")),
            Unfit::NoMemory(error) => error,
        }
    }
}

/// Address, dtype, shape and order of a tensor, as its library describes it.
#[derive(FromPyObject)]
struct Described(usize, String, Vec<i64>, Order);

/// The name of a dtype in PyTorch.
fn python_name(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        DType::U8 => "uint8",
        _ => "float32",
    }
}

/// Strides of elements one behind the other, the last index fastest.
fn in_order(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for at in (1..shape.len()).rev() {
        strides[at - 1] = strides[at] * shape[at];
    }
    strides
}

/// Whether a tensor has the shape and order of its parameter.
fn fits(form: &Form, seen: Seen<'_>) -> Result<(), Unfit> {
    if seen.shape != form.shape {
        return Err(Unfit::Shape(seen.shape.to_vec()));
    }
    if lie_as(form.strides(), seen.shape, seen.strides) { Ok(()) } else { Err(Unfit::Strides) }
}

/// The place of a tensor that has one of the role's dtypes and passes `check`.
fn listed(
    role: Role<'_, '_>,
    seen: Seen<'_>,
    check: impl FnOnce(Seen<'_>) -> Result<(), Unfit>,
) -> Result<Listed, Unfit> {
    let dtype = seen.dtype.filter(|dtype| role.dtypes.contains(dtype));
    let dtype = dtype.ok_or(Unfit::DType(seen.dtype))?;
    check(seen)?;
    let len_bytes = numel_of(seen.shape) * dtype.len_bytes();
    if seen.address == 0 && len_bytes > 0 {
        return Err(Unfit::NoMemory(PyTypeError::new_err("its address is null")));
    }
    if !seen.address.is_multiple_of(dtype.len_bytes()) {
        return Err(Unfit::Alignment);
    }
    Ok(Listed { dtype, address: seen.address, len_bytes })
}
