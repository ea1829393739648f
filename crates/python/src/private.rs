//! State that nobody else can have seen.
//!
//! Whoever holds a tensor may move its memory, so that every tensor is looked at anew at each step.
//! State that was made here and handed to nobody stays where it was found: a step over thousands
//! of small parameters looks at parameters and gradients alone.

/// Of which parameters of the plan the state is known, so that it can be nowhere else.
#[derive(Debug)]
pub(crate) struct Private(Vec<bool>);

impl Private {
    /// For so many parameters, of none of which anything is known.
    pub(crate) fn new(members: usize) -> Self {
        Self(vec![false; members])
    }

    /// Whether the state of this parameter is known.
    pub(crate) fn has(&self, member: usize) -> bool {
        self.0[member]
    }

    /// Whether that of any parameter is known.
    pub(crate) fn has_any(&self) -> bool {
        self.0.contains(&true)
    }

    /// Takes down that a step was taken with the state that was found of these parameters.
    pub(crate) fn remember(&mut self, members: &[usize]) {
        for &member in members {
            self.0[member] = true;
        }
    }

    /// Forgets everything: from now on others may have seen it.
    pub(crate) fn forget(&mut self) {
        self.0.fill(false);
    }
}
