//! Evaluation of a model, for which variables may have other values for a while.

use candle_core::Var;

use crate::fused::Tensors;
use crate::lend::{copy, with_bytes, write_in_place};
use crate::{AdapterError, Fused, Params};

impl<P: Params> Fused<'_, P> {
    /// Runs `work` while the variables have the values for evaluation. Under
    /// [`crate::ScheduleFree`] these are the averages, as after `optimizer.eval()` of its authors'
    /// package. Under any other rule the variables keep their values. Afterwards the averaged
    /// variables have their old bits, whether `work` succeeds, fails or panics, and writes of
    /// `work` to them are lost. All ranks call it.
    ///
    /// # Errors
    /// That of `work`; an [`AdapterError`] if a variable is not contiguous in host memory any more,
    /// or a call between ranks fails.
    /// # Cost
    /// None if the variables keep their values; else a copy of them for as long as `work` runs, and
    /// a pass over the optimizer's state.
    pub fn evaluate<R>(
        &mut self,
        work: impl FnOnce() -> candle_core::Result<R>,
    ) -> candle_core::Result<R> {
        if !self.state().averages() {
            return work();
        }
        if let Tensors::Lent { .. } = &self.tensors {
            return with_values(&self.vars, work, |index, bytes| {
                let averaged = self.session.average_lent(&self.vars[index].0, bytes);
                Ok(averaged.map_err(AdapterError::from)?)
            });
        }
        let names: Vec<&str> = self.vars.iter().map(|(name, _)| name.as_str()).collect();
        let gathered = self.session.gather_averages(&names);
        let gathered = gathered.map_err(AdapterError::from)?;
        with_values(&self.vars, work, |index, bytes| copy(gathered.bytes(index), bytes))
    }
}

/// Runs `work` while variables have the values that `change` makes of their old ones.
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

/// Values of variables before they were changed for a while. Dropping it writes them back.
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
        // `restore` has emptied the list if it succeeded; an error here cannot be returned.
        while !self.0.is_empty() {
            let _ = self.restore();
        }
    }
}

/// Writes a variable's elements in place.
fn write(var: &Var, bytes: &[u8]) -> candle_core::Result<()> {
    write_in_place(var, &mut |own| copy(bytes, own))
}
