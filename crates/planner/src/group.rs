//! Which tensors may share a launch.

use fusestep_launch::LaunchLimits;
use fusestep_tensor::ParamDesc;
use serde::{Deserialize, Serialize};

use crate::ParameterGroup;

/// Whether a tensor fits into one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SizeClass {
    /// Its chunks fit into one launch, and many such tensors share it.
    Small,
    /// It has more chunks than one launch takes and goes on over several.
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

    pub(crate) fn name(self) -> &'static str {
        match self {
            SizeClass::Small => "small",
            SizeClass::Large => "large",
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
