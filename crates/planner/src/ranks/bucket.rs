//! Which gradients one call reduces.

use fusestep_tensor::ParamDesc;
use serde::Serialize;

use super::Flat;
use crate::passes::{FuseAllReduce, Oversize};

/// Consecutive elements of one gradient within a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Span {
    /// Position of the parameter in the plan.
    pub param: u32,
    /// First element within the tensor.
    pub first: u64,
    /// Element count, at least 1.
    pub numel: u64,
    /// First element within the bucket.
    pub at: u64,
    /// First element within the dtype's line.
    pub flat_at: u64,
}

/// Gradients that one call reduces.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bucket {
    /// Index of the dtype's line.
    pub flat: usize,
    /// Its gradients, in the order they lie in the line, so that each rank's part is a range of the bucket.
    pub spans: Vec<Span>,
    /// Elements of all spans.
    pub numel: u64,
    /// Elements of each rank's part.
    pub counts: Vec<usize>,
}

/// The buckets of all lines, in the order their gradients become ready; without `fuse` one for each tensor.
pub(crate) fn buckets(
    params: &[ParamDesc],
    flats: &[Flat],
    fuse: Option<&FuseAllReduce>,
) -> Vec<Bucket> {
    let mut place = vec![None; params.len()];
    for (index, flat) in flats.iter().enumerate() {
        for (position, &member) in flat.members.iter().enumerate() {
            place[member as usize] = Some((index, flat.starts[position]));
        }
    }
    let groups: Vec<Vec<u32>> = match fuse {
        None => (0..params.len() as u32).rev().map(|p| vec![p]).collect(),
        Some(fuse) => fuse.groups(params),
    };
    let mut filling = Filling {
        flats,
        fuse,
        open: vec![Vec::new(); flats.len()],
        done: Vec::new(),
    };
    for group in groups {
        for param in group {
            if let Some((flat, start)) = place[param as usize] {
                filling.add(param, flat, start, params[param as usize].numel());
            }
        }
        if fuse.is_none_or(|fuse| fuse.layers.is_some()) {
            filling.close_all();
        }
    }
    filling.close_all();
    // Those that are never reduced come last.
    filling.done.sort_by_key(|bucket| flats[bucket.flat].held);
    filling.done
}

struct Filling<'a> {
    flats: &'a [Flat],
    fuse: Option<&'a FuseAllReduce>,
    open: Vec<Vec<Span>>,
    done: Vec<Bucket>,
}

impl Filling<'_> {
    fn add(&mut self, param: u32, flat: usize, start: u64, numel: u64) {
        if numel == 0 {
            return;
        }
        let span = |first: u64, numel: u64| Span {
            param,
            first,
            numel,
            at: 0,
            flat_at: start + first,
        };
        let Some(fuse) = self.fuse.filter(|fuse| fuse.layers.is_none()) else {
            self.open[flat].push(span(0, numel));
            return;
        };
        let width = self.flats[flat].grad_dtype.len_bytes() as u64;
        let cap = (fuse.cap_bytes / width).max(1);
        let open: u64 = self.open[flat].iter().map(|span| span.numel).sum();
        if open > 0 && (open.saturating_add(numel) > cap || self.open[flat].len() >= fuse.cap_count)
        {
            self.close(flat);
        }
        if numel <= cap || fuse.oversize == Oversize::Alone {
            self.open[flat].push(span(0, numel));
            if numel >= cap {
                self.close(flat);
            }
            return;
        }
        let mut first = 0;
        while first < numel {
            let part = (numel - first).min(cap);
            self.open[flat].push(span(first, part));
            first += part;
            if part == cap {
                self.close(flat);
            }
        }
    }

    fn close_all(&mut self) {
        for flat in 0..self.flats.len() {
            self.close(flat);
        }
    }

    fn close(&mut self, flat: usize) {
        let mut spans = std::mem::take(&mut self.open[flat]);
        if spans.is_empty() {
            return;
        }
        spans.sort_by_key(|span| span.flat_at);
        let bounds = &self.flats[flat].bounds;
        let mut counts = vec![0; bounds.len() - 1];
        let mut numel = 0;
        for span in &mut spans {
            span.at = numel;
            numel += span.numel;
            let elements = span.flat_at..span.flat_at + span.numel;
            for (count, part) in counts
                .iter_mut()
                .zip(super::flat::overlaps(bounds, &elements))
            {
                *count += part;
            }
        }
        self.done.push(Bucket {
            flat,
            spans,
            numel,
            counts,
        });
    }
}

/// Parameters by layer, as the pass `coalesce_grad_tensor` of PaddlePaddle 2023 groups them: the layer is the name up to the first
/// `.`; consecutive layers are put together until a group has more than `most` gradients (if `most` is above 1) or at least
/// `mib` MiB of them. With `mib` 0 everything is one group in order of names; below 0 layers stay apart. Each group is split by
/// dtype, in order of first appearance.
///
/// The limits are soft: a group is closed after it has passed one, and a layer is never split.
pub fn groups_by_layer(
    params: &[ParamDesc],
    order: &[u32],
    mib: f64,
    most: usize,
) -> Vec<Vec<u32>> {
    let of = |param: &u32| &params[*param as usize];
    let mut groups: Vec<Vec<u32>> = Vec::new();
    if mib == 0.0 {
        let mut all = order.to_vec();
        all.sort_by(|a, b| of(a).name.cmp(&of(b).name));
        groups.push(all);
    } else {
        let mut layers: Vec<(&str, Vec<u32>)> = Vec::new();
        let mut known = std::collections::HashMap::new();
        for param in order {
            let name = of(param).name.as_str();
            let layer = name.split_once('.').map_or(name, |(layer, _)| layer);
            let at = *known.entry(layer).or_insert_with(|| {
                layers.push((layer, Vec::new()));
                layers.len() - 1
            });
            layers[at].1.push(*param);
        }
        let mut open: Vec<u32> = Vec::new();
        let mut bytes = 0.0;
        for (_, layer) in layers {
            for param in &layer {
                bytes += (of(param).numel() * of(param).dtype.len_bytes() as u64) as f64;
            }
            open.extend(layer);
            let full = (most > 1 && open.len() > most) || bytes / 1_048_576.0 >= mib;
            if mib < 0.0 || full {
                groups.push(std::mem::take(&mut open));
                bytes = 0.0;
            }
        }
        groups.push(open);
    }
    let mut split = Vec::new();
    for group in groups {
        let mut by_dtype: Vec<(fusestep_tensor::DType, Vec<u32>)> = Vec::new();
        for param in group {
            let dtype = of(&param).dtype;
            match by_dtype.iter_mut().find(|known| known.0 == dtype) {
                Some(known) => known.1.push(param),
                None => by_dtype.push((dtype, vec![param])),
            }
        }
        split.extend(by_dtype.into_iter().map(|(_, group)| group));
    }
    split
}
