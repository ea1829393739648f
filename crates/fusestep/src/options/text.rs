//! Texts of values: names of choices, loss scales, settings of some parameters.

use fusestep_amp::{AmpError, LossScale, ScalePolicy};
use fusestep_launch::{Master, StateDType};
use fusestep_planner::{
    Accumulated, Averaged, Initial, Interval, Ownership, ReduceDType, ReducedWhen, Schedule,
    ScheduleError, TableKind,
};
use fusestep_tensor::{Quoted, Trust, power_of_two};

use super::choice::{Choice, Named};
use super::of_params::OfParams;

/// Names of the values of one type, each with its sentence.
macro_rules! choices {
    ($($type:ty { $($name:literal => $value:expr, $says:literal;)* })*) => {
        $(
            impl Choice for $type {
                const ALL: &'static [(Named, Self)] =
                    &[$((Named { name: $name, says: $says }, $value)),*];
            }
        )*
    };
}

/// Rounding without its seed, which is a setting of its own.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum RoundingKind {
    Nearest,
    Stochastic,
}

choices! {
    Master {
        "none" => Master::None, "Nothing";
        "f32" => Master::F32, "An f32 copy, which is updated";
        "remainder" => Master::Remainder, "16 bits that make a bf16 parameter an f32 again";
        "remainder8" => Master::Remainder8,
            "8 bits that make it the upper 24 of an f32, beside state in int8";
    }
    StateDType {
        "f32" => StateDType::Compute, "f32, or f64 for f64 parameters";
        "bf16" => StateDType::Bf16, "bf16";
        "int8" => StateDType::Int8,
            "Codes of 8 bits with an f32 unit for each 32 elements; f32 below 4,096 elements";
    }
    RoundingKind {
        "nearest" => RoundingKind::Nearest, "To nearest, ties to even";
        "stochastic" => RoundingKind::Stochastic, "At random, with the exact value as the mean";
    }
    Accumulated {
        "mean" => Accumulated::Mean, "Their mean; weighted, if weights were given";
        "sum" => Accumulated::Sum, "Their sum";
    }
    ReducedWhen {
        "per_update" => ReducedWhen::PerWindow,
            "Once per update: fewest bytes between ranks";
        "per_micro_step" => ReducedWhen::PerMicroStep,
            "In every micro-step: least memory, most calls; sums are in another order, so results \
             differ by rounding";
    }
    ReduceDType {
        "param" => ReduceDType::Param, "That of the parameter, to which sums are rounded";
        "f32" => ReduceDType::F32, "f32 for f16 and bf16 parameters; sums stay f32 until the update";
        "bf16" => ReduceDType::Bf16,
            "bf16 between ranks for f32 parameters; each rank rounds once, sums are f32";
        "f16" => ReduceDType::F16,
            "f16 between ranks for f32 parameters; each rank rounds once, sums are f32";
    }
    Ownership {
        "elements" => Ownership::Elements, "Shards of equal length, which may cut tensors";
        "tensors" => Ownership::Tensors, "Whole tensors";
    }
    Averaged {
        "parameters" => Averaged::Params, "Parameters; each rank's state stays its own";
        "parameters_and_state" => Averaged::ParamsAndState, "The optimizer's state as well";
    }
    Interval {
        "fixed" => Interval::Fixed, "The number of steps stays";
        "adaptive" => Interval::Adaptive, "The number of steps follows the loss";
    }
    TableKind {
        "auto" => TableKind::Auto,
            "On a GPU in arguments where each stage fits into one launch, else resident";
        "arguments" => TableKind::Arguments,
            "In the launch's arguments, as many tensors as fit";
        "resident" => TableKind::Resident,
            "In the device's memory, any number of tensors";
    }
    Initial {
        "rank_0" => Initial::OfRankZero, "Those of rank 0, which all ranks take";
        "own_and_equal" => Initial::OwnAndEqual, "Each rank's own, which the first step compares";
    }
    Trust {
        "ratio" => Trust::Ratio, "Scaled by the trust ratio";
        "plain" => Trust::Plain, "The plain learning rate";
    }
}

/// Texts of schedules.
pub(super) const SCHEDULE: &str = "phases joined by commas: warmup:STEPS, cosine:STEPS[:FLOOR], \
    polynomial:STEPS:POWER[:FLOOR], linear:STEPS:FROM:TO, constant[:STEPS[:FACTOR]], \
    step:EVERY:GAMMA[:STEPS]";

/// Reads a schedule.
///
/// # Errors
/// What was expected of the phase that is wrong.
pub(super) fn parse_schedule(text: &str) -> Result<Schedule, String> {
    text.parse().map_err(|error| match error {
        ScheduleError::Text { index, expected, found } => {
            format!("{expected} as phase {}, not `{}`", index + 1, Quoted(&found))
        }
        ScheduleError::Range { index, phase, what, expected, found } => {
            format!("{what} of phase {}, {phase}, to be {expected}, not {found}", index + 1)
        }
        ScheduleError::Endless { index, phase } => format!(
            "a number of steps for phase {}, {phase}, since another phase follows",
            index + 1
        ),
        ScheduleError::Phases { found } => format!("fewer phases, not {found}"),
        _ => SCHEDULE.to_owned(),
    })
}

/// Texts of loss scales.
pub(super) const LOSS_SCALE: &str = "a power of two from 1 to 2^126 such as 1024 or 2^10, \
    `dynamic`, or dynamic: followed by start=, growth=, growth_interval=, backoff=, \
    backoff_interval=, floor= or ceiling=, joined by commas";

/// Keys behind `dynamic:`, each with its values.
const SCALE_KEYS: [(&str, &str); 7] = [
    ("start", "a power of two from 1 to 2^126"),
    ("growth", "a power of two from 1 to 2^126"),
    ("growth_interval", "a whole number from 1 on"),
    ("backoff", "a power of two from 2^-126 to 1"),
    ("backoff_interval", "a whole number from 1 on"),
    ("floor", "a power of two from 1 to start"),
    ("ceiling", "a power of two from start to 2^126"),
];

/// Reads a loss scale.
///
/// # Errors
/// What was expected: of a key or value that is wrong, its own.
pub(super) fn parse_loss_scale(text: &str) -> Result<LossScale, String> {
    let any = || LOSS_SCALE.to_owned();
    if let Some(scale) = parse_power(text) {
        return LossScale::fixed(scale).map_err(|_| any());
    }
    let rest = text.strip_prefix("dynamic").ok_or_else(any)?;
    let mut start = LossScale::dynamic().scale();
    let mut policy = ScalePolicy::default();
    let settings = match rest.strip_prefix(':') {
        Some(settings) => settings.split(','),
        None if rest.is_empty() => return Ok(LossScale::dynamic()),
        None => return Err(any()),
    };
    let mut given = Vec::new();
    for setting in settings {
        let (name, value) = setting.split_once('=').unwrap_or((setting, ""));
        let name = name.trim();
        if given.contains(&name) {
            return Err(format!("each key behind `dynamic:` once; {name}= is there twice"));
        }
        given.push(name);
        let taken = take_scale_key(name, value.trim(), &mut start, &mut policy);
        taken.ok_or_else(|| wrong_scale_key(name))?;
    }
    LossScale::with_policy(start, policy).map_err(|error| {
        let what = match error {
            AmpError::PowerOfTwo { what, .. } | AmpError::Interval { what } => what,
            _ => return any(),
        };
        wrong_scale_key(&what.replace("loss scale", "start").replace(' ', "_"))
    })
}

/// A number, as digits or as a power of two, `2^10`.
fn parse_power(text: &str) -> Option<f64> {
    match text.strip_prefix("2^") {
        Some(exponent) => Some(2f64.powi(exponent.parse().ok()?)),
        None => text.parse().ok(),
    }
}

/// Sets the value of a key; `None` where there is no such key, or the value is no number.
fn take_scale_key(
    name: &str,
    value: &str,
    start: &mut f64,
    policy: &mut ScalePolicy,
) -> Option<()> {
    match name {
        "start" => *start = parse_power(value)?,
        "growth" => policy.growth = parse_power(value)?,
        "growth_interval" => policy.growth_interval = value.parse().ok()?,
        "backoff" => policy.backoff = parse_power(value)?,
        "backoff_interval" => policy.backoff_interval = value.parse().ok()?,
        "floor" => policy.floor = parse_power(value)?,
        "ceiling" => policy.ceiling = parse_power(value)?,
        _ => return None,
    }
    Some(())
}

/// The expectation of a key behind `dynamic:`, by the key itself if there is one of its name.
fn wrong_scale_key(name: &str) -> String {
    if let Some((key, values)) = SCALE_KEYS.iter().find(|(key, _)| *key == name) {
        return format!("{key}= to be {values}");
    }
    let keys: Vec<&str> = SCALE_KEYS.iter().map(|(key, _)| *key).collect();
    format!(
        "keys of {} with values behind `dynamic:`, such as start=1024, joined by commas; `{}` is \
         none of them",
        keys.join(", "),
        Quoted(name)
    )
}

/// A loss scale as [`parse_loss_scale`] reads it; counters of steps are no settings.
pub(super) fn loss_scale_text(scale: &LossScale) -> String {
    let policy = scale.policy();
    if policy.is_fixed() {
        return power_of_two(scale.scale());
    }
    let default = ScalePolicy::default();
    let mut told = Vec::new();
    let mut tell = |name: &str, value: f64, usual: f64| {
        if value != usual {
            told.push(format!("{name}={}", power_of_two(value)));
        }
    };
    tell("start", scale.scale(), LossScale::dynamic().scale());
    tell("growth", policy.growth, default.growth);
    tell("growth_interval", policy.growth_interval.into(), default.growth_interval.into());
    tell("backoff", policy.backoff, default.backoff);
    tell("backoff_interval", policy.backoff_interval.into(), default.backoff_interval.into());
    tell("floor", policy.floor, default.floor);
    tell("ceiling", policy.ceiling, default.ceiling);
    if told.is_empty() { "dynamic".to_owned() } else { format!("dynamic:{}", told.join(",")) }
}

/// A name, or a part of one; none where it is empty.
pub(super) fn parse_name(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

/// Reads `SUBSTRING=NUMBER`, a finite number of at least 0.
pub(super) fn parse_number_of(text: &str) -> Option<OfParams<f64>> {
    let (pattern, value) = text.rsplit_once('=').filter(|(pattern, _)| !pattern.is_empty())?;
    let value = value.parse::<f64>().ok().filter(|value| value.is_finite() && *value >= 0.0)?;
    Some(OfParams { pattern: pattern.to_owned(), value })
}

/// Reads `SUBSTRING=ratio` or `SUBSTRING=plain`.
pub(super) fn parse_trust_of(text: &str) -> Option<OfParams<Trust>> {
    let (pattern, name) = text.rsplit_once('=').filter(|(pattern, _)| !pattern.is_empty())?;
    let (_, value) = *Trust::ALL.iter().find(|(named, _)| named.name == name)?;
    Some(OfParams { pattern: pattern.to_owned(), value })
}

/// `SUBSTRING=NUMBER`.
pub(super) fn number_of_text(of: &OfParams<f64>) -> String {
    format!("{}={}", of.pattern, of.value)
}

/// `SUBSTRING=NAME`.
pub(super) fn trust_of_text(of: &OfParams<Trust>) -> String {
    let name = of.value.named().map_or("ratio", |named| named.name);
    format!("{}={name}", of.pattern)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_scale_is_read_as_it_is_written() {
        for text in ["1024", "dynamic", "dynamic:start=256,growth_interval=10,floor=4"] {
            let scale = parse_loss_scale(text).expect("a scale");
            assert_eq!(loss_scale_text(&scale), text);
        }
        for (text, read) in
            [("2^10", "1024"), ("dynamic:start=2^8,floor=2^2", "dynamic:start=256,floor=4")]
        {
            assert_eq!(loss_scale_text(&parse_loss_scale(text).expect("a scale")), read);
        }
        for wrong in ["3", "0", "NaN", "2^127", "2^-1", "2^x", "dynamics"] {
            assert_eq!(parse_loss_scale(wrong), Err(LOSS_SCALE.to_owned()), "{wrong}");
        }
        for (wrong, told) in [
            ("dynamic:", "keys of start, growth, growth_interval, "),
            ("dynamic:x=2", "joined by commas; `x` is none of them"),
            ("dynamic:floor=3", "floor= to be a power of two from 1 to start"),
            ("dynamic:floor", "floor= to be a power of two from 1 to start"),
            ("dynamic:start=many", "start= to be a power of two from 1 to 2^126"),
            ("dynamic:start=3", "start= to be a power of two from 1 to 2^126"),
            ("dynamic:growth_interval=0", "growth_interval= to be a whole number from 1 on"),
            ("dynamic:start=8,start=4", "each key behind `dynamic:` once; start= is there twice"),
            ("dynamic:start=8,ceiling=4", "ceiling= to be a power of two from start to 2^126"),
        ] {
            let error = parse_loss_scale(wrong).expect_err(wrong);
            assert!(error.contains(told), "{wrong}: {error}");
        }
    }

    #[test]
    fn a_schedule_is_refused_by_its_phase() {
        for (wrong, told) in [
            ("warmup", "warmup:STEPS as phase 1, not `warmup`"),
            ("warmup:10,cosine", "cosine:STEPS[:FLOOR] as phase 2, not `cosine`"),
            ("warmup:10,cos:3", "polynomial or step as phase 2, not `cos:3`"),
            ("constant,cosine:80", "steps for phase 1, constant, since another phase follows"),
            ("polynomial:9:-1", "of phase 1, polynomial, to be"),
        ] {
            let error = parse_schedule(wrong).expect_err(wrong);
            assert!(error.contains(told), "{wrong}: {error}");
        }
        assert_eq!(parse_schedule("warmup:4,constant"), Ok("warmup:4,constant".parse().unwrap()));
    }

    #[test]
    fn settings_of_some_parameters_are_read_as_they_are_written() {
        let of = parse_number_of("a=b=0.5").expect("a factor");
        assert_eq!((of.pattern.as_str(), of.value), ("a=b", 0.5));
        assert_eq!(number_of_text(&of), "a=b=0.5");
        for wrong in ["bias", "bias=", "bias=-1", "bias=inf", "bias=NaN"] {
            assert_eq!(parse_number_of(wrong), None, "{wrong}");
        }
        let of = parse_trust_of("bias=plain").expect("a trust");
        assert_eq!(trust_of_text(&of), "bias=plain");
        assert_eq!(parse_trust_of("bias=none"), None);
    }
}
