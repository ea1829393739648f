//! Rates and settings that one rank alone changes between steps: every rank hears which.

use fusestep::{AdamW, Cpu, DType, Error, ParamDesc, Session, Shape};

fn params() -> Vec<ParamDesc> {
    let of = |name| ParamDesc::new(name, Shape::new([5]).unwrap(), DType::F32);
    ["a", "b"].map(of).to_vec()
}

fn step(opt: &mut Session<'_>) -> Result<(), Error> {
    opt.push_grad("a", &[1.0_f32; 5])?;
    opt.push_grad("b", &[1.0_f32; 5])?;
    opt.step()?;
    Ok(())
}

#[test]
fn a_rate_that_one_rank_alone_changes_is_named_on_all_by_the_next_step() {
    for (zero, streams, in_backward) in
        [(0, 0, false), (0, 2, false), (2, 0, false), (3, 2, false), (0, 1, true), (2, 0, true)]
    {
        let told = fusestep::threads(2, |comm| {
            let rank = comm.rank();
            let mut asked = AdamW::new(1e-2).zero(zero).comm_streams(streams);
            if in_backward {
                asked = asked.bucket_cap_mib(1e-5).update_in_backward();
            }
            let mut opt = asked.on(comm).build(&params(), Cpu::new())?;
            step(&mut opt)?;
            opt.state_mut().set_lr(0.5)?;
            step(&mut opt)?;
            if rank == 1 {
                opt.state_mut().set_lr(0.25)?;
            }
            Ok::<_, Error>(step(&mut opt).unwrap_err().to_string())
        });
        for told in told.unwrap() {
            let named = told.starts_with("lr: expected 0.5 as on rank 0, found 0.25 on rank 1");
            assert!(named, "{zero} {streams} {in_backward}: {told}");
        }
    }
}

#[test]
fn a_parameter_that_ranks_have_not_set_alike_is_named_on_all_by_the_next_step() {
    for (zero, in_backward) in [(0, false), (2, false), (0, true), (2, true)] {
        for of_rank_1 in [Some(2.0_f32), None] {
            let told = fusestep::threads(2, |comm| {
                let rank = comm.rank();
                let mut asked = AdamW::new(1e-2).zero(zero);
                if in_backward {
                    asked = asked.bucket_cap_mib(1e-5).update_in_backward();
                }
                let mut opt = asked.on(comm).build(&params(), Cpu::new())?;
                step(&mut opt)?;
                // Set in another order, and twice: what counts is what they have in the end.
                for name in if rank == 0 { ["a", "b"] } else { ["b", "a"] } {
                    opt.set_param(name, &[0.5_f32; 5])?;
                }
                if rank == 1 {
                    opt.set_param("b", &[0.5_f32; 5])?;
                }
                step(&mut opt)?;
                if let Some(value) = [Some(1.0), of_rank_1][rank] {
                    opt.set_param("b", &[value; 5])?;
                }
                Ok::<_, Error>(step(&mut opt).unwrap_err().to_string())
            });
            for told in told.unwrap() {
                let named = told.starts_with("values of `b`: expected hash ");
                assert!(named && told.contains("on rank 1"), "{zero} {in_backward}: {told}");
            }
        }
    }
}
