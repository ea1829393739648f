//! State that launches reuse: entries, each loaded once, the bytes of arguments, and rows for sums.

use std::sync::{Arc, Mutex, PoisonError};

use cust::sys::CUfunction;
use fusestep_kernels::TABLE_BYTES;
use fusestep_launch::BackendError;

use crate::Result;
use crate::loaded_entry::{EntryCode, LoadedEntry};
use crate::rows::Rows;
use crate::session::Session;

/// Words of an argument block.
const BLOCK_WORDS: usize = TABLE_BYTES / 8;

/// Loaded entries, argument bytes and rows for sums, which launches reuse.
#[derive(Debug)]
pub(crate) struct Kernels {
    session: Arc<Session>,
    loaded: Vec<LoadedEntry>,
    /// The argument block; words, because the driver copies it for parameters that are aligned to
    /// 8 bytes.
    pub(crate) block: Box<[u64; BLOCK_WORDS]>,
    /// Rows for sums over tensors.
    pub(crate) rows: Rows,
    /// Rows for sums over leaves that the host reads.
    pub(crate) leaf_rows: Rows,
    /// Rows for sums over whole tensors of which parts are updated here.
    pub(crate) part_rows: Rows,
    /// Rows of resident tables, each with its own.
    placed_rows: Vec<Arc<Mutex<Rows>>>,
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
            rows: Rows::default(),
            leaf_rows: Rows::default(),
            part_rows: Rows::default(),
            placed_rows: Vec::new(),
        }
    }

    /// Rows of a resident table, kept by it.
    pub(crate) fn place_rows(
        &mut self,
        count: u64,
    ) -> Result<(Arc<Mutex<Rows>>, u64), BackendError> {
        let mut rows = Rows::default();
        let address = rows.at_least(&self.session, count)?;
        let rows = Arc::new(Mutex::new(rows));
        self.forget_rows()?;
        self.placed_rows.push(Arc::clone(&rows));
        Ok((rows, address))
    }

    /// Tensors skipped since the last call; waits for the device.
    pub(crate) fn take_skipped(&mut self) -> Result<u64, BackendError> {
        let mut skipped = self.rows.take_skipped()? + self.part_rows.take_skipped()?;
        for rows in &self.placed_rows {
            skipped += rows.lock().unwrap_or_else(PoisonError::into_inner).take_skipped()?;
        }
        self.forget_rows()?;
        Ok(skipped)
    }

    /// Lets go of rows whose tables are gone, and keeps their counts.
    fn forget_rows(&mut self) -> Result<()> {
        for rows in self.placed_rows.extract_if(.., |rows| Arc::strong_count(rows) == 1) {
            let mut rows = rows.lock().unwrap_or_else(PoisonError::into_inner);
            self.rows.count_skipped(rows.take_skipped()?);
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

    /// The entries that were loaded until now, in that order.
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
