//! Texts of values: names of choices, loss scales, settings of some parameters.

use fusestep_amp::{LossScale, ScalePolicy};
use fusestep_launch::{Master, StateDType};
use fusestep_planner::{
    Accumulated, Averaged, Initial, Interval, Ownership, ReduceDType, ReducedWhen, TableKind,
};
use fusestep_tensor::Trust;

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
            "In arguments where each stage fits into one launch, else resident";
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

/// Texts of loss scales.
pub(super) const LOSS_SCALE: &str = "a power of two from 1 on, `dynamic`, or dynamic: followed by \
    start=, growth=, growth_interval=, backoff=, backoff_interval=, floor= or ceiling=, joined by \
    commas";

/// Reads a loss scale; `None` where the text is none.
pub(super) fn parse_loss_scale(text: &str) -> Option<LossScale> {
    if let Ok(scale) = text.parse() {
        return LossScale::fixed(scale).ok();
    }
    let rest = text.strip_prefix("dynamic")?;
    let mut start = LossScale::dynamic().scale();
    let mut policy = ScalePolicy::default();
    let settings = match rest.strip_prefix(':') {
        Some(settings) => settings.split(','),
        None if rest.is_empty() => return Some(LossScale::dynamic()),
        None => return None,
    };
    for setting in settings {
        let (name, value) = setting.split_once('=')?;
        match name.trim() {
            "start" => start = value.parse().ok()?,
            "growth" => policy.growth = value.parse().ok()?,
            "growth_interval" => policy.growth_interval = value.parse().ok()?,
            "backoff" => policy.backoff = value.parse().ok()?,
            "backoff_interval" => policy.backoff_interval = value.parse().ok()?,
            "floor" => policy.floor = value.parse().ok()?,
            "ceiling" => policy.ceiling = value.parse().ok()?,
            _ => return None,
        }
    }
    LossScale::with_policy(start, policy).ok()
}

/// A loss scale as [`parse_loss_scale`] reads it; counters of steps are no settings.
pub(super) fn loss_scale_text(scale: &LossScale) -> String {
    let policy = scale.policy();
    if policy.is_fixed() {
        return scale.scale().to_string();
    }
    let default = ScalePolicy::default();
    let mut told = Vec::new();
    let mut tell = |name: &str, value: f64, usual: f64| {
        if value != usual {
            told.push(format!("{name}={value}"));
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
    let (pattern, value) = text.rsplit_once('=')?;
    let value = value.parse::<f64>().ok().filter(|value| value.is_finite() && *value >= 0.0)?;
    Some(OfParams { pattern: pattern.to_owned(), value })
}

/// Reads `SUBSTRING=ratio` or `SUBSTRING=plain`.
pub(super) fn parse_trust_of(text: &str) -> Option<OfParams<Trust>> {
    let (pattern, name) = text.rsplit_once('=')?;
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
        for wrong in ["3", "0", "NaN", "dynamics", "dynamic:", "dynamic:floor=3", "dynamic:x=2"] {
            assert_eq!(parse_loss_scale(wrong), None, "{wrong}");
        }
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
