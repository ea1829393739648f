#![doc = include_str!("../README.md")]
// Forbidden but in the one module whose constructor is a promise of its caller.
#![deny(unsafe_code)]

mod counted;
mod desc;
#[expect(unsafe_code, reason = "memory of a device can only be promised, and tests promise some")]
mod device;
mod dtype;
mod error;
mod quoted;
mod role;
mod shape;

pub use counted::{advised, counted, counted_are, grouped, power_of_two, short_number};
pub use desc::{ParamDesc, Trust, check_total_numel, check_unique_names};
pub use device::{DeviceOrder, DeviceSliceMut};
pub use dtype::{DType, Element};
pub use error::{MAX_MODEL_NUMEL, MAX_NUMEL, TensorError};
pub use quoted::{MAX_QUOTED_CHARS, Quoted, escaped, escaped_json};
pub use role::{Role, UNIT_ELEMENTS};
pub use shape::Shape;
