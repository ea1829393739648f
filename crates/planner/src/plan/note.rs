//! Notes: what a pass did and why.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The outcome that a note explains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The pass rewrote the plan.
    Applied,
    /// Things that might have gone together were kept apart.
    Split,
    /// Something was left out.
    Skipped,
    /// The pass left the plan as it was.
    Refused,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Verdict::Applied => "applied",
            Verdict::Split => "split",
            Verdict::Skipped => "skipped",
            Verdict::Refused => "refused",
        })
    }
}

/// One decision of one pass, with its reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// The pass.
    pub pass: String,
    /// The pass's decision.
    pub verdict: Verdict,
    /// The reason, as a sentence.
    pub reason: String,
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.pass, self.verdict, self.reason)
    }
}
