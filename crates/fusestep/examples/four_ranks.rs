//! Four ranks as threads, each with a gradient of its own and a quarter of the optimizer's state.

use fusestep::{Cpu, DType, Error, ParamDesc, Sgd, Shape};

pub(crate) fn main() -> Result<(), Error> {
    let params = [ParamDesc::new("w", Shape::new([1000])?, DType::F32)];
    let found = fusestep::threads(4, |comm| {
        let rank = comm.rank() as f32;
        let mut opt = Sgd::new(0.5).zero(1).on(comm).build(&params, Cpu::new())?;
        opt.grad_mut::<f32>("w")?.fill(rank);
        opt.step()?;
        Ok(opt.param::<f32>("w")?.to_vec())
    })?;
    // The mean of 0, 1, 2 and 3 times the learning rate, on every rank.
    let expected = vec![-0.75; 1000];
    if found.iter().any(|params| *params != expected) {
        return Err(format!("expected -0.75, found {}", found[0][0]).into());
    }
    println!("four ranks agree on {}", found[0][0]);
    Ok(())
}
