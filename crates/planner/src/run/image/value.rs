//! A rank's part of a run as files keep it.

use std::ops::Range;

use fusestep_amp::LossScale;
use fusestep_schedule::Schedule;
use fusestep_tensor::{DType, Role, Shape};

use crate::plan::passes::rewrite::Rewrite;
use crate::plan::settings::{GradientAccumulation, LocalSgd, Tensors};
use crate::plan::topology::Topology;
use crate::run::image::counts::RunCounts;
use crate::run::image::rules::RulesImage;

/// A rank's part of a run as files keep it: names and types of all tensors, counts, the settings
/// that change what they mean, and ranges of this rank's elements. Of arenas, buckets and segments
/// it knows nothing.
#[derive(Clone, Debug, Default)]
pub struct RunImage {
    /// This rank and the number of ranks.
    pub topology: Topology,
    /// Whether the caller keeps tensors.
    pub tensors: Tensors,
    /// Parameters, in plan order.
    pub params: Vec<ParamImage>,
    /// Steps, the loss scale, and where the rank stands between updates and averages.
    pub counts: RunCounts,
    /// Rules and their settings.
    pub rules: RulesImage,
    /// Schedule that multiplies the rates.
    pub schedule: Option<Schedule>,
    /// Sums over micro-steps, as planned.
    pub accumulation: Option<GradientAccumulation>,
    /// Averages of parameters over ranks, as planned.
    pub averaging: Option<LocalSgd>,
    /// Whether ranks average their parameters.
    pub averages: bool,
    /// Loss scale and its policy, where the loss is scaled.
    pub loss_scale: Option<LossScale>,
    /// Ranges that this rank saves, in plan order, the parameter's first.
    pub parts: Vec<PartImage>,
    /// Elements of [`RunImage::parts`]; the memory is used again by the next copy.
    pub(crate) bytes: Vec<u8>,
}

/// A parameter and the lists that a run keeps for it.
#[derive(Clone, Debug)]
pub struct ParamImage {
    /// Name of the parameter.
    pub name: String,
    /// Shape on this rank.
    pub shape: Shape,
    /// Shape of each rank's slice, where ranks have slices of their own; else nothing.
    pub slices: Vec<Shape>,
    /// Lists that are saved, the parameter's first.
    pub lists: Vec<ListImage>,
    /// Element type of sums over micro-steps.
    pub sums: DType,
    /// Whether every rank has values of its own.
    pub own: bool,
    /// Whether the parameter is cut into slices of the ranks' own.
    pub distributed: bool,
    /// Whether one rank has the parameter whole and saves it so.
    pub whole: bool,
}

/// A list of tensors: its role and its element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListImage {
    /// Role of the tensors.
    pub role: Role,
    /// Element type.
    pub dtype: DType,
}

/// List that a range of elements belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum List {
    /// A parameter, or a tensor of its rule's state.
    Role(Role),
    /// Sums of gradients over the micro-steps so far.
    Sums,
}

/// Consecutive elements of a tensor.
#[derive(Clone, Debug)]
pub struct PartImage {
    /// Position of the parameter in the plan.
    pub param: usize,
    /// List of the tensor.
    pub list: List,
    /// Element type.
    pub dtype: DType,
    /// Number of the first element, within the parameter.
    pub first: u64,
    /// Whether it is a whole parameter, which goes to the model's file.
    pub whole: bool,
    pub(crate) place: Range<usize>,
}

impl RunImage {
    /// Name of sums over micro-steps in notes and errors.
    pub const ACCUMULATION: &str = GradientAccumulation::NAME;

    /// Name of averages of parameters over ranks in notes and errors.
    pub const AVERAGES: &str = LocalSgd::NAME;

    /// The elements of a part, as bytes.
    pub fn bytes(&self, part: &PartImage) -> &[u8] {
        &self.bytes[part.place.clone()]
    }

    /// The shape that a parameter, or its slice, has on a rank.
    pub fn shape_on(&self, rank: usize, param: usize) -> &Shape {
        let param = &self.params[param];
        param.slices.get(rank).unwrap_or(&param.shape)
    }

    /// Whether gradients are reduced in every micro-step, so that all ranks have the same sums.
    pub fn reduces_each(&self) -> bool {
        self.accumulation.is_some_and(|rule| rule.reduces_each())
    }
}
