//! What holds of every schedule.

use std::num::NonZeroU64;

use fusestep_schedule::{MOST_PHASES, Phase, Schedule, ScheduleError};
use proptest::prelude::*;

/// A phase with an end.
fn phase() -> impl Strategy<Value = Phase> {
    let (steps, factor, share) = (0u64..200, 0.0..3.0f64, 0.0..=1.0f64);
    prop_oneof![
        (steps.clone(), factor.clone())
            .prop_map(|(steps, factor)| Phase::Constant { steps: Some(steps), factor }),
        (steps.clone(), factor.clone(), factor.clone())
            .prop_map(|(steps, from, to)| Phase::Linear { steps, from, to }),
        (steps.clone(), share.clone()).prop_map(|(steps, floor)| Phase::Cosine { steps, floor }),
        (steps.clone(), factor.clone(), share.clone())
            .prop_map(|(steps, power, floor)| { Phase::Polynomial { steps, power, floor } }),
        (1u64..50, share, steps).prop_map(|(every, gamma, steps)| Phase::Step {
            every: NonZeroU64::new(every).unwrap(),
            gamma,
            steps: Some(steps),
        }),
    ]
}

proptest! {
    #[test]
    fn the_text_of_a_schedule_reads_back_as_the_value(
        phases in prop::collection::vec(phase(), 1..4)
    ) {
        let mut schedules = phases.into_iter().map(Schedule::from);
        let first = schedules.next().unwrap();
        let schedule = schedules.fold(first, Schedule::then);
        prop_assert_eq!(schedule.validate(), Ok(()));
        prop_assert_eq!(schedule.to_string().parse(), Ok(schedule));
    }

    #[test]
    fn a_phase_that_follows_begins_at_its_own_step_0(
        first in phase(),
        second in phase(),
        step in 0u64..500
    ) {
        let steps = first.steps().unwrap();
        let both = Schedule::from(first).then(second);
        let expected = match step.checked_sub(steps) {
            Some(own) => second.factor(own),
            None => first.factor(step),
        };
        prop_assert_eq!(both.factor(step).to_bits(), expected.to_bits());
        prop_assert!(both.factor(step).is_finite() && both.factor(step) >= 0.0);
    }

    #[test]
    fn from_the_settled_step_on_the_factor_stays(
        first in phase(),
        second in phase(),
        more in 0u64..1_000_000
    ) {
        let schedule = Schedule::from(first).then(second);
        let end = schedule.settled_from().unwrap();
        prop_assert_eq!(schedule.factor(end + more), schedule.factor(end));
    }
}

#[test]
fn a_warm_up_loses_no_step_and_ends_at_the_whole_rate() {
    let schedule = Schedule::warmup(3);
    let factors: Vec<f64> = (0..5).map(|step| schedule.factor(step)).collect();
    assert_eq!(factors, [0.25, 0.5, 0.75, 1.0, 1.0]);
    assert_eq!(Schedule::warmup(0).factor(0), 1.0);
}

#[test]
fn the_step_count_may_be_any() {
    for text in [
        "constant",
        "warmup:18446744073709551615,cosine:18446744073709551615:0.1",
        "step:1:0.1",
        "polynomial:0:2",
    ] {
        let schedule: Schedule = text.parse().unwrap();
        assert!(schedule.factor(u64::MAX).is_finite(), "{text}");
        assert!(schedule.factor(0) >= 0.0, "{text}");
    }
}

#[test]
fn whatever_is_no_schedule_is_refused_by_phase_and_number() {
    for (text, expected) in [
        ("", "phase 1: expected constant, warmup,"),
        ("warmup:1,", "phase 2: expected constant, warmup,"),
        ("warmup", "phase 1: expected warmup:STEPS, found `warmup`"),
        ("warmup:x", "expected warmup:STEPS, found `warmup:x`"),
        ("warmup:-1", "expected warmup:STEPS"),
        ("cosine:9:0.1:2", "expected cosine:STEPS[:FLOOR]"),
        ("step:0:0.1", "EVERY above 0, found `step:0:0.1`"),
        ("cosine:9:1.5", "floor of cosine: expected a number from 0 to 1, found 1.5"),
        ("step:9:-1", "gamma of step: expected a number from 0 to 1, or"),
        ("step:9:1.5", "gamma of step: expected a number from 0 to 1, or"),
        ("step:1:2:21", "factor is at most 1e6, found 2"),
        ("linear:5:nan:1", "from of linear: expected a number from 0 to 1e6, found NaN"),
        ("constant:5:1e7", "expected a number from 0 to 1e6"),
        ("polynomial:5:inf", "power of polynomial: expected a finite number"),
        ("warm\u{1b}[2Jup", "found `warm\\u{1b}[2Jup`"),
        (
            "step:9:0.9,cosine:5",
            "phase 1: expected a number of steps for step, since a phase follows",
        ),
        ("cosine:5:1:1:1:1", "expected cosine:STEPS[:FLOOR]"),
    ] {
        let error = text.parse::<Schedule>().unwrap_err();
        assert!(error.to_string().contains(expected), "{text}: {error}");
    }
    let own = Schedule::from(Phase::Constant { steps: None, factor: -1.0 });
    assert!(matches!(own.validate(), Err(ScheduleError::Range { .. })));
}

#[test]
fn schedules_have_bounds_whatever_is_written() {
    let phases = vec!["constant:1"; MOST_PHASES].join(",");
    assert!(phases.parse::<Schedule>().is_ok());
    let error = format!("{phases},cosine:5").parse::<Schedule>();
    assert_eq!(error, Err(ScheduleError::Phases { found: MOST_PHASES + 1 }));
    let built = (0..MOST_PHASES).fold(Schedule::cosine(1), |all, _| all.then(Schedule::cosine(1)));
    assert!(matches!(built.validate(), Err(ScheduleError::Phases { .. })));
    let long = "x".repeat(1 << 20).parse::<Schedule>().unwrap_err();
    assert!(long.to_string().len() < 400, "{long}");
    let grown: Schedule = "step:1:2:19".parse().unwrap();
    assert_eq!(grown.factor(u64::MAX), 524_288.0);
}
