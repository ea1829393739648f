//! Private state, which nobody else can have seen.
//!
//! Anyone who holds a tensor may move its memory, so every tensor is looked at anew at each step.
//! State that was made here and never handed out stays at its place. A step over thousands of small
//! parameters then looks only at parameters and gradients.

/// Flags of the plan's parameters: whether the place of a parameter's state is known, and nobody
/// can change it.
#[derive(Debug)]
pub(crate) struct Private(Vec<bool>);

impl Private {
    /// A value for `members` parameters, whose state is not known yet.
    pub(crate) fn new(members: usize) -> Self {
        Self(vec![false; members])
    }

    /// Whether the state of this parameter is known.
    pub(crate) fn has(&self, member: usize) -> bool {
        self.0[member]
    }

    /// Whether the state of any parameter is known.
    pub(crate) fn has_any(&self) -> bool {
        self.0.contains(&true)
    }

    /// Marks the state of these parameters as known, after a step with it.
    pub(crate) fn remember(&mut self, members: &[usize]) {
        for &member in members {
            self.0[member] = true;
        }
    }

    /// Forgets all state, since others may see it from now on.
    pub(crate) fn forget(&mut self) {
        self.0.fill(false);
    }
}
