//! A planned step in one process and on two ranks, with the same bits.
#![forbid(unsafe_code)]

use fusestep::{AdamW, Cpu, DType, Error, ParamDesc, Shape};

fn main() -> Result<(), Error> {
    let params = [
        ParamDesc::new("weight", Shape::new([128, 64])?, DType::F32),
        ParamDesc::new("bias", Shape::new([128])?, DType::F32),
    ];
    let names = ["weight", "bias"];
    let builder = || AdamW::new(1e-3).clip_norm(1.0);

    let mut alone = builder().build(&params, Cpu::new())?;
    for name in names {
        alone.grad_mut::<f32>(name)?.fill(0.25);
    }
    alone.step()?;

    // The mean of both ranks' gradients is what one process has alone.
    let found = fusestep::threads(2, |comm| {
        let grad = [0.0f32, 0.5][comm.rank()];
        let mut ranks = builder().zero(2).on(comm).build(&params, Cpu::new())?;
        for name in names {
            let numel = ranks.param::<f32>(name)?.len();
            ranks.push_grad(name, &vec![grad; numel])?;
        }
        ranks.step()?;
        Ok([
            ranks.param::<f32>("weight")?.to_vec(),
            ranks.param::<f32>("bias")?.to_vec(),
        ])
    })?;
    for (at, name) in names.into_iter().enumerate() {
        let expected = alone.param::<f32>(name)?;
        assert!(
            expected.iter().all(|value| (value + 1e-3).abs() < 1e-6),
            "found {expected:?}"
        );
        assert!(
            found.iter().all(|rank| rank[at] == expected),
            "ranks differ in {name}"
        );
    }
    println!("facade: one process and two ranks agree");
    Ok(())
}
