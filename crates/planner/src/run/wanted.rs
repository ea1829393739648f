//! Parameters that a gather asks for: parameters of which each rank has a part, with their places
//! in one buffer, and parameters that a rank has whole.

use std::ops::Range;

use crate::error::Result;
use crate::plan::settings::ZeroStage;
use crate::plan::value::Plan;
use crate::run::memory::evaluated;
use crate::run::memory::evaluated::Values;
use crate::run::memory::state::State;

/// A parameter of which each rank has a part.
pub(crate) struct Wanted {
    pub(crate) segment: usize,
    /// Elements of the parameter in its storage.
    pub(crate) elements: Range<u64>,
    /// The position at which it was asked for.
    pub(crate) at: usize,
    /// Factor of the parameter's average, if an average is asked for.
    pub(crate) factor: Option<f64>,
}

/// A parameter that this rank has whole.
pub(crate) struct Here {
    /// The position at which it was asked for.
    pub(crate) at: usize,
    pub(crate) param: usize,
}

/// Parameters of one segment in a buffer of their own.
#[derive(Default)]
pub(crate) struct Block {
    pub(crate) len_bytes: usize,
    pub(crate) places: Vec<Range<usize>>,
    /// Bytes of each bucket, and the number of elements of each rank's part.
    pub(crate) calls: Vec<(Range<usize>, Vec<usize>)>,
    /// Parts of this rank: place in the buffer, parameter, and elements of the storage.
    pub(crate) own: Vec<(usize, usize, Range<u64>)>,
}

/// The parameters of these names: those of which each rank has a part, by bucket and place
/// there, so that each rank's part of neighbours is one block; and those that this rank has
/// whole.
pub(crate) fn asked_for(
    plan: &Plan,
    state: &State,
    names: &[&str],
    values: Values,
) -> Result<(Vec<Wanted>, Vec<Here>)> {
    let (mut wanted, mut here) = (Vec::with_capacity(names.len()), Vec::new());
    for (at, name) in names.iter().enumerate() {
        let param = state.find(name)?;
        let (storage, tensor) = plan.places[param];
        let spec = &plan.storages[storage];
        let elements = spec.layout.range(tensor);
        let factor = match values {
            Values::Params => None,
            Values::Averages => evaluated::factor_of(state, param),
        };
        // Averages come from those that have the state.
        let shared_from = match factor {
            None => ZeroStage::Three,
            Some(_) => ZeroStage::One,
        };
        let shared = plan.zero >= shared_from && plan.reduces() && !spec.distributed;
        let segment = plan.segments.iter().position(|segment| {
            segment.storage == storage && segment.elements.contains(&elements.start)
        });
        match segment.filter(|_| shared && !elements.is_empty()) {
            Some(segment) => wanted.push(Wanted { segment, elements, at, factor }),
            None => here.push(Here { at, param }),
        }
    }
    wanted.sort_unstable_by_key(|one| (one.segment, one.elements.start));
    Ok((wanted, here))
}

/// The layout of parameters of one segment in a buffer of their own.
pub(crate) fn block_of(plan: &Plan, wanted: &[Wanted]) -> Block {
    let segment = &plan.segments[wanted[0].segment];
    let width = plan.storages[segment.storage].param_dtype().len_bytes();
    let rank = plan.shard_place().rank;
    let mut block = Block::default();
    for one in wanted {
        let from = block.len_bytes;
        block.len_bytes += (one.elements.end - one.elements.start) as usize * width;
        block.places.push(from..block.len_bytes);
    }
    let mut end = 0;
    for bucket in &plan.buckets[segment.buckets.clone()] {
        let mut counts = vec![0; bucket.bounds.len() - 1];
        for one in wanted {
            for (count, part) in counts.iter_mut().zip(bucket.overlaps(&one.elements)) {
                *count += part;
            }
        }
        let from = end;
        end += counts.iter().sum::<usize>() * width;
        let mut next = from + counts[..rank].iter().sum::<usize>() * width;
        let own = bucket.part(rank);
        for (which, one) in wanted.iter().enumerate() {
            let inside = own.start.max(one.elements.start)..own.end.min(one.elements.end);
            if !inside.is_empty() {
                let len_bytes = (inside.end - inside.start) as usize * width;
                block.own.push((next, which, inside));
                next += len_bytes;
            }
        }
        if from < end {
            block.calls.push((from..end, counts));
        }
    }
    block
}
