//! Figures of a machine, as a value and as a file.

mod file;
mod machine;
mod value;

pub use file::{FIGURES_VARIABLE, FiguresError};
pub use value::{Figures, ThreadFigures, WorldFigures};
