//! Where in its images a run is: what a checkpoint of `train` says beside its tensors.

use std::collections::BTreeMap;

use crate::train::MOST_EPOCHS;

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
        Self { epochs: 0, batches: 0, loss_sum: 0.0, last_loss: f64::NAN }
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

    /// What was saved; `None` if it is no position of a run whose epochs have so many batches.
    pub(crate) fn read(texts: &BTreeMap<String, String>, of_epoch: usize) -> Option<Self> {
        let count = |key: &str, most| {
            let count = texts.get(key)?.parse().ok();
            count.filter(|&count: &usize| count <= most)
        };
        let bits = |key: &str| u64::from_str_radix(texts.get(key)?, 16).ok();
        Some(Self {
            epochs: count("epochs", MOST_EPOCHS)?,
            batches: count("batches", of_epoch)?,
            loss_sum: f64::from_bits(bits("loss_sum")?),
            // Older checkpoints lack it.
            last_loss: bits("last_loss").map_or(f64::NAN, f64::from_bits),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_is_within_a_run() {
        let saved = |epochs, batches| {
            let position = Position { epochs, batches, ..Position::default() };
            position.texts()
        };
        let read = Position::read(&saved(MOST_EPOCHS, 45), 45).unwrap();
        assert_eq!((read.epochs, read.batches), (MOST_EPOCHS, 45));
        for (epochs, batches) in [(MOST_EPOCHS + 1, 0), (usize::MAX, 0), (1, 46), (1, usize::MAX)] {
            assert!(Position::read(&saved(epochs, batches), 45).is_none());
        }
    }
}
