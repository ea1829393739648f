//! The type that tensors are kept in.

use bytemuck::Pod;
use fusestep_tensor::DType;

use crate::Compute;

/// A type that tensors are kept in and that arithmetic in `C` reads exactly and writes with one rounding.
pub trait Storage<C: Compute>: Pod + Send + Sync {
    /// The element type.
    const DTYPE: DType;
    /// The same value.
    fn widen(self) -> C;
    /// The nearest value, ties to even.
    fn narrow(value: C) -> Self;
}

impl<C: Compute> Storage<C> for C {
    const DTYPE: DType = C::DTYPE;
    #[inline(always)]
    fn widen(self) -> C {
        self
    }
    #[inline(always)]
    fn narrow(value: C) -> Self {
        value
    }
}
