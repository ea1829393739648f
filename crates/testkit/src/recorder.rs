//! A backend that writes down what it was asked to launch.

use std::sync::{Mutex, PoisonError};

use fusestep_launch::{
    Backend, BackendError, Batch, Buffer, CONCLUSION_BYTES, Conclude, Graph, GroupValues, Launch,
    LaunchLimits, LaunchReport, Reduce, ResidentTable,
};

/// Argument bytes of a launch from a resident table: two addresses.
const RESIDENT_BYTES: usize = 16;

/// One launch as a device would have seen it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedLaunch {
    /// The kernel's entry.
    pub entry: &'static str,
    /// Tensors, or parts of tensors, in the launch.
    pub records: usize,
    /// Groups of hyper-parameters in the launch.
    pub groups: usize,
    /// Blocks.
    pub chunks: u32,
    /// Elements updated.
    pub elements: u64,
    /// Argument bytes used.
    pub argument_bytes: usize,
}

impl RecordedLaunch {
    fn of(entry: &'static str, batch: &Batch, argument_bytes: usize) -> Self {
        Self {
            entry,
            records: batch.records.len(),
            groups: batch.groups.len(),
            chunks: batch.chunks,
            elements: batch.elements(),
            argument_bytes,
        }
    }

    /// One that updates nothing.
    fn of_sums(entry: &'static str, batch: &Batch, argument_bytes: usize) -> Self {
        Self { groups: 0, elements: 0, ..Self::of(entry, batch, argument_bytes) }
    }
}

/// Passes everything on to another backend and records each launch: a plan can be tested for what
/// it issues without a device.
#[derive(Debug)]
pub struct Recorder<B> {
    inner: B,
    launches: Mutex<Vec<RecordedLaunch>>,
}

impl<B: Backend> Recorder<B> {
    /// Records what `inner` is asked to launch.
    pub fn new(inner: B) -> Self {
        Self { inner, launches: Mutex::new(Vec::new()) }
    }

    fn record(&self, launches: impl IntoIterator<Item = RecordedLaunch>) {
        let mut recorded = self.launches.lock().unwrap_or_else(PoisonError::into_inner);
        recorded.extend(launches);
    }

    /// The launches since the last call.
    pub fn take(&self) -> Vec<RecordedLaunch> {
        std::mem::take(&mut self.launches.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<B: Backend> Backend for Recorder<B> {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn limits(&self) -> LaunchLimits {
        self.inner.limits()
    }

    fn allocate(&self, len_bytes: usize) -> Result<Box<dyn Buffer>, BackendError> {
        self.inner.allocate(len_bytes)
    }

    fn write(
        &self,
        buffer: &mut dyn Buffer,
        offset_bytes: usize,
        bytes: &[u8],
    ) -> Result<(), BackendError> {
        self.inner.write(buffer, offset_bytes, bytes)
    }

    fn read(
        &self,
        buffer: &dyn Buffer,
        offset_bytes: usize,
        bytes: &mut [u8],
    ) -> Result<(), BackendError> {
        self.inner.read(buffer, offset_bytes, bytes)
    }

    fn place_table(
        &self,
        launch: &Launch<'_>,
        values: &[GroupValues],
    ) -> Result<Option<Box<dyn ResidentTable>>, BackendError> {
        self.inner.place_table(launch, values)
    }

    fn launch_table(
        &self,
        launch: Launch<'_>,
        table: &dyn ResidentTable,
    ) -> Result<LaunchReport, BackendError> {
        let derives = launch.kernel.resident().map(|resident| resident.entry);
        let derivations = launch.batches.iter().filter_map(|batch| {
            Some(RecordedLaunch {
                chunks: 1,
                elements: 0,
                ..RecordedLaunch::of(derives?, batch, RESIDENT_BYTES)
            })
        });
        let entry = launch.kernel.entry();
        let updates = launch.batches.iter();
        let updates = updates.map(|batch| RecordedLaunch::of(entry, batch, RESIDENT_BYTES));
        self.record(derivations.chain(updates));
        self.inner.launch_table(launch, table)
    }

    fn set_table_lr(&self, table: &mut dyn ResidentTable, lr: f64) -> Result<(), BackendError> {
        self.inner.set_table_lr(table, lr)
    }

    fn place_reduction(
        &self,
        reduce: &Reduce<'_>,
    ) -> Result<Option<Box<dyn ResidentTable>>, BackendError> {
        self.inner.place_reduction(reduce)
    }

    fn reduce_table(
        &self,
        reduce: Reduce<'_>,
        table: &dyn ResidentTable,
    ) -> Result<LaunchReport, BackendError> {
        let entry = reduce.kernel.entry();
        let sums = reduce.batches.iter();
        self.record(sums.map(|batch| RecordedLaunch::of_sums(entry, batch, RESIDENT_BYTES)));
        self.inner.reduce_table(reduce, table)
    }

    fn capture(
        &self,
        enqueue: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<Box<dyn Graph>, BackendError> {
        self.inner.capture(enqueue)
    }

    fn launch(&self, launch: Launch<'_>) -> Result<LaunchReport, BackendError> {
        let layout = launch.kernel.argument_layout();
        let entry = launch.kernel.entry();
        self.record(launch.batches.iter().map(|batch| {
            let bytes = layout.bytes(batch.records.len(), batch.groups.len());
            RecordedLaunch::of(entry, batch, bytes)
        }));
        self.inner.launch(launch)
    }

    fn reduce(&self, reduce: Reduce<'_>) -> Result<LaunchReport, BackendError> {
        let layout = reduce.kernel.argument_layout();
        let entry = reduce.kernel.entry();
        self.record(reduce.batches.iter().map(|batch| {
            RecordedLaunch::of_sums(entry, batch, layout.bytes(batch.records.len(), 0))
        }));
        self.inner.reduce(reduce)
    }

    fn conclude(&self, conclude: Conclude<'_>) -> Result<LaunchReport, BackendError> {
        self.record([RecordedLaunch {
            entry: conclude.rule.entry(),
            records: 0,
            groups: 0,
            chunks: 1,
            elements: 0,
            argument_bytes: CONCLUSION_BYTES + conclude.scalars.len(),
        }]);
        self.inner.conclude(conclude)
    }

    fn take_skipped(&self) -> Result<u64, BackendError> {
        self.inner.take_skipped()
    }

    fn skipped(&self) -> u64 {
        self.inner.skipped()
    }

    fn synchronize(&self) -> Result<(), BackendError> {
        self.inner.synchronize()
    }
}
