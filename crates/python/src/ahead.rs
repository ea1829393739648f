//! Memory that is asked for before it is read.
//!
//! A tensor of PyTorch is three objects, each somewhere: Python's, the description, the storage. A
//! step over thousands of small ones would wait for one line of memory after the other. Their
//! addresses are remembered as hints for the next step, which looks at every tensor anew: a hint
//! that is out of date costs time and nothing else.

use fusestep::launch::MAX_LISTS;
use fusestep::simd::prefetch_memory;
use pyo3::intern;
use pyo3::prelude::*;

/// Tensors of a parameter: the lists of its kernel, and the one that counts steps.
pub(crate) const TENSORS: usize = MAX_LISTS + 1;

/// How many parameters ahead memory is asked for: enough to be there in time, few enough to stay.
const AHEAD: usize = 8;

/// Bytes of a description and of a storage that a look reads. PyTorch does not tell their sizes.
const DESCRIPTION_BYTES: usize = 184;
const STORAGE_BYTES: usize = 64;

/// Where one tensor was seen.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    object: usize,
    description: usize,
    storage: usize,
    is_known: bool,
}

/// Where the tensors of all parameters were seen in the last step.
#[derive(Debug)]
pub(crate) struct Ahead(Vec<[Seen; TENSORS]>);

impl Ahead {
    /// For so many parameters, none of which has been seen.
    pub(crate) fn new(parameters: usize) -> Self {
        Self(vec![Default::default(); parameters])
    }

    /// Asks for the memory of a parameter that comes soon after `parameter`.
    #[inline]
    pub(crate) fn ask(&self, parameter: usize) {
        let Some(tensors) = self.0.get(parameter + AHEAD) else {
            return;
        };
        for seen in tensors.iter().filter(|seen| seen.object != 0) {
            prefetch_memory(seen.object, 1);
            if seen.description != 0 {
                prefetch_memory(seen.description, DESCRIPTION_BYTES);
                prefetch_memory(seen.storage, STORAGE_BYTES);
            }
        }
    }

    /// Takes down where a tensor of a parameter is. What comes again is worth being asked for all
    /// its addresses, which takes a microsecond.
    #[inline]
    pub(crate) fn saw(&mut self, parameter: usize, tensor: usize, object: &Bound<'_, PyAny>) {
        let seen = &mut self.0[parameter][tensor];
        let address = object.as_ptr().addr();
        if seen.object != address {
            *seen = Seen {
                object: address,
                ..Seen::default()
            };
        } else if !seen.is_known {
            seen.is_known = true;
            if let Ok((description, storage)) = addresses(object) {
                (seen.description, seen.storage) = (description, storage);
            }
        }
    }
}

/// Where PyTorch has the description and the storage of a tensor.
fn addresses(object: &Bound<'_, PyAny>) -> PyResult<(usize, usize)> {
    let py = object.py();
    let description = object.getattr(intern!(py, "_cdata"))?.extract()?;
    let storage = object.call_method0(intern!(py, "untyped_storage"))?;
    Ok((
        description,
        storage.getattr(intern!(py, "_cdata"))?.extract()?,
    ))
}
