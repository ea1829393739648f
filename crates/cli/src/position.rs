//! Where in its images a run is: what a checkpoint of `train` says beside its tensors.

use std::collections::BTreeMap;

/// Where in its images a run is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Position {
    /// Epochs that are over.
    pub(crate) epochs: usize,
    /// Batches of the next that are over, and the sum of their images' losses.
    pub(crate) batches: usize,
    pub(crate) loss_sum: f64,
    /// Mean loss of the last epoch that is over; not a number before.
    pub(crate) last_loss: f64,
}

impl Default for Position {
    fn default() -> Self {
        Self {
            epochs: 0,
            batches: 0,
            loss_sum: 0.0,
            last_loss: f64::NAN,
        }
    }
}

impl Position {
    /// What is saved.
    pub(crate) fn texts(self) -> BTreeMap<String, String> {
        // Bits, so that means are the same to the last one.
        let bits = |value: f64| format!("{:016x}", value.to_bits());
        let entries = [
            ("epochs", self.epochs.to_string()),
            ("batches", self.batches.to_string()),
            ("loss_sum", bits(self.loss_sum)),
            ("last_loss", bits(self.last_loss)),
        ];
        entries.map(|(key, value)| (key.to_owned(), value)).into()
    }

    /// What was saved; `None` if it is no position.
    pub(crate) fn read(texts: &BTreeMap<String, String>) -> Option<Self> {
        let bits = |key: &str| u64::from_str_radix(texts.get(key)?, 16).ok();
        Some(Self {
            epochs: texts.get("epochs")?.parse().ok()?,
            batches: texts.get("batches")?.parse().ok()?,
            loss_sum: f64::from_bits(bits("loss_sum")?),
            // Older checkpoints lack it.
            last_loss: bits("last_loss").map_or(f64::NAN, f64::from_bits),
        })
    }
}
