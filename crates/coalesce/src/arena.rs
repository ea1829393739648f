//! The arena: one aligned allocation that holds many tensors as its layout places them.

use fusestep_tensor::Element;

use crate::{CoalesceError, FlatLayout, HostMemory};

/// Many tensors of one dtype in one buffer, in which each is a view.
///
/// A view is a layout and an index, so it cannot dangle or be re-pointed. Padding is zero and stays
/// zero: no view reaches it.
#[derive(Debug)]
pub struct Coalesced<T> {
    layout: FlatLayout,
    memory: HostMemory,
    element: std::marker::PhantomData<T>,
}

impl<T: Element> Coalesced<T> {
    /// Allocates a zeroed buffer for `layout`.
    ///
    /// # Errors
    /// [`CoalesceError::OutOfMemory`] with the bytes asked for.
    pub fn allocate(layout: FlatLayout) -> Result<Self, CoalesceError> {
        let len_bytes = layout.total_numel().saturating_mul(size_of::<T>() as u64);
        let memory = usize::try_from(len_bytes)
            .map_err(|_| CoalesceError::OutOfMemory { len_bytes })
            .and_then(HostMemory::zeroed)?;
        Ok(Self { layout, memory, element: std::marker::PhantomData })
    }

    /// A buffer that holds copies of `tensors`.
    ///
    /// # Errors
    /// As [`Coalesced::allocate`] and [`Coalesced::gather`].
    pub fn from_slices(layout: FlatLayout, tensors: &[&[T]]) -> Result<Self, CoalesceError> {
        let mut coalesced = Self::allocate(layout)?;
        coalesced.gather(tensors)?;
        Ok(coalesced)
    }

    /// Lays the same tensors out as `layout`; nothing moves if they already are.
    ///
    /// # Errors
    /// [`CoalesceError::TensorCount`] or [`CoalesceError::NumelMismatch`] if `layout` is one of
    /// other tensors, and [`CoalesceError::OutOfMemory`]; the buffer is unchanged then.
    pub fn recoalesce(&mut self, layout: FlatLayout) -> Result<(), CoalesceError> {
        if self.layout != layout {
            let views: Vec<&[T]> = self.views().collect();
            *self = Self::from_slices(layout, &views)?;
        }
        Ok(())
    }

    /// The layout: the place of each tensor in the buffer.
    pub fn layout(&self) -> &FlatLayout {
        &self.layout
    }

    /// The whole buffer, padding included: what a collective sends.
    pub fn flat(&self) -> &[T] {
        self.memory.elements()
    }

    /// View of tensor `index`, without padding.
    ///
    /// # Panics
    /// If the layout has no such tensor.
    pub fn view(&self, index: usize) -> &[T] {
        &self.flat()[to_usize(self.layout.range(index))]
    }

    /// Mutable view of tensor `index`, without padding.
    ///
    /// # Panics
    /// If the layout has no such tensor.
    pub fn view_mut(&mut self, index: usize) -> &mut [T] {
        let range = to_usize(self.layout.range(index));
        &mut self.memory.elements_mut()[range]
    }

    /// Views of all tensors, in the layout's order and without padding.
    pub fn views(&self) -> impl Iterator<Item = &[T]> {
        (0..self.layout.tensors()).map(|index| self.view(index))
    }

    /// Mutable views of all tensors at once, in the layout's order and without padding.
    pub fn views_mut(&mut self) -> impl Iterator<Item = &mut [T]> {
        let layout = &self.layout;
        let mut rest: &mut [T] = self.memory.elements_mut();
        (0..layout.tensors()).map(move |index| {
            let slot = (layout.offsets()[index + 1] - layout.offset(index)) as usize;
            let (slot, behind) = std::mem::take(&mut rest).split_at_mut(slot);
            rest = behind;
            &mut slot[..layout.numel(index) as usize]
        })
    }

    /// Sets every tensor's elements to `value`; padding stays zero.
    pub fn fill(&mut self, value: T) {
        for view in self.views_mut() {
            view.fill(value);
        }
    }

    /// Copies `tensors` into their places: for callers who cannot produce into the views.
    ///
    /// # Errors
    /// [`CoalesceError::TensorCount`], [`CoalesceError::NumelMismatch`]; all are checked before
    /// anything is copied.
    pub fn gather(&mut self, tensors: &[&[T]]) -> Result<(), CoalesceError> {
        self.check(tensors.iter().map(|tensor| tensor.len()))?;
        for (view, tensor) in self.views_mut().zip(tensors) {
            view.copy_from_slice(tensor);
        }
        Ok(())
    }

    /// Copies the tensors out to `tensors`: for callers who cannot consume the views.
    ///
    /// # Errors
    /// As [`Coalesced::gather`].
    pub fn scatter(&self, tensors: &mut [&mut [T]]) -> Result<(), CoalesceError> {
        self.check(tensors.iter().map(|tensor| tensor.len()))?;
        for (view, tensor) in self.views().zip(tensors) {
            tensor.copy_from_slice(view);
        }
        Ok(())
    }

    fn check(&self, numels: impl ExactSizeIterator<Item = usize>) -> Result<(), CoalesceError> {
        let (expected, found) = (self.layout.tensors(), numels.len());
        if expected != found {
            return Err(CoalesceError::TensorCount { expected, found });
        }
        for (tensor, found) in numels.enumerate() {
            let (expected, found) = (self.layout.numel(tensor), found as u64);
            if expected != found {
                return Err(CoalesceError::NumelMismatch { tensor, expected, found });
            }
        }
        Ok(())
    }
}

/// The range as `usize`: every index into an allocated buffer fits, since its length in bytes does.
fn to_usize(range: std::ops::Range<u64>) -> std::ops::Range<usize> {
    range.start as usize..range.end as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LayoutOptions;
    use crate::SLOT_BYTES;
    use half::{bf16, f16};

    fn layout(numels: &[u64]) -> FlatLayout {
        FlatLayout::new(numels.iter().copied(), LayoutOptions::new(4)).unwrap()
    }

    fn round_trip<T: Element>(value: impl Fn(usize) -> T) {
        let numels = [60u64, 0, 20, 1, 64, 6000, 1, 0];
        let options = LayoutOptions::new(size_of::<T>());
        let layout = FlatLayout::new(numels, options).unwrap();
        let tensors: Vec<Vec<T>> = numels
            .iter()
            .enumerate()
            .map(|(k, &n)| (0..n as usize).map(|i| value(i + 7 * k)).collect())
            .collect();
        let slices: Vec<&[T]> = tensors.iter().map(Vec::as_slice).collect();
        let coalesced = Coalesced::from_slices(layout.clone(), &slices).unwrap();
        let mut copies: Vec<Vec<T>> =
            numels.iter().map(|&n| vec![T::default(); n as usize]).collect();
        let mut targets: Vec<&mut [T]> = copies.iter_mut().map(Vec::as_mut_slice).collect();
        coalesced.scatter(&mut targets).unwrap();
        assert_eq!(copies, tensors);
        assert_eq!(coalesced.flat().as_ptr() as usize % SLOT_BYTES as usize, 0);
        for index in 0..layout.tensors() {
            let padding = layout.range(index).end as usize..layout.offsets()[index + 1] as usize;
            let bytes: &[u8] = bytemuck::cast_slice(&coalesced.flat()[padding]);
            assert!(bytes.iter().all(|&b| b == 0), "padding behind tensor {index}");
        }
    }

    #[test]
    fn every_dtype_round_trips_and_padding_is_zero() {
        round_trip(|i| i as f32 - 0.5);
        round_trip(|i| i as f64 * 1e-3);
        round_trip(|i| f16::from_f32(i as f32));
        round_trip(|i| bf16::from_f32(i as f32));
        round_trip(|i| i as i32);
    }

    #[test]
    fn views_write_through_and_fill_spares_the_padding() {
        let mut coalesced = Coalesced::<f32>::allocate(layout(&[3, 0, 5])).unwrap();
        coalesced.view_mut(2)[4] = 9.0;
        assert_eq!(coalesced.flat()[64 + 4], 9.0);
        assert!(coalesced.view(1).is_empty());
        coalesced.fill(0.5);
        assert_eq!(coalesced.flat().iter().filter(|&&x| x == 0.5).count(), 8);
        assert_eq!(coalesced.flat().iter().filter(|&&x| x == 0.0).count(), 120);
    }

    #[test]
    fn a_flat_set_is_coalesced_again_without_moving() {
        let mut coalesced =
            Coalesced::<f32>::from_slices(layout(&[3]), &[&[1.0, 2.0, 3.0]]).unwrap();
        let address = coalesced.flat().as_ptr();
        coalesced.recoalesce(layout(&[3])).unwrap();
        assert_eq!(coalesced.flat().as_ptr(), address);
        assert!(coalesced.recoalesce(layout(&[4])).is_err());
        let options = LayoutOptions { slot_bytes: 4096, unit_bytes: 4 };
        coalesced.recoalesce(FlatLayout::new([3], options).unwrap()).unwrap();
        assert_eq!(coalesced.layout().total_numel(), 1024);
        assert_eq!(coalesced.view(0), [1.0, 2.0, 3.0]);
    }

    #[test]
    fn wrong_tensors_are_refused_before_anything_is_copied() {
        let mut coalesced = Coalesced::<f32>::allocate(layout(&[2, 3])).unwrap();
        let error = coalesced.gather(&[&[1.0, 1.0], &[1.0; 4]]).unwrap_err();
        assert_eq!(error.to_string(), "tensor 1: expected 3 elements, found 4");
        assert!(coalesced.gather(&[&[1.0, 1.0]]).is_err());
        assert!(coalesced.flat().iter().all(|&x| x == 0.0));
    }

    #[test]
    fn memory_that_cannot_be_had_is_an_error() {
        let huge = FlatLayout::new([1 << 58], LayoutOptions::new(4)).unwrap();
        assert!(matches!(Coalesced::<f32>::allocate(huge), Err(CoalesceError::OutOfMemory { .. })));
    }

    #[test]
    fn ten_thousand_small_tensors() {
        let numels: Vec<u64> = (0..10_000).map(|i| i % 9).collect();
        let mut coalesced = Coalesced::<f32>::allocate(layout(&numels)).unwrap();
        for (index, view) in coalesced.views_mut().enumerate() {
            view.fill(index as f32);
        }
        assert!((0..10_000).all(|i| coalesced.view(i).iter().all(|&x| x == i as f32)));
    }
}
