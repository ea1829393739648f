//! One loop, first in one process, then in every process that a launcher has started. Two lines
//! differ.
//!
//! `cargo run --release -p fusestep --example quickstart`

use fusestep::{AdamW, Cpu, DType, Error, ParamDesc, Shape};

pub(crate) fn main() -> Result<(), Error> {
    let batches: Vec<f32> = (0..100).map(|batch| (batch % 7) as f32).collect();
    let (ranks, many) = many_processes(&batches)?;
    println!("{ranks} ranks end with {}", many[0]);
    // One process takes all batches, as a world of one does.
    if ranks == 1 && one_process(&batches)? != many {
        return Err("expected a world of one to end as one process".into());
    }
    Ok(())
}

fn one_process(batches: &[f32]) -> Result<Vec<f32>, Error> {
    let params = [ParamDesc::new("w", Shape::new([1000])?, DType::F32)];
    let mut opt = AdamW::new(1e-3).build(&params, Cpu::new())?;
    for batch in batches {
        let gradient = backward(opt.param("w")?, *batch);
        opt.push_grad("w", &gradient)?;
        opt.step()?;
    }
    Ok(opt.param("w")?.to_vec())
}

fn many_processes(batches: &[f32]) -> Result<(usize, Vec<f32>), Error> {
    let params = [ParamDesc::new("w", Shape::new([1000])?, DType::F32)];
    let mut world = fusestep::world()?;
    let mut opt = AdamW::new(1e-3).zero(1).on(world.as_mut()).build(&params, Cpu::new())?;
    for batch in batches {
        let gradient = backward(opt.param("w")?, *batch);
        opt.push_grad("w", &gradient)?;
        opt.step()?;
    }
    Ok((opt.communicator().world_size(), opt.param("w")?.to_vec()))
}

/// Stands for a backward pass: the gradient of the squared distance between `w` and the batch.
fn backward(w: &[f32], batch: f32) -> Vec<f32> {
    w.iter().map(|w| 2.0 * (w - batch)).collect()
}
