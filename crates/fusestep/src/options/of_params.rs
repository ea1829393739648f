//! Settings of some parameters, or of those of one dtype.

use fusestep_launch::Precision;
use fusestep_planner::Optimizer;
use fusestep_tensor::{DType, ParamDesc, Quoted};

use super::StepOptions;

/// Parameters with a rule of their own, which no group before this one has.
///
/// Groups of equal rules are one to the plan, and one that has the optimizer's own rule follows the
/// optimizer's settings.
#[derive(Clone, Debug, PartialEq)]
pub struct OwnRule {
    /// The parameters.
    pub of: Names,
    /// Their rule.
    pub rule: Optimizer,
}

/// How parameters are named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Names {
    /// By their whole names, each of which a parameter has to have.
    Whole(Vec<String>),
    /// By parts of their names, each of which a name has to contain.
    Containing(Vec<String>),
}

impl OwnRule {
    /// The parameters of these names.
    pub fn of<N: Into<String>>(
        names: impl IntoIterator<Item = N>,
        rule: impl Into<Optimizer>,
    ) -> Self {
        let names = names.into_iter().map(Into::into).collect();
        Self { of: Names::Whole(names), rule: rule.into() }
    }

    /// The parameters whose names contain one of these.
    pub fn containing<N: Into<String>>(
        parts: impl IntoIterator<Item = N>,
        rule: impl Into<Optimizer>,
    ) -> Self {
        let parts = parts.into_iter().map(Into::into).collect();
        Self { of: Names::Containing(parts), rule: rule.into() }
    }
}

/// A value of the parameters whose names contain a pattern.
#[derive(Clone, Debug, PartialEq)]
pub struct OfParams<T> {
    /// Part of their names.
    pub pattern: String,
    /// Their value.
    pub value: T,
}

/// The precision of parameters of one dtype.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrecisionOf {
    /// Their dtype.
    pub dtype: DType,
    /// How exactly they and their state are kept.
    pub precision: Precision,
}

/// A pattern that counts for parameters of which another pattern says otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// The setting and text that count.
    pub counts: Pattern,
    /// The setting and text that do not.
    pub yields: Pattern,
    /// The first of these parameters.
    pub param: String,
    /// The number of these parameters.
    pub count: usize,
}

/// A setting of some parameters, as it was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    /// Name of the setting.
    pub name: &'static str,
    /// Text of the pattern and its value.
    pub text: String,
}

/// Patterns of which one counts and another yields, in the order of the parameters. Of one setting
/// the last counts; a weight decay counts more than its exclusion.
pub fn overlaps(options: &StepOptions, params: &[ParamDesc]) -> Vec<Overlap> {
    let StepOptions { exclude, weight_decay_of, lr_scale, trust_of, .. } = options;
    let excluded = exclude.iter().map(|part| (("exclude", part.as_str()), "0".to_owned()));
    let decays = excluded.chain(given("weight_decay_of", weight_decay_of, f64::to_string));
    let sets: [Vec<Given<'_>>; 3] = [
        decays.collect(),
        given("lr_scale", lr_scale, f64::to_string).collect(),
        given("trust_of", trust_of, |trust| format!("{trust:?}").to_lowercase()).collect(),
    ];
    let mut found: Vec<Overlap> = Vec::new();
    for (param, set) in params.iter().flat_map(|param| sets.iter().map(move |set| (param, set))) {
        let mut matching = set.iter().filter(|((_, part), _)| param.name.contains(part)).rev();
        let Some(counting) = matching.next() else { continue };
        for yielding in matching.filter(|(_, value)| *value != counting.1) {
            let (counts, yields) = (pattern(counting), pattern(yielding));
            match found.iter_mut().find(|told| told.counts == counts && told.yields == yields) {
                Some(told) => told.count += 1,
                None => {
                    found.push(Overlap { counts, yields, param: param.name.clone(), count: 1 });
                }
            }
        }
    }
    found
}

/// A setting's name and part of names, and the text of its value.
type Given<'a> = ((&'static str, &'a str), String);

fn given<'a, T>(
    name: &'static str,
    all: &'a [OfParams<T>],
    text: impl Fn(&T) -> String,
) -> impl Iterator<Item = Given<'a>> {
    all.iter().map(move |of| ((name, of.pattern.as_str()), text(&of.value)))
}

fn pattern(given: &Given<'_>) -> Pattern {
    let ((name, part), value) = given;
    let part = Quoted(part);
    let text = if *name == "exclude" { part.to_string() } else { format!("{part}={value}") };
    Pattern { name, text }
}

#[cfg(test)]
mod tests {
    use fusestep_tensor::Shape;

    use super::*;

    #[test]
    fn the_last_pattern_counts_and_equal_ones_are_not_told() {
        let of = |part: &str, value: f64| OfParams { pattern: part.to_owned(), value };
        let options = StepOptions {
            exclude: vec!["bias".to_owned(), "0".to_owned()],
            weight_decay_of: vec![of("0", 0.1)],
            lr_scale: vec![of("bias", 2.0), of("0.", 3.0), of("0.w", 3.0)],
            ..StepOptions::default()
        };
        let names = ["0.bias", "0.weight", "1.bias"];
        let shape = Shape::new([1]).unwrap();
        let params = names.map(|name| ParamDesc::new(name, shape.clone(), DType::F32));
        let told = overlaps(&options, &params);
        let texts: Vec<String> = told
            .iter()
            .map(|o| {
                format!(
                    "{} {} {} {} {}",
                    o.counts.name, o.counts.text, o.yields.text, o.param, o.count
                )
            })
            .collect();
        let expected = [
            "weight_decay_of 0=0.1 0 0.bias 2",
            "weight_decay_of 0=0.1 bias 0.bias 1",
            "lr_scale 0.=3 bias=2 0.bias 1",
        ];
        assert_eq!(texts, expected);
    }
}
