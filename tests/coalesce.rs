//! Laws of layouts and coalesced buffers, for any tensors.

use fusestep_coalesce::{
    CoalesceError, Coalesced, FlatLayout, HostMemory, LayoutOptions, SLOT_BYTES,
};
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::{Adam, WeightDecay};
use fusestep_launch::{
    Backend, BackendError, Buffer, Conclude, Launch, LaunchLimits, LaunchReport, Launches,
    MAX_SUMS, Memory, Reduce,
};
use fusestep_planner::{Optimizer, Planner, RunAlone};
use fusestep_tensor::{DType, Role};
use fusestep_testkit::Case;
use proptest::prelude::*;

fn options() -> impl Strategy<Value = LayoutOptions> {
    let widths = prop::sample::select(vec![1u64, 2, 4, 8]);
    let slots = prop::sample::select(vec![1u64, 8, 256, 4096]);
    (slots, widths).prop_map(|(slot_bytes, unit_bytes)| LayoutOptions { slot_bytes, unit_bytes })
}

fn numels() -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec(prop_oneof![Just(0), Just(64), 0..300u64], 0..40)
}

/// Tensors whose elements all differ.
fn tensors(numels: &[u64]) -> Vec<Vec<f32>> {
    let mut next = 0.0;
    let mut element = || {
        next += 1.0;
        next
    };
    let tensor = |&numel: &u64| (0..numel).map(|_| element()).collect();
    numels.iter().map(tensor).collect()
}

fn slices(tensors: &[Vec<f32>]) -> Vec<&[f32]> {
    tensors.iter().map(Vec::as_slice).collect()
}

/// Whether all elements behind the tensors, up to the next slot, are zero bits.
fn padding_is_zero(layout: &FlatLayout, flat: &[f32]) -> bool {
    (0..layout.tensors()).all(|index| {
        let padding = layout.range(index).end as usize..layout.offsets()[index + 1] as usize;
        flat[padding].iter().all(|x| x.to_bits() == 0)
    })
}

proptest! {
    #[test]
    fn slots_are_aligned_disjoint_and_tight(numels in numels(), options in options()) {
        let layout = FlatLayout::new(numels.iter().copied(), options).unwrap();
        let slot = (options.slot_bytes / options.unit_bytes).max(1);
        prop_assert_eq!(layout.tensors(), numels.len());
        prop_assert_eq!(layout.tensor_numel(), numels.iter().sum::<u64>());
        let mut end = 0;
        for (index, &numel) in numels.iter().enumerate() {
            prop_assert_eq!(layout.offset(index), end, "a slot starts where the one before ends");
            prop_assert_eq!(layout.range(index), end..end + numel);
            if options.slot_bytes > 1 {
                prop_assert_eq!(end * options.unit_bytes % options.slot_bytes, 0);
            }
            end = layout.offsets()[index + 1];
            prop_assert!(end - layout.offset(index) < numel + slot, "padding is less than a slot");
            prop_assert!(numel > 0 || end == layout.offset(index), "an empty tensor has no slot");
        }
        prop_assert_eq!(layout.total_numel(), end);
    }

    #[test]
    fn a_layout_is_a_prefix_of_the_layout_of_more_tensors(
        numels in numels(),
        more in numels(),
        options in options(),
    ) {
        let short = FlatLayout::new(numels.iter().copied(), options).unwrap();
        let long = FlatLayout::new(numels.iter().chain(&more).copied(), options).unwrap();
        prop_assert_eq!(short.offsets(), &long.offsets()[..=numels.len()]);
    }

    #[test]
    fn layouts_of_one_unit_fit_every_width_with_aligned_slots(numels in numels()) {
        // The narrowest of two dtypes decides, and the wider buffer's slots stay aligned.
        let layout = FlatLayout::new(numels, LayoutOptions::new(2)).unwrap();
        for width in [2u64, 4, 8] {
            prop_assert!(layout.offsets().iter().all(|o| o * width % SLOT_BYTES == 0));
        }
    }

    #[test]
    fn gather_and_scatter_are_inverse_and_spare_the_padding(numels in numels()) {
        let layout = FlatLayout::new(numels.iter().copied(), LayoutOptions::new(4)).unwrap();
        let tensors = tensors(&numels);
        let coalesced = Coalesced::from_slices(layout.clone(), &slices(&tensors)).unwrap();
        prop_assert!(coalesced.views().eq(slices(&tensors)));
        prop_assert!(padding_is_zero(&layout, coalesced.flat()));
        prop_assert_eq!(coalesced.flat().len() as u64, layout.total_numel());
        let mut copies: Vec<Vec<f32>> = numels.iter().map(|&n| vec![-1.0; n as usize]).collect();
        let mut targets: Vec<&mut [f32]> = copies.iter_mut().map(Vec::as_mut_slice).collect();
        coalesced.scatter(&mut targets).unwrap();
        prop_assert_eq!(copies, tensors);
    }

    #[test]
    fn views_are_distinct_and_aligned(numels in numels()) {
        let layout = FlatLayout::new(numels.iter().copied(), LayoutOptions::new(4)).unwrap();
        let mut coalesced = Coalesced::<f32>::allocate(layout.clone()).unwrap();
        for (index, view) in coalesced.views_mut().enumerate() {
            assert_eq!(view.as_ptr() as u64 % SLOT_BYTES, 0);
            view.fill(index as f32 + 1.0);
        }
        for index in 0..numels.len() {
            prop_assert!(coalesced.view(index).iter().all(|&x| x == index as f32 + 1.0));
        }
        prop_assert!(padding_is_zero(&layout, coalesced.flat()));
        coalesced.fill(7.0);
        prop_assert!(padding_is_zero(&layout, coalesced.flat()));
        prop_assert_eq!(coalesced.flat().iter().sum::<f32>(), 7.0 * layout.tensor_numel() as f32);
    }

    #[test]
    fn coalescing_again_moves_nothing_if_flat_and_keeps_values_if_not(
        numels in numels(),
        options in options(),
    ) {
        let layout = FlatLayout::new(numels.iter().copied(), LayoutOptions::new(4)).unwrap();
        let other = FlatLayout::new(numels.iter().copied(), options).unwrap();
        let tensors = tensors(&numels);
        let mut coalesced = Coalesced::from_slices(layout.clone(), &slices(&tensors)).unwrap();
        let address = coalesced.flat().as_ptr();
        coalesced.recoalesce(layout).unwrap();
        prop_assert_eq!(coalesced.flat().as_ptr(), address);
        coalesced.recoalesce(other.clone()).unwrap();
        prop_assert_eq!(coalesced.layout(), &other);
        prop_assert!(coalesced.views().eq(slices(&tensors)));
        prop_assert!(padding_is_zero(&other, coalesced.flat()));
    }

    #[test]
    fn tensors_that_do_not_fit_the_layout_change_nothing(
        numels in prop::collection::vec(1..100u64, 1..20),
        at in any::<prop::sample::Index>(),
    ) {
        let layout = FlatLayout::new(numels.iter().copied(), LayoutOptions::new(4)).unwrap();
        let mut coalesced = Coalesced::<f32>::allocate(layout).unwrap();
        let mut wrong = tensors(&numels);
        let tensor = at.index(wrong.len());
        wrong[tensor].pop();
        let expected = numels[tensor];
        let error = CoalesceError::NumelMismatch { tensor, expected, found: expected - 1 };
        prop_assert_eq!(coalesced.gather(&slices(&wrong)), Err(error));
        wrong.pop();
        let error = CoalesceError::TensorCount { expected: numels.len(), found: numels.len() - 1 };
        prop_assert_eq!(coalesced.gather(&slices(&wrong)), Err(error));
        prop_assert!(coalesced.flat().iter().all(|&x| x == 0.0));
    }

    #[test]
    fn overflow_names_the_first_tensor_that_does_not_fit(
        before in numels(),
        numel in (1u64 << 60)..=u64::MAX,
        after in numels(),
    ) {
        let all = before.iter().copied().chain([numel]).chain(after);
        let error = FlatLayout::new(all, LayoutOptions::new(4)).unwrap_err();
        prop_assert_eq!(error, CoalesceError::Overflow { tensor: before.len(), numel });
    }
}

#[test]
fn the_longest_buffer_is_accepted_and_one_slot_more_is_not() {
    let longest = (1u64 << 60) - 64;
    let layout = FlatLayout::new([longest], LayoutOptions::new(4)).unwrap();
    assert_eq!(layout.total_numel(), longest);
    assert_eq!(
        FlatLayout::new([longest, 1], LayoutOptions::new(4)).unwrap_err(),
        CoalesceError::Overflow { tensor: 1, numel: 1 }
    );
    assert!(matches!(Coalesced::<f32>::allocate(layout), Err(CoalesceError::OutOfMemory { .. })));
    assert!(HostMemory::zeroed(usize::MAX).is_err());
}

#[test]
fn memory_is_zeroed_and_aligned_at_any_length() {
    for len_bytes in [0, 1, 255, 256, 257, 100_003] {
        let memory = HostMemory::zeroed(len_bytes).unwrap();
        assert_eq!(memory.bytes().len(), len_bytes);
        assert_eq!(memory.bytes().as_ptr() as u64 % SLOT_BYTES, 0);
        assert!(memory.bytes().iter().all(|&b| b == 0));
    }
}

/// Looks at the buffers of each launch after it has run, padding included.
struct PaddingInspector(CpuBackend);

impl Backend for PaddingInspector {}

impl Memory for PaddingInspector {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn limits(&self) -> LaunchLimits {
        self.0.limits()
    }

    fn allocate(&self, len_bytes: usize) -> Result<Box<dyn Buffer>, BackendError> {
        self.0.allocate(len_bytes)
    }

    fn write(
        &self,
        buffer: &mut dyn Buffer,
        offset_bytes: usize,
        bytes: &[u8],
    ) -> Result<(), BackendError> {
        self.0.write(buffer, offset_bytes, bytes)
    }

    fn read(
        &self,
        buffer: &dyn Buffer,
        offset_bytes: usize,
        bytes: &mut [u8],
    ) -> Result<(), BackendError> {
        self.0.read(buffer, offset_bytes, bytes)
    }

    fn synchronize(&self) -> Result<(), BackendError> {
        self.0.synchronize()
    }
}

impl Launches for PaddingInspector {
    fn launch(&self, launch: Launch<'_>) -> Result<LaunchReport, BackendError> {
        let Launch {
            kernel,
            batches,
            offsets,
            members,
            lists,
            firsts,
            scalars,
            control,
            grad_sums,
            tensor_sums,
            update_sums: _,
            step_scalars,
            limits,
        } = launch;
        let report = self.0.launch(Launch {
            kernel,
            batches,
            offsets,
            members,
            lists: &mut *lists,
            firsts,
            scalars,
            control,
            grad_sums,
            tensor_sums,
            update_sums: None,
            step_scalars,
            limits,
        })?;
        let mut inside = 0;
        for record in batches.iter().flat_map(|batch| &batch.records) {
            inside += record.numel as usize;
        }
        for list in lists.iter() {
            let bytes = list.buffer.host().expect("host memory");
            let written: &[f32] = bytemuck::cast_slice(bytes);
            let changed = written.iter().filter(|x| x.to_bits() != 0).count();
            assert_eq!(changed, inside, "{}: only tensors hold values", list.role());
        }
        Ok(report)
    }

    fn reduce(&self, reduce: Reduce<'_>) -> Result<LaunchReport, BackendError> {
        self.0.reduce(reduce)
    }

    fn conclude(&self, conclude: Conclude<'_>) -> Result<LaunchReport, BackendError> {
        self.0.conclude(conclude)
    }

    fn leaf_sums(
        &self,
        launch: &Launch<'_>,
        sums: &mut [[f64; MAX_SUMS]],
    ) -> Result<(), BackendError> {
        self.0.leaf_sums(launch, sums)
    }

    fn take_skipped(&self) -> Result<u64, BackendError> {
        self.0.take_skipped()
    }

    fn skipped(&self) -> u64 {
        self.0.skipped()
    }
}

#[test]
fn padding_stays_zero_over_steps() {
    let case = Case::new([1, 63, 0, 64, 65, 300, 17], DType::F32);
    // Without eps an element of the padding would become 0/0 if a step touched it.
    let adam = Adam { eps: 0.0, weight_decay: WeightDecay::L2(0.1), ..Adam::default() };
    let plan = Planner::new(Optimizer::Adam(adam)).plan(&case.params).unwrap();
    let backend = PaddingInspector(CpuBackend::with_all_threads());
    let mut state = plan.allocate(&backend).unwrap();
    for param in &case.params {
        // Every value and, after a step, every moment differs from zero.
        let values = state.view_mut::<f32>(Role::Param, &param.name).unwrap();
        values.fill(1.0);
        state.grad_mut::<f32>(&param.name).unwrap().fill(0.5);
    }
    for _ in 0..3 {
        RunAlone::of(&plan, &mut state, &backend).step_all().unwrap();
    }
}
