//! What is timed on each set: rules, dtypes, and ways to run a step.

use std::fmt;

use fusestep_fused_adam::Adam;
use fusestep_fused_sgd::Sgd;
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::Lars;
use fusestep_launch::{Master, Precision};
use fusestep_planner::{ClipByGlobalNorm, LossScaling, Optimizer, Planner, TableKind};
use fusestep_tensor::DType;

/// Most bytes of traffic per element among all entrants: AdamW in f32 and one more read of the
/// gradient.
pub(crate) const MOST_BYTES: u64 = 32;

/// How parameters are kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kept {
    /// In f32.
    F32,
    /// In bf16 with an f32 master.
    Bf16Master,
    /// In bf16 with the 16 bits that it lacks to an f32.
    Bf16Remainder,
}

impl Kept {
    /// The parameters' dtype.
    pub(crate) fn dtype(self) -> DType {
        match self {
            Kept::F32 => DType::F32,
            Kept::Bf16Master | Kept::Bf16Remainder => DType::BF16,
        }
    }

    /// The name in tables.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kept::F32 => "f32",
            Kept::Bf16Master => "bf16+master",
            Kept::Bf16Remainder => "bf16+remainder",
        }
    }

    fn precision(self) -> Precision {
        let master = match self {
            Kept::F32 => Master::None,
            Kept::Bf16Master => Master::F32,
            Kept::Bf16Remainder => Master::Remainder,
        };
        Precision { master, ..Precision::default() }
    }
}

/// How a step gets to the device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Way {
    /// Launch by launch, with tables in arguments.
    Arguments,
    /// Launch by launch, from resident tables.
    Resident,
    /// As one graph, from resident tables.
    Graph,
}

impl Way {
    /// The name in tables.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Way::Arguments => "arguments",
            Way::Resident => "resident",
            Way::Graph => "graph",
        }
    }
}

/// What comes before the update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Before {
    /// Nothing.
    Nothing,
    /// The norm of all gradients: clipping and a loss scale.
    ClipAndScale,
}

/// One plan, and the ways its step is run.
#[derive(Clone, Debug)]
pub(crate) struct Entrant {
    /// The rule.
    pub(crate) rule: Optimizer,
    /// What comes before it.
    pub(crate) before: Before,
    /// How parameters are kept.
    pub(crate) kept: Kept,
    /// Ways that share a plan.
    pub(crate) ways: &'static [Way],
}

impl Entrant {
    /// The rule's name in tables.
    pub(crate) fn name(&self) -> String {
        // The names of the command line: SGD with momentum is `momentum`.
        match self.before {
            Before::Nothing => self.rule.name().to_owned(),
            Before::ClipAndScale => format!("{}+clip+scale", self.rule.name()),
        }
    }

    /// What makes the plan, without limits.
    pub(crate) fn planner(&self) -> Planner {
        let table = if self.ways.contains(&Way::Arguments) {
            TableKind::Arguments
        } else {
            TableKind::Resident
        };
        let planner = Planner::new(self.rule).precision(self.kept.precision()).table(table);
        match self.before {
            Before::Nothing => planner,
            Before::ClipAndScale => {
                planner.with(ClipByGlobalNorm::new(1.0)).with(LossScaling::fixed(1024.0))
            }
        }
    }
}

impl fmt::Display for Entrant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ways: Vec<_> = self.ways.iter().map(|way| way.name()).collect();
        write!(f, "{} {} ({})", self.name(), self.kept.name(), ways.join(", "))
    }
}

/// Everything that is timed on a set, what matters most first.
pub(crate) fn entrants() -> Vec<Entrant> {
    const ARGUMENTS: &[Way] = &[Way::Arguments];
    const RESIDENT: &[Way] = &[Way::Resident, Way::Graph];
    let adam = || Optimizer::from(Adam::default());
    let plain = |rule, kept, ways| Entrant { rule, before: Before::Nothing, kept, ways };
    let tail = Entrant { before: Before::ClipAndScale, ..plain(adam(), Kept::F32, RESIDENT) };
    vec![
        plain(adam(), Kept::F32, RESIDENT),
        plain(adam(), Kept::F32, ARGUMENTS),
        tail,
        plain(Lars::default().into(), Kept::F32, ARGUMENTS),
        plain(Lamb::default().into(), Kept::F32, ARGUMENTS),
        plain(adam(), Kept::Bf16Master, RESIDENT),
        plain(adam(), Kept::Bf16Remainder, RESIDENT),
        plain(Sgd::with_momentum().into(), Kept::F32, RESIDENT),
        plain(Lars::default().into(), Kept::F32, RESIDENT),
        plain(Lamb::default().into(), Kept::F32, RESIDENT),
    ]
}

/// Names of rules and dtypes.
pub(crate) fn names() -> Vec<String> {
    entrants().iter().map(ToString::to_string).collect()
}

/// Planners that between them launch a kernel of every module.
pub(crate) fn one_of_each_module() -> Vec<(&'static str, Planner)> {
    let rules = Optimizer::all().into_iter();
    let rules = rules.filter(|rule| !matches!(rule, Optimizer::Adam(_)));
    let planner = |rule: Optimizer| Planner::new(rule).table(TableKind::Resident);
    let clipped = planner(Adam::default().into()).with(ClipByGlobalNorm::new(1.0));
    let alone = rules.map(|rule| (rule.name(), planner(rule)));
    alone.into_iter().chain([("clip", clipped)]).collect()
}
