//! Values that the step scalars of a group of tensors are derived from, on the host or on a device.

use fusestep_tensor::Trust;

/// Hyper-parameters that a device derives step scalars from, the learning rate first.
pub const HYPER_VALUES: usize = 8;

/// The hyper-parameters of one tensor at one step, from which a kernel derives the step scalars it
/// reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupValues {
    /// Learning rate of the optimizer at this step.
    pub lr: f64,
    /// The tensor's factor on the learning rate.
    pub lr_scale: f64,
    /// The tensor's own weight decay; `None` for the optimizer's.
    pub weight_decay: Option<f64>,
    /// Whether a layer-wise rule scales the tensor's rate; `None` leaves it to the rule.
    pub trust: Option<Trust>,
    /// The tensor's step (t), counted from 1.
    pub step: u64,
}

/// The device entry that derives the step scalars of a resident table, and the values that it
/// derives them from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ResidentStepScalars {
    /// The device entry that derives the step scalars: `fused_adam_sets_f32`, as such entries have
    /// always been named.
    pub entry: &'static str,
    /// The rule's hyper-parameters as the entry reads them; the first is left for the learning
    /// rate.
    pub hyper: [f64; HYPER_VALUES],
    /// Start of the random numbers of stochastic rounding.
    pub seed: u64,
}

impl ResidentStepScalars {
    /// The entry and the hyper-parameters behind the learning rate.
    ///
    /// # Panics
    /// If there are more than fit: a rule has a fixed number.
    pub fn new(entry: &'static str, behind_lr: &[f64], seed: u64) -> Self {
        let mut hyper = [0.0; HYPER_VALUES];
        hyper[1..=behind_lr.len()].copy_from_slice(behind_lr);
        Self { entry, hyper, seed }
    }
}

/// The device entry that derives step scalars, by the type that arithmetic is done in.
///
/// ```
/// # use fusestep_launch::{step_scalars_entry, Format, Precision};
/// # use fusestep_tensor::DType;
/// let format = Format::new("adamw", DType::BF16, Precision::default()).unwrap();
/// assert_eq!(step_scalars_entry!("fused_adam", format), "fused_adam_sets_f32");
/// ```
#[macro_export]
macro_rules! step_scalars_entry {
    ($stem:literal, $format:expr) => {
        match $format.layout() {
            $crate::Layout::F64 => concat!($stem, "_sets_f64"),
            _ => concat!($stem, "_sets_f32"),
        }
    };
}
