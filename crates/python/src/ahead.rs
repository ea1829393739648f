//! Prefetch of memory that a step will read.
//!
//! A tensor of PyTorch is three objects in different places: Python's object, the description and
//! the storage. A step over thousands of small tensors would wait for one line of memory after the
//! other. So their addresses are kept as hints for the next step. That step looks at all tensors
//! anew, so a hint that is out of date costs time and nothing else.

use fusestep::launch::MAX_LISTS;
use fusestep::simd::prefetch_memory;
use pyo3::intern;
use pyo3::prelude::*;

use crate::loan::GRADIENT;

/// Number of tensors of a parameter: the lists of its kernel, and the tensor that counts steps.
pub(crate) const TENSORS: usize = MAX_LISTS + 1;

/// Distance of the prefetch in parameters: far enough that memory arrives in time, near enough that
/// it stays in the cache.
const AHEAD: usize = 8;

/// Bytes of a description and of a storage that a look reads; PyTorch does not tell their sizes.
const DESCRIPTION_BYTES: usize = 184;
const STORAGE_BYTES: usize = 64;

/// Addresses at which one tensor was seen; 0 for an unknown address.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    object: usize,
    description: usize,
    storage: usize,
}

impl Seen {
    #[inline]
    fn ask(&self) {
        if self.object != 0 {
            prefetch_memory(self.object, 1);
            if self.description != 0 {
                prefetch_memory(self.description, DESCRIPTION_BYTES);
                prefetch_memory(self.storage, STORAGE_BYTES);
            }
        }
    }
}

/// Addresses at which the tensors of all parameters were seen in the last step.
#[derive(Debug)]
pub(crate) struct Ahead {
    /// Addresses of parameter and gradient. State has its own field, since a step does not look at
    /// private state.
    own: Vec<[Seen; GRADIENT + 1]>,
    state: Vec<[Seen; TENSORS - GRADIENT - 1]>,
}

impl Ahead {
    /// Hints for `parameters` parameters, none of which has been seen.
    pub(crate) fn new(parameters: usize) -> Self {
        Self {
            own: vec![Default::default(); parameters],
            state: vec![Default::default(); parameters],
        }
    }

    /// Prefetches the memory of a parameter that comes soon after `parameter`, with its state if
    /// the step will look at it.
    #[inline]
    pub(crate) fn ask(&self, parameter: usize, with_state: bool) {
        let Some(own) = self.own.get(parameter + AHEAD) else {
            return;
        };
        own.iter().for_each(Seen::ask);
        if with_state {
            self.state[parameter + AHEAD].iter().for_each(Seen::ask);
        }
    }

    /// Notes the address of a tensor of a parameter. All its addresses are looked up, in a
    /// microsecond, only if the tensor is seen again.
    #[inline]
    pub(crate) fn saw(&mut self, parameter: usize, tensor: usize, object: &Bound<'_, PyAny>) {
        let seen = match tensor.checked_sub(GRADIENT + 1) {
            Some(state) => &mut self.state[parameter][state],
            None => &mut self.own[parameter][tensor],
        };
        let address = object.as_ptr().addr();
        if seen.object != address {
            *seen = Seen { object: address, ..Seen::default() };
        } else if seen.description == 0 {
            // A library that does not tell its addresses is asked only once: the object's own
            // address stands for them.
            let found = addresses(object).unwrap_or((address, address));
            (seen.description, seen.storage) = found;
        }
    }
}

/// The addresses of PyTorch's description and storage of a tensor.
fn addresses(object: &Bound<'_, PyAny>) -> PyResult<(usize, usize)> {
    let py = object.py();
    let description = object.getattr(intern!(py, "_cdata"))?.extract()?;
    let storage = object.call_method0(intern!(py, "untyped_storage"))?;
    Ok((description, storage.getattr(intern!(py, "_cdata"))?.extract()?))
}
