//! Gradients of many tensors in one aligned buffer: each is a view, and one loop reaches them all.
//!
//! `cargo run --release -p fusestep-coalesce --example flat_gradients`

use std::error::Error;

use fusestep_coalesce::{Coalesced, FlatLayout, LayoutOptions};

fn main() -> Result<(), Box<dyn Error>> {
    let numels = [60, 0, 20, 7];
    let layout = FlatLayout::new(numels, LayoutOptions::new(4))?;
    let mut gradients = Coalesced::<f32>::allocate(layout)?;
    for (index, numel) in numels.into_iter().enumerate() {
        let view = gradients.view_mut(index);
        assert_eq!(view.len() as u64, numel);
        view.fill(index as f32 + 1.0);
    }
    // What a collective or a norm does: one pass over one range. Padding is zero.
    let sum: f32 = gradients.flat().iter().sum();
    println!("{} elements in one buffer for {:?}, sum {sum}", gradients.flat().len(), numels);
    assert_eq!(sum, 60.0 + 3.0 * 20.0 + 4.0 * 7.0);
    Ok(())
}
