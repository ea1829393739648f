//! What launches reuse: entries, loaded once each, and the bytes of arguments.

use std::sync::{Arc, Mutex, PoisonError};

use cust::sys::CUfunction;
use fusestep_kernels::TABLE_BYTES;
use fusestep_launch::BackendError;

use crate::loaded_entry::{EntryCode, LoadedEntry};
use crate::normed::Slots;
use crate::session::Session;

/// Words of an argument block.
const BLOCK_WORDS: usize = TABLE_BYTES / 8;

/// What launches reuse: loaded entries and the argument bytes.
#[derive(Debug)]
pub(crate) struct Kernels {
    session: Arc<Session>,
    loaded: Vec<LoadedEntry>,
    /// The argument block; words, because the driver copies it for parameters that are aligned to
    /// 8 bytes.
    pub(crate) block: Box<[u64; BLOCK_WORDS]>,
    /// Where sums over tensors go.
    pub(crate) slots: Slots,
    /// Where those over leaves go, for the host.
    pub(crate) leaf_slots: Slots,
    /// Where those lie that the host has of tensors, whose parts are updated here.
    pub(crate) part_slots: Slots,
    /// Entries for resident tables, each its own.
    placed_slots: Vec<Arc<Mutex<Slots>>>,
}

// SAFETY: module and function handles belong to the context, not to a thread; the driver locks them
// itself.
unsafe impl Send for Kernels {}

impl Kernels {
    pub(crate) fn new(session: &Arc<Session>) -> Self {
        Self {
            session: Arc::clone(session),
            loaded: Vec::new(),
            block: Box::new([0; BLOCK_WORDS]),
            slots: Slots::default(),
            leaf_slots: Slots::default(),
            part_slots: Slots::default(),
            placed_slots: Vec::new(),
        }
    }

    /// Slots of a resident table, kept by it.
    pub(crate) fn place_slots(
        &mut self,
        count: u64,
    ) -> Result<(Arc<Mutex<Slots>>, u64), BackendError> {
        let mut slots = Slots::default();
        let address = slots.at_least(&self.session, count)?;
        let slots = Arc::new(Mutex::new(slots));
        self.forget_slots()?;
        self.placed_slots.push(Arc::clone(&slots));
        Ok((slots, address))
    }

    /// Tensors skipped since the last call; waits for the device.
    pub(crate) fn take_skipped(&mut self) -> Result<u64, BackendError> {
        let mut skipped = self.slots.take_skipped()? + self.part_slots.take_skipped()?;
        for slots in &self.placed_slots {
            skipped += slots
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take_skipped()?;
        }
        self.forget_slots()?;
        Ok(skipped)
    }

    /// Lets go of slots whose tables are gone, and keeps their counts.
    fn forget_slots(&mut self) -> Result<(), BackendError> {
        for slots in self
            .placed_slots
            .extract_if(.., |slots| Arc::strong_count(slots) == 1)
        {
            let mut slots = slots.lock().unwrap_or_else(PoisonError::into_inner);
            self.slots.count_skipped(slots.take_skipped()?);
        }
        Ok(())
    }

    /// The function of an entry; the context must be current.
    ///
    /// Only the first call for an entry allocates.
    pub(crate) fn function(
        &mut self,
        stem: &'static str,
        entry: &'static str,
    ) -> Result<CUfunction, BackendError> {
        let mut known = self.loaded.iter();
        if let Some(known) = known.find(|known| known.entry == entry) {
            return Ok(known.function);
        }
        let loaded = LoadedEntry::load(&self.session, stem, entry)?;
        let function = loaded.function;
        self.loaded.push(loaded);
        Ok(function)
    }

    /// What was loaded until now, in that order.
    pub(crate) fn loaded(&self) -> impl Iterator<Item = (&'static str, EntryCode)> {
        self.loaded.iter().map(|loaded| (loaded.entry, loaded.code))
    }

    /// Unloads the modules; the context must be current and nothing that was launched may still
    /// run.
    fn unload(&mut self) {
        for loaded in self.loaded.drain(..) {
            loaded.unload();
        }
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // Modules must not go while their code runs. After a fault of the device nothing runs, and
        // nothing can be unloaded either.
        if self.session.synchronize().is_ok() {
            self.unload();
        }
    }
}
