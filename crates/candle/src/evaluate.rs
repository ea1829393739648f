//! Variables as a model is evaluated with them, for a while.

use candle_core::{CpuStorage, InplaceOp1, Layout, Var};

use crate::lend::{bytes_mut, bytes_of};
use crate::{AdapterError, Fused, Params};

impl<P: Params> Fused<P> {
    /// Runs `work` while the variables are what a model is evaluated with: under
    /// [`crate::ScheduleFree`] the average, as after `optimizer.eval()` of its authors' package,
    /// under any other rule what they are anyway. Then they have the bits they had, so training
    /// does not notice, whether `work` succeeds, fails or panics; what it writes to a variable is
    /// lost.
    ///
    /// # Errors
    /// That of `work`; an [`AdapterError`] if a variable is not contiguous in host memory any more.
    /// # Cost
    /// Nothing where the variables stay; else a copy of them for as long as `work` runs, and a pass
    /// over the optimizer's state.
    pub fn evaluate<R>(
        &self,
        work: impl FnOnce() -> candle_core::Result<R>,
    ) -> candle_core::Result<R> {
        if !self.state.averages() {
            return work();
        }
        let mut trained = Trained(Vec::with_capacity(self.vars.len()));
        for (name, var) in &self.vars {
            let mut bytes = trained.keep(var)?;
            let averaged = self.state.average_borrowed(&self.backend, name, &mut bytes);
            averaged.map_err(AdapterError::from)?;
            write(var, &bytes)?;
        }
        let result = work();
        trained.restore()?;
        result
    }
}

/// What variables were while they are something else; they are that again when this is dropped.
struct Trained<'a>(Vec<(&'a Var, Vec<u8>)>);

impl<'a> Trained<'a> {
    /// Keeps a variable's values and returns a copy.
    fn keep(&mut self, var: &'a Var) -> candle_core::Result<Vec<u8>> {
        let (storage, layout) = var.storage_and_layout();
        let bytes = bytes_of(&storage, layout)?.to_vec();
        drop(storage);
        self.0.push((var, bytes.clone()));
        Ok(bytes)
    }

    fn restore(&mut self) -> candle_core::Result<()> {
        while let Some((var, bytes)) = self.0.pop() {
            write(var, &bytes)?;
        }
        Ok(())
    }
}

impl Drop for Trained<'_> {
    fn drop(&mut self) {
        // Empty after a restoring that went well; nobody is left to tell of another.
        while !self.0.is_empty() {
            let _ = self.restore();
        }
    }
}

/// Writes a variable's elements in place.
fn write(var: &Var, bytes: &[u8]) -> candle_core::Result<()> {
    var.as_tensor().inplace_op1(&Write(bytes))
}

struct Write<'a>(&'a [u8]);

impl InplaceOp1 for Write<'_> {
    fn name(&self) -> &'static str {
        "fused-evaluate"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let name = InplaceOp1::name(self);
        let width = candle_core::backend::BackendStorage::dtype(storage).size_in_bytes();
        let place = layout.contiguous_offsets();
        let elements = place.and_then(|(start, end)| {
            let bytes = bytes_mut(storage)?.get_mut(start * width..end * width)?;
            (bytes.len() == self.0.len()).then_some(bytes)
        });
        let Some(elements) = elements else {
            candle_core::bail!(
                "{name}: expected the contiguous tensor of {} bytes that was read, found another",
                self.0.len()
            )
        };
        elements.copy_from_slice(self.0);
        Ok(())
    }
}
