//! Errors in the words of the command line: settings go by their flags.

use fusestep_launch::RuleError;
use fusestep_planner::{PlanError, ReduceDType, ScalePolicy};
use fusestep_tensor::Quoted;

use crate::planning::flag_of;
use crate::rule_flags::{is_switch, long_of};
use crate::settings::is_setting;

/// Fields that ranks compare, and the flags that they come from.
const FLAGS_OF_FIELDS: [(&str, &str); 10] = [
    ("zero stage", "--zero"),
    ("ranks that share shards", "--shard-group"),
    ("updates are shared out", "--owners"),
    ("buckets", "--bucket-cap-mib"),
    ("clip_by_global_norm", "--clip-norm"),
    ("loss_scaling", "--loss-scale"),
    ("second_moment", "--amsgrad"),
    ("objective", "--maximize"),
    ("world size", "number of ranks"),
    ("number of parameters", "number of parameters of --model"),
];

/// Settings as files of runs have them, and their flags, where those are no setting's name.
const FLAGS_OF_FILES: [(&str, &str); 6] = [
    ("loss_scaling", "--loss-scale"),
    ("objective", "--maximize"),
    ("optimizer", "--optimizer"),
    ("decoupled", "--decay"),
    ("excluded", "--excluded"),
    ("second_moment", "--amsgrad"),
];

/// Flags of a precision.
const OF_PRECISION: &str = "--master-weights, --state-dtype and --rounding";

/// SGD without a velocity, by both its names.
const SGD: &str = "sgd (momentum at --momentum 0)";

/// Advice of files of runs, by which they are known to be of another setting.
const GO_ON: &str = "; go on with that";

/// An error in words, in which settings go by their flags.
pub(crate) fn in_words(error: &anyhow::Error) -> String {
    let message = format!("{error:#}");
    let cause = error.chain().find_map(|cause| cause.downcast_ref::<PlanError>());
    let told = cause.map_or_else(|| message.clone(), |cause| of_plan(cause, &message));
    // Groups of ranks are refused by the planner or, on ranks, by what makes them.
    let of_groups = "expected a world that is a multiple of a shard group's";
    let told =
        told.replacen(&format!("ranks: {of_groups}"), &format!("--shard-group: {of_groups}"), 1);
    with_flags(&told)
}

/// A message of a plan's error.
fn of_plan(cause: &PlanError, message: &str) -> String {
    match cause {
        PlanError::RanksDiffer { field, expected, found, .. } if !field.starts_with("--") => {
            let own = of_parameter(expected, found).map(|flag| format!("{flag} ({field})"));
            let own = own.filter(|_| field.starts_with("parameter "));
            let flag = own.unwrap_or_else(|| of_ranks(field));
            message.replacen(&format!("{field}: expected"), &format!("{flag}: expected"), 1)
        }
        PlanError::Checkpoint { what, found, .. } if found.contains(GO_ON) => {
            of_file(what, found, message)
        }
        PlanError::Checkpoint { what, .. } if what.starts_with("--") => {
            message.replacen(&format!("`{what}`: expected"), &format!("{what}: expected"), 1)
        }
        PlanError::Checkpoint { what, expected, .. } if what.ends_with("@max_moment2") => {
            let was = if expected == "no such tensor" { "with" } else { "without" };
            format!("{message}: it was saved {was} --amsgrad")
        }
        PlanError::Kernel { name, error } => {
            let told =
                of_kernel(name, error).map(|told| message.replacen(&cause.to_string(), &told, 1));
            told.unwrap_or_else(|| message.to_owned())
        }
        // The planner knows ranks alone here.
        PlanError::Topology { expected, .. }
            if expected.ends_with(" lane") || expected.ends_with(" lanes") =>
        {
            message.replacen("ranks: expected", "--lanes: expected", 1)
        }
        PlanError::Rule(RuleError::Hyper { what, .. }) => match long_of(what) {
            Some(long) => message.replacen(&format!("{what}: "), &format!("--{long}: "), 1),
            None => message.to_owned(),
        },
        _ => message.to_owned(),
    }
}

/// The flags of the first setting of its own that a parameter has otherwise on another rank.
fn of_parameter(expected: &str, found: &str) -> Option<&'static str> {
    let flags = [
        ("lr_scale", "--lr-scale"),
        ("weight decay", "--exclude or --weight-decay-of"),
        ("trust ratio", "--trust-of"),
    ];
    let differs = |name: &str| {
        let of = |text: &str| {
            let (_, rest) = text.split_once(&format!(", {name} "))?;
            rest.split(',').next().map(str::to_owned)
        };
        of(expected) != of(found)
    };
    flags.into_iter().find(|(name, _)| differs(name)).map(|(_, flag)| flag)
}

/// The flag of a field that ranks compare.
fn of_ranks(field: &str) -> String {
    let known = FLAGS_OF_FIELDS.iter().find(|(known, _)| *known == field);
    match known {
        Some((_, flag)) => (*flag).to_owned(),
        None if field.starts_with("precision of ") => format!("{OF_PRECISION} ({field})"),
        None if field.contains(' ') || field == "plan" => field.to_owned(),
        None => long_of(field).map_or_else(|| flag_of(field), |long| format!("--{long}")),
    }
}

/// A message on a run that was saved under another setting.
fn of_file(what: &str, found: &str, message: &str) -> String {
    let value = found.split([';', ',']).next().unwrap_or_default();
    let flag = match (what, value) {
        // Two settings by one name: how decay enters, and how much.
        ("weight_decay", "l2" | "decoupled") => Some("--decay".to_owned()),
        _ => flag_in_file(what),
    };
    let Some(flag) = flag else {
        return message.to_owned();
    };
    let told =
        message.replacen(&format!("`{}`: expected", Quoted(what)), &format!("{flag}: expected"), 1);
    let value = found.split(';').next().unwrap_or_default();
    if what == "optimizer" {
        // What is typed is another rule's name.
        let alone = |side: &str| (format!("{side} sgd,"), format!("{side} {SGD},"));
        let [expected, found] = ["expected", "found"].map(alone);
        return told.replacen(&expected.0, &expected.1, 1).replacen(&found.0, &found.1, 1);
    }
    if what.starts_with("precision.") && value == "none" {
        return told.replacen("found none;", "found the default;", 1);
    }
    told.replacen(GO_ON, &advice(what, &flag, value), 1)
}

/// Advice to go on with a setting that a run was saved with, as it is typed.
fn advice(what: &str, flag: &str, value: &str) -> String {
    let Some((setting, param)) = what.split_once('@') else {
        return match value {
            "none" => format!("; go on without {flag}"),
            "l2" | "decoupled" => format!("; go on with {flag} {value}"),
            "1" if is_switch(what) => format!("; go on with {flag}"),
            _ if what == "loss_scaling" => match typed_scale(value) {
                Some(typed) => format!("; go on with {flag} {typed}"),
                None => GO_ON.to_owned(),
            },
            _ if value.parse::<f64>().is_ok() => format!("; go on with {flag} {value}"),
            _ => GO_ON.to_owned(),
        };
    };
    let param = Quoted(param);
    match (setting, value) {
        (_, "none") => format!("; go on with no such flag for `{param}`"),
        ("weight_decay_of", "0") => format!("; go on with --exclude {param}"),
        _ => format!("; go on with {} {param}={value}", flag_of(setting)),
    }
}

/// A policy that moves a loss scale, from the words that files have, as it is typed.
fn typed_scale(words: &str) -> Option<String> {
    let mut numbers = words.split([' ', ',']).filter_map(|word| word.parse::<f64>().ok());
    let mut next = || numbers.next();
    let (growth, growth_interval) = (next()?, next()?);
    let (backoff, backoff_interval) = (next()?, next()?);
    let (floor, ceiling) = (next()?, next()?);
    let policy = ScalePolicy {
        growth,
        growth_interval: growth_interval as u32,
        backoff,
        backoff_interval: backoff_interval as u32,
        floor,
        ceiling,
    };
    if policy == ScalePolicy::default() {
        return Some("dynamic".to_owned());
    }
    Some(format!(
        "dynamic:growth={growth},growth_interval={growth_interval},backoff={backoff},\
         backoff_interval={backoff_interval},floor={floor},ceiling={ceiling:e}"
    ))
}

/// The flag of a setting by its key in files of runs.
fn flag_in_file(what: &str) -> Option<String> {
    if let Some((_, flag)) = FLAGS_OF_FILES.iter().find(|(known, _)| *known == what) {
        return Some((*flag).to_owned());
    }
    if let Some(dtype) = what.strip_prefix("precision.") {
        return Some(format!("{OF_PRECISION} of {dtype} parameters"));
    }
    let (setting, param) = what.split_once('@').unwrap_or((what, ""));
    let flag = match (long_of(setting), setting) {
        (Some(long), _) => format!("--{long}"),
        (None, "weight_decay_of") => "--exclude and --weight-decay-of".to_owned(),
        (None, _) if is_setting(setting) => flag_of(setting),
        (None, _) => return None,
    };
    Some(if param.is_empty() { flag } else { format!("{flag} of `{}`", Quoted(param)) })
}

/// A refusal of a precision that the rule does not have.
fn of_kernel(name: &str, error: &RuleError) -> Option<String> {
    let RuleError::Precision { rule, dtype, expected, found, .. } = error else {
        return None;
    };
    let flag = flag_of(error.setting()?);
    // Which of both was typed is not known here.
    let rule = if *rule == "sgd" { SGD } else { rule };
    // State in the type of computation, which no flag names for f64.
    if flag == "--state-dtype" && *expected == "f64" {
        return Some(format!(
            "{flag} with --optimizer {rule} and parameters of {dtype} such as `{}`: expected none, \
             found {found}; leave {flag} out",
            Quoted(name)
        ));
    }
    Some(format!(
        "{flag} with --optimizer {rule} and parameters of {dtype} such as `{}`: expected {expected}, \
         found {found}; give one of these, or leave {flag} out",
        Quoted(name)
    ))
}

/// A message with flags in place of names that the planner has for settings.
fn with_flags(message: &str) -> String {
    let mut told = message.to_owned();
    for name in [ReduceDType::NAME, "state_dtype", "any_settings"] {
        let flag = flag_of(name);
        told = words_replaced(&told.replace(&format!("`{name}`"), &flag), name, &flag);
    }
    told
}

/// A message with another word in place of `name`, but where that is a part of a path or name.
fn words_replaced(message: &str, name: &str, word: &str) -> String {
    let is_part = |c: char| c.is_alphanumeric() || "/\\._-".contains(c);
    let (mut told, mut rest) = (String::new(), message);
    while let Some((before, behind)) = rest.split_once(name) {
        told += before;
        let stands_alone = !told.ends_with(is_part) && !behind.starts_with(is_part);
        told += if stands_alone { word } else { name };
        rest = behind;
    }
    told + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conflicts_of_settings_name_flags_and_one_advice() {
        let (first, second) = ("reduce_dtype f32".to_owned(), "a model".to_owned());
        let why = "do not go together; leave `reduce_dtype` out";
        let error = PlanError::Conflict { first, second, why }.into();
        let told = "--reduce-dtype f32 and a model do not go together; leave --reduce-dtype out";
        assert_eq!(in_words(&error), told);
    }

    #[test]
    fn paths_and_names_stay_as_they_are() {
        let path = "/runs/any_settings/state_dtype.json: use state_dtype bf16";
        let told = in_words(&anyhow::anyhow!(path));
        assert_eq!(told, "/runs/any_settings/state_dtype.json: use --state-dtype bf16");
    }

    #[test]
    fn what_ranks_have_otherwise_goes_by_its_flag() {
        for (field, flag) in [
            ("zero stage", "--zero"),
            ("accumulate", "--accumulate"),
            ("weight_decay", "--weight-decay"),
            ("--seed", "--seed"),
            ("precision of bf16 parameters", "--master-weights, --state-dtype and --rounding"),
            ("parameter `w`", "parameter `w`"),
        ] {
            let (expected, found) = ("0".to_owned(), "1".to_owned());
            let differ =
                PlanError::RanksDiffer { field: field.to_owned(), expected, rank: 1, found };
            let told = in_words(&anyhow::Error::from(differ).context("rank 1"));
            assert!(told.starts_with(&format!("rank 1: {flag}")), "{told}");
            assert!(told.contains(": expected 0 as on rank 0, found 1 on rank 1"), "{told}");
        }
    }

    #[test]
    fn what_ranks_have_otherwise_of_one_parameter_goes_by_its_flags() {
        let text = |of: [&str; 3]| {
            let [lr_scale, decay, trust] = of;
            format!(
                "f32 [4, 3], lr_scale {lr_scale}, weight decay {decay}, trust ratio {trust}, rule 0"
            )
        };
        let expected = text(["1", "its rule's", "its rule's"]);
        for (found, flag) in [
            (["2", "its rule's", "its rule's"], "--lr-scale (parameter `w`)"),
            (["1", "0", "its rule's"], "--exclude or --weight-decay-of (parameter `w`)"),
            (["1", "its rule's", "plain"], "--trust-of (parameter `w`)"),
        ] {
            let (field, found) = ("parameter `w`".to_owned(), text(found));
            let expected = expected.clone();
            let told = in_words(&PlanError::RanksDiffer { field, expected, rank: 1, found }.into());
            assert!(told.starts_with(&format!("{flag}: expected f32 [4, 3]")), "{told}");
        }
    }

    #[test]
    fn what_a_run_was_saved_with_goes_by_its_flag() {
        let advice = "go on with that, or allow other settings by `any_settings`";
        for (what, found, expected) in [
            ("beta1", "0.9", "run: --beta1: expected 7, found 0.9; go on with --beta1 0.9, or"),
            (
                "clip_norm",
                "none",
                "run: --clip-norm: expected 7, found none; go on without --clip-norm, or",
            ),
            ("weight_decay_of@w", "0", "--exclude and --weight-decay-of of `w`: expected 7"),
            ("weight_decay_of@w", "0", "found 0; go on with --exclude w, or"),
            ("weight_decay_of@w", "0.5", "found 0.5; go on with --weight-decay-of w=0.5, or"),
            ("weight_decay_of@w", "none", "found none; go on with no such flag for `w`, or"),
            ("trust_of@w", "plain", "found plain; go on with --trust-of w=plain, or"),
            ("precision.f32", "none", "--master-weights, --state-dtype and --rounding of f32"),
            ("manifest", "none", "run: `manifest`: expected 7"),
        ] {
            let error = PlanError::Checkpoint {
                path: "run".to_owned(),
                what: what.to_owned(),
                expected: "7".to_owned(),
                found: format!("{found}; {advice}"),
            };
            let told = in_words(&error.into());
            assert!(told.contains(expected), "{told}");
            assert!(told.ends_with("or allow other settings by --any-settings"), "{told}");
        }
    }

    #[test]
    fn precisions_that_a_rule_has_not_go_by_flags() {
        let error = RuleError::Precision {
            rule: "lamb",
            what: "state",
            dtype: fusestep_tensor::DType::F32,
            expected: "f32 or bf16",
            found: "int8",
        };
        let error = PlanError::Kernel { name: "w".to_owned(), error };
        let told = "--state-dtype with --optimizer lamb and parameters of f32 such as `w`: expected \
                    f32 or bf16, found int8; give one of these, or leave --state-dtype out";
        assert_eq!(in_words(&error.into()), told);
    }
}
