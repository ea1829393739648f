#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod config;
mod cpu;
pub mod device;
pub mod reference;
mod slices;

pub use config::Adagrad;
pub use cpu::AdagradKernel;
pub use fusestep_elementwise::StepError;
pub use fusestep_launch::Objective;
pub use slices::AdagradTensors;
