//! One process: a plan that is printed, a gradient written through its view, a step.

use fusestep::{AdamW, Cpu, DType, Error, ParamDesc, Shape};

pub(crate) fn main() -> Result<(), Error> {
    let weight = Shape::new([128, 64])?;
    let params = [ParamDesc::new("encoder.0.weight", weight, DType::F32)];
    let g = vec![0.5; 128 * 64];

    let mut opt = AdamW::new(1e-3).clip_norm(1.0).build(&params, Cpu::new())?;
    println!("{}", opt.plan());
    opt.grad_mut::<f32>("encoder.0.weight")?.copy_from_slice(&g);
    let report = opt.step()?;

    println!("{report:?}");
    let first = opt.param::<f32>("encoder.0.weight")?[0];
    if (first + 1e-3).abs() > 1e-5 {
        return Err(format!("expected a first step of the learning rate, found {first}").into());
    }
    Ok(())
}
