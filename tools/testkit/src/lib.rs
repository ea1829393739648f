#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod case;
mod disk;
mod normed_reference;
mod reference;
mod rules;
mod runner;
mod simulation;
mod ulp;

pub use case::{Case, EDGE_NUMELS, Gradients};
pub use disk::{Fault, Seen, SimulatedDisk};
pub use rules::{ElementState, each_rule, element_rules, reference_step, rules};
pub use runner::{backends, check, check_at, check_bits, outcome};
pub use simulation::{Story, simulate};
pub use ulp::ulp_distance;
