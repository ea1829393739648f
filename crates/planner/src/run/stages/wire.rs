//! Gradients of f32 that travel in 16 bits: each rank rounds its contribution once, and sums are
//! f32, in rank order.

use fusestep_coalesce::HostMemory;
use fusestep_collective::{CallContext, Operation, even_counts};
use fusestep_launch::{Accumulate, Accumulation, Backend, Buffer};
use fusestep_tensor::DType;

use crate::error::Result;
use crate::plan::bucket::Bucket;
use crate::plan::stage::Reduced;
use crate::run::comms::bytes::{Bytes, foreign};
use crate::run::comms::calls::Comms;
use crate::run::memory::absorb::{BLOCK, narrowed, widened};
use crate::run::memory::device;
use crate::run::run::Run;

/// Bytes of an element of sums.
const WIDE: usize = size_of::<f32>();

/// Bytes of an element that travels.
const NARROW: usize = size_of::<u16>();

/// The type in which a segment's gradients travel, if it is another than that of their sums.
pub(crate) fn of_segment(run: &Run<'_, '_>, index: usize) -> Option<DType> {
    let storage = run.plan.segments[index].storage;
    run.plan.wire.filter(|_| run.plan.storages[storage].grad_dtype() == DType::F32)
}

/// Reduces a segment, whose sums go to its own memory.
///
/// # Cost
/// A rank sends what a reduce-scatter of half the bytes sends, and an all-gather of the sums where
/// every rank needs all.
pub(crate) fn reduce_segment(
    run: &mut Run<'_, '_>,
    index: usize,
    wire: DType,
    result: Reduced,
    memory: &mut dyn Buffer,
) -> Result<()> {
    let segment = &run.plan.segments[index];
    let on_device = run.comms.device_of(run.backend).is_some();
    let mut staged = match memory.host() {
        None if !on_device => Some(device::staged(run.backend, memory)?),
        _ => None,
    };
    let mut done = Ok(());
    for at in segment.buckets.clone() {
        let bucket = &run.plan.buckets[at];
        let context = CallContext { plan_hash: run.plan.hash(), bucket: Some(at as u32) };
        run.comms.communicator().set_context(context);
        let reduced = Travelling {
            wire,
            counts: match result {
                Reduced::Part => bucket.counts(),
                Reduced::Whole => even_counts(bucket.numel() as usize, run.plan.topology.world),
            },
            result,
        };
        let host = match &mut staged {
            Some(staged) => Some(staged.bytes_mut()),
            None => memory.host_mut(),
        };
        done = match host {
            Some(bytes) => {
                let own = bytes.get_mut(bucket.place(segment.elements.start, WIDE));
                reduced.on_host(run.comms, own.unwrap_or_default())
            }
            None => {
                reduced.on_device(run.comms, run.backend, bucket, segment.elements.start, memory)
            }
        };
        if done.is_err() {
            break;
        }
    }
    run.comms.set_plan(run.plan.hash());
    done?;
    if let Some(staged) = staged {
        run.backend.write(memory, 0, staged.bytes())?;
    }
    Ok(())
}

/// A bucket whose gradients travel.
struct Travelling {
    wire: DType,
    /// Elements of each rank's part.
    counts: Vec<usize>,
    result: Reduced,
}

impl Travelling {
    fn on_host(&self, comms: &mut Comms<'_>, sums: &mut [u8]) -> Result<()> {
        let (rank, world) = (comms.rank(), self.counts.len());
        let numel: usize = self.counts.iter().sum();
        let mut given = HostMemory::zeroed(numel * NARROW)?;
        for (narrow, wide) in
            given.bytes_mut().chunks_exact_mut(NARROW).zip(sums.chunks_exact(WIDE))
        {
            let value = bytemuck::pod_read_unaligned(wide);
            narrow.copy_from_slice(&narrowed(self.wire, value).to_le_bytes());
        }
        let own = self.counts[rank];
        let before: usize = self.counts[..rank].iter().sum();
        let mut parts = Vec::with_capacity(world);
        for root in 0..world {
            let mut part = HostMemory::zeroed(own * NARROW)?;
            let send: &[u8] = if root == rank { given.bytes() } else { &[] };
            comms.scatter(root, self.wire, &self.counts, send, part.bytes_mut())?;
            parts.push(part);
        }
        self.add(&parts, &mut sums[before * WIDE..(before + own) * WIDE]);
        if self.result == Reduced::Whole {
            comms.in_place(Operation::AllGather, DType::F32, Some(&self.counts), sums)?;
        }
        Ok(())
    }

    /// The mean of all ranks' parts, added from the first rank on.
    fn add(&self, parts: &[HostMemory], sums: &mut [u8]) {
        let world = parts.len() as f32;
        for (at, block) in sums.chunks_mut(BLOCK * WIDE).enumerate() {
            let first = at * BLOCK * NARROW;
            let mut held = [0.0f32; BLOCK];
            let held = &mut held[..block.len() / WIDE];
            for (rank, part) in parts.iter().enumerate() {
                let part = part.bytes()[first..][..held.len() * NARROW].chunks_exact(NARROW);
                for (sum, bits) in held.iter_mut().zip(part) {
                    let value = widened(self.wire, bytemuck::pod_read_unaligned(bits));
                    *sum = if rank == 0 { value } else { *sum + value };
                }
            }
            for (sum, held) in block.chunks_exact_mut(WIDE).zip(held) {
                sum.copy_from_slice(&(*held / world).to_le_bytes());
            }
        }
    }

    fn on_device(
        &self,
        comms: &mut Comms<'_>,
        backend: &dyn Backend,
        bucket: &Bucket,
        start: u64,
        memory: &mut dyn Buffer,
    ) -> Result<()> {
        let (rank, world) = (comms.rank(), self.counts.len());
        let (numel, own) = (self.counts.iter().sum::<usize>(), self.counts[rank]);
        let before: usize = self.counts[..rank].iter().sum();
        let place = bucket.place(start, WIDE);
        let device = device::of_sums(backend)?;
        // All of it before the first call: a driver may wait for calls before it gives memory.
        let mut given = comms.spare(backend, numel * NARROW)?;
        let mut part = comms.spare(backend, own * NARROW)?;
        let mut mean = comms.spare(backend, own * WIDE)?;
        device.add_gradients(Accumulate {
            dtype: self.wire,
            sums: (memory, place.start),
            grads: (given.as_mut(), 0),
            numel: numel as u64,
            what: Accumulation::Mean { divisor: 1.0 },
        })?;
        let at = place.start + before * WIDE;
        for root in 0..world {
            device::hand_over(backend, given.as_mut())?;
            device::hand_over(backend, part.as_mut())?;
            let all = 0..numel * NARROW;
            let (send, receive) = (given.as_mut(), part.as_mut());
            comms.scatter_on_device(root, self.wire, &self.counts, send, all, receive)?;
            device::take_back(backend, part.as_mut())?;
            let weight = 1.0;
            let what = match root {
                0 => Accumulation::First { weight },
                _ => Accumulation::Add { weight },
            };
            device.add_gradients(Accumulate {
                dtype: self.wire,
                sums: (memory, at),
                grads: (part.as_mut(), 0),
                numel: own as u64,
                what,
            })?;
        }
        device.add_gradients(Accumulate {
            dtype: DType::F32,
            sums: (memory, at),
            grads: (mean.as_mut(), 0),
            numel: own as u64,
            what: Accumulation::Mean { divisor: world as f64 },
        })?;
        backend.copy(mean.as_ref(), 0, memory, at, own * WIDE)?;
        device::hand_over(backend, memory)?;
        device::take_back(backend, given.as_mut())?;
        comms.keep([given, part, mean]);
        if self.result == Reduced::Whole {
            let bytes = Bytes::of(memory, place).ok_or_else(|| foreign(rank))?;
            comms.in_place(Operation::AllGather, DType::F32, Some(&self.counts), bytes)?;
        }
        Ok(())
    }
}
