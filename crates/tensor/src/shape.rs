//! Extents of a tensor.

use std::fmt;

use crate::{MAX_NUMEL, TensorError};

/// The extents of a tensor, outermost first; no extents at all is a scalar of one element.
///
/// The element count is checked at construction, so [`Shape::numel`] cannot overflow.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "Vec<u64>", into = "Vec<u64>"))]
pub struct Shape {
    dims: Vec<u64>,
    numel: u64,
}

impl Shape {
    /// A shape of these extents.
    ///
    /// # Errors
    /// [`TensorError::ShapeOverflow`] if the element count exceeds [`MAX_NUMEL`].
    pub fn new(dims: impl Into<Vec<u64>>) -> Result<Self, TensorError> {
        let dims = dims.into();
        // A zero anywhere makes the tensor empty, however large the other extents are.
        let numel = if dims.contains(&0) {
            Some(0)
        } else {
            dims.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim))
        };
        match numel {
            Some(numel) if numel <= MAX_NUMEL => Ok(Self { dims, numel }),
            _ => Err(TensorError::ShapeOverflow { dims }),
        }
    }

    /// The extents, outermost first.
    pub fn dims(&self) -> &[u64] {
        &self.dims
    }

    /// The element count; at most [`MAX_NUMEL`].
    pub fn numel(&self) -> u64 {
        self.numel
    }
}

impl TryFrom<Vec<u64>> for Shape {
    type Error = TensorError;

    fn try_from(dims: Vec<u64>) -> Result<Self, Self::Error> {
        Self::new(dims)
    }
}

impl From<Shape> for Vec<u64> {
    fn from(shape: Shape) -> Self {
        shape.dims
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dims: Vec<String> = self.dims.iter().map(u64::to_string).collect();
        write!(f, "[{}]", dims.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numel_of_scalar_empty_and_overflowing_shapes() {
        assert_eq!(Shape::new([]).unwrap().numel(), 1);
        assert_eq!(Shape::new([3, 0, u64::MAX]).unwrap().numel(), 0);
        assert_eq!(Shape::new([1 << 31, 3]).unwrap().numel(), 3 << 31);
        assert!(Shape::new([u64::MAX, 2]).is_err());
        assert!(Shape::new([1 << 63]).is_err());
        assert_eq!(Shape::new([MAX_NUMEL]).unwrap().numel(), MAX_NUMEL);
        assert!(Shape::new([MAX_NUMEL + 1]).is_err());
    }
}
