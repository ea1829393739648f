//! Size classes, which decide whether tensors share a launch, and parameter groups.

use fusestep_launch::LaunchLimits;
use fusestep_tensor::{ParamDesc, Trust};
use serde::{Deserialize, Serialize};

/// Size class: whether a tensor fits into one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SizeClass {
    /// The tensor's chunks fit into one launch, which many such tensors share.
    Small,
    /// The tensor has more chunks than one launch takes, and so takes several launches.
    Large,
}

impl SizeClass {
    /// The class of a tensor of this many elements under these limits.
    pub fn of(numel: u64, limits: LaunchLimits) -> Self {
        if numel.div_ceil(u64::from(limits.chunk_elements.max(1)))
            <= u64::from(limits.chunks_per_launch)
        {
            SizeClass::Small
        } else {
            SizeClass::Large
        }
    }
}

/// The distinct hyper-parameters of tensors, and each tensor's index among them.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ParameterGroups {
    pub(crate) groups: Vec<ParameterGroup>,
    pub(crate) of_param: Vec<u32>,
}

impl ParameterGroups {
    /// Groups in order of first appearance; `steps_behind` gives each parameter's missed steps.
    pub(crate) fn new(params: &[ParamDesc], steps_behind: impl Fn(usize) -> u64) -> Self {
        let mut found = std::collections::HashMap::new();
        let mut groups = Vec::new();
        let of_param = params.iter().enumerate().map(|(index, param)| {
            let group = ParameterGroup {
                lr_scale: param.lr_scale,
                weight_decay: param.weight_decay,
                trust: param.trust,
                steps_behind: steps_behind(index),
            };
            // Validated values are finite and not negative, so equal bits are equal values but for
            // the two zeros, which only cost a group more.
            let key = (
                group.lr_scale.to_bits(),
                group.weight_decay.map(f64::to_bits),
                group.trust,
                group.steps_behind,
            );
            *found.entry(key).or_insert_with(|| {
                groups.push(group);
                groups.len() as u32 - 1
            })
        });
        let of_param = of_param.collect();
        Self { groups, of_param }
    }
}

/// Hyper-parameters that tensors share; a per-tensor index in the argument table, never a reason to
/// split a launch.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ParameterGroup {
    /// Factor on the learning rate.
    pub lr_scale: f64,
    /// Weight decay; `None` for the optimizer's.
    pub weight_decay: Option<f64>,
    /// Whether a layer-wise rule scales the rate; `None` leaves it to the rule.
    pub trust: Option<Trust>,
    /// Steps that these tensors have missed. Their step is the state's less this number.
    pub steps_behind: u64,
}
