//! Memory that is asked for before it is read.
//!
//! A tensor of PyTorch is three objects, each somewhere: Python's, the description, the storage. A
//! step over thousands of small ones would wait for one line of memory after the other. Their
//! addresses are remembered as hints for the next step, which looks at tensors anew: a hint
//! that is out of date costs time and nothing else.

use fusestep::launch::MAX_LISTS;
use fusestep::simd::prefetch_memory;
use pyo3::intern;
use pyo3::prelude::*;

use crate::loan::GRADIENT;

/// Tensors of a parameter: the lists of its kernel, and the one that counts steps.
pub(crate) const TENSORS: usize = MAX_LISTS + 1;

/// How many parameters ahead memory is asked for: enough to be there in time, few enough to stay.
const AHEAD: usize = 8;

/// Bytes of a description and of a storage that a look reads. PyTorch does not tell their sizes.
const DESCRIPTION_BYTES: usize = 184;
const STORAGE_BYTES: usize = 64;

/// Where one tensor was seen; zeros where nothing is known.
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

/// Where the tensors of all parameters were seen in the last step.
#[derive(Debug)]
pub(crate) struct Ahead {
    /// Parameter and gradient, apart from state, which private state needs no look at.
    own: Vec<[Seen; GRADIENT + 1]>,
    state: Vec<[Seen; TENSORS - GRADIENT - 1]>,
}

impl Ahead {
    /// For so many parameters, none of which has been seen.
    pub(crate) fn new(parameters: usize) -> Self {
        Self {
            own: vec![Default::default(); parameters],
            state: vec![Default::default(); parameters],
        }
    }

    /// Asks for the memory of a parameter that comes soon after `parameter`, that of its state if
    /// it will be looked at.
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

    /// Takes down where a tensor of a parameter is. What comes again is worth being asked for all
    /// its addresses, which takes a microsecond.
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
            // Its own again where a library does not tell, which is asked once.
            let found = addresses(object).unwrap_or((address, address));
            (seen.description, seen.storage) = found;
        }
    }
}

/// Where PyTorch has the description and the storage of a tensor.
fn addresses(object: &Bound<'_, PyAny>) -> PyResult<(usize, usize)> {
    let py = object.py();
    let description = object.getattr(intern!(py, "_cdata"))?.extract()?;
    let storage = object.call_method0(intern!(py, "untyped_storage"))?;
    Ok((description, storage.getattr(intern!(py, "_cdata"))?.extract()?))
}
