//! Any bytes as a file of tensors.

use std::path::Path;

use fusestep_tensor_file::{TensorFile, serialize};

use crate::Outcome;

pub(crate) fn run(input: &[u8]) -> Outcome {
    let path = Path::new("input");
    let file = match TensorFile::parse(path, input.to_vec()) {
        Ok(file) => file,
        Err(error) => return Ok(error.to_string()),
    };
    let tensors: Vec<_> = file
        .entries()
        .iter()
        .map(|(name, entry)| (name.clone(), entry.with_bytes(file.bytes(name).unwrap_or_default())))
        .collect();
    let written =
        serialize(path, &tensors, file.metadata().clone()).map_err(|error| error.to_string())?;
    let again = TensorFile::parse(path, written).map_err(|error| error.to_string())?;
    let same = again.metadata() == file.metadata()
        && again.entries().len() == file.entries().len()
        && file.entries().iter().all(|(name, entry)| {
            let other = &again.entries()[name];
            (&other.dtype, &other.shape) == (&entry.dtype, &entry.shape)
                && again.bytes(name) == file.bytes(name)
        });
    if same {
        Ok(format!("{} tensors", tensors.len().min(3)))
    } else {
        Err("written again it reads as something else".to_owned())
    }
}
