//! Sums over parameters from one step to the next.
//!
//! LARS needs the norm of every parameter before it updates it. The update before had the parameter at hand and took the sum along
//! ([`fusestep_launch::CarriedSum`]), which saves a read of all parameters, as long as nobody has written them in between. The
//! buffers know: each counts how often it was lent to be written.

use std::sync::atomic::{AtomicBool, AtomicU64};

use fusestep_elementwise::Carried;
use fusestep_launch::{CHUNK_ELEMENTS, Launch, ListBuffer};
use fusestep_tensor::Role;

use crate::buffer::HostBuffer;

/// The sums over the chunks of all parameters of a storage, as their last update left them.
///
/// # Cost
/// 8 bytes for each 65,536 elements, allocated at the first step.
#[derive(Debug)]
pub(crate) struct ParamSums {
    /// Place of each tensor's first sum, and one past the last tensor's.
    starts: Vec<usize>,
    chunks: Vec<AtomicU64>,
    /// For each tensor.
    valid: Vec<AtomicBool>,
    /// The state of the memory that they are the sums of.
    of: Option<Written>,
}

/// How often the memory of the parameters, and that of what is beside them, was lent to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Written {
    param: u64,
    beside: Option<u64>,
}

impl ParamSums {
    /// Those that the launch's parameters carry, to be given back by [`ParamSums::keep`] when they have been updated; `None` if the
    /// kernel has no use for them or the parameters are not kept here. Sums over what has changed since are marked as such.
    pub(crate) fn take(launch: &mut Launch<'_>) -> Option<Self> {
        launch.kernel.normed()?.carried()?;
        let written = Written::of(launch.lists)?;
        let sums = param(launch.lists)?.sums.take();
        let mut sums = match sums.filter(|sums| sums.fit(launch.offsets)) {
            Some(sums) => sums,
            None => Self::new(launch.offsets),
        };
        if sums.of.take() != Some(written) {
            for valid in &mut sums.valid {
                *valid.get_mut() = false;
            }
        }
        Some(sums)
    }

    /// Leaves the sums with the parameters, which were written by nobody but the launch since they were taken.
    pub(crate) fn keep(mut self, lists: &mut [ListBuffer]) {
        self.of = Written::of(lists);
        if let Some(buffer) = param(lists) {
            buffer.sums = Some(self);
        }
    }

    /// Those of one tensor of so many elements.
    pub(crate) fn of(&self, tensor: usize, numel: u64) -> Option<Carried<'_>> {
        let chunks = self
            .chunks
            .get(self.starts[tensor]..self.starts[tensor + 1])?;
        Some(Carried {
            chunks: chunks.get(..numel.div_ceil(u64::from(CHUNK_ELEMENTS)) as usize)?,
            valid: &self.valid[tensor],
        })
    }

    /// For tensors that lie at these elements.
    fn new(offsets: &[u64]) -> Self {
        let starts: Vec<usize> = starts(offsets).collect();
        let chunks = starts.last().copied().unwrap_or(0);
        Self {
            chunks: (0..chunks).map(|_| AtomicU64::new(0)).collect(),
            valid: (1..starts.len()).map(|_| AtomicBool::new(false)).collect(),
            starts,
            of: None,
        }
    }

    fn fit(&self, offsets: &[u64]) -> bool {
        starts(offsets).eq(self.starts.iter().copied())
    }
}

/// Where the sums of tensors start that lie at these elements, padding included.
fn starts(offsets: &[u64]) -> impl Iterator<Item = usize> {
    let chunks = offsets.windows(2).map(|tensor| {
        // The storage lies in host memory, so its element counts fit a usize.
        (tensor[1] - tensor[0]).div_ceil(u64::from(CHUNK_ELEMENTS)) as usize
    });
    std::iter::once(0).chain(chunks.scan(0, |start, chunks| {
        *start += chunks;
        Some(*start)
    }))
}

impl Written {
    /// As the lists are now; `None` if they are not memory of this backend.
    fn of(lists: &[ListBuffer]) -> Option<Self> {
        let mut param = None;
        let mut beside = None;
        for list in lists {
            let place = match list.role() {
                Role::Param => &mut param,
                Role::Master | Role::Remainder => &mut beside,
                _ => continue,
            };
            let buffer = list.buffer.as_any().downcast_ref::<HostBuffer>()?;
            *place = Some(buffer.times_lent());
        }
        Some(Self {
            param: param?,
            beside,
        })
    }
}

fn param(lists: &mut [ListBuffer]) -> Option<&mut HostBuffer> {
    let list = lists.iter_mut().find(|list| list.role() == Role::Param)?;
    list.buffer.as_any_mut().downcast_mut()
}
