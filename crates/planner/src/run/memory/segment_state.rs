//! State of a segment's memory, and the way in which gradients are given.

use fusestep_collective::Pending;
use fusestep_launch::Buffer;

/// Way in which a gradient was given in a micro-step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Given {
    #[default]
    No,
    /// By `push_grad`, which has written the gradient to its place.
    Pushed,
    /// Through a view that the caller may still write to.
    Viewed,
}

/// The place of a segment's memory: here, in a call, or with the updates.
pub(crate) enum SegmentState {
    /// Gradients are being written, or are about to be; `None` until the first is written.
    Here(Option<Box<dyn Buffer>>),
    /// A communication stream has the memory.
    InFlight(Pending<Box<dyn Buffer>>),
    /// The segment has been reduced, and this rank's part of it is in its shard.
    Through,
    /// A failed call has kept the memory.
    Lost,
}
