//! AdamW with moments of 8 bits beside an independent script, bit for bit.

use fusestep_fused_adam::{Adam, CodedAdamTensors, WeightDecay};
use half::bf16;
use safetensors::SafeTensors;
use serde::Deserialize;

use super::{CodedState, List, ParamSlices};

/// Results of `tests/golden/coded.py`.
const GOLDEN: &[u8] = include_bytes!("../golden/coded.safetensors");

/// Settings of one golden case, as its script writes them.
#[derive(Clone, Copy, Deserialize)]
struct Settings {
    lr: f64,
    beta1: f64,
    beta2: f64,
    eps: f64,
    weight_decay: f64,
    remainder: bool,
}

impl Settings {
    fn adam(self) -> Adam {
        let Self { lr, beta1, beta2, eps, weight_decay, .. } = self;
        let weight_decay = WeightDecay::Decoupled(weight_decay);
        Adam { lr, beta1, beta2, eps, weight_decay, ..Adam::default() }
    }
}

/// A case for one element count.
struct Case<'a> {
    file: &'a SafeTensors<'a>,
    name: String,
}

impl Case<'_> {
    fn bytes(&self, list: &str, step: u64) -> Vec<u8> {
        self.file.tensor(&format!("{}.{list}.{step}", self.name)).unwrap().data().to_vec()
    }

    fn list<T: bytemuck::Pod>(&self, list: &str, step: u64) -> Vec<T> {
        bytemuck::pod_collect_to_vec(&self.bytes(list, step))
    }

    /// Whether bits are those of the file after every step that it keeps.
    fn agrees(&self, adam: &Adam, remainder: bool, numel: usize) -> bool {
        let (mut wide, mut narrow, mut rest) = (Vec::new(), Vec::new(), Vec::new());
        if remainder {
            narrow = self.list::<bf16>("param", 0);
            rest = self.list::<i8>("remainder", 0);
        } else {
            wide = self.list::<f32>("param", 0);
        }
        let (mut moment1, mut moment2) = (List::zeros(numel), List::zeros(numel));
        for step in 1..=10 {
            let (wide_grad, narrow_grad): (Vec<f32>, Vec<bf16>);
            let param = if remainder {
                narrow_grad = self.list("grad", step);
                let (param, remainder) = (&mut narrow[..], &mut rest[..]);
                ParamSlices::Bf16Remainder8 { param, remainder, grad: &narrow_grad }
            } else {
                wide_grad = self.list("grad", step);
                ParamSlices::F32 { param: &mut wide, grad: &wide_grad }
            };
            let [moment1_list, moment2_list] = [&mut moment1, &mut moment2]
                .map(|list| CodedState { codes: &mut list.codes, units: &mut list.units });
            let tensor = CodedAdamTensors {
                param,
                moment1: moment1_list,
                moment2: moment2_list,
                max_moment2: None,
            };
            adam.step_coded(step, &mut [tensor]).unwrap();
            let param: &[u8] =
                if remainder { bytemuck::cast_slice(&narrow) } else { bytemuck::cast_slice(&wide) };
            let mut same = true;
            if [1, 2, 10].contains(&step) {
                same &= param == self.bytes("param", step);
                same &= !remainder || rest == self.list::<i8>("remainder", step);
                same &= moment1.codes == self.bytes("moment1_codes", step);
                same &= moment1.units == self.list::<f32>("moment1_units", step);
                same &= moment2.codes == self.bytes("moment2_codes", step);
                same &= moment2.units == self.list::<f32>("moment2_units", step);
            }
            if !same {
                return false;
            }
        }
        true
    }
}

#[test]
fn ten_steps_have_the_bits_of_the_definition_in_numpy() {
    let file = SafeTensors::deserialize(GOLDEN).unwrap();
    let (_, header) = SafeTensors::read_metadata(GOLDEN).unwrap();
    let cases = header.metadata().as_ref().unwrap().iter();
    let cases = cases.filter_map(|(key, text)| Some((key.strip_prefix("case.")?, text)));
    let mut checked = 0;
    for (name, text) in cases {
        let settings: Settings = serde_json::from_str(text).unwrap();
        for numel in [1, 31, 33, 100] {
            let case = Case { file: &file, name: format!("{name}.{numel}") };
            let adam = settings.adam();
            assert!(case.agrees(&adam, settings.remainder, numel), "{name}, {numel} elements");
            // The comparison can fail.
            let wrong = Adam { beta2: adam.beta2 * 0.9999, ..adam };
            assert!(!case.agrees(&wrong, settings.remainder, numel), "{name}, {numel} elements");
            checked += 1;
        }
    }
    assert_eq!(checked, 12);
}
