//! Large tensors of a launch borrowed one inside the other, so that the whole launch is one
//! hand-over to the pool.
//!
//! What a framework lends is locked until the call returns that lent it. So each large tensor is
//! borrowed within the call of the one before, and within the last of them all threads work: on
//! those that are held, cut anywhere, and on the small ones between them, which they borrow
//! themselves.

use std::cell::Cell;
use std::sync::PoisonError;

use fusestep_elementwise::Tensor;
use fusestep_simd::{Pool, Split};

use crate::borrowed::{AtLarge, PARTS_PER_THREAD, SmallPieces};
use crate::tensors::{Tensors, large_elements};

/// Threads for which tensors are as many as large as can be: some 60, whose calls are nested on the
/// stack. More threads than that share them out as they share the parts of any work, which are not
/// more either.
const MOST_THREADS: usize = 12;

/// As [`large_elements`], for tensors that are borrowed together.
pub(crate) fn most_large(tensors: Tensors<'_>, threads: usize) -> u64 {
    large_elements(tensors, threads.min(MOST_THREADS))
}

/// What goes on while a tensor is lent.
pub(crate) trait GoOn {
    /// Takes the tensor, borrows the others, and updates all.
    fn go_on(&self, tensor: Tensor<'_>);
}

/// Tensors of a launch, some of which are borrowed already.
pub(crate) struct Nest<'a> {
    /// In order: those that are held, and small ones between them.
    parts: Vec<Option<Part<'a>>>,
    /// The tensors behind them.
    rest: SmallPieces<'a>,
    pool: &'a Pool,
}

enum Part<'a> {
    Held(Tensor<'a>),
    ToBorrow(SmallPieces<'a>),
}

impl<'a> Nest<'a> {
    pub(crate) fn new(rest: SmallPieces<'a>, pool: &'a Pool) -> Self {
        let parts = match rest.count_large() {
            0 => Vec::new(),
            large => Vec::with_capacity(2 * large + 1),
        };
        Self { parts, rest, pool }
    }

    /// Borrows the large tensors that are left and updates all. An error of one of those is kept
    /// with the pieces, and nothing is updated then.
    pub(crate) fn run(mut self) {
        let pool = self.pool;
        let rest = loop {
            let AtLarge {
                before,
                large,
                behind,
            } = match self.rest.at_large() {
                Ok(at_large) => at_large,
                Err(small) => break small,
            };
            self.parts.push(Some(Part::ToBorrow(before)));
            let errors = behind.errors();
            let nest = Cell::new(Some(Nest {
                rest: behind,
                ..self
            }));
            if let Err(error) = large.lend(&nest) {
                let mut first = errors.lock().unwrap_or_else(PoisonError::into_inner);
                first.get_or_insert(error);
                return;
            }
            match nest.into_inner() {
                // Left as it is by whoever keeps it.
                Some(nest) => self = nest,
                None => return,
            }
        };
        if self.parts.is_empty() {
            return pool.run(rest);
        }
        self.parts.push(Some(Part::ToBorrow(rest)));
        let elements = self.parts.iter().flatten().map(Part::elements).sum();
        pool.run(Parts {
            first: None,
            middle: &mut self.parts,
            last: None,
            elements,
        });
    }
}

impl GoOn for Cell<Option<Nest<'_>>> {
    fn go_on(&self, tensor: Tensor<'_>) {
        if let Some(mut nest) = self.take() {
            nest.parts.push(Some(Part::Held(tensor)));
            nest.run();
        }
    }
}

impl Part<'_> {
    fn elements(&self) -> u64 {
        match self {
            Part::Held(tensor) => tensor.elements(),
            Part::ToBorrow(pieces) => pieces.elements(),
        }
    }

    /// Cuts off about so many elements; nothing is left or nothing is cut off at the ends.
    fn split(self, elements: u64) -> (Option<Self>, Option<Self>) {
        if elements == 0 {
            return (None, Some(self));
        }
        if elements >= self.elements() {
            return (Some(self), None);
        }
        match self {
            Part::Held(tensor) => {
                let (left, right) = tensor.split(elements);
                (Some(Part::Held(left)), Some(Part::Held(right)))
            }
            Part::ToBorrow(pieces) => {
                let (left, right) = pieces.split(elements);
                (Some(Part::ToBorrow(left)), Some(Part::ToBorrow(right)))
            }
        }
    }

    fn run(self) {
        match self {
            Part::Held(tensor) => tensor.run(),
            Part::ToBorrow(pieces) => pieces.run(),
        }
    }
}

/// Consecutive parts; what cuts have left of the first and the last is apart from the others.
struct Parts<'s, 'a> {
    first: Option<Part<'a>>,
    middle: &'s mut [Option<Part<'a>>],
    last: Option<Part<'a>>,
    elements: u64,
}

impl Split for Parts<'_, '_> {
    const PARTS_PER_THREAD: usize = PARTS_PER_THREAD;

    fn elements(&self) -> u64 {
        self.elements
    }

    fn split(mut self, elements: u64) -> (Self, Self) {
        let of = |part: &Option<Part<'_>>| part.as_ref().map_or(0, Part::elements);
        let (own, all) = (of(&self.first), self.elements);
        let (left, right) = if elements <= own {
            let (left, right) = self.first.map_or((None, None), |part| part.split(elements));
            let left = Parts {
                first: left,
                middle: &mut [],
                last: None,
                elements: 0,
            };
            let right = Parts {
                first: right,
                ..self
            };
            (left, right)
        } else {
            let (mut at, mut before) = (0, own);
            while let Some(part) = self.middle.get(at)
                && before + of(part) < elements
            {
                before += of(part);
                at += 1;
            }
            let (middle, behind) = self.middle.split_at_mut(at);
            let (cut, last) = match behind.first_mut() {
                Some(cut) => (cut.take(), self.last.take()),
                None => (self.last.take(), None),
            };
            let (left, right) = cut.map_or((None, None), |part| part.split(elements - before));
            let left = Parts {
                first: self.first,
                middle,
                last: left,
                elements: 0,
            };
            let right = Parts {
                first: right,
                middle: behind,
                last,
                elements: 0,
            };
            (left, right)
        };
        // Pieces that cannot be cut anywhere may have more elements than asked for.
        let count = |parts: &Parts<'_, '_>| {
            let middle: u64 = parts.middle.iter().map(of).sum();
            of(&parts.first) + middle + of(&parts.last)
        };
        let elements = count(&left);
        (
            Parts { elements, ..left },
            Parts {
                elements: all - elements,
                ..right
            },
        )
    }

    fn run(self) {
        let middle = self.middle.iter_mut().map(Option::take);
        for part in [self.first].into_iter().chain(middle).chain([self.last]) {
            if let Some(part) = part {
                part.run();
            }
        }
    }
}
