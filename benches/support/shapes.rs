//! Parameter sets.

use std::path::Path;

use fusestep_tensor::{DType, ParamDesc, Shape};
use serde::Deserialize;

/// Named parameters, all f32.
#[derive(Debug)]
pub(crate) struct Set {
    /// The name in benchmark ids.
    pub(crate) name: &'static str,
    /// The parameters.
    pub(crate) params: Vec<ParamDesc>,
}

impl Set {
    /// Elements of all parameters.
    pub(crate) fn elements(&self) -> u64 {
        self.params.iter().map(ParamDesc::numel).sum()
    }
}

#[derive(Deserialize)]
struct NamedShape {
    name: String,
    shape: Shape,
}

/// The parameters of `data/shapes/<model>.json`.
///
/// # Panics
/// If there is no such file: it is part of the repository.
pub(crate) fn model(model: &'static str) -> Set {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/shapes");
    let path = folder.join(format!("{model}.json"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let shapes: Vec<NamedShape> = serde_json::from_str(&text).expect("a list of named shapes");
    let params = shapes.into_iter().map(|s| ParamDesc::new(s.name, s.shape, DType::F32));
    Set { name: model, params: params.collect() }
}

/// 10,000 tensors of 64 to 512 elements.
pub(crate) fn tiny() -> Set {
    Set { name: "tiny_10000", params: params((0..10_000).map(|i| 64 + i * 7 % 449)) }
}

fn params(numels: impl IntoIterator<Item = u64>) -> Vec<ParamDesc> {
    let params = numels.into_iter().enumerate().map(|(index, numel)| {
        let shape = Shape::new([numel]).expect("a count is a shape");
        ParamDesc::new(format!("tensor.{index}"), shape, DType::F32)
    });
    params.collect()
}
