//! The run that a session gives: the same steps as the session's, and what the session lacks.

use fusestep::{AdamW, Cpu, DType, Error, ParamDesc, Session, Shape};

const NUMELS: [(&str, usize); 3] = [("a", 300), ("b", 17), ("c", 1)];
const STEPS: usize = 3;

fn params() -> Vec<ParamDesc> {
    NUMELS
        .map(|(name, numel)| ParamDesc::new(name, Shape::new([numel as u64]).unwrap(), DType::F32))
        .to_vec()
}

fn grad(rank: usize, step: usize, numel: usize) -> Vec<f32> {
    let value = |at: usize| ((at * 7 + step * 3 + rank * 5) % 11) as f32 - 5.0;
    (0..numel).map(value).collect()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Parameters after some steps of the session, or of the run that it gives.
fn train(opt: &mut Session<'_>, rank: usize, of_run: bool) -> Result<Vec<Vec<u8>>, Error> {
    opt.meet()?;
    for step in 0..STEPS {
        if of_run {
            let mut run = opt.run();
            for (name, numel) in NUMELS {
                run.push_grad(name, &bytes(&grad(rank, step, numel)))?;
            }
            run.step()?;
        } else {
            for (name, numel) in NUMELS {
                opt.push_grad(name, &grad(rank, step, numel))?;
            }
            opt.step()?;
        }
    }
    let names = NUMELS.map(|(name, _)| name);
    let mut run = opt.run();
    let pending = run.prefetch(&names)?;
    let gathered = pending.wait(run.state())?;
    Ok((0..names.len()).map(|at| gathered.bytes(at).to_vec()).collect())
}

#[test]
fn the_run_of_a_session_makes_its_steps() -> Result<(), Error> {
    for (world, zero) in [(1, 0), (2, 1), (3, 3)] {
        let run = |of_run| {
            fusestep::threads(world, |comm| {
                let rank = comm.rank();
                let built = AdamW::new(1e-2).zero(zero).on(comm).build(&params(), Cpu::new());
                train(&mut built?, rank, of_run)
            })
        };
        assert!(run(true)? == run(false)?, "{world} {zero}");
    }
    Ok(())
}

#[test]
fn a_run_without_its_calls_steps_on_gradients_as_they_lie() -> Result<(), Error> {
    let mut session = AdamW::new(1e-2).build(&params(), Cpu::new())?;
    let mut alone = AdamW::new(1e-2).build(&params(), Cpu::new())?;
    for step in 0..STEPS {
        for (name, numel) in NUMELS {
            session.push_grad(name, &grad(0, step, numel))?;
            alone.grad_mut::<f32>(name)?.copy_from_slice(&grad(0, step, numel));
        }
        session.step()?;
        let report = alone.run().alone().step_all()?;
        assert_eq!(report.step, step as u64 + 1);
    }
    for (name, _) in NUMELS {
        assert!(session.param::<f32>(name)? == alone.param::<f32>(name)?, "{name}");
    }
    Ok(())
}
