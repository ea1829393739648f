//! The memory of gradients: segments that ranks reduce, sums over micro-steps, and who has what.

use fusestep_collective::Pending;
use fusestep_launch::{Backend, Buffer};
use fusestep_tensor::DType;

use crate::allocate::Allocator;
use crate::bytes::take_shortest;
use crate::comms::Comms;
use crate::passes::ReducedWhen;
use crate::ready::Ready;
use crate::region::{Region, place_in, regions, sum_width};
use crate::{Plan, Result, Stage, StorageSpec, ZeroStage};

/// Gradients that micro-steps add and ranks reduce.
#[derive(Default)]
pub(crate) struct GradientArena {
    pub(crate) segments: Vec<SegmentState>,
    /// Which of them may be reduced.
    pub(crate) ready: Ready,
    /// Where each parameter's gradient is written.
    pub(crate) regions: Vec<Region>,
    /// For each region the sums of micro-steps, where the gradients' own memory cannot hold them.
    pub(crate) sums: Vec<Option<Box<dyn Buffer>>>,
    /// For each storage the sums of gradients that are reduced in every micro-step: of the shard,
    /// or of all of it.
    pub(crate) reduced_sums: Vec<Option<Box<dyn Buffer>>>,
    /// For each parameter in how many micro-steps its gradient was given.
    pub(crate) given: Vec<u32>,
    /// For each parameter how it was given in this micro-step.
    pub(crate) now: Vec<Given>,
    /// Micro-steps that are over, and the sum of their weights.
    pub(crate) micro_steps: u32,
    pub(crate) weights: f64,
    pub(crate) weight: Option<f64>,
    /// Stands for the weights of all micro-steps, if gradients are reduced in each.
    pub(crate) weights_hash: u64,
    /// Memory of segments that are through, for those that come; it may be longer than they need.
    pub(crate) spare: Vec<Box<dyn Buffer>>,
    /// [`usual_bytes`] of the plan: what memory for a segment has at least, so that the next one
    /// fits into it.
    usual_bytes: usize,
    /// Address of the memory of so many bytes that stays from step to step.
    kept: Option<usize>,
    /// Segments from the front whose parts have been taken.
    pub(crate) through: usize,
    /// Bytes of segments, and the most there have been since the last update.
    held_bytes: u64,
    peak_bytes: u64,
    /// The most of several such numbers.
    pub(crate) seen_peak_bytes: u64,
    /// Bytes of gradients copied from one place to another since the last update.
    pub(crate) copied_bytes: u64,
    /// Time of calls behind the backward passes since the last update.
    pub(crate) exposed_ns: u64,
    pub(crate) on_host: bool,
    /// Whether micro-steps add their gradients before they are reduced.
    pub(crate) accumulates: bool,
    pub(crate) starts_early: bool,
}

/// How a gradient came in a micro-step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Given {
    #[default]
    No,
    /// By `push_grad`: it is where it belongs.
    Pushed,
    /// Through a view that the caller may still write to.
    Viewed,
}

/// Who has a segment's memory.
pub(crate) enum SegmentState {
    /// Gradients are being written, or are about to be; `None` until the first is.
    Here(Option<Box<dyn Buffer>>),
    /// A communication stream has it.
    InFlight(Pending<Box<dyn Buffer>>),
    /// It has been reduced, and this rank's part of it is in its shard.
    Through,
    /// A call has failed with it.
    Lost,
}

impl GradientArena {
    pub(crate) fn allocate(plan: &Plan, allocator: &mut Allocator<'_>) -> Result<Self> {
        let keeps = keeps_segments(plan);
        let mut segments = Vec::with_capacity(plan.segments.len());
        let mut held_bytes = 0;
        for segment in &plan.segments {
            let len_bytes = len_bytes(plan, segment);
            let memory = if keeps {
                held_bytes += len_bytes as u64;
                Some(allocator.arena(len_bytes, true)?)
            } else {
                None
            };
            segments.push(SegmentState::Here(memory));
        }
        let (regions, count) = regions(plan);
        let mut arena = Self {
            ready: Ready::new(plan.segments.iter().map(|s| full_tensors(plan, s)).collect()),
            segments,
            sums: (0..count).map(|_| None).collect(),
            regions,
            reduced_sums: plan.storages.iter().map(|_| None).collect(),
            given: vec![0; plan.params.len()],
            now: vec![Given::No; plan.params.len()],
            usual_bytes: usual_bytes(plan),
            held_bytes,
            on_host: allocator.backend.takes_host_memory(),
            accumulates: plan.micro_steps() > 1 && !plan.reduces_each(),
            starts_early: starts_early(plan),
            ..Self::default()
        };
        arena.allocate_sums(plan, allocator.backend)?;
        if arena.on_host && !keeps && arena.usual_bytes > 0 {
            let memory = allocator.arena(arena.usual_bytes, true)?;
            arena.kept = address(memory.as_ref());
            arena.spare.push(memory);
        }
        arena.allocate_spares(plan, allocator.backend)?;
        arena.held_bytes += bytes_of(&arena.spare);
        arena.peak_bytes = arena.held_bytes;
        Ok(arena)
    }

    /// Memory for the segments that are filled and reduced at a time, where a driver may wait for
    /// calls under way before it gives any; a backward pass that runs further ahead takes more.
    fn allocate_spares(&mut self, plan: &Plan, backend: &dyn Backend) -> Result<()> {
        if self.on_host || keeps_segments(plan) {
            return Ok(());
        }
        let lens = plan.segments.iter().map(|segment| len_bytes(plan, segment));
        let longest = lens.max().unwrap_or(0);
        for _ in 0..plan.segments.len().min(1 + Comms::DEFAULT_STREAMS) {
            self.spare.push(backend.allocate(longest)?);
        }
        Ok(())
    }

    /// Sums for gradients of 16 bits, and for gradients that are reduced in every micro-step.
    fn allocate_sums(&mut self, plan: &Plan, backend: &dyn Backend) -> Result<()> {
        let Some(rule) = plan.accumulation().filter(|rule| rule.every.get() > 1) else {
            return Ok(());
        };
        if rule.reduced == ReducedWhen::PerMicroStep {
            for (storage, sums) in plan.storages.iter().zip(&mut self.reduced_sums) {
                let width = sum_width(storage.grad_dtype());
                *sums = Some(backend.allocate(storage.shard_numel() as usize * width)?);
            }
            return Ok(());
        }
        for region in self.regions.clone() {
            let narrow = plan.storages[region.storage].grad_dtype().len_bytes() < 4;
            let dtype = plan.storages[region.storage].grad_dtype();
            // A view of a device is written by others, who know nothing of sums in it.
            if narrow || !self.on_host {
                self.sums_of(region, dtype, |len_bytes| Ok(backend.allocate(len_bytes)?))?;
            }
        }
        Ok(())
    }

    /// The sums of a region, allocated when they are first needed.
    pub(crate) fn sums_of(
        &mut self,
        region: Region,
        dtype: DType,
        allocate: impl FnOnce(usize) -> Result<Box<dyn Buffer>>,
    ) -> Result<&mut dyn Buffer> {
        let len_bytes = region.numel as usize * sum_width(dtype);
        let sums = match self.sums[region.index].take() {
            Some(sums) => sums,
            None => allocate(len_bytes)?,
        };
        Ok(self.sums[region.index].insert(sums).as_mut())
    }

    /// Bytes that are held right now besides the arenas of storages.
    pub(crate) fn held_bytes(&self) -> u64 {
        let sums = self.sums.iter().chain(&self.reduced_sums).flatten();
        let sums: usize = sums.map(|memory| memory.len_bytes()).sum();
        self.held_bytes + sums as u64
    }

    /// A segment's memory, made when it is first needed; `None` while a call has it.
    pub(crate) fn memory(
        &mut self,
        segment: usize,
        len_bytes: usize,
        mut allocate: impl FnMut(usize) -> Result<Box<dyn Buffer>>,
    ) -> Result<Option<&mut Box<dyn Buffer>>> {
        if let SegmentState::Here(None) = &self.segments[segment] {
            let memory = match take_shortest(&mut self.spare, len_bytes) {
                Some(spare) => spare,
                None => {
                    let mut len_bytes = len_bytes;
                    if self.on_host {
                        // Pages that nobody touches take no memory; what is too short would.
                        len_bytes = len_bytes.max(self.usual_bytes);
                        self.drop_spares();
                    }
                    self.held_bytes += len_bytes as u64;
                    self.peak_bytes = self.peak_bytes.max(self.held_bytes);
                    allocate(len_bytes)?
                }
            };
            self.segments[segment] = SegmentState::Here(Some(memory));
        }
        Ok(match &mut self.segments[segment] {
            SegmentState::Here(memory) => memory.as_mut(),
            _ => None,
        })
    }

    /// Takes a segment's memory; it counts as lost until it is put back.
    pub(crate) fn take(&mut self, segment: usize) -> SegmentState {
        std::mem::replace(&mut self.segments[segment], SegmentState::Lost)
    }

    /// Makes all segments fit for the next gradients; says the most bytes there have been.
    ///
    /// A device gives memory back only once all its work has ended, that of calls too, which is
    /// another rank's matter: what a step has needed of it stays for the next one.
    pub(crate) fn settle(&mut self, keeps: bool) -> u64 {
        self.through = 0;
        if !keeps {
            for segment in &mut self.segments {
                *segment = SegmentState::Here(None);
            }
            if self.on_host {
                self.drop_spares();
                self.held_bytes = bytes_of(&self.spare);
            }
        }
        std::mem::replace(&mut self.peak_bytes, self.held_bytes)
    }

    /// Gives back the memory of segments that are through, but for what stays.
    fn drop_spares(&mut self) {
        let (kept, before) = (self.kept, bytes_of(&self.spare));
        self.spare.retain(|spare| kept.is_some() && address(spare.as_ref()) == kept);
        self.held_bytes -= before - bytes_of(&self.spare);
    }

    /// Notes the most bytes that segments have had in one micro-step.
    pub(crate) fn seen_peak(&mut self, bytes: u64) {
        self.seen_peak_bytes = self.seen_peak_bytes.max(bytes);
    }

    /// Makes all segments fit to be written after a failure: calls have kept their memory.
    pub(crate) fn restore(&mut self) {
        for segment in &mut self.segments {
            if !matches!(segment, SegmentState::Here(_)) {
                *segment = SegmentState::Here(None);
            }
        }
        if self.on_host {
            self.drop_spares();
        }
        self.through = 0;
        self.ready.again();
        self.now.fill(Given::No);
        self.weight = None;
    }

    /// Forgets what was given, once it has been used.
    pub(crate) fn clear(&mut self) {
        self.micro_steps = 0;
        self.weights = 0.0;
        self.weights_hash = 0;
        self.given.fill(0);
        self.now.fill(Given::No);
        self.ready.again();
    }

    /// One tensor's gradient in its segment, if that is there and the host's.
    pub(crate) fn view(&self, spec: &StorageSpec, param: usize, tensor: usize) -> Option<&[u8]> {
        // By parameter: the region of an empty one is the whole storage.
        let region = self.regions[param];
        let place = place_in(spec, &region, tensor, spec.grad_dtype().len_bytes());
        if place.is_empty() {
            return Some(&[]);
        }
        let SegmentState::Here(Some(memory)) = &self.segments[region.segment?] else {
            return None;
        };
        memory.host()?.get(place)
    }

    /// The sums of one tensor's gradients so far, as a checkpoint keeps them; `None` if they are
    /// where the gradients lie.
    pub(crate) fn sums(
        &self,
        spec: &StorageSpec,
        backend: &dyn Backend,
        (param, tensor): (usize, usize),
    ) -> Result<Option<Vec<u8>>> {
        let region = self.regions[param];
        let Some(sums) = &self.sums[region.index] else {
            return Ok(None);
        };
        let place = place_in(spec, &region, tensor, sum_width(spec.grad_dtype()));
        let mut bytes = vec![0; place.len()];
        backend.read(sums.as_ref(), place.start, &mut bytes)?;
        Ok(Some(bytes))
    }
}

/// Whether segments keep their memory once they are reduced. From ZeRO stage 2 on a rank needs no
/// more than its shard.
pub(crate) fn keeps_segments(plan: &Plan) -> bool {
    plan.zero < ZeroStage::Two
}

/// Whether segments may be reduced before the step is run: not where an update reduces them.
pub(crate) fn starts_early(plan: &Plan) -> bool {
    plan.stages.iter().any(|s| matches!(s, Stage::Reduce(_)))
}

/// Bytes of the longest segment of several tensors, which is no longer than the cap of buckets: one
/// arena of so many stays from step to step where segments do not, so that most steps need no new
/// memory, and calls find it where ranks see each other's.
pub(crate) fn usual_bytes(plan: &Plan) -> usize {
    let several = plan.segments.iter().filter(|s| s.tensors.len() > 1);
    several.map(|s| len_bytes(plan, s)).max().unwrap_or(0)
}

/// Bytes of that arena; 0 where segments keep theirs.
pub(crate) fn kept_bytes(plan: &Plan) -> u64 {
    if keeps_segments(plan) {
        return 0;
    }
    usual_bytes(plan) as u64
}

fn address(memory: &dyn Buffer) -> Option<usize> {
    memory.host().map(|bytes| bytes.as_ptr().addr())
}

fn bytes_of(memory: &[Box<dyn Buffer>]) -> u64 {
    memory.iter().map(|memory| memory.len_bytes() as u64).sum()
}

pub(crate) fn len_bytes(plan: &Plan, segment: &crate::Segment) -> usize {
    let width = plan.storages[segment.storage].grad_dtype().len_bytes();
    (segment.elements.end - segment.elements.start) as usize * width
}

/// Tensors of a segment that have elements.
pub(crate) fn full_tensors(plan: &Plan, segment: &crate::Segment) -> usize {
    let layout = &plan.storages[segment.storage].layout;
    let full = |&tensor: &u32| layout.numel(tensor as usize) > 0;
    segment.tensors.clone().filter(full).count()
}
