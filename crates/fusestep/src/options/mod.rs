//! Settings of a step, each once: name, value, default, range, sentence and conflicts.

mod check;
mod choice;
mod chosen;
mod conflicts;
mod error;
mod of_params;
mod of_precision;
mod planner;
mod rank_cores;
mod row;
mod step_options;
mod text;

pub use check::Changed;
pub use choice::Named;
pub use chosen::Chosen;
pub use error::OptionError;
pub use of_params::{Names, OfParams, Overlap, OwnRule, Pattern, PrecisionOf, overlaps};
pub use rank_cores::RankCores;
pub use row::{Alone, Conflict, Need, Row, Section, Visit};
pub use step_options::StepOptions;
