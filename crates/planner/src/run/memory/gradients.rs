//! Memory of gradients: segments that ranks reduce, and sums over micro-steps.

use fusestep_coalesce::HostMemory;
use fusestep_coalesce::zeroed_bytes;
use fusestep_launch::{Backend, Buffer};
use fusestep_tensor::DType;

use crate::error::Result;
use crate::plan::segments::{
    Region, full_tensors, keeps_segments, len_bytes, place_in, regions, starts_early, sum_width,
    usual_bytes,
};
use crate::plan::storage::StorageSpec;
use crate::plan::value::Plan;
use crate::run::comms::bytes::take_shortest;
use crate::run::comms::calls::Comms;
use crate::run::memory::allocator::Allocator;
use crate::run::memory::lanes::LaneWindow;
use crate::run::memory::ready::Ready;
use crate::run::memory::segment_state::{Given, SegmentState};

/// Gradients that micro-steps add and ranks reduce.
#[derive(Default)]
pub(crate) struct GradientArena {
    pub(crate) segments: Vec<SegmentState>,
    /// Segments whose reduction may start.
    pub(crate) ready: Ready,
    /// The region that each parameter's gradient is written to.
    pub(crate) regions: Vec<Region>,
    /// Sums over micro-steps of each region, if the gradients' own memory cannot hold them.
    pub(crate) sums: Vec<Option<Box<dyn Buffer>>>,
    /// Sums of lanes of each region beside the first, which lies where sums do.
    pub(crate) slots: Vec<Vec<Box<dyn Buffer>>>,
    /// Lanes of the update to come, if the plan has lanes.
    pub(crate) window: Option<LaneWindow>,
    /// Lanes of an update that has not begun.
    first_window: Option<LaneWindow>,
    /// Memories of [`GradientArena::slots`] that stay from update to update.
    planned_slots: usize,
    /// Memory for a gradient of 16 bits that is kept in f32.
    pub(crate) widened: Option<HostMemory>,
    /// Sums of each storage's gradients that are reduced in every micro-step, of the shard or of
    /// the whole storage.
    pub(crate) reduced_sums: Vec<Option<Box<dyn Buffer>>>,
    /// Number of micro-steps in which each parameter's gradient was given.
    pub(crate) given: Vec<u32>,
    /// Way in which each parameter's gradient was given in this micro-step.
    pub(crate) now: Vec<Given>,
    /// Whether the place of a parameter's gradient may hold one of an earlier micro-step or of
    /// another parameter.
    pub(crate) stale: Vec<bool>,
    /// Micro-steps that are over, and the sum of their weights.
    pub(crate) micro_steps: u32,
    pub(crate) weights: f64,
    pub(crate) weight: Option<f64>,
    /// Hash of the weights of all micro-steps, if gradients are reduced in each.
    pub(crate) weights_hash: u64,
    /// Memory of reduced segments, to be used by later ones; it may be longer than they need.
    pub(crate) spare: Vec<Box<dyn Buffer>>,
    /// Least bytes of memory for a segment, by [`usual_bytes`], so that the next segment fits into
    /// it.
    usual_bytes: usize,
    /// Address of the memory of so many bytes that stays from step to step.
    kept: Option<usize>,
    /// Segments from the front whose parts have been taken.
    pub(crate) through: usize,
    /// Bytes of segments, and the most there have been since the last update.
    held_bytes: u64,
    peak_bytes: u64,
    /// Largest peak of the bytes of segments in any micro-step since the last update.
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
        // Memory that stays is zero when it is allocated.
        let stale = regions.iter().map(|region| region.segment.is_some() && !keeps).collect();
        let mut arena = Self {
            stale,
            ready: Ready::new(plan.segments.iter().map(|s| full_tensors(plan, s)).collect()),
            segments,
            sums: (0..count).map(|_| None).collect(),
            regions,
            widened: None,
            reduced_sums: plan.storages.iter().map(|_| None).collect(),
            given: vec![0; plan.params.len()],
            now: vec![Given::No; plan.params.len()],
            usual_bytes: usual_bytes(plan),
            held_bytes,
            on_host: allocator.backend.host().is_some(),
            accumulates: plan.adds_micro_steps() && !plan.reduces_each(),
            starts_early: starts_early(plan),
            slots: (0..count).map(|_| Vec::new()).collect(),
            window: LaneWindow::of(plan),
            first_window: LaneWindow::of(plan),
            ..Self::default()
        };
        arena.allocate_sums(plan, allocator)?;
        arena.allocate_slots(plan, allocator)?;
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
    fn allocate_sums(&mut self, plan: &Plan, allocator: &mut Allocator<'_>) -> Result<()> {
        if !plan.adds_micro_steps() {
            return Ok(());
        }
        if plan.reduces_each() {
            for (storage, sums) in plan.storages.iter().zip(&mut self.reduced_sums) {
                let width = sum_width(storage.grad_dtype());
                let len_bytes = storage.shard_numel() as usize * width;
                *sums = Some(allocator.backend.allocate(len_bytes)?);
            }
            return Ok(());
        }
        let moves = plan.exchanges_lanes();
        for region in self.regions.clone() {
            let narrow = plan.storages[region.storage].grad_dtype().len_bytes() < 4;
            let dtype = plan.storages[region.storage].grad_dtype();
            // A view of a device is written by others, who know nothing of sums in it.
            if narrow || !self.on_host {
                self.sums_of(region, dtype, |len_bytes| allocator.arena(len_bytes, moves))?;
            }
        }
        Ok(())
    }

    /// Memory of the sums of lanes that a rank holds at once, beside the first.
    fn allocate_slots(&mut self, plan: &Plan, allocator: &mut Allocator<'_>) -> Result<()> {
        let slots = plan.lane_slots(plan.topology.rank);
        if slots == 0 {
            return Ok(());
        }
        // A device adds a gradient to sums where it lies itself.
        let slots = slots + usize::from(!self.on_host);
        self.planned_slots = slots - 1;
        self.hold_slots(plan, slots, |len_bytes, moves| allocator.arena(len_bytes, moves))
    }

    /// Memory of so many sums of lanes in all, as far as there is not yet.
    pub(crate) fn hold_slots(
        &mut self,
        plan: &Plan,
        slots: usize,
        mut allocate: impl FnMut(usize, bool) -> Result<Box<dyn Buffer>>,
    ) -> Result<()> {
        for region in &self.regions {
            let width = sum_width(plan.storages[region.storage].grad_dtype());
            let held = &mut self.slots[region.index];
            while held.len() + 1 < slots {
                held.push(allocate(region.numel as usize * width, plan.exchanges_lanes())?);
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

    /// Bytes held now, besides the arenas of storages.
    pub(crate) fn held_bytes(&self) -> u64 {
        let sums = self.sums.iter().chain(&self.reduced_sums).flatten();
        let sums = sums.chain(self.slots.iter().flatten());
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

    /// Micro-steps of this rank until the next update.
    pub(crate) fn steps_of_window(&self, plan: &Plan) -> u32 {
        self.window.as_ref().map_or(plan.micro_steps(), |window| window.given_steps as u32)
    }

    /// Whether micro-steps of the update to come have ended, here or on the ranks before.
    pub(crate) fn has_begun(&self) -> bool {
        let window = self.window.as_ref();
        self.micro_steps > 0 || window.is_some_and(|window| window.origin.is_some())
    }

    /// Whether gradients go to sums of lanes, which lie in memory of their own.
    pub(crate) fn adds_lanes(&self) -> bool {
        self.window.as_ref().is_some_and(|window| window.adds)
    }

    /// Takes a segment's memory; it counts as lost until it is put back.
    pub(crate) fn take(&mut self, segment: usize) -> SegmentState {
        std::mem::replace(&mut self.segments[segment], SegmentState::Lost)
    }

    /// Makes all segments ready for the next gradients; returns the most bytes that they have held.
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

    /// Frees the memory of reduced segments, except the arena that stays.
    fn drop_spares(&mut self) {
        let (kept, before) = (self.kept, bytes_of(&self.spare));
        self.spare.retain(|spare| kept.is_some() && address(spare.as_ref()) == kept);
        self.held_bytes -= before - bytes_of(&self.spare);
    }

    /// Notes the most bytes that segments have had in one micro-step.
    pub(crate) fn seen_peak(&mut self, bytes: u64) {
        self.seen_peak_bytes = self.seen_peak_bytes.max(bytes);
    }

    /// Makes all segments writable after a failure, in which calls have kept their memory.
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
        self.forget_given();
        self.weight = None;
    }

    /// Forgets which gradients were given, once they have been used.
    pub(crate) fn clear(&mut self) {
        self.micro_steps = 0;
        self.window.clone_from(&self.first_window);
        // A window that began on other ranks may have needed more.
        self.slots.iter_mut().for_each(|slots| slots.truncate(self.planned_slots));
        self.weights = 0.0;
        self.weights_hash = 0;
        self.given.fill(0);
        self.forget_given();
        self.ready.again();
    }

    /// Forgets which gradients were given in this micro-step; their values stay.
    pub(crate) fn forget_given(&mut self) {
        self.now.fill(Given::No);
        self.stale.fill(true);
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
        param: usize,
        tensor: usize,
    ) -> Result<Option<Vec<u8>>> {
        let region = self.regions[param];
        let Some(sums) = &self.sums[region.index] else {
            return Ok(None);
        };
        let place = place_in(spec, &region, tensor, sum_width(spec.grad_dtype()));
        let mut bytes = zeroed_bytes(place.len())?;
        backend.read(sums.as_ref(), place.start, &mut bytes)?;
        Ok(Some(bytes))
    }
}

fn address(memory: &dyn Buffer) -> Option<usize> {
    memory.host().map(|bytes| bytes.as_ptr().addr())
}

fn bytes_of(memory: &[Box<dyn Buffer>]) -> u64 {
    memory.iter().map(|memory| memory.len_bytes() as u64).sum()
}
