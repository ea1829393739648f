//! Errors of shapes and descriptors, and the bounds that they name.

use crate::{Quoted, short_number};

/// Most elements of a tensor, 2^50.
pub const MAX_NUMEL: u64 = 1 << 50;

/// Most elements of all parameters of a model, 2^54. Sums over them of the bytes of an element, and
/// of the bytes that a step moves for it, stay below 2^64.
pub const MAX_MODEL_NUMEL: u64 = 1 << 54;

/// Error of a shape or a descriptor.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// The product of the extents is beyond what any machine holds.
    #[error(
        "shape {dims}: expected at most {MAX_NUMEL} elements, found more; check the extents",
        dims = Quoted(&format!("{dims:?}"))
    )]
    ShapeOverflow {
        /// The extents given.
        dims: Vec<u64>,
    },
    /// The parameters of a model are together beyond what any machine holds.
    #[error(
        "parameters: expected at most {MAX_MODEL_NUMEL} elements of all together, found {found}; \
         check the extents"
    )]
    ModelOverflow {
        /// Elements of all parameters; `u64::MAX` stands for more.
        found: u64,
    },
    /// Two parameters share a name.
    #[error(
        "parameter `{name}` is registered twice, at positions {first} and {second}; names must be unique",
        name = Quoted(name)
    )]
    DuplicateName {
        /// The shared name.
        name: String,
        /// Position of the first registration.
        first: usize,
        /// Position of the second registration.
        second: usize,
    },
    /// A per-parameter hyper-parameter is out of range.
    #[error(
        "{what} of `{name}`: expected {expected}, found {found}",
        name = Quoted(name),
        found = short_number(*found)
    )]
    Hyper {
        /// The parameter.
        name: String,
        /// Name of the hyper-parameter.
        what: &'static str,
        /// Range that the value must keep.
        expected: &'static str,
        /// The value given.
        found: f64,
    },
}
