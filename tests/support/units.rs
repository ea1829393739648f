//! Distances from a reference in units in the last place.

/// Errors of one tensor over a run.
#[derive(Debug)]
pub(crate) struct Errors {
    /// The largest magnitude each element has had.
    scales: Vec<f64>,
    /// The largest error at each mark.
    pub(crate) marked: Vec<f64>,
}

impl Errors {
    /// A run that starts at these values.
    pub(crate) fn new(start: &[f64]) -> Self {
        Self { scales: start.iter().map(|x| x.abs()).collect(), marked: Vec::new() }
    }

    /// Notes the values of the reference after a step.
    pub(crate) fn step(&mut self, exact: &[f64]) {
        for (scale, x) in self.scales.iter_mut().zip(exact) {
            *scale = scale.max(x.abs());
        }
    }

    /// Notes the largest error of `found`, in units in the last place of the largest value that the
    /// element has had.
    pub(crate) fn mark(&mut self, found: &[f32], exact: &[f64]) {
        let errors = found.iter().zip(exact).zip(&self.scales);
        let units = errors.map(|((&x, exact), &scale)| (f64::from(x) - exact).abs() / unit(scale));
        self.marked.push(units.fold(0.0, f64::max));
    }
}

/// The distance between neighbouring f32 at `scale`.
fn unit(scale: f64) -> f64 {
    let scale = scale as f32;
    f64::from(scale.next_up()) - f64::from(scale)
}
