//! Which parameters are kept how exactly.

use fusestep_launch::Precision;
use fusestep_tensor::DType;

/// The precision of parameters, by their dtype.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Precisions {
    all: Precision,
    /// Dtypes with a precision of their own.
    apart: Vec<(DType, Precision)>,
}

impl Precisions {
    /// One precision for all dtypes.
    pub(crate) fn all(precision: Precision) -> Self {
        Self {
            all: precision,
            apart: Vec::new(),
        }
    }

    /// These settings, but for one dtype.
    pub(crate) fn set(&mut self, dtype: DType, precision: Precision) {
        self.apart.retain(|apart| apart.0 != dtype);
        self.apart.push((dtype, precision));
    }

    /// The precision of parameters of this dtype.
    pub(crate) fn of(&self, dtype: DType) -> Precision {
        let apart = self.apart.iter().find(|apart| apart.0 == dtype);
        apart.map_or(self.all, |apart| apart.1)
    }
}
