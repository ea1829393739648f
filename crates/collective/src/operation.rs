//! Operations of calls, and the ways in which they reduce.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Pair;

/// Ways in which elements of different ranks become one element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReduceOp {
    /// `((x₀ + x₁) + x₂) + …`; integers wrap around.
    Sum,
    /// The sum divided once by the world size; floating-point only.
    Average,
    /// `((x₀ · x₁) · x₂) · …`; integers wrap around.
    Prod,
    /// The largest; NaN if any is NaN. Of equal values (0 and −0) the lowest rank's.
    Max,
    /// The smallest; NaN if any is NaN. Of equal values (0 and −0) the lowest rank's.
    Min,
    /// The sum in one binary tree over the ranks, divided once; floating-point only.
    ///
    /// ```text
    /// T(a, a+1) = xₐ        T(a, b) = T(a, m) + T(m, b)
    /// ```
    ///
    /// `m − a` is the largest power of two below `b − a`. A rank that adds some of the elements
    /// first, along the same tree, leaves the bits as they are. Of f16 and bf16 sum and quotient
    /// are f32, and rounded once.
    Tree(Divisor),
}

/// The number that a sum is divided by: a positive one, compared by its bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Divisor(u64);

impl Divisor {
    /// The divisor of sums that stay as they are.
    pub const ONE: Self = Self(1.0f64.to_bits());

    /// The divisor of this value.
    pub const fn of(value: f64) -> Self {
        Self(value.to_bits())
    }

    /// The value, which elements that are not f64 are divided by as an f32.
    pub const fn value(self) -> f64 {
        f64::from_bits(self.0)
    }

    /// The bits, as messages carry them.
    pub(crate) const fn bits(self) -> u64 {
        self.0
    }

    pub(crate) const fn of_bits(bits: u64) -> Self {
        Self(bits)
    }
}

impl ReduceOp {
    /// The ways to reduce that need no number.
    pub const ALL: [ReduceOp; 5] =
        [ReduceOp::Sum, ReduceOp::Average, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min];

    /// Whether integers cannot be reduced so.
    pub const fn is_of_floats(self) -> bool {
        matches!(self, ReduceOp::Average | ReduceOp::Tree(_))
    }

    /// The number of the way in messages.
    pub(crate) const fn code(self) -> u64 {
        match self {
            ReduceOp::Sum => 0,
            ReduceOp::Average => 1,
            ReduceOp::Prod => 2,
            ReduceOp::Max => 3,
            ReduceOp::Min => 4,
            ReduceOp::Tree(_) => 5,
        }
    }

    /// The bits of the divisor in messages; 0 for a way that needs none.
    pub(crate) const fn divisor_bits(self) -> u64 {
        match self {
            ReduceOp::Tree(divisor) => divisor.bits(),
            _ => 0,
        }
    }

    /// The way that [`Self::code`] and [`Self::divisor_bits`] were made of.
    pub(crate) fn of_code(code: u64, divisor: u64) -> Option<Self> {
        if code == 5 {
            return Some(ReduceOp::Tree(Divisor::of_bits(divisor)));
        }
        ReduceOp::ALL.into_iter().find(|op| op.code() == code)
    }

    /// The lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Average => "average",
            ReduceOp::Prod => "prod",
            ReduceOp::Max => "max",
            ReduceOp::Min => "min",
            ReduceOp::Tree(_) => "tree",
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReduceOp::Tree(divisor) => write!(f, "tree / {}", divisor.value()),
            _ => f.pad(self.name()),
        }
    }
}

/// An operation of a call; ranks are numbered from 0.
///
/// `L` is the length of the whole in elements. Block `i` is the part that belongs to rank `i` (see
/// [`Blocks`](crate::Blocks)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// `L` elements on every rank become their reduction, on every rank.
    AllReduce(ReduceOp),
    /// `L` elements on every rank become their reduction, on the root only.
    Reduce {
        /// The way to reduce.
        reduce: ReduceOp,
        /// The rank that gets the result.
        root: usize,
    },
    /// The root's `L` elements come to every rank.
    Broadcast {
        /// The rank whose elements are sent.
        root: usize,
    },
    /// Block `i` of rank `i`, for all `i`, comes to every rank.
    AllGather,
    /// Rank `i` gets block `i` of the reduction.
    ReduceScatter(ReduceOp),
    /// Rank `i` gets block `i` of the root's elements.
    Scatter {
        /// The rank whose elements are sent.
        root: usize,
    },
    /// Block `i` of rank `i`, for all `i`, comes to the root.
    Gather {
        /// The rank that gets the blocks.
        root: usize,
    },
    /// Block `i` of rank `j` becomes block `j` of rank `i`; all blocks are of the same length.
    AllToAll,
    /// Elements go to one other rank, which receives them; both wait for each other.
    Send {
        /// The rank that receives.
        to: usize,
    },
    /// Elements come from one other rank, which sends them; both wait for each other.
    Receive {
        /// The rank that sends.
        from: usize,
    },
    /// Nobody goes on before everybody has come.
    Barrier,
    /// Rank `i` reduces block `i` of all gradients and updates block `i` of all parameters; done by
    /// [`Communicator::reduce_update`](crate::Communicator::reduce_update) only.
    ReduceUpdate,
    /// Membership in subgroups is exchanged; done by
    /// [`Communicator::split`](crate::Communicator::split) only.
    Split,
}

impl Operation {
    /// The name in messages.
    pub const fn name(self) -> &'static str {
        Self::NAMES[self.code()]
    }

    /// The names of all operations.
    pub const NAMES: [&'static str; 13] = [
        "all-reduce",
        "reduce",
        "broadcast",
        "all-gather",
        "reduce-scatter",
        "scatter",
        "gather",
        "all-to-all",
        "send",
        "receive",
        "barrier",
        "split",
        "reduce-update",
    ];

    /// The number of the operation in messages: its place in [`Self::NAMES`].
    pub(crate) const fn code(self) -> usize {
        match self {
            Operation::AllReduce(_) => 0,
            Operation::Reduce { .. } => 1,
            Operation::Broadcast { .. } => 2,
            Operation::AllGather => 3,
            Operation::ReduceScatter(_) => 4,
            Operation::Scatter { .. } => 5,
            Operation::Gather { .. } => 6,
            Operation::AllToAll => 7,
            Operation::Send { .. } => 8,
            Operation::Receive { .. } => 9,
            Operation::Barrier => 10,
            Operation::Split => 11,
            Operation::ReduceUpdate => 12,
        }
    }

    /// The way to reduce, if the operation reduces.
    pub const fn reduce_op(self) -> Option<ReduceOp> {
        match self {
            Operation::AllReduce(reduce)
            | Operation::Reduce { reduce, .. }
            | Operation::ReduceScatter(reduce) => Some(reduce),
            _ => None,
        }
    }

    /// The two ranks of a transfer, seen from `rank`; `None` for an operation of all ranks.
    pub const fn pair(self, rank: usize) -> Option<Pair> {
        match self {
            Operation::Send { to } => Some(Pair { sender: rank, receiver: to }),
            Operation::Receive { from } => Some(Pair { sender: from, receiver: rank }),
            _ => None,
        }
    }

    /// The rank that plays a part of its own: the root, or the other side of a transfer.
    pub const fn root(self) -> Option<usize> {
        match self {
            Operation::Reduce { root, .. }
            | Operation::Broadcast { root }
            | Operation::Scatter { root }
            | Operation::Gather { root } => Some(root),
            Operation::Send { to } => Some(to),
            Operation::Receive { from } => Some(from),
            _ => None,
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
