//! Parameters as Python describes them.

use fusestep::DType;
use pyo3::prelude::*;

/// A parameter as Python describes it.
#[derive(FromPyObject)]
pub(crate) struct Described {
    pub(crate) name: String,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) group: usize,
    /// Strides of another order of elements than that in which the last index is fastest.
    #[pyo3(default)]
    pub(crate) strides: Option<Vec<i64>>,
    /// Whether the parameter can have a gradient.
    pub(crate) trains: bool,
    /// Whether gradients of a 16-bit parameter are in float32.
    #[pyo3(default)]
    pub(crate) wide: bool,
}

/// The dtype of a name of PyTorch's or NumPy's.
pub(crate) fn dtype_of(name: &str) -> PyResult<DType> {
    match name.rsplit('.').next().unwrap_or(name) {
        "float32" => Ok(DType::F32),
        "float64" => Ok(DType::F64),
        "float16" => Ok(DType::F16),
        "bfloat16" => Ok(DType::BF16),
        // The remainders of bfloat16 parameters, which no kernel takes as parameters.
        "int16" => Ok(DType::U16),
        // Codes of state, likewise, and remainders of a byte, which is signed.
        "uint8" | "int8" => Ok(DType::U8),
        other => Err(pyo3::exceptions::PyTypeError::new_err(format!(
            "expected float32, float64, float16 or bfloat16, found {other}"
        ))),
    }
}
