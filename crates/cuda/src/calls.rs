//! The calls of a backend, each handed to the module that enqueues it.

use fusestep_launch::{
    Accumulate, Backend, BackendError, Buffer, Conclude, DeviceBackend, DeviceStream, DeviceSums,
    FoldLeaves, Graph, GroupValues, Launch, LaunchLimits, LaunchReport, Launches, LeafSquares,
    MAX_SUMS, Memory, Reduce, ResidentTable, SquareSum, Tables,
};

use crate::backend::CudaBackend;
use crate::buffer::DeviceBuffer;
use crate::{NAME, Result, gradient_sums, graph, launch, leaves, reduce, resident, tensor_sums};

impl Backend for CudaBackend {
    fn device(&self) -> Option<&dyn DeviceBackend> {
        Some(self)
    }
}

impl Memory for CudaBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn limits(&self) -> LaunchLimits {
        self.limits
    }

    fn allocate(&self, len_bytes: usize) -> Result<Box<dyn Buffer>, BackendError> {
        Ok(Box::new(DeviceBuffer::zeroed(&self.session, len_bytes)?))
    }

    fn write(&self, buffer: &mut dyn Buffer, offset_bytes: usize, bytes: &[u8]) -> Result<()> {
        DeviceBuffer::of_mut(&self.session, buffer)?.write(offset_bytes, bytes)
    }

    fn read(&self, buffer: &dyn Buffer, offset_bytes: usize, bytes: &mut [u8]) -> Result<()> {
        DeviceBuffer::of(&self.session, buffer)?.read(offset_bytes, bytes)
    }

    fn copy(
        &self,
        from: &dyn Buffer,
        from_offset_bytes: usize,
        to: &mut dyn Buffer,
        to_offset_bytes: usize,
        len_bytes: usize,
    ) -> Result<()> {
        let from = DeviceBuffer::of(&self.session, from)?;
        let to = DeviceBuffer::of_mut(&self.session, to)?;
        to.copy_from(to_offset_bytes, from, from_offset_bytes, len_bytes)
    }

    fn zero(&self, buffer: &mut dyn Buffer) -> Result<()> {
        DeviceBuffer::of_mut(&self.session, buffer)?.zero()
    }

    fn synchronize(&self) -> Result<()> {
        self.session.synchronize()
    }
}

impl Launches for CudaBackend {
    fn launch(&self, launch: Launch<'_>) -> Result<LaunchReport, BackendError> {
        launch::launch(self, launch)
    }

    fn reduce(&self, reduce: Reduce<'_>) -> Result<LaunchReport, BackendError> {
        reduce::reduce(self, reduce)
    }

    fn conclude(&self, conclude: Conclude<'_>) -> Result<LaunchReport, BackendError> {
        reduce::conclude(self, conclude)
    }

    fn leaf_squares(&self, leaves: LeafSquares<'_>, sums: &mut [SquareSum]) -> Result<()> {
        leaves::squares(self, leaves, sums)
    }

    fn leaf_sums(&self, launch: &Launch<'_>, sums: &mut [[f64; MAX_SUMS]]) -> Result<()> {
        leaves::sums(self, launch, sums)
    }

    fn take_skipped(&self) -> Result<u64, BackendError> {
        self.session.enter()?;
        self.kernels().take_skipped()
    }

    fn skipped(&self) -> u64 {
        0
    }
}

impl DeviceStream for CudaBackend {
    fn ordinal(&self) -> u32 {
        self.session.info.ordinal
    }

    fn hand_over(&self, buffer: &mut dyn Buffer) -> Result<()> {
        DeviceBuffer::of_mut(&self.session, buffer)?.hand_over()
    }

    fn take_back(&self, buffer: &mut dyn Buffer) -> Result<()> {
        DeviceBuffer::of_mut(&self.session, buffer)?.take_back()
    }

    fn capture(
        &self,
        enqueue: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Box<dyn Graph>, BackendError> {
        Ok(Box::new(graph::record(self, enqueue)?))
    }
}

impl DeviceSums for CudaBackend {
    fn add_gradients(&self, sums: Accumulate<'_>) -> Result<()> {
        gradient_sums::enqueue(self, sums)
    }

    fn leaf_squares_into(
        &self,
        leaves: LeafSquares<'_>,
        into: &mut dyn Buffer,
        first: u64,
    ) -> Result<()> {
        leaves::squares_into(self, leaves, into, first)
    }

    fn leaf_sums_into(&self, launch: &Launch<'_>, rows: &mut dyn Buffer, first: u64) -> Result<()> {
        tensor_sums::enqueue_leaf_sums(self, launch, rows, first)
    }

    fn fold_leaves(&self, fold: FoldLeaves<'_>) -> Result<()> {
        leaves::enqueue_fold(self, fold)
    }
}

impl Tables for CudaBackend {
    fn place_table(
        &self,
        launch: &Launch<'_>,
        values: &[GroupValues],
    ) -> Result<Box<dyn ResidentTable>, BackendError> {
        Ok(Box::new(resident::place_launch(self, launch, values)?))
    }

    fn launch_table(
        &self,
        launch: Launch<'_>,
        table: &dyn ResidentTable,
    ) -> Result<LaunchReport, BackendError> {
        resident::launch::enqueue(self, &launch, table)
    }

    fn set_table_lr(&self, table: &mut dyn ResidentTable, lr: f64) -> Result<()> {
        resident::set_lr(self, table, lr)
    }

    fn place_reduction(&self, reduce: &Reduce<'_>) -> Result<Box<dyn ResidentTable>, BackendError> {
        Ok(Box::new(resident::place_reads(self, reduce)?))
    }

    fn reduce_table(
        &self,
        reduce: Reduce<'_>,
        table: &dyn ResidentTable,
    ) -> Result<LaunchReport, BackendError> {
        resident::launch::enqueue_reads(self, &reduce, table)
    }

    fn place_leaf_sums(
        &self,
        launch: &Launch<'_>,
        values: &[GroupValues],
        rows: &dyn Buffer,
        first: u64,
    ) -> Result<Box<dyn ResidentTable>, BackendError> {
        Ok(Box::new(resident::place_leaves(self, launch, values, rows, first)?))
    }

    fn leaf_sums_of_table(&self, launch: &Launch<'_>, table: &dyn ResidentTable) -> Result<()> {
        resident::launch::enqueue_leaves(self, launch, table)
    }
}
