//! The trait of backends, which own memory and run launches.

use bytemuck::Zeroable;
use fusestep_simd::Level;

use crate::{
    Accumulate, BackendError, Buffer, Conclude, ControlBlock, FoldLeaves, Graph, GroupValues,
    LEAF_ELEMENTS, Launch, LaunchLimits, LaunchReport, LeafSquares, MAX_SUMS, Reduce, Replicas,
    ResidentTable, SquareSum,
};

/// Owns memory and runs launches.
///
/// The bits of the result are the same on every backend.
pub trait Backend {
    /// The backend's name: `cpu` or `cuda`.
    fn name(&self) -> &'static str;

    /// The device's number; `None` on a backend that works in host memory.
    fn device(&self) -> Option<u32> {
        None
    }

    /// Limits of one launch on this backend.
    fn limits(&self) -> LaunchLimits;

    /// Allocates zeroed memory aligned to 256 bytes; 0 bytes are allowed.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`] with the length asked for.
    fn allocate(&self, len_bytes: usize) -> Result<Box<dyn Buffer>, BackendError>;

    /// Copies host bytes into `buffer` from `offset_bytes` on.
    ///
    /// # Errors
    /// [`BackendError::OutOfBounds`] if they do not fit; nothing is written then.
    fn write(
        &self,
        buffer: &mut dyn Buffer,
        offset_bytes: usize,
        bytes: &[u8],
    ) -> Result<(), BackendError>;

    /// Copies bytes of `buffer` from `offset_bytes` on to the host.
    ///
    /// # Errors
    /// [`BackendError::OutOfBounds`] if `buffer` is shorter.
    fn read(
        &self,
        buffer: &dyn Buffer,
        offset_bytes: usize,
        bytes: &mut [u8],
    ) -> Result<(), BackendError>;

    /// Copies bytes between two buffers of this backend. A device copies them itself, and the call
    /// returns when the copy is enqueued.
    ///
    /// # Errors
    /// As [`Backend::read`] and [`Backend::write`].
    fn copy(
        &self,
        from: &dyn Buffer,
        from_offset_bytes: usize,
        to: &mut dyn Buffer,
        to_offset_bytes: usize,
        len_bytes: usize,
    ) -> Result<(), BackendError> {
        if let Some(bytes) = from.host() {
            let end = from_offset_bytes.saturating_add(len_bytes);
            let own = bytes.get(from_offset_bytes..end);
            let own = own.ok_or(BackendError::OutOfBounds {
                backend: self.name(),
                offset_bytes: from_offset_bytes,
                len_bytes,
                found: bytes.len(),
            })?;
            return self.write(to, to_offset_bytes, own);
        }
        let mut staged = vec![0; len_bytes];
        self.read(from, from_offset_bytes, &mut staged)?;
        self.write(to, to_offset_bytes, &staged)
    }

    /// Adds up gradients over micro-steps on a device; returns when the launch is enqueued.
    /// Gradients in host memory are summed in place, without this call.
    ///
    /// # Errors
    /// [`BackendError::OutOfBounds`], [`BackendError::Device`]; [`BackendError::Unavailable`] for a
    /// type that has no sums, and on a backend of the host.
    fn add_gradients(&self, _sums: Accumulate<'_>) -> Result<(), BackendError> {
        Err(BackendError::not_of_host(self.name()))
    }

    /// Makes a device's buffer ready for others that work on the device. Their work on it begins
    /// behind all work that is enqueued here by now ([`Buffer::device_mut`]). A host backend does
    /// nothing.
    ///
    /// # Errors
    /// [`BackendError::ForeignBuffer`]; [`BackendError::Device`].
    fn hand_over(&self, _buffer: &mut dyn Buffer) -> Result<(), BackendError> {
        Ok(())
    }

    /// Lets work that is enqueued here from now on wait for the work of others on a buffer that was
    /// handed over. The host does not wait.
    ///
    /// # Errors
    /// As [`Backend::hand_over`].
    fn take_back(&self, _buffer: &mut dyn Buffer) -> Result<(), BackendError> {
        Ok(())
    }

    /// Runs all batches of `launch`; on a device it returns when they are enqueued.
    ///
    /// # Errors
    /// [`BackendError::Device`] with the device's own code.
    fn launch(&self, launch: Launch<'_>) -> Result<LaunchReport, BackendError>;

    /// Sums all chunks of `reduce`; on a device it returns when the launches are enqueued.
    ///
    /// # Errors
    /// [`BackendError::OutOfBounds`] if the partial sums do not fit; [`BackendError::Device`] with
    /// the device's own code.
    fn reduce(&self, reduce: Reduce<'_>) -> Result<LaunchReport, BackendError>;

    /// Writes the control block from all partial sums; on a device it returns when the launch is
    /// enqueued.
    ///
    /// # Errors
    /// [`BackendError::OutOfBounds`] if a buffer is too short; [`BackendError::Device`] with the
    /// device's own code.
    fn conclude(&self, conclude: Conclude<'_>) -> Result<LaunchReport, BackendError>;

    /// Averages gradients over all ranks, updates from the averages, and writes new values to all
    /// ranks that keep them. This takes one pass, and the averages are never written. The launch's
    /// own list of gradients is not used, and neither are lists that `replicas` has.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] on a backend that does not work in the host's memory.
    fn launch_reduced(
        &self,
        _launch: Launch<'_>,
        _replicas: Replicas<'_, '_, '_>,
    ) -> Result<LaunchReport, BackendError> {
        Err(BackendError::Unavailable {
            backend: self.name(),
            reason: "expected gradients in host memory to reduce and update in one pass; reduce \
                     first and update then"
                .to_owned(),
        })
    }

    /// The sum of squares of every leaf, in the order of the records; a record has `⌈numel / 1024⌉`
    /// leaves.
    ///
    /// # Errors
    /// [`BackendError::OutOfBounds`] if `sums` has another length or the list is too short.
    fn leaf_squares(
        &self,
        leaves: LeafSquares<'_>,
        sums: &mut [SquareSum],
    ) -> Result<(), BackendError> {
        let (level, width) = (Level::detect(), leaves.list.dtype().len_bytes());
        let mut bytes = vec![0; LEAF_ELEMENTS as usize * width];
        let mut places = sums.iter_mut();
        for (first, numel) in leaves.places() {
            let Some(sum) = places.next() else {
                return Err(BackendError::OutOfBounds {
                    backend: self.name(),
                    offset_bytes: 0,
                    len_bytes: leaves.places().count() * size_of::<SquareSum>(),
                    found: size_of_val(sums),
                });
            };
            let leaf = &mut bytes[..numel as usize * width];
            self.read(leaves.list.buffer.as_ref(), first as usize * width, leaf)?;
            *sum = leaves.kernel.run_host(level, leaf);
        }
        Ok(())
    }

    /// [`Backend::leaf_squares`] into memory of the device, from sum `first` on; returns when the
    /// launches are enqueued.
    ///
    /// # Errors
    /// As [`Backend::leaf_squares`]; [`BackendError::Unavailable`] on a backend that works in host
    /// memory.
    fn leaf_squares_into(
        &self,
        _leaves: LeafSquares<'_>,
        _into: &mut dyn Buffer,
        _first: u64,
    ) -> Result<(), BackendError> {
        Err(BackendError::not_of_host(self.name()))
    }

    /// Folds sums over leaves into those over chunks, in the fixed tree; returns when the launch is
    /// enqueued.
    ///
    /// # Errors
    /// As [`Backend::reduce`]; [`BackendError::Unavailable`] on a backend that works in host
    /// memory.
    fn fold_leaves(&self, _fold: FoldLeaves<'_>) -> Result<(), BackendError> {
        Err(BackendError::not_of_host(self.name()))
    }

    /// Sets all bytes of a buffer to 0, in the order of what is enqueued.
    ///
    /// # Errors
    /// As [`Backend::write`].
    fn zero(&self, buffer: &mut dyn Buffer) -> Result<(), BackendError> {
        let zeros = vec![0; buffer.len_bytes()];
        self.write(buffer, 0, &zeros)
    }

    /// The sums over every leaf that the launch's kernel takes before an update, in the order of
    /// the records.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] on a backend that takes them in the update only; as
    /// [`Backend::leaf_squares`].
    fn leaf_sums(
        &self,
        _launch: &Launch<'_>,
        _sums: &mut [[f64; MAX_SUMS]],
    ) -> Result<(), BackendError> {
        Err(BackendError::Unavailable {
            backend: self.name(),
            reason: "expected a host backend to sum parts of tensors; give whole tensors to ranks \
                     (`Ownership::Tensors`)"
                .to_owned(),
        })
    }

    /// [`Backend::leaf_sums`] into memory of the device, for records of at most
    /// [`crate::CHUNK_UNITS`] leaves. The first record's sums go to row `first` of
    /// [`crate::ROW_VALUES`] f64, each further record's to the next row, one leaf behind the other
    /// ([`crate::leaf_place`]). Returns when the launches are enqueued. Nothing is written if the
    /// control block stops the step.
    ///
    /// # Errors
    /// As [`Backend::leaf_squares_into`].
    fn leaf_sums_into(
        &self,
        _launch: &Launch<'_>,
        _rows: &mut dyn Buffer,
        _first: u64,
    ) -> Result<(), BackendError> {
        Err(BackendError::not_of_host(self.name()))
    }

    /// Builds the tables of [`Backend::leaf_sums_into`]; as [`Backend::place_table`].
    ///
    /// # Errors
    /// As [`Backend::leaf_sums_into`] and [`Backend::place_table`].
    fn place_leaf_sums(
        &self,
        _launch: &Launch<'_>,
        _values: &[GroupValues],
        _rows: &dyn Buffer,
        _first: u64,
    ) -> Result<Option<Box<dyn ResidentTable>>, BackendError> {
        Ok(None)
    }

    /// Takes the sums that `table` was built for; as [`Backend::launch_table`].
    ///
    /// # Errors
    /// As [`Backend::launch_table`].
    fn leaf_sums_of_table(
        &self,
        _launch: &Launch<'_>,
        _table: &dyn ResidentTable,
    ) -> Result<(), BackendError> {
        Err(BackendError::ForeignTable { backend: self.name() })
    }

    /// Whether launches take any [`Buffer`] that the host can write, whoever allocated it.
    fn takes_host_memory(&self) -> bool {
        false
    }

    /// Builds the tables of a launch in the backend's memory; `values` are the groups'
    /// hyper-parameters at the next step. `None` on a backend whose launches read the batches in
    /// place: call [`Backend::launch`] there, with step scalars from the host.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] for a kernel that derives no step scalars, and else as
    /// [`Backend::launch`]; [`BackendError::OutOfMemory`].
    /// # Cost
    /// Linear in tensors and chunks, and waits for a device: once per plan, not per step.
    fn place_table(
        &self,
        _launch: &Launch<'_>,
        _values: &[GroupValues],
    ) -> Result<Option<Box<dyn ResidentTable>>, BackendError> {
        Ok(None)
    }

    /// Runs the launch that `table` was built from. The device counts a step, derives the step
    /// scalars and updates, unless the control block skips the step. The host's work does not grow
    /// with the number of tensors.
    ///
    /// # Errors
    /// [`BackendError::ForeignTable`] if the table was built from other lists or another control
    /// block; [`BackendError::Device`].
    fn launch_table(
        &self,
        _launch: Launch<'_>,
        _table: &dyn ResidentTable,
    ) -> Result<LaunchReport, BackendError> {
        Err(BackendError::ForeignTable { backend: self.name() })
    }

    /// Changes the learning rate that a table derives its step scalars from, from the next launch
    /// on: one write of 8 bytes per batch.
    ///
    /// # Errors
    /// [`BackendError::ForeignTable`]; [`BackendError::Device`].
    fn set_table_lr(&self, _table: &mut dyn ResidentTable, _lr: f64) -> Result<(), BackendError> {
        Err(BackendError::ForeignTable { backend: self.name() })
    }

    /// Builds the tables of a reduction; as [`Backend::place_table`].
    ///
    /// # Errors
    /// As [`Backend::reduce`]; [`BackendError::OutOfMemory`].
    fn place_reduction(
        &self,
        _reduce: &Reduce<'_>,
    ) -> Result<Option<Box<dyn ResidentTable>>, BackendError> {
        Ok(None)
    }

    /// Runs the reduction that `table` was built from.
    ///
    /// # Errors
    /// As [`Backend::launch_table`].
    fn reduce_table(
        &self,
        _reduce: Reduce<'_>,
        _table: &dyn ResidentTable,
    ) -> Result<LaunchReport, BackendError> {
        Err(BackendError::ForeignTable { backend: self.name() })
    }

    /// Records the launches that `enqueue` enqueues, instead of running them. The graph keeps the
    /// memory that they refer to.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] on a backend that has no such recording; `enqueue`'s own
    /// error; [`BackendError::Device`], for example if `enqueue` waits for the device.
    fn capture(
        &self,
        _enqueue: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<Box<dyn Graph>, BackendError> {
        Err(BackendError::Unavailable {
            backend: self.name(),
            reason: "launches cannot be recorded here; run the steps one by one".to_owned(),
        })
    }

    /// Tensors that kernels have skipped since the last call because a norm was not finite; a
    /// device is waited for.
    ///
    /// # Errors
    /// [`BackendError::Device`] with the device's own code.
    fn take_skipped(&self) -> Result<u64, BackendError> {
        Ok(0)
    }

    /// Tensors that kernels have skipped since the backend was made, as far as the host knows
    /// without waiting: 0 on a device.
    fn skipped(&self) -> u64 {
        0
    }

    /// Waits until everything enqueued is done.
    ///
    /// # Errors
    /// [`BackendError::Device`] with the device's own code.
    fn synchronize(&self) -> Result<(), BackendError>;
}

impl ControlBlock {
    /// Copies the block from a backend's memory; waits for what was enqueued before.
    ///
    /// # Errors
    /// As [`Backend::read`].
    pub fn read(backend: &dyn Backend, buffer: &dyn Buffer) -> Result<Self, BackendError> {
        let mut block = Self::zeroed();
        backend.read(buffer, 0, bytemuck::bytes_of_mut(&mut block))?;
        Ok(block)
    }

    /// Copies the block into a backend's memory.
    ///
    /// # Errors
    /// As [`Backend::write`].
    pub fn write(
        &self,
        backend: &dyn Backend,
        buffer: &mut dyn Buffer,
    ) -> Result<(), BackendError> {
        backend.write(buffer, 0, bytemuck::bytes_of(self))
    }
}
