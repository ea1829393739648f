//! Variables as a model is evaluated with them, for a while.

use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::Var;

use crate::lend::{copy, with_bytes, write_in_place};
use crate::{AdapterError, Fused, Params, Ranked};

impl<P: Params> Fused<P> {
    /// Runs `work` while the variables are what a model is evaluated with: under
    /// [`crate::ScheduleFree`] the average, as after `optimizer.eval()` of its authors' package,
    /// under any other rule what they are anyway. Then they have the bits they had, so training
    /// does not notice, whether `work` succeeds, fails or panics; what it writes to a variable is
    /// lost. Within such a `work` another one finds the variables as they are.
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
        // The average of what is an average already would be another one.
        if !self.state.averages() || self.evaluating.swap(true, Ordering::Relaxed) {
            return work();
        }
        let _evaluating = Evaluating(&self.evaluating);
        with_values(&self.vars, work, |index, bytes| {
            let name = &self.vars[index].0;
            let backend = self.memory.backend();
            let averaged = self.state.average_borrowed(backend, name, bytes);
            Ok(averaged.map_err(AdapterError::from)?)
        })
    }
}

impl<P: Params> Ranked<'_, P> {
    /// As [`Fused::evaluate`]; all ranks call it, and each runs `work`.
    ///
    /// # Errors
    /// As [`Fused::evaluate`], and for a call between ranks.
    pub fn evaluate<R>(
        &mut self,
        work: impl FnOnce() -> candle_core::Result<R>,
    ) -> candle_core::Result<R> {
        if !self.state.averages() {
            return work();
        }
        let names: Vec<&str> = self.vars.iter().map(|(name, _)| name.as_str()).collect();
        let gathered =
            self.plan.gather_averages(&self.state, &self.backend, &mut self.comms, &names);
        let gathered = gathered.map_err(AdapterError::from)?;
        with_values(&self.vars, work, |index, bytes| copy(gathered.bytes(index), bytes))
    }
}

/// Set until this is dropped, by a panic, too.
struct Evaluating<'a>(&'a AtomicBool);

impl Drop for Evaluating<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// Runs `work` while variables have the values that `change` makes of their own.
fn with_values<R>(
    vars: &[(String, Var)],
    work: impl FnOnce() -> candle_core::Result<R>,
    change: impl Fn(usize, &mut [u8]) -> candle_core::Result<()>,
) -> candle_core::Result<R> {
    let mut trained = Trained(Vec::with_capacity(vars.len()));
    for (index, (_, var)) in vars.iter().enumerate() {
        let mut bytes = trained.keep(var)?;
        change(index, &mut bytes)?;
        write(var, &bytes)?;
    }
    let result = work();
    trained.restore()?;
    result
}

/// What variables were while they are something else; they are that again when this is dropped.
struct Trained<'a>(Vec<(&'a Var, Vec<u8>)>);

impl<'a> Trained<'a> {
    /// Keeps a variable's values and returns a copy.
    fn keep(&mut self, var: &'a Var) -> candle_core::Result<Vec<u8>> {
        let bytes = with_bytes(var.as_tensor(), |bytes| Ok(bytes.to_vec()))?;
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
    write_in_place(var, &mut |own| copy(bytes, own))
}
