#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod bars;
mod canvas;
mod lines;
mod scale;
#[cfg(test)]
mod seen;

pub use bars::{Bar, Bars, Group, Place, Side};
pub use canvas::{COLORS, safe};
pub use lines::{Line, Lines};
