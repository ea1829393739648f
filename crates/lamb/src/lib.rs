#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod config;
mod cpu;
pub mod device;
pub mod reference;
mod slices;

pub use config::Lamb;
pub use cpu::LambKernel;
pub use fusestep_elementwise::StepError;
pub use fusestep_launch::Excluded;
pub use fusestep_tensor::Trust;
pub use slices::LambTensors;
