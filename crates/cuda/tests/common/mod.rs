//! Helpers that the tests of the CUDA backend share.
// Each test file uses a part of it.
#![allow(dead_code)]

pub(crate) mod mutants;
pub(crate) mod resident;

use std::num::NonZeroUsize;

use fusestep_cpu::CpuBackend;
use fusestep_cuda::CudaBackend;
use fusestep_fused_adam::Adam;
use fusestep_launch::{
    Backend, BackendError, Batchable, GradDType, GroupValues, Launch, LaunchLimits, ListBuffer,
    Master, Memory, MultiTensorKernel, Precision, Rounding, StateDType, TensorList, UpdateRule,
    batches,
};
use fusestep_planner::{Optimizer, Planner};
use fusestep_tensor::DType;
use fusestep_testkit::{Case, outcome};
use half::{bf16, f16};

/// Limits that small cases cross in every way.
pub(crate) const TINY: LaunchLimits = LaunchLimits {
    argument_bytes: 700,
    chunk_elements: 64,
    chunks_per_launch: 3,
    keeps_tables: false,
};

pub(crate) fn cuda() -> CudaBackend {
    CudaBackend::open(0).unwrap_or_else(|error| panic!("{error}"))
}

pub(crate) fn cpu() -> CpuBackend {
    CpuBackend::new(NonZeroUsize::MIN)
}

/// Every combination of dtype and precision that there is a kernel for, but the plain f32 and f64.
pub(crate) fn formats() -> Vec<(DType, Precision)> {
    let mut all = Vec::new();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for master in [Master::None, Master::F32, Master::Remainder] {
            for state in [StateDType::Compute, StateDType::Bf16] {
                for rounding in [Rounding::Nearest, Rounding::Stochastic { seed: 3 }] {
                    let precision = Precision { master, state, rounding, ..Precision::default() };
                    if Adam::default().kernel(dtype, precision).is_ok() {
                        all.push((dtype, precision));
                    }
                }
            }
        }
    }
    assert_eq!(all.len(), 15);
    all
}

/// Every format with state in codes, which tensors of 4,096 elements and more have in plans.
pub(crate) fn coded_formats() -> Vec<(DType, Precision)> {
    let mut all = Vec::new();
    for dtype in [DType::F32, DType::BF16] {
        for master in [Master::None, Master::F32, Master::Remainder, Master::Remainder8] {
            let precision = Precision { master, state: StateDType::Int8, ..Precision::default() };
            if Adam::default().kernel(dtype, precision).is_ok() {
                all.push((dtype, precision));
            }
        }
    }
    assert_eq!(all.len(), 5);
    all
}

/// The rules among these whose state may be in codes.
pub(crate) fn coded_rules(rules: Vec<Optimizer>) -> Vec<Optimizer> {
    let (dtype, precision) = coded_formats()[0];
    let is_coded = |rule: &Optimizer| rule.rule().kernel(dtype, precision).is_ok();
    rules.into_iter().filter(is_coded).collect()
}

/// Every format of 16-bit parameters, with gradients in f32.
pub(crate) fn wide_formats() -> Vec<(DType, Precision)> {
    formats().into_iter().filter_map(widened).collect()
}

/// A format of 16-bit parameters with gradients in f32; `None` for others.
pub(crate) fn widened((dtype, of): (DType, Precision)) -> Option<(DType, Precision)> {
    (dtype != DType::F32).then_some((dtype, Precision { grad: GradDType::Compute, ..of }))
}

/// Requires the host's bits from the device, fused and naive, at these limits.
pub(crate) fn same_bits(rule: impl Into<Optimizer>, case: &Case, limits: LaunchLimits) {
    same_bits_at(rule, Precision::default(), case, limits);
}

/// [`same_bits`] for parameters and state kept with this precision.
pub(crate) fn same_bits_at(
    rule: impl Into<Optimizer>,
    precision: Precision,
    case: &Case,
    limits: LaunchLimits,
) {
    same_bits_on(&cuda().with_limits(limits), rule.into(), precision, case);
}

/// Requires the host's bits from `backend` for any rule and precision, fused and naive.
pub(crate) fn same_bits_on(
    backend: &CudaBackend,
    optimizer: Optimizer,
    precision: Precision,
    case: &Case,
) {
    let planner = || Planner::new(optimizer).precision(precision);
    let plan = planner().naive().plan(&case.params).unwrap();
    let expected = outcome(&plan, case, &cpu());
    for planner in [planner().limits(backend.limits()), planner().limits(backend.limits()).naive()]
    {
        let found = outcome(&planner.plan(&case.params).unwrap(), case, backend);
        let difference = found.iter().zip(&expected).position(|(a, b)| a != b);
        assert!(
            found == expected,
            "{optimizer}, {precision}, {:?}: first difference at byte {difference:?} of {}",
            backend.limits(),
            expected.len()
        );
    }
}

/// What a step of [`launch_at`] has.
pub(crate) const VALUES: GroupValues =
    GroupValues { lr: 0.01, lr_scale: 1.0, weight_decay: None, trust: None, step: 3 };

/// Tensors of one length at given element offsets.
#[derive(Clone, Copy)]
pub(crate) struct Places<'a> {
    pub(crate) offsets: &'a [u64],
    pub(crate) numel: u64,
    pub(crate) chunk_elements: u32,
}

impl<'a> Places<'a> {
    /// In chunks of 64 elements.
    pub(crate) fn cut(offsets: &'a [u64], numel: u64) -> Self {
        Self { offsets, numel, chunk_elements: 64 }
    }

    /// In one chunk each, of which a thread takes several elements at a time.
    pub(crate) fn whole(offsets: &'a [u64], numel: u64) -> Self {
        Self { chunk_elements: 65_536, ..Self::cut(offsets, numel) }
    }
}

/// A launch of `kernel` over tensors at `places`, with `fill` giving each list's first bytes;
/// returns the lists after it.
pub(crate) fn launch_at(
    backend: &dyn Backend,
    kernel: &dyn MultiTensorKernel,
    places: Places,
    fill: &mut dyn FnMut(usize) -> Vec<u8>,
) -> Result<Vec<ListBuffer>, BackendError> {
    let Places { offsets, numel, .. } = places;
    let layout = kernel.argument_layout();
    let limits = LaunchLimits {
        chunk_elements: places.chunk_elements,
        ..LaunchLimits::with_argument_bytes(4096)
    }
    .of(kernel);
    let tensors = (0..offsets.len() as u32).map(|tensor| Batchable {
        tensor,
        first_element: 0,
        numel,
        group: 0,
    });
    let batches = batches("test", tensors, layout, limits).unwrap();
    let mut lists = Vec::new();
    for (index, &list) in kernel.lists().iter().enumerate() {
        let bytes = fill(index);
        let mut buffer = backend.allocate(bytes.len())?;
        backend.write(buffer.as_mut(), 0, &bytes)?;
        lists.push(ListBuffer { list, buffer });
    }
    let mut scalars = vec![0; layout.scalar_bytes];
    let mut step_scalars = vec![0; layout.step_scalar_bytes];
    kernel.write_scalars(&mut scalars);
    kernel.write_step_scalars(VALUES, &mut step_scalars);
    let members: Vec<u32> = (0..offsets.len() as u32).collect();
    backend.launch(Launch {
        kernel,
        batches: &batches,
        offsets,
        members: &members,
        lists: &mut lists,
        firsts: &[],
        scalars: &scalars,
        control: None,
        grad_sums: None,
        tensor_sums: None,
        update_sums: None,
        step_scalars: &step_scalars,
        limits,
    })?;
    backend.synchronize()?;
    Ok(lists)
}

/// The bytes of a kernel's list before [`step_at`].
pub(crate) fn first_bytes(kernel: &dyn MultiTensorKernel, list: usize, elements: u64) -> Vec<u8> {
    let TensorList { role, dtype, .. } = kernel.lists()[list];
    let values = 0..role.entries(elements) as usize;
    let values = values.map(|i| (i * 7 + list * 3 + 1) as f64 / 64.0);
    match dtype {
        // Codes of all kinds, a root of which is never 0.
        DType::U8 => values.map(|v| (v * 64.0) as u8 | 1).collect(),
        DType::F32 => values.flat_map(|v| (v as f32).to_le_bytes()).collect(),
        DType::F16 => values.flat_map(|v| f16::from_f64(v).to_le_bytes()).collect(),
        DType::BF16 => values.flat_map(|v| bf16::from_f64(v).to_le_bytes()).collect(),
        DType::U16 => values.flat_map(|v| (v as u16).to_le_bytes()).collect(),
        _ => values.flat_map(f64::to_le_bytes).collect(),
    }
}

/// One step over tensors at `places`; returns the bytes of all lists, those between the tensors
/// included.
pub(crate) fn step_at(
    backend: &dyn Backend,
    rule: &dyn UpdateRule,
    places: Places,
    (dtype, precision): (DType, Precision),
) -> Vec<u8> {
    let kernel = rule.kernel(dtype, precision).unwrap();
    let elements = places.offsets.iter().max().unwrap() + places.numel;
    let mut fill = |list: usize| first_bytes(kernel.as_ref(), list, elements);
    let lists = launch_at(backend, kernel.as_ref(), places, &mut fill).unwrap();
    let mut all = Vec::new();
    for list in &lists {
        let mut bytes = vec![0; list.buffer.len_bytes()];
        backend.read(list.buffer.as_ref(), 0, &mut bytes).unwrap();
        all.extend(bytes);
    }
    all
}
