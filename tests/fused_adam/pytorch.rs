//! Ten steps against PyTorch's Adam and AdamW.

use std::collections::HashMap;

use bytemuck::pod_collect_to_vec;
use fusestep_elementwise::Compute;
use fusestep_fused_adam::{Adam, Objective, SecondMoment, WeightDecay};
use safetensors::SafeTensors;
use serde::Deserialize;

use crate::Trained;

/// What `tests/golden/fused_adam.py` wrote.
const GOLDEN: &[u8] = include_bytes!("../golden/fused_adam.safetensors");

/// Settings of one golden case, as its script writes them.
#[derive(Deserialize)]
struct Settings {
    lr: f64,
    beta1: f64,
    beta2: f64,
    eps: f64,
    weight_decay: f64,
    decay: String,
    amsgrad: bool,
    maximize: bool,
}

impl Settings {
    fn adam(&self) -> Adam {
        Adam {
            lr: self.lr,
            beta1: self.beta1,
            beta2: self.beta2,
            eps: self.eps,
            weight_decay: match self.decay.as_str() {
                "decoupled" => WeightDecay::Decoupled(self.weight_decay),
                "l2" => WeightDecay::L2(self.weight_decay),
                other => panic!("unknown decay `{other}`"),
            },
            second_moment: if self.amsgrad { SecondMoment::Largest } else { SecondMoment::Running },
            objective: if self.maximize { Objective::Maximize } else { Objective::Minimize },
        }
    }
}

/// ‖found − expected‖ / ‖expected − start‖, or 0 if nothing differs.
fn relative_difference(start: &[f64], expected: &[f64], found: &[f64]) -> f64 {
    assert_eq!(expected.len(), found.len());
    let norm = |a: &[f64], b: &[f64]| {
        let squares = a.iter().zip(b).map(|(a, b)| (a - b) * (a - b));
        squares.sum::<f64>().sqrt()
    };
    match norm(found, expected) {
        0.0 => 0.0,
        difference => difference / norm(expected, start),
    }
}

/// Trains as the golden case did and returns the largest relative difference of the total update of
/// any list.
fn differ_from_golden<T: Compute + Into<f64>>(
    golden: &SafeTensors<'_>,
    case: &str,
    adam: Adam,
    numel: usize,
) -> f64 {
    let read = |name: String| pod_collect_to_vec::<u8, T>(golden.tensor(&name).unwrap().data());
    let wide = |values: &[T]| values.iter().map(|&x| x.into()).collect::<Vec<f64>>();
    let key = format!("{}.{numel}", T::DTYPE);
    let start = read(format!("{key}.param.0"));
    assert_eq!(start.len(), numel);
    let mut trained = Trained::new(adam, start.clone());
    let mut worst = 0.0f64;
    for step in 1..=10 {
        trained.step(&read(format!("{key}.grad.{step}")));
        if [1, 2, 10].contains(&step) {
            let expected = wide(&read(format!("{case}.{key}.param.{step}")));
            let found = wide(&trained.lists[0]);
            worst = worst.max(relative_difference(&wide(&start), &expected, &found));
        }
    }
    let lists = match adam.second_moment {
        SecondMoment::Running => 2,
        SecondMoment::Largest => 3,
    };
    let names = ["moment1", "moment2", "max_moment2"];
    for (name, found) in names.iter().zip(&trained.lists[1..]).take(lists) {
        let expected = wide(&read(format!("{case}.{key}.{name}.10")));
        let zeros = vec![0.0; numel];
        worst = worst.max(relative_difference(&zeros, &expected, &wide(found)));
    }
    worst
}

#[test]
fn ten_steps_agree_with_pytorch() {
    let golden = SafeTensors::deserialize(GOLDEN).unwrap();
    let (_, header) = SafeTensors::read_metadata(GOLDEN).unwrap();
    let metadata: &HashMap<String, String> = header.metadata().as_ref().unwrap();
    let (mut cases, mut worst) = (0, (0.0f64, 0.0f64));
    for (key, settings) in metadata {
        let Some(case) = key.strip_prefix("case.") else {
            continue;
        };
        cases += 1;
        let adam = serde_json::from_str::<Settings>(settings).unwrap().adam();
        for numel in [0, 1, 17, 257] {
            let single = differ_from_golden::<f32>(&golden, case, adam, numel);
            assert!(single <= 1e-5, "{case}, f32, {numel} elements: {single:e}");
            let double = differ_from_golden::<f64>(&golden, case, adam, numel);
            assert!(double <= 1e-12, "{case}, f64, {numel} elements: {double:e}");
            worst = (worst.0.max(single), worst.1.max(double));
        }
    }
    println!("largest relative difference: f32 {:e}, f64 {:e}", worst.0, worst.1);
    assert_eq!(cases, 9, "the script's cases; {:?}", metadata.get("versions"));
}

#[test]
fn the_golden_comparison_can_fail() {
    let golden = SafeTensors::deserialize(GOLDEN).unwrap();
    let wrong = Adam { lr: 1.00002e-3, ..Adam::default() };
    assert!(differ_from_golden::<f32>(&golden, "adamw", Adam::default(), 257) <= 1e-5);
    assert!(differ_from_golden::<f32>(&golden, "adamw", wrong, 257) > 1e-5);
    assert!(differ_from_golden::<f64>(&golden, "adamw", wrong, 257) > 1e-12);
}
