//! Images of digits and their labels.

/// Pixels of one image: 8 × 8.
pub(crate) const PIXELS: usize = 64;
/// Digits 0 to 9.
pub(crate) const CLASSES: usize = 10;

/// Images and their labels.
#[derive(Clone, Debug, Default)]
pub(crate) struct Images {
    /// Pixels of all images, row by row, scaled to [0, 1].
    pub(crate) pixels: Vec<f32>,
    pub(crate) labels: Vec<u32>,
}

impl Images {
    pub(crate) fn len(&self) -> usize {
        self.labels.len()
    }

    pub(crate) fn push(&mut self, (pixels, label): &([f32; PIXELS], u32)) {
        self.pixels.extend_from_slice(pixels);
        self.labels.push(*label);
    }

    /// The images at these positions, in this order.
    pub(crate) fn select(&self, positions: &[usize]) -> Self {
        let mut selected = Self::default();
        for &at in positions {
            selected.pixels.extend_from_slice(&self.pixels[at * PIXELS..(at + 1) * PIXELS]);
            selected.labels.push(self.labels[at]);
        }
        selected
    }
}
