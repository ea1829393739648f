//! Ten steps against numbers that an independent script computed.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::Path;

use bytemuck::pod_collect_to_vec;
use fusestep_cpu::CpuBackend;
use fusestep_planner::{Optimizer, Planner, RunAlone};
use fusestep_tensor::{DType, ParamDesc, Role, Shape};
use safetensors::SafeTensors;

/// Steps of the script.
const STEPS: usize = 10;

/// The settings of one case, as JSON in the file's metadata.
#[derive(Debug)]
pub(crate) struct Settings(serde_json::Value);

impl Settings {
    /// A number of the case.
    pub(crate) fn number(&self, key: &str) -> f64 {
        self.0[key].as_f64().unwrap_or_else(|| panic!("no number `{key}` in {self:?}"))
    }
}

/// Requires of every case in `tests/golden/STEM.safetensors` that ten steps in f64 are the script's
/// up to 1e-12 of the update's largest element, and in f32 up to 1e-5.
pub(crate) fn agree(stem: &str, rule: impl Fn(&Settings) -> Optimizer) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("golden/{stem}.safetensors"));
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let metadata: BTreeMap<String, String> =
        header.metadata().clone().unwrap().into_iter().collect();
    let mut cases = 0;
    for (key, settings) in &metadata {
        let Some(case) = key.strip_prefix("case.") else {
            continue;
        };
        cases += 1;
        let settings = Settings(serde_json::from_str(settings).unwrap());
        let optimizer = rule(&settings);
        for (dtype, bound) in [(DType::F64, 1e-12), (DType::F32, 1e-5)] {
            compare(&file, case, optimizer, &settings, dtype, bound);
        }
    }
    assert!(cases >= 4, "{cases} cases in {}", path.display());
}

fn compare(
    file: &SafeTensors<'_>,
    case: &str,
    optimizer: Optimizer,
    settings: &Settings,
    dtype: DType,
    bound: f64,
) {
    let numbers = |name: &str| -> Vec<f64> {
        let tensor = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        pod_collect_to_vec(tensor.data())
    };
    // Tensors have their own decay and rate factor: what the script does by hand, the plan does by
    // groups.
    let names = ["0", "1", "2", "3"];
    let params: Vec<ParamDesc> = names
        .iter()
        .map(|name| {
            let numel = numbers(&format!("{name}.param.0")).len() as u64;
            let mut param = ParamDesc::new(*name, Shape::new([numel]).unwrap(), dtype);
            if *name == "2" {
                param.weight_decay = Some(0.0);
            }
            if *name == "3" {
                param.lr_scale = settings.number("lr_scale_of_3");
            }
            param
        })
        .collect();
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let plan = Planner::new(optimizer).plan(&params).unwrap();
    let mut state = plan.allocate(&backend).unwrap();
    let bytes = |values: &[f64]| -> Vec<u8> {
        match dtype {
            DType::F64 => bytemuck::cast_slice(values).to_vec(),
            _ => values.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect(),
        }
    };
    for name in names {
        let first = bytes(&numbers(&format!("{name}.param.0")));
        state.write(&backend, Role::Param, name, &first).unwrap();
    }
    for step in 1..=STEPS {
        for name in names {
            let grad = bytes(&numbers(&format!("{name}.grad.{step}")));
            state.write(&backend, Role::Grad, name, &grad).unwrap();
        }
        RunAlone::of(&plan, &mut state, &backend).step_all().unwrap();
    }
    for name in names {
        let first = numbers(&format!("{name}.param.0"));
        let expected = numbers(&format!("{case}.{name}.param.{STEPS}"));
        let mut found = vec![0; first.len() * dtype.len_bytes()];
        state.read(&backend, Role::Param, name, &mut found).unwrap();
        let found: Vec<f64> = match dtype {
            DType::F64 => pod_collect_to_vec(&found),
            _ => pod_collect_to_vec::<u8, f32>(&found).into_iter().map(f64::from).collect(),
        };
        let what = format!("{case}, {dtype}, tensor {name}");
        near(&what, [&first, &expected, &found], dtype, bound);
    }
}

/// Requires of parameters that went from `first` to `expected` that `found` is within `bound` of
/// the largest update.
fn near(what: &str, [first, expected, found]: [&[f64]; 3], dtype: DType, bound: f64) {
    let moved = expected.iter().zip(first).map(|(p, f)| (p - f).abs());
    let update = moved.fold(0.0, f64::max);
    assert!(update > 0.0, "{what}: the script did nothing");
    // An f32 parameter has a rounding of its own besides that of its update.
    let own = if dtype == DType::F32 { 4e-7 } else { 1e-15 };
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(
            (found - expected).abs() <= bound * update + own * expected.abs(),
            "{what}, element {at}: expected {expected}, found {found}"
        );
    }
}
