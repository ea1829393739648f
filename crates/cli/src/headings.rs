//! Headings of flags in help, beside those of the table of settings.

pub(crate) const MODEL: &str = "Model";
pub(crate) const RULE: &str = "Rule";
pub(crate) const PRECISION: &str = "Precision";
pub(crate) const RANKS: &str = "Ranks";
pub(crate) const LAUNCHES: &str = "Launches and threads";
pub(crate) const SAVING: &str = "Saving";
pub(crate) const OUTPUT: &str = "Output";
