//! Which parameters are kept how exactly.

use fusestep_launch::Precision;
use fusestep_tensor::DType;

/// The precision of parameters, by their dtype.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Precisions {
    all: Precision,
    /// Dtypes with a precision of their own.
    exceptions: Vec<(DType, Precision)>,
}

impl Precisions {
    pub(crate) fn all(precision: Precision) -> Self {
        Self { all: precision, exceptions: Vec::new() }
    }

    /// These settings, but for one dtype.
    pub(crate) fn set(&mut self, dtype: DType, precision: Precision) {
        self.exceptions.retain(|exception| exception.0 != dtype);
        self.exceptions.push((dtype, precision));
    }

    pub(crate) fn of(&self, dtype: DType) -> Precision {
        let exception = self.exceptions.iter().find(|exception| exception.0 == dtype);
        exception.map_or(self.all, |exception| exception.1)
    }
}
