//! A step over tensors of mixed dtypes: the kernel of each tensor, and the cut into parts.

use fusestep_launch::{
    GroupValues, HostCall, KEY_BYTES, Master, MultiTensorKernel, Precision, StateDType, UpdateRule,
};
use fusestep_simd::{Level, Pool, Split};
use fusestep_tensor::DType;

use super::blocks::{Buffers, update};
use super::lists::StateMut;
use super::tensor::MixedTensor;
use crate::StepError;
use crate::coded::GROUP;

/// Whether moments that began at zero are corrected for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BiasCorrection {
    /// By the number of the step.
    #[default]
    On,
    /// No correction, as behind infinitely many steps.
    Off,
}

/// Settings of a step that are no part of its rule.
#[derive(Clone, Copy, Debug)]
pub struct MixedStep<'a> {
    /// The threads that share the step; `None` for the caller's alone.
    pub pool: Option<&'a Pool>,
    /// Factor on every gradient, rounded once to f32: loss scaling and clipping; 1 changes nothing.
    pub grad_factor: f64,
    /// Whether moments are corrected.
    pub bias_correction: BiasCorrection,
}

impl Default for MixedStep<'_> {
    fn default() -> Self {
        Self { pool: None, grad_factor: 1.0, bias_correction: BiasCorrection::On }
    }
}

/// Applies one step of `rule` to every tensor; `names` are those of the lists of state, for errors.
///
/// # Errors
/// [`StepError::Rule`], [`StepError::StepZero`], [`StepError::GradFactor`],
/// [`StepError::NumelMismatch`], [`StepError::Units`], [`StepError::List`]; everything is checked
/// before anything is written.
/// # Panics
/// If the rule's kernel does not have `N` lists of state: the crate of the rule knows them.
/// # Cost
/// One pass over the lists. A copy adds its own bytes, and room for the tensor before adds those of
/// parameter and state.
pub fn step_mixed_slices<const N: usize>(
    rule: &dyn UpdateRule,
    names: [&'static str; N],
    step: MixedStep<'_>,
    tensors: Vec<MixedTensor<'_, N>>,
) -> Result<(), StepError> {
    step_at(Level::detect(), rule, names, step, tensors)
}

/// [`step_mixed_slices`] at a level.
pub(super) fn step_at<const N: usize>(
    level: Level,
    rule: &dyn UpdateRule,
    names: [&'static str; N],
    step: MixedStep<'_>,
    tensors: Vec<MixedTensor<'_, N>>,
) -> Result<(), StepError> {
    if !step.grad_factor.is_finite() {
        return Err(StepError::GradFactor { found: step.grad_factor });
    }
    rule.validate()?;
    for (index, tensor) in tensors.iter().enumerate() {
        tensor.check(index, &names)?;
    }
    let mut kernels = Kernels::default();
    let mut places = Vec::with_capacity(tensors.len());
    for tensor in &tensors {
        places.push(kernels.place(rule, tensor, step.bias_correction)?);
    }
    let items = tensors.into_iter().zip(places).map(|(tensor, place)| {
        let kind = &kernels.kinds[kernels.scalars[place].kind];
        let call = HostCall {
            level,
            scalars: &kind.scalars,
            grad_factor: step.grad_factor,
            step_scalars: &kernels.scalars[place].bytes,
            changes: None,
            squares: None,
        };
        Item { kernel: kind.kernel.as_ref(), call, tensor }
    });
    let work = Work { items: items.collect() };
    match step.pool {
        Some(pool) => pool.run(work),
        None => work.run(),
    }
    Ok(())
}

/// A kernel that has some of the combinations of dtypes.
struct Kind {
    wanted: Wanted,
    kernel: Box<dyn MultiTensorKernel>,
    scalars: Vec<u8>,
}

/// The step scalars of tensors with one kernel and one number of their step.
struct StepScalars {
    kind: usize,
    step: u64,
    bytes: Vec<u8>,
}

/// The kernels of a step, each made once.
#[derive(Default)]
struct Kernels {
    kinds: Vec<Kind>,
    scalars: Vec<StepScalars>,
}

impl Kernels {
    /// Place of a tensor's step scalars, which are made unless they are there.
    fn place<const N: usize>(
        &mut self,
        rule: &dyn UpdateRule,
        tensor: &MixedTensor<'_, N>,
        bias_correction: BiasCorrection,
    ) -> Result<usize, StepError> {
        let kind = self.kind(rule, tensor)?;
        let step = tensor.step;
        let fits = |own: &StepScalars| (own.kind, own.step) == (kind, step);
        if let Some(place) = self.scalars.iter().rposition(fits) {
            return Ok(place);
        }
        let kernel = &self.kinds[kind].kernel;
        let mut bytes = vec![0; kernel.argument_layout().step_scalar_bytes];
        // βᵗ of the last number there is is 0, whatever β below 1.
        let corrected_at = match bias_correction {
            BiasCorrection::On => step,
            BiasCorrection::Off => u64::MAX,
        };
        let values = GroupValues {
            lr: rule.lr(),
            lr_scale: 1.0,
            weight_decay: None,
            trust: None,
            step: corrected_at,
        };
        kernel.write_step_scalars(values, &mut bytes);
        if self.kinds[kind].wanted.state == StateDType::Int8 {
            // The number of the dither is the step's own.
            let key = bytes.len() - KEY_BYTES;
            bytes[key..].copy_from_slice(&step.to_le_bytes());
        }
        self.scalars.push(StepScalars { kind, step, bytes });
        Ok(self.scalars.len() - 1)
    }

    /// Index of the kernel that takes most of a tensor's lists as they are.
    fn kind<const N: usize>(
        &mut self,
        rule: &dyn UpdateRule,
        tensor: &MixedTensor<'_, N>,
    ) -> Result<usize, StepError> {
        let wanted = Wanted::of(tensor);
        if let Some(kind) = self.kinds.iter().position(|kind| kind.wanted == wanted) {
            return Ok(kind);
        }
        let Wanted { param, master, state } = wanted;
        let kernel = rule.kernel(param, Precision { master, state, ..Precision::default() })?;
        let units = if state == StateDType::Int8 { N } else { 0 };
        let lists = N + 2 + units + usize::from(master == Master::F32);
        assert_eq!(kernel.lists().len(), lists, "the rule's crate brings every list of its kernel");
        let mut scalars = vec![0; kernel.argument_layout().scalar_bytes];
        kernel.write_scalars(&mut scalars);
        self.kinds.push(Kind { wanted, kernel, scalars });
        Ok(self.kinds.len() - 1)
    }
}

/// The combination of dtypes that a tensor's kernel is to have.
#[derive(Clone, Copy, PartialEq)]
struct Wanted {
    param: DType,
    master: Master,
    state: StateDType,
}

impl Wanted {
    /// The combination nearest to a tensor's, among those that there are kernels for.
    fn of<const N: usize>(tensor: &MixedTensor<'_, N>) -> Self {
        let (own, grad) = (tensor.param.dtype(), tensor.grad.dtype());
        let found = tensor.state.first().map_or(DType::F32, StateMut::dtype);
        let state = match found {
            DType::BF16 => StateDType::Bf16,
            DType::U8 => StateDType::Int8,
            _ => StateDType::Compute,
        };
        let has_state = match grad {
            DType::BF16 => found != DType::F16,
            _ => found == DType::F32,
        };
        let (param, master) = match (own, grad) {
            // Parameter and gradient of one kernel, which has the parameter's copy, too.
            (DType::F32, DType::BF16 | DType::F16) if has_state => (grad, Master::F32),
            (DType::BF16 | DType::F16, _) if own == grad && has_state => (own, Master::None),
            _ => (DType::F32, Master::None),
        };
        Self { param, master, state }
    }
}

/// A tensor, or a part of one, with its kernel.
struct Item<'a, 'b, const N: usize> {
    kernel: &'b dyn MultiTensorKernel,
    call: HostCall<'b>,
    tensor: MixedTensor<'a, N>,
}

struct Work<'a, 'b, const N: usize> {
    items: Vec<Item<'a, 'b, N>>,
}

impl<const N: usize> Split for Work<'_, '_, N> {
    fn elements(&self) -> u64 {
        self.items.iter().map(|item| item.tensor.param.numel() as u64).sum()
    }

    fn split(self, elements: u64) -> (Self, Self) {
        let (mut left, mut right, mut wanted) = (Vec::new(), Vec::new(), elements as usize);
        for item in self.items {
            let numel = item.tensor.param.numel();
            // Nothing cuts a group of state in 8 bits.
            let middle = wanted.next_multiple_of(GROUP);
            wanted -= numel.min(wanted);
            if numel <= middle {
                left.push(item);
            } else if middle == 0 {
                right.push(item);
            } else {
                let (head, tail) = item.tensor.split_at(middle);
                left.push(Item { tensor: head, ..item });
                right.push(Item { tensor: tail, ..item });
            }
        }
        (Self { items: left }, Self { items: right })
    }

    fn run(self) {
        let mut buffers = Buffers::default();
        for Item { kernel, call, tensor } in self.items {
            update(kernel, call, tensor, &mut buffers);
        }
    }
}
