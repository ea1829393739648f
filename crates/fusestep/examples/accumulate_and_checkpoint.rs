//! Four ranks that add the gradients of four micro-steps, save as they go, and go on where a run
//! before has ended.

use std::path::Path;

use fusestep::{AdamW, Cpu, DType, Error, ParamDesc, Shape};

pub(crate) fn main() -> Result<(), Error> {
    let name = format!("fusestep-example-{}", std::process::id());
    let folder = std::env::temp_dir().join(name);
    let halves = (train(150, &folder)?, train(400, &folder)?);
    std::fs::remove_dir_all(&folder)?;
    let whole = train(400, &folder)?;
    std::fs::remove_dir_all(&folder)?;
    if halves.1 != whole || halves.0 == whole {
        return Err("expected a run in two halves to end as one in a piece".into());
    }
    println!("400 steps in two halves end as 400 in a piece");
    Ok(())
}

/// Trains up to `steps` micro-steps; the parameters of rank 0.
fn train(steps: usize, folder: &Path) -> Result<Vec<f32>, Error> {
    let params = [ParamDesc::new("w", Shape::new([1000])?, DType::F32)];
    let found = fusestep::threads(4, |comm| {
        let rank = comm.rank();
        let opt = AdamW::new(1e-3).zero(2).accumulate(4);
        let mut opt = opt.on(comm).build(&params, Cpu::new())?;
        let first = opt.resume(folder)?;
        for (step, batch) in data(rank).take(steps).enumerate().skip(first) {
            backward(batch, |name, g| Ok(opt.push_grad(name, g)?))?;
            opt.step()?;
            // Written while training goes on; an error is the next call's.
            opt.checkpoint_every(50, folder, step)?;
        }
        opt.finish_saves()?;
        Ok(opt.param::<f32>("w")?.to_vec())
    })?;
    Ok(found.into_iter().next().unwrap_or_default())
}

/// The batches of one rank.
fn data(rank: usize) -> impl Iterator<Item = usize> {
    (0..).map(move |batch| 4 * batch + rank)
}

/// Stands for a backward pass, which gives gradients as it finds them.
fn backward(
    batch: usize,
    mut give: impl FnMut(&str, &[f32]) -> Result<(), Error>,
) -> Result<(), Error> {
    let gradient: Vec<f32> = (0..1000).map(|at| ((at * batch) % 17) as f32 - 8.0).collect();
    give("w", &gradient)
}
