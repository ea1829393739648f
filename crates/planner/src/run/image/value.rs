//! A rank's part of a run as files keep it.

use std::ops::Range;

use fusestep_amp::LossScale;
use fusestep_schedule::Schedule;
use fusestep_tensor::{DType, Role, Shape};

use crate::plan::lanes::Lanes;
#[cfg(doc)]
use crate::plan::lanes::OpenLanes;
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
    /// Lanes of the global batch, as planned.
    pub lanes: Option<Lanes>,
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
    /// A part of the window of lanes that has begun ([`OpenLanes`]).
    Lanes(usize),
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
    /// Number of the first element within the list, which for units is that of a group.
    pub first: u64,
    /// Whether it is a whole parameter, which goes to the model's file.
    pub whole: bool,
    pub(crate) place: Range<usize>,
}

impl List {
    /// Places in this list of some elements of a parameter.
    pub(crate) fn entries(self, elements: Range<u64>) -> Range<u64> {
        match self {
            List::Role(role) => role.entries(elements.start)..role.entries(elements.end),
            List::Sums | List::Lanes(_) => elements,
        }
    }
}

impl ListImage {
    /// Shape of the list's tensor for a parameter of this shape: the same, and of units one for
    /// each group of its elements.
    pub fn shape(&self, param: &Shape) -> Shape {
        match self.role.unit_of() {
            // Fewer than a parameter's elements, whose number has been checked.
            Some(_) => Shape::new([self.role.entries(param.numel())]).unwrap_or(param.clone()),
            None => param.clone(),
        }
    }
}

impl RunImage {
    /// Name of sums over micro-steps in notes and errors.
    pub const ACCUMULATION: &str = GradientAccumulation::NAME;

    /// Name of lanes in notes and errors.
    pub const LANES: &str = Lanes::NAME;

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
