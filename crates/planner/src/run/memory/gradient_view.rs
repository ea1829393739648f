//! View of a gradient, which callers write in place.

use fusestep_tensor::Element;

/// Mutable view of one parameter's gradient where ranks reduce it and updates read it.
///
/// In every micro-step its elements are zero until written, at every ZeRO stage and on one rank. So
/// rows that a program adds to or leaves out have the same bits however ranks share out. A gradient
/// written whole, by [`GradMut::copy_from_slice`] or [`GradMut::fill`], is not set to zero before.
/// [`crate::RunAlone::step_all`] ends no micro-step: it leaves gradients as they are, for the next
/// step too.
#[derive(Debug)]
pub struct GradMut<'a, T: Element> {
    values: &'a mut [T],
    /// Whether the memory still holds an earlier gradient.
    is_stale: bool,
}

impl<'a, T: Element> GradMut<'a, T> {
    pub(crate) fn new(values: &'a mut [T], is_stale: bool) -> Self {
        Self { values, is_stale }
    }

    /// Copies the whole gradient from `gradient`.
    ///
    /// # Panics
    /// If `gradient` and the view have different lengths.
    pub fn copy_from_slice(&mut self, gradient: &[T]) {
        self.values.copy_from_slice(gradient);
        self.is_stale = false;
    }

    /// Writes one value to all elements.
    pub fn fill(&mut self, value: T) {
        self.values.fill(value);
        self.is_stale = false;
    }

    /// The gradient's elements, which are zero where they have not been written in this micro-step.
    ///
    /// # Cost
    /// One pass that sets them to zero, the first time in a micro-step.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        self.clear();
        self.values
    }

    /// [`GradMut::as_mut_slice`] for as long as the state is borrowed.
    pub fn into_mut_slice(mut self) -> &'a mut [T] {
        self.clear();
        std::mem::take(&mut self.values)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Whether the gradient has no elements.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    fn clear(&mut self) {
        if std::mem::take(&mut self.is_stale) {
            self.values.fill(T::zeroed());
        }
    }
}

impl<T: Element> Drop for GradMut<'_, T> {
    /// A gradient that counts as given and was not written is zero.
    fn drop(&mut self) {
        self.clear();
    }
}
