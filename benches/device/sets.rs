//! Parameter sets by name.

use std::error::Error;
use std::path::Path;

use fusestep_tensor::{DType, ParamDesc, Shape};
use serde::Deserialize;

/// The set that is one gradient, of which only the norm is taken.
pub(crate) const NORM: &str = "norm_1e9";

/// Elements of [`NORM`].
pub(crate) const NORM_ELEMENTS: u64 = 1_000_000_000;

/// Every set, in the order of the table.
pub(crate) const NAMES: [&str; 8] =
    ["10x16.8M", "200x1.05M", "10000x64", "1000x1024", "resnet50", "gpt2", "bert_large", NORM];

/// Names and element counts.
#[derive(Debug)]
pub(crate) struct Set {
    /// The name on the command line.
    pub(crate) name: String,
    tensors: Vec<(String, u64)>,
}

impl Set {
    /// Elements of all tensors.
    pub(crate) fn elements(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.1).sum()
    }

    /// Elements of the largest tensor.
    pub(crate) fn most_elements(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.1).max().unwrap_or(0)
    }

    /// The parameters, of one dtype.
    pub(crate) fn params(&self, dtype: DType) -> Result<Vec<ParamDesc>, Box<dyn Error>> {
        let params = self.tensors.iter().map(|(name, numel)| {
            let shape = Shape::new([*numel])?;
            Ok(ParamDesc::new(name, shape, dtype))
        });
        params.collect()
    }
}

#[derive(Deserialize)]
struct NamedShape {
    name: String,
    shape: Shape,
}

/// A set, with counts of like tensors and all numels divided by `scale` and rounded up.
///
/// # Errors
/// If a model's file is not in `shapes` or is no list of named shapes.
pub(crate) fn set(name: &str, shapes: &Path, scale: u64) -> Result<Set, Box<dyn Error>> {
    let alike = |count: u64, numel: u64| {
        let tensors =
            (0..count.div_ceil(scale)).map(|i| (format!("tensor.{i}"), numel.div_ceil(scale)));
        tensors.collect()
    };
    let tensors = match name {
        "10x16.8M" => alike(10, 1 << 24),
        "200x1.05M" => alike(200, 1 << 20),
        "1000x1024" => alike(1000, 1024),
        "10000x64" => alike(10_000, 64),
        model => {
            let path = shapes.join(format!("{model}.json"));
            let text = std::fs::read_to_string(&path).map_err(|error| {
                format!("{}: {error}; give its folder by --shapes", path.display())
            })?;
            let named: Vec<NamedShape> = serde_json::from_str(&text)?;
            let tensors = named.into_iter().map(|entry| {
                let numel = ParamDesc::new(&entry.name, entry.shape, DType::F32).numel();
                (entry.name, numel.div_ceil(scale))
            });
            tensors.collect()
        }
    };
    Ok(Set { name: name.to_owned(), tensors })
}
