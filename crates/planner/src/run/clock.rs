//! Clock of a step: seconds of its parts where a program asks for them, and spans around them where
//! feature `tracing` is on. Without either it does nothing.

use std::time::Instant;

use serde::Serialize;

/// Seconds that the parts of a step took on one rank, by the host's clock.
///
/// Each part counts without those that run within it: an update that the call of a gradient makes
/// is of `update`, not of `give`. On a device launches are enqueued, and the wait for them is of
/// `rest`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct StageSeconds {
    /// Gradients that are given: copied or added, and buckets started on streams.
    pub give: f64,
    /// Ranks that tell each other which parameters have gradients, and wait for the slowest.
    pub agree: f64,
    /// Gradients that are reduced over ranks.
    pub reduce: f64,
    /// Norms of gradients, and the decision whether to skip.
    pub norm: f64,
    /// Norms of tensors, for rules with a rate for each layer.
    pub trust: f64,
    /// Updates.
    pub update: f64,
    /// Updates that are fused with the reduction of their gradients.
    pub reduce_update: f64,
    /// Parameters that are gathered from the ranks that updated them, for steps or for the model.
    pub gather: f64,
    /// Parameters that are averaged over ranks, under LocalSGD.
    pub average: f64,
    /// Everything else in the calls of the step: scalars, tables, outcomes read back.
    pub rest: f64,
}

impl StageSeconds {
    /// The parts by their names, in the order of a step.
    pub fn parts(&self) -> [(&'static str, f64); 10] {
        let mut own = *self;
        PARTS.map(|part| (part.name(), *own.of(part)))
    }

    /// The sum of all parts.
    pub fn total(&self) -> f64 {
        self.parts().iter().map(|(_, seconds)| seconds).sum()
    }

    fn of(&mut self, part: StepPart) -> &mut f64 {
        match part {
            StepPart::Give => &mut self.give,
            StepPart::Agree => &mut self.agree,
            StepPart::Reduce => &mut self.reduce,
            StepPart::Norm => &mut self.norm,
            StepPart::Trust => &mut self.trust,
            StepPart::Update => &mut self.update,
            StepPart::ReduceUpdate => &mut self.reduce_update,
            StepPart::Gather => &mut self.gather,
            StepPart::Average => &mut self.average,
            StepPart::Rest => &mut self.rest,
        }
    }
}

/// A part of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) enum StepPart {
    Give,
    Agree,
    Reduce,
    Norm,
    Trust,
    Update,
    ReduceUpdate,
    Gather,
    Average,
    Rest,
}

/// All parts, in the order of a step.
const PARTS: [StepPart; 10] = [
    StepPart::Give,
    StepPart::Agree,
    StepPart::Reduce,
    StepPart::Norm,
    StepPart::Trust,
    StepPart::Update,
    StepPart::ReduceUpdate,
    StepPart::Gather,
    StepPart::Average,
    StepPart::Rest,
];

impl StepPart {
    const fn name(self) -> &'static str {
        match self {
            StepPart::Give => "give",
            StepPart::Agree => "agree",
            StepPart::Reduce => "reduce",
            StepPart::Norm => "norm",
            StepPart::Trust => "trust",
            StepPart::Update => "update",
            StepPart::ReduceUpdate => "reduce_update",
            StepPart::Gather => "gather",
            StepPart::Average => "average",
            StepPart::Rest => "rest",
        }
    }

    /// The span of this part, entered. That of the rest is the step itself.
    #[cfg(feature = "tracing")]
    fn span(self) -> tracing::span::EnteredSpan {
        use tracing::{debug_span, info_span};

        let span = match self {
            StepPart::Give => debug_span!(target: "fusestep", "give"),
            StepPart::Agree => debug_span!(target: "fusestep", "agree"),
            StepPart::Reduce => debug_span!(target: "fusestep", "reduce"),
            StepPart::Norm => debug_span!(target: "fusestep", "norm"),
            StepPart::Trust => debug_span!(target: "fusestep", "trust"),
            StepPart::Update => debug_span!(target: "fusestep", "update"),
            StepPart::ReduceUpdate => debug_span!(target: "fusestep", "reduce_update"),
            StepPart::Gather => debug_span!(target: "fusestep", "gather"),
            StepPart::Average => debug_span!(target: "fusestep", "average"),
            StepPart::Rest => info_span!(target: "fusestep", "step"),
        };
        span.entered()
    }
}

/// Clock of a state's steps; stands still until a program starts it.
#[derive(Debug, Default)]
pub(crate) struct Clock {
    is_on: bool,
    /// Parts since the update before.
    now: StageSeconds,
    /// Sum of all parts that have ended, from which a part knows what ran within it.
    ended: f64,
    /// Parts of the last update.
    last: Option<StageSeconds>,
}

/// A part that has begun. Its span ends with it, whether it is told to end or dropped.
pub(crate) struct Begun {
    part: StepPart,
    /// The moment, and the sum of ended parts then; `None` where nothing is measured.
    at: Option<(Instant, f64)>,
    #[cfg(feature = "tracing")]
    _span: tracing::span::EnteredSpan,
}

impl Clock {
    pub(crate) fn start(&mut self) {
        self.is_on = true;
    }

    /// Parts of the last update.
    pub(crate) fn last(&self) -> Option<StageSeconds> {
        self.last
    }

    pub(crate) fn begin(&self, part: StepPart) -> Begun {
        Begun {
            part,
            at: self.is_on.then(|| (Instant::now(), self.ended)),
            #[cfg(feature = "tracing")]
            _span: part.span(),
        }
    }

    pub(crate) fn end(&mut self, begun: Begun) {
        if let Some((at, ended)) = begun.at {
            let within = self.ended - ended;
            let own = (at.elapsed().as_secs_f64() - within).max(0.0);
            *self.now.of(begun.part) += own;
            self.ended += own;
        }
    }

    /// Ends an update, whose parts are the last from here on.
    pub(crate) fn end_update(&mut self) {
        if self.is_on {
            self.last = Some(std::mem::take(&mut self.now));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread::sleep;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_part_counts_without_those_within_it() {
        let nap = Duration::from_millis(20);
        let mut clock = Clock::default();
        clock.start();
        let whole = Instant::now();
        let outer = clock.begin(StepPart::Rest);
        for part in [StepPart::Update, StepPart::Reduce] {
            let inner = clock.begin(part);
            sleep(nap);
            clock.end(inner);
        }
        clock.end(outer);
        let whole = whole.elapsed().as_secs_f64();
        assert_eq!(clock.last(), None);
        clock.end_update();
        let last = clock.last().unwrap();
        assert!(last.update >= 0.02 && last.reduce >= 0.02, "{last:?}");
        assert!(last.total() <= whole && last.rest <= whole - 0.04, "{last:?} of {whole}");
        clock.end_update();
        assert_eq!(clock.last(), Some(StageSeconds::default()));
    }

    #[test]
    fn a_clock_that_stands_still_measures_nothing() {
        let mut clock = Clock::default();
        let begun = clock.begin(StepPart::Update);
        clock.end(begun);
        clock.end_update();
        assert_eq!((clock.last(), clock.ended), (None, 0.0));
    }

    #[test]
    fn parts_have_the_names_of_their_fields() {
        let mut seconds = StageSeconds::default();
        for (at, part) in PARTS.into_iter().enumerate() {
            *seconds.of(part) = at as f64;
        }
        let told = serde_json::to_value(seconds).unwrap();
        for (at, (name, value)) in seconds.parts().into_iter().enumerate() {
            assert_eq!((value, told[name].as_f64()), (at as f64, Some(at as f64)), "{name}");
        }
    }
}
