//! Order in which ranks start to reduce buckets.

#[cfg(test)]
#[path = "ready_tests.rs"]
mod tests;

/// Buckets that may start, in one order on all ranks.
///
/// A bucket starts when all its gradients have been given and all buckets before it have started.
/// So ranks whose gradients become ready in different orders still make their calls in one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Ready {
    /// Number of gradients of each bucket.
    of: Vec<usize>,
    /// Gradients that each bucket still waits for in this micro-step.
    missing: Vec<usize>,
    /// First bucket that has not been started.
    next: usize,
}

impl Ready {
    /// Buckets of so many gradients each, none of them given.
    pub(crate) fn new(of: Vec<usize>) -> Self {
        Self { missing: of.clone(), of, next: 0 }
    }

    pub(crate) fn given(&mut self, bucket: usize) {
        // Buckets of slices that each rank has for itself are not among them.
        if let Some(missing) = self.missing.get_mut(bucket) {
            *missing = missing.saturating_sub(1);
        }
    }

    /// The next bucket, if all its gradients are given.
    pub(crate) fn full(&self) -> Option<usize> {
        (self.missing.get(self.next) == Some(&0)).then_some(self.next)
    }

    /// The next bucket, full or not: after the backward pass nothing more will come.
    pub(crate) fn rest(&self) -> Option<usize> {
        (self.next < self.of.len()).then_some(self.next)
    }

    pub(crate) fn start(&mut self) {
        self.next += 1;
    }

    pub(crate) fn started(&self) -> usize {
        self.next
    }

    /// Waits for all gradients again, in a micro-step whose buckets start from the first.
    pub(crate) fn again(&mut self) {
        self.next = 0;
        self.missing.clone_from(&self.of);
    }
}
