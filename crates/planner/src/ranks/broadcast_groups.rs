//! Which updated parameters one call brings to all ranks.

use std::ops::Range;

use serde::Serialize;

use super::plan::RankOptions;
use super::{Flat, Held, Ownership};
use crate::passes::Zero;
use crate::{Note, Verdict};

/// Parameters of one owner and dtype that one call brings to all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BroadcastGroup {
    /// Index of the dtype's line.
    pub flat: usize,
    /// The rank that has updated them.
    pub owner: usize,
    /// Their elements in the line.
    pub elements: Range<u64>,
    /// The parameters, in the order they lie.
    pub params: Vec<u32>,
}

/// The groups that pass `fuse_broadcast` makes, and its note; no group if it does not apply.
pub(crate) fn broadcast_groups(
    flats: &[Flat],
    options: &RankOptions,
) -> (Vec<BroadcastGroup>, Option<Note>) {
    let Some(cap_bytes) = options.broadcast_cap_bytes else {
        return (Vec::new(), None);
    };
    let note = |verdict, reason: String| Note::new("fuse_broadcast", verdict, reason);
    let refusal = match (options.zero, options.ownership) {
        _ if options.topology.world == 1 => Some("a world of 1 rank has nobody to tell"),
        (Zero::Zero0, _) => Some("every rank updates all parameters itself"),
        (Zero::Zero3, _) => Some("parameters stay in their shards until a layer asks for them"),
        (_, Ownership::Elements | Ownership::Chunks) => {
            Some("shards of equal length come together in one all-gather for each dtype")
        }
        _ => None,
    };
    if let Some(reason) = refusal {
        let note = note(Verdict::Skipped, reason.to_owned());
        return (Vec::new(), Some(note));
    }
    let mut groups = Vec::new();
    let together = |(_, flat): &(usize, &Flat)| flat.held == Held::Together;
    for (index, flat) in flats.iter().enumerate().filter(together) {
        let width = flat.dtype.len_bytes() as u64;
        for owner in 0..options.shard_place().world {
            let shard = flat.shard(owner);
            let mut open: Option<BroadcastGroup> = None;
            for piece in flat.pieces(shard.clone()) {
                let start = shard.start + piece.at;
                let end = start + piece.numel;
                match &mut open {
                    Some(group) if (end - group.elements.start) * width <= cap_bytes => {
                        group.elements.end = end;
                        group.params.push(piece.param);
                    }
                    _ => groups.extend(open.replace(BroadcastGroup {
                        flat: index,
                        owner,
                        elements: start..end,
                        params: vec![piece.param],
                    })),
                }
            }
            groups.extend(open);
        }
    }
    let params: usize = groups.iter().map(|group| group.params.len()).sum();
    let reason = format!(
        "{params} parameters come from their owners in {} calls",
        groups.len()
    );
    let note = note(Verdict::Applied, reason);
    (groups, Some(note))
}
