//! Values that variables have for a while.

use candle_core::Var;

use crate::lend::{copy, with_bytes, write_in_place};

/// Runs `work` while variables have the values that `change` makes of their old ones.
pub(crate) fn with_values<R>(
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
