//! Losses of runs whose state is in int8, beside those of runs in f32 from other seeds.

use serde_json::Value;

use crate::ok;

/// Ways to keep state in int8.
const CODED: [&[&str]; 2] = [
    &["--state-dtype", "int8"],
    &["--state-dtype", "int8", "--dtype", "bf16", "--master-weights", "remainder8"],
];

/// The training loss and the test loss that a run ends with.
fn losses(run: &[&str], seed: u64, kept: &[&str]) -> [f64; 2] {
    let seed = seed.to_string();
    let text = ok(&[&["train", "--json", "-q", "--seed", &seed], run, kept].concat());
    let report: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    ["final_loss", "test_loss"].map(|name| report[name].as_f64().unwrap())
}

/// Losses in codes lie nearer to those in f32 from the same seed than other seeds' do. Their mean
/// over the seeds is within a quarter of the seeds' spread.
fn within_the_spread(run: &[&str], seeds: u64) {
    let of_seeds =
        |kept: &[&str]| -> Vec<_> { (1..=seeds).map(|seed| losses(run, seed, kept)).collect() };
    let wide = of_seeds(&[]);
    for kept in CODED {
        let coded = of_seeds(kept);
        for loss in 0..2 {
            let of_wide: Vec<f64> = wide.iter().map(|losses| losses[loss]).collect();
            let most = of_wide.iter().copied().fold(f64::MIN, f64::max);
            let spread = most - of_wide.iter().copied().fold(f64::MAX, f64::min);
            let pairs = coded.iter().zip(&of_wide);
            let differences: Vec<f64> = pairs.map(|(coded, wide)| coded[loss] - wide).collect();
            let mean = differences.iter().sum::<f64>() / seeds as f64;
            let found = format!("{run:?} {kept:?}: {differences:?}, between seeds {spread}");
            let within = differences.iter().all(|difference| difference.abs() < spread);
            assert!(spread > 0.0 && within, "{found}");
            assert!(mean.abs() < spread / 4.0, "{found}");
        }
    }
}

#[test]
fn digits_learn_in_codes_as_in_f32() {
    within_the_spread(&["--epochs", "8"], 5);
}

#[test]
fn a_transformer_learns_in_codes_as_in_f32() {
    let small = ["--layers", "1", "--width", "48", "--context", "16", "--epochs", "1"];
    within_the_spread(&[&["--model", "transformer"], &small[..]].concat(), 3);
}
