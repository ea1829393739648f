//! Texts in checkpoints, and what a run that was resumed begins with.

use std::path::Path;

use fusestep::{AdamW, Cpu, DType, Error, ParamDesc, Shape};

const NUMEL: usize = 100;

#[test]
fn what_ranks_remember_is_in_their_checkpoint() -> Result<(), Error> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("remembered");
    let _ = std::fs::remove_dir_all(&folder);
    let param = || -> Result<_, Error> {
        let shape = Shape::new([NUMEL as u64])?;
        Ok([ParamDesc::new("a", shape, DType::F32)])
    };
    let train = |resumes: bool| {
        fusestep::threads(2, |comm| {
            let mut opt = AdamW::new(1e-2).on(comm).build(&param()?, Cpu::new())?;
            if !resumes {
                opt.remember("rng", "state 7");
            }
            let resumed = if resumes { opt.resume(&folder)? } else { 0 };
            opt.push_grad("a", &[1.0_f32; NUMEL])?;
            if resumes {
                opt.flush()?;
            } else {
                opt.step()?;
                opt.save(&folder, 1)?;
                // Told once.
                assert!(opt.take_saved().is_some() && opt.take_saved().is_none());
            }
            Ok((resumed, opt.remembered("rng").map(str::to_owned)))
        })
    };
    for resumes in [false, true] {
        for (resumed, told) in train(resumes)? {
            assert_eq!((resumed, told.as_deref()), (usize::from(resumes), Some("state 7")));
        }
    }
    Ok(())
}

#[test]
fn ranks_of_other_rates_hear_of_it_in_a_flush_that_comes_first() {
    let shape = Shape::new([NUMEL as u64]).unwrap();
    let param = [ParamDesc::new("a", shape, DType::F32)];
    let many = fusestep::threads(2, |comm| {
        let lr = [1e-2, 1e-3][comm.rank()];
        let mut opt = AdamW::new(lr).on(comm).build(&param, Cpu::new())?;
        opt.flush()?;
        Ok(())
    });
    let error = many.unwrap_err().to_string();
    assert!(error.contains("lr"), "{error}");
}
