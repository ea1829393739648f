//! A backend that counts what passes between host and device.

use std::sync::atomic::{AtomicU64, Ordering};

use fusestep_cuda::CudaBackend;
use fusestep_launch::{
    Accumulate, Backend, BackendError, Buffer, Conclude, DeviceBackend, DeviceStream, DeviceSums,
    FoldLeaves, Graph, GroupValues, Launch, LaunchLimits, LaunchReport, Launches, LeafSquares,
    MAX_SUMS, Memory, Reduce, ResidentTable, SquareSum, Tables,
};

/// CUDA, with the bytes that the planner reads and writes.
#[derive(Debug)]
pub(crate) struct Counted {
    cuda: CudaBackend,
    read: AtomicU64,
    written: AtomicU64,
    waits: AtomicU64,
}

impl Counted {
    pub(crate) fn open(device: usize) -> Self {
        Self {
            cuda: CudaBackend::open(device as u32).unwrap(),
            read: AtomicU64::new(0),
            written: AtomicU64::new(0),
            waits: AtomicU64::new(0),
        }
    }

    /// Calls that have waited for the device.
    pub(crate) fn waits(&self) -> u64 {
        self.waits.load(Ordering::Relaxed)
    }

    fn wait(&self) -> &CudaBackend {
        self.waits.fetch_add(1, Ordering::Relaxed);
        &self.cuda
    }

    /// Bytes read from the device and written to it.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        let count = |of: &AtomicU64| of.load(Ordering::Relaxed);
        (count(&self.read), count(&self.written))
    }
}

impl Backend for Counted {
    fn device(&self) -> Option<&dyn DeviceBackend> {
        Some(self)
    }
}

impl Memory for Counted {
    fn name(&self) -> &'static str {
        self.cuda.name()
    }
    fn limits(&self) -> LaunchLimits {
        self.cuda.limits()
    }
    fn allocate(&self, len_bytes: usize) -> Result<Box<dyn Buffer>, BackendError> {
        self.cuda.allocate(len_bytes)
    }
    fn write(
        &self,
        buffer: &mut dyn Buffer,
        offset_bytes: usize,
        bytes: &[u8],
    ) -> Result<(), BackendError> {
        self.written.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        self.wait().write(buffer, offset_bytes, bytes)
    }
    fn read(
        &self,
        buffer: &dyn Buffer,
        offset_bytes: usize,
        bytes: &mut [u8],
    ) -> Result<(), BackendError> {
        self.read.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        self.wait().read(buffer, offset_bytes, bytes)
    }
    fn copy(
        &self,
        from: &dyn Buffer,
        from_offset_bytes: usize,
        to: &mut dyn Buffer,
        to_offset_bytes: usize,
        len_bytes: usize,
    ) -> Result<(), BackendError> {
        Memory::copy(&self.cuda, from, from_offset_bytes, to, to_offset_bytes, len_bytes)
    }
    fn zero(&self, buffer: &mut dyn Buffer) -> Result<(), BackendError> {
        self.cuda.zero(buffer)
    }
    fn synchronize(&self) -> Result<(), BackendError> {
        self.wait().synchronize()
    }
}

impl Launches for Counted {
    fn launch(&self, launch: Launch<'_>) -> Result<LaunchReport, BackendError> {
        self.cuda.launch(launch)
    }
    fn reduce(&self, reduce: Reduce<'_>) -> Result<LaunchReport, BackendError> {
        self.cuda.reduce(reduce)
    }
    fn conclude(&self, conclude: Conclude<'_>) -> Result<LaunchReport, BackendError> {
        self.cuda.conclude(conclude)
    }
    fn leaf_squares(
        &self,
        leaves: LeafSquares<'_>,
        sums: &mut [SquareSum],
    ) -> Result<(), BackendError> {
        self.wait().leaf_squares(leaves, sums)
    }
    fn leaf_sums(
        &self,
        launch: &Launch<'_>,
        sums: &mut [[f64; MAX_SUMS]],
    ) -> Result<(), BackendError> {
        self.wait().leaf_sums(launch, sums)
    }
    fn take_skipped(&self) -> Result<u64, BackendError> {
        self.wait().take_skipped()
    }
    fn skipped(&self) -> u64 {
        self.cuda.skipped()
    }
}

impl DeviceStream for Counted {
    fn ordinal(&self) -> u32 {
        self.cuda.ordinal()
    }
    fn hand_over(&self, buffer: &mut dyn Buffer) -> Result<(), BackendError> {
        self.cuda.hand_over(buffer)
    }
    fn take_back(&self, buffer: &mut dyn Buffer) -> Result<(), BackendError> {
        self.cuda.take_back(buffer)
    }
    fn capture(
        &self,
        enqueue: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<Box<dyn Graph>, BackendError> {
        self.cuda.capture(enqueue)
    }
}

impl DeviceSums for Counted {
    fn add_gradients(&self, sums: Accumulate<'_>) -> Result<(), BackendError> {
        self.cuda.add_gradients(sums)
    }
    fn leaf_squares_into(
        &self,
        leaves: LeafSquares<'_>,
        into: &mut dyn Buffer,
        first: u64,
    ) -> Result<(), BackendError> {
        self.cuda.leaf_squares_into(leaves, into, first)
    }
    fn leaf_sums_into(
        &self,
        launch: &Launch<'_>,
        rows: &mut dyn Buffer,
        first: u64,
    ) -> Result<(), BackendError> {
        self.cuda.leaf_sums_into(launch, rows, first)
    }
    fn fold_leaves(&self, fold: FoldLeaves<'_>) -> Result<(), BackendError> {
        self.cuda.fold_leaves(fold)
    }
}

impl Tables for Counted {
    fn place_table(
        &self,
        launch: &Launch<'_>,
        values: &[GroupValues],
    ) -> Result<Box<dyn ResidentTable>, BackendError> {
        self.cuda.place_table(launch, values)
    }
    fn launch_table(
        &self,
        launch: Launch<'_>,
        table: &dyn ResidentTable,
    ) -> Result<LaunchReport, BackendError> {
        self.cuda.launch_table(launch, table)
    }
    fn set_table_lr(&self, table: &mut dyn ResidentTable, lr: f64) -> Result<(), BackendError> {
        self.cuda.set_table_lr(table, lr)
    }
    fn place_reduction(&self, reduce: &Reduce<'_>) -> Result<Box<dyn ResidentTable>, BackendError> {
        self.cuda.place_reduction(reduce)
    }
    fn reduce_table(
        &self,
        reduce: Reduce<'_>,
        table: &dyn ResidentTable,
    ) -> Result<LaunchReport, BackendError> {
        self.cuda.reduce_table(reduce, table)
    }
    fn place_leaf_sums(
        &self,
        launch: &Launch<'_>,
        values: &[GroupValues],
        rows: &dyn Buffer,
        first: u64,
    ) -> Result<Box<dyn ResidentTable>, BackendError> {
        self.cuda.place_leaf_sums(launch, values, rows, first)
    }
    fn leaf_sums_of_table(
        &self,
        launch: &Launch<'_>,
        table: &dyn ResidentTable,
    ) -> Result<(), BackendError> {
        self.cuda.leaf_sums_of_table(launch, table)
    }
}
