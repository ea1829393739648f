//! Scales of values, and ticks at round numbers: a coordinate of `plotters` for values of any size,
//! also none.

use std::ops::Range;

use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};

/// Largest value that is drawn; sums and differences of larger ones are no numbers.
const MOST: f64 = 1e300;

/// Values whose ratio is larger, and all above 0, are drawn by their logarithms.
const WIDE: f64 = 300.0;

/// Share of a value below which others count as equal to it.
const EQUAL: f64 = 1e-9;

/// A range of values, by themselves or by their logarithms.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    low: f64,
    high: f64,
    is_log: bool,
}

impl Scale {
    /// The range of all values that are finite; by logarithms if their ratio is large.
    pub(super) fn of(values: impl Iterator<Item = f64> + Clone) -> Self {
        let known = values.filter(|value| value.abs() <= MOST);
        let (low, high) = bounds(known.clone());
        if low > 0.0 && high / low > WIDE {
            return Self { low: low.log10().floor(), high: high.log10().ceil(), is_log: true };
        }
        Self::between(low, high)
    }

    /// The range of all values that are finite, by themselves.
    pub(super) fn linear(values: impl Iterator<Item = f64>) -> Self {
        let (low, high) = bounds(values.filter(|value| value.abs() <= MOST));
        Self::between(low, high)
    }

    fn between(low: f64, high: f64) -> Self {
        let size = low.abs().max(high.abs());
        let (low, high) = match high - low {
            range if range > EQUAL * size => (low, high),
            _ if size == 0.0 => (-1.0, 1.0),
            _ => (low - 0.5 * size, high + 0.5 * size),
        };
        Self { low, high, is_log: false }
    }

    /// This scale with ticks, `most` or one more.
    pub(super) fn with_ticks(self, most: usize) -> Axis {
        Axis { scale: self, ticks: ticks(&self, most) }
    }

    /// Whether values are drawn by their logarithms.
    pub(super) fn is_log(&self) -> bool {
        self.is_log
    }

    /// Whether a value can be drawn.
    pub(super) fn takes(&self, value: f64) -> bool {
        value.abs() <= MOST && (!self.is_log || value > 0.0)
    }

    /// The place of a value between the range's ends, from 0 to 1.
    pub(super) fn share(&self, value: f64) -> f64 {
        let at = if self.is_log { value.log10() } else { value };
        ((at - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
    }
}

/// A scale and its ticks.
#[derive(Clone, Debug)]
pub(super) struct Axis {
    pub(super) scale: Scale,
    pub(super) ticks: Vec<Tick>,
}

impl Axis {
    /// Label of a tick.
    pub(super) fn label(&self, value: f64) -> String {
        let is_there = |tick: &&Tick| tick.value == value;
        self.ticks.iter().find(is_there).map_or_else(String::new, |tick| tick.label.clone())
    }
}

impl Ranged for Axis {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        let (from, to) = (f64::from(limit.0), f64::from(limit.1));
        (from + (to - from) * self.scale.share(*value)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.ticks.iter().map(|tick| tick.value).collect()
    }

    fn range(&self) -> Range<f64> {
        let value = |at: f64| if self.scale.is_log { 10f64.powf(at) } else { at };
        value(self.scale.low)..value(self.scale.high)
    }
}

fn bounds(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
        (low.min(value), high.max(value))
    });
    if low <= high { (low, high) } else { (0.0, 0.0) }
}

/// A value that is labelled.
#[derive(Clone, Debug)]
pub(super) struct Tick {
    pub(super) value: f64,
    pub(super) label: String,
}

/// Round numbers within the scale, `most` or one more: 1, 2 or 5 times a power of ten lie between
/// two of them.
pub(super) fn ticks(scale: &Scale, most: usize) -> Vec<Tick> {
    if scale.is_log {
        return powers(scale, most);
    }
    let values = round(scale, most);
    let labelled = values.iter().map(|value| Tick { value: *value, label: label(*value, &values) });
    labelled.collect()
}

/// Powers of ten within the scale.
fn powers(scale: &Scale, most: usize) -> Vec<Tick> {
    let distance = ((scale.high - scale.low) / most as f64).ceil().max(1.0) as usize;
    let exponents = (scale.low as i32..=scale.high as i32).step_by(distance);
    let labelled = exponents.map(|exponent| {
        let short = format!("1e{exponent}");
        let value: f64 = short.parse().unwrap_or(f64::NAN);
        let label = if (-4..7).contains(&exponent) { value.to_string() } else { short };
        Tick { value, label }
    });
    labelled.collect()
}

fn round(scale: &Scale, most: usize) -> Vec<f64> {
    let distance = round_up((scale.high - scale.low) / most as f64);
    let (first, last) = ((scale.low / distance).ceil(), (scale.high / distance).floor());
    let count = (last - first).clamp(0.0, most as f64) as i32;
    (0..=count).map(|at| (first + f64::from(at)) * distance).collect()
}

/// The least of 1, 2, 5 times a power of ten that is as large.
fn round_up(distance: f64) -> f64 {
    let power = 10f64.powf(distance.log10().floor());
    let times = [1.0, 2.0, 5.0].into_iter().find(|times| times * power >= distance * (1.0 - 1e-12));
    times.map_or(10.0 * power, |times| times * power)
}

/// A tick as a text, with as many digits as tell it from its neighbours.
fn label(tick: f64, all: &[f64]) -> String {
    let distance = match all {
        [first, second, ..] => second - first,
        _ => tick.abs(),
    };
    let largest = all.iter().fold(0.0, |most: f64, tick| most.max(tick.abs()));
    if tick == 0.0 || largest == 0.0 || distance == 0.0 {
        return "0".to_owned();
    }
    if (1e-4..1e7).contains(&largest) && distance >= 1e-5 {
        let decimals = (-distance.log10()).ceil().clamp(0.0, 5.0) as usize;
        return format!("{tick:.decimals$}");
    }
    // Digits from the tick's first to the distance of its neighbours.
    let digits = (tick.abs().log10().floor() - distance.log10().floor()).clamp(0.0, 9.0) as usize;
    format!("{tick:.digits$e}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(values: &[f64]) -> Vec<String> {
        let marks = ticks(&Scale::of(values.iter().copied()), 5);
        marks.into_iter().map(|mark| mark.label).collect()
    }

    #[test]
    fn ticks_are_round_and_labels_differ() {
        for (values, expected) in [
            (&[0.0, 1.0][..], &["0", "0.2", "0.4", "0.6", "0.8", "1.0"][..]),
            (&[0.31, 2.4], &["0.5", "1.0", "1.5", "2.0"]),
            (&[-3.0, 7.0], &["-2", "0", "2", "4", "6"]),
            (&[1.0, 45.0], &["10", "20", "30", "40"]),
            (&[2e-3, 2e-3], &["0.0010", "0.0015", "0.0020", "0.0025", "0.0030"]),
            (&[0.0, 3.1e9], &["0", "1e9", "2e9", "3e9"]),
            (&[1e-9, 2e-9], &["1.0e-9", "1.2e-9", "1.4e-9", "1.6e-9", "1.8e-9", "2.0e-9"]),
            (&[1e-3, 1.0], &["0.001", "0.01", "0.1", "1"]),
            (&[1e-12, 40.0], &["1e-12", "1e-9", "1e-6", "0.001", "1"]),
            (&[0.0], &["-1.0", "-0.5", "0", "0.5", "1.0"]),
        ] {
            assert_eq!(labels(values), expected, "{values:?}");
        }
    }

    #[test]
    fn ticks_are_few_and_different_at_any_size() {
        for low in [-1e300, -1.0, 0.0, 1e-300, 0.1, 123_456.789] {
            for distance in [0.0, 1e-300, 1e-6, 0.7, 3e5, 1e300] {
                let labels = labels(&[low, low + distance]);
                assert!((1..=7).contains(&labels.len()), "{low} {distance}: {labels:?}");
                let different: std::collections::BTreeSet<&String> = labels.iter().collect();
                assert_eq!(different.len(), labels.len(), "{low} {distance}: {labels:?}");
                assert!(labels.iter().all(|label| label.len() <= 14), "{labels:?}");
            }
        }
    }
}
