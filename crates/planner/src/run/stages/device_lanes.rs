//! Sums of lanes that ranks exchange and add in memory of their devices.

use fusestep_collective::{Divisor, Operation, even_counts};
use fusestep_launch::{Accumulate, Accumulation, Backend, Buffer};
use fusestep_tensor::DType;

use crate::error::Result;
use crate::plan::bucket::Bucket;
use crate::plan::lanes::Contribution;
use crate::plan::stage::Reduced;
use crate::run::comms::bytes::{Bytes, foreign};
use crate::run::comms::calls::Comms;
use crate::run::memory::absorb::sum_dtype;
use crate::run::memory::device;

/// Sums of lanes of one segment in memory of a device.
pub(crate) struct DeviceExchange<'a> {
    /// The backend of that device.
    pub(crate) backend: &'a dyn Backend,
    /// Sums of all ranks, in the order of lanes.
    pub(crate) contributions: &'a [Contribution],
    /// Sums that are added to each of them before the next one comes.
    pub(crate) merges: &'a [usize],
    /// The number that the sum of all is divided by.
    pub(crate) divisor: Divisor,
    /// The part of a bucket that each rank gets.
    pub(crate) result: Reduced,
    /// Storage type of the gradients.
    pub(crate) dtype: DType,
}

/// A segment's buffers on a device.
pub(crate) struct DeviceMemory<'a> {
    /// First element of the segment.
    pub(crate) start: u64,
    /// The gradients of the update.
    pub(crate) grads: &'a mut dyn Buffer,
    /// The sums by their slot; empty where a rank's one sum lies in place of the gradients.
    pub(crate) slots: &'a mut [Box<dyn Buffer>],
}

impl DeviceExchange<'_> {
    /// Reduces a bucket: each rank gets all sums of its part, adds them along the tree and divides.
    ///
    /// # Cost
    /// A rank sends what a reduce-scatter of each of its sums sends, and an all-gather of gradients
    /// where every rank needs all. It holds as many sums of its part as the tree has levels.
    pub(crate) fn reduce(
        &self,
        comms: &mut Comms<'_>,
        bucket: &Bucket,
        memory: &mut DeviceMemory<'_>,
    ) -> Result<()> {
        let (rank, world) = (comms.rank(), comms.world());
        let device = device::of_sums(self.backend)?;
        let counts = match self.result {
            Reduced::Part => bucket.counts(),
            Reduced::Whole => even_counts(bucket.numel() as usize, world),
        };
        let (narrow, wide) = (self.dtype.len_bytes(), sum_dtype(self.dtype).len_bytes());
        let numel = counts[rank];
        let before: usize = counts[..rank].iter().sum();
        // All of it before the first call: a driver may wait for calls before it gives memory.
        let mut free = self.buffers(comms, numel * wide)?;
        let mut held: Vec<Box<dyn Buffer>> = Vec::new();
        for (contribution, &merges) in self.contributions.iter().zip(self.merges) {
            let mut sum = match free.pop() {
                Some(sum) => sum,
                None => comms.spare(self.backend, numel * wide)?,
            };
            self.scatter(comms, bucket, memory, contribution, &counts, sum.as_mut())?;
            for _ in 0..merges {
                let Some(mut left) = held.pop() else {
                    break;
                };
                device.add_gradients(Accumulate {
                    dtype: sum_dtype(self.dtype),
                    sums: (left.as_mut(), 0),
                    grads: (sum.as_mut(), 0),
                    numel: numel as u64,
                    what: Accumulation::Add { weight: 1.0 },
                })?;
                free.push(std::mem::replace(&mut sum, left));
            }
            held.push(sum);
        }
        if let Some(sum) = held.first_mut() {
            device::take_back(self.backend, memory.grads)?;
            let at = bucket.place(memory.start, narrow).start + before * narrow;
            device.add_gradients(Accumulate {
                dtype: self.dtype,
                sums: (sum.as_mut(), 0),
                grads: (memory.grads, at),
                numel: numel as u64,
                what: Accumulation::Mean { divisor: self.divisor.value() },
            })?;
        }
        device::hand_over(self.backend, memory.grads)?;
        comms.keep(held.into_iter().chain(free));
        if self.result == Reduced::Whole {
            let place = bucket.place(memory.start, narrow);
            let bytes = Bytes::of(memory.grads, place).ok_or_else(|| foreign(rank))?;
            comms.in_place(Operation::AllGather, self.dtype, Some(&counts), bytes)?;
        }
        Ok(())
    }

    /// Memory for the sums that are held at once, of so many bytes each.
    fn buffers(&self, comms: &mut Comms<'_>, len_bytes: usize) -> Result<Vec<Box<dyn Buffer>>> {
        let (mut most, mut held) = (0, 0);
        for merges in self.merges {
            held += 1;
            most = most.max(held);
            held -= merges;
        }
        let all = (0..most).map(|_| Ok(comms.spare(self.backend, len_bytes)?));
        all.collect()
    }

    /// Sends each rank its part of one sum.
    fn scatter(
        &self,
        comms: &mut Comms<'_>,
        bucket: &Bucket,
        memory: &mut DeviceMemory<'_>,
        from: &Contribution,
        counts: &[usize],
        part: &mut dyn Buffer,
    ) -> Result<()> {
        let dtype = sum_dtype(self.dtype);
        let place = bucket.place(memory.start, dtype.len_bytes());
        let send: &mut dyn Buffer = match memory.slots.get_mut(from.slot) {
            Some(slot) => slot.as_mut(),
            None => memory.grads,
        };
        device::hand_over(self.backend, send)?;
        device::hand_over(self.backend, part)?;
        comms.scatter_on_device(from.rank, dtype, counts, send, place, part)?;
        Ok(device::take_back(self.backend, part)?)
    }
}
