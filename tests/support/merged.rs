//! Many tensors in few launches against each alone.

use std::num::NonZeroUsize;

use fusestep_cpu::CpuBackend;
use fusestep_launch::{
    Backend, BackendError, Buffer, Conclude, Launch, LaunchLimits, LaunchReport, Launches,
    MAX_SUMS, Memory, Reduce,
};
use fusestep_planner::{Optimizer, Planner};
use fusestep_tensor::DType;
use fusestep_testkit::{Case, backends, outcome};

/// Sizes around a vector, a block and several chunks.
const SIZES: [u64; 6] = [0, 1, 511, 512, 513, (1 << 18) + 3];

/// `count` tensors of the sizes in turn; the largest only now and then, for the test to stay short.
fn case(count: usize) -> Case {
    let numels = (0..count).map(|i| match i % 100 {
        3 => SIZES[5],
        other => SIZES[other % 5],
    });
    Case { steps: 2, ..Case::new(numels, DType::F32).with_groups() }
}

/// Requires the same bits from one plan over all tensors, on every backend, as from a plan for each
/// tensor.
pub(crate) fn merged_is_separate(optimizer: Optimizer) {
    let alone = CpuBackend::new(NonZeroUsize::MIN);
    for count in [1, 2, 59, 60, 61, 150, 200, 1000] {
        let case = case(count);
        let naive = Planner::new(optimizer).naive();
        let expected = outcome(&naive.plan(&case.params).unwrap(), &case, &alone);
        let start: Vec<u8> = (0..count).flat_map(|i| case.param_bytes(i)).collect();
        assert!(count < 2 || expected != start, "nothing was done");
        for (name, backend) in backends() {
            for limits in [LaunchLimits::default(), LaunchLimits::with_argument_bytes(4096)] {
                let plan = Planner::new(optimizer).limits(limits);
                let plan = plan.plan(&case.params).unwrap();
                let found = outcome(&plan, &case, backend.as_ref());
                assert!(found == expected, "{count} tensors on {name}, {limits:?}");
            }
        }
    }
}

/// A backend that loses the last batch of every launch with several.
#[derive(Debug)]
struct Forgetful(CpuBackend);

impl Backend for Forgetful {}

impl Memory for Forgetful {
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

impl Launches for Forgetful {
    fn launch(&self, launch: Launch<'_>) -> Result<LaunchReport, BackendError> {
        let kept = launch.batches.len().saturating_sub(1).max(1);
        self.0.launch(Launch { batches: &launch.batches[..kept], ..launch })
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

/// Requires the comparison above to see that a launch is missing.
pub(crate) fn a_dropped_last_launch_is_noticed(optimizer: Optimizer) {
    let case = case(150);
    let limits = LaunchLimits::with_argument_bytes(4096);
    let plan = Planner::new(optimizer).limits(limits);
    let plan = plan.plan(&case.params).unwrap();
    assert!(plan.launches() > 1);
    let cpu = || CpuBackend::new(NonZeroUsize::MIN);
    let expected = outcome(&plan, &case, &cpu());
    assert!(outcome(&plan, &case, &Forgetful(cpu())) != expected);
}
