//! Writes a small file and lists it, or lists the file that is named: no tensor is copied.
//!
//! `cargo run --release -p fusestep-tensor-file --example list -- model.safetensors`

use std::collections::HashMap;
use std::error::Error;
use std::path::PathBuf;

use fusestep_tensor::{DType, Shape};
use fusestep_tensor_file::{TensorBytes, TensorFile, write_atomically};

fn main() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let path = match std::env::args_os().nth(1) {
        Some(path) => PathBuf::from(path),
        None => {
            let path = folder.path().join("model.safetensors");
            let bytes = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0].map(f32::to_le_bytes).concat();
            let shape = Shape::new([2, 3])?;
            let tensor = TensorBytes::of(DType::F32, &shape, bytes.as_slice().into());
            write_atomically(&path, &[("weight".to_owned(), tensor)], HashMap::new())?;
            path
        }
    };
    let file = TensorFile::read(&path)?;
    for (name, entry) in file.entries() {
        println!("{name}: {} {:?}", entry.dtype_name(), entry.shape.dims());
    }
    Ok(())
}
