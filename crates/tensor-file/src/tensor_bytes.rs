//! Tensors to be written.

use std::borrow::Cow;

use fusestep_tensor::{DType, Shape};
use safetensors::{Dtype, View};

/// A tensor to be written.
#[derive(Clone, Debug)]
pub struct TensorBytes<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Elements, little-endian.
    pub bytes: Cow<'a, [u8]>,
}

impl<'a> TensorBytes<'a> {
    /// A tensor of one of fusestep's own dtypes.
    pub fn of(dtype: DType, shape: &Shape, bytes: Cow<'a, [u8]>) -> Self {
        let dtype = match dtype {
            DType::F32 => Dtype::F32,
            DType::F64 => Dtype::F64,
            DType::F16 => Dtype::F16,
            DType::BF16 => Dtype::BF16,
            DType::I32 => Dtype::I32,
            DType::I64 => Dtype::I64,
            DType::U8 => Dtype::U8,
            DType::U16 => Dtype::U16,
        };
        Self { dtype, shape: shape.dims().iter().map(|&dim| dim as usize).collect(), bytes }
    }
}

impl View for &TensorBytes<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}
