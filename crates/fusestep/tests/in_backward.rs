//! Updates in backward by the facade: the bits of updates in the step, checkpoints among them.

use std::path::Path;

use fusestep::{AdamW, Cpu, DType, Error, Lamb, ParamDesc, Session, Shape};

const NUMELS: [(&str, usize); 4] = [("a", 3_000), ("b", 17), ("c", 1_000), ("d", 1)];
const STEPS: usize = 4;

fn params() -> Vec<ParamDesc> {
    NUMELS
        .map(|(name, numel)| ParamDesc::new(name, Shape::new([numel as u64]).unwrap(), DType::F32))
        .to_vec()
}

fn grad(rank: usize, step: usize, numel: usize) -> Vec<f32> {
    let value = |at: usize| ((at * 7 + step * 3 + rank * 5) % 11) as f32 - 5.0;
    (0..numel).map(value).collect()
}

/// Trains and saves in the middle; every rank ends with these parameters.
fn train(opt: &mut Session<'_>, rank: usize, folder: &Path) -> Result<Vec<Vec<u8>>, Error> {
    for step in 0..STEPS {
        for (name, numel) in NUMELS.iter().rev() {
            // Rank 1 lacks one, so its bucket waits for that rank's step.
            if (rank, step, *name) != (1, 1, "c") {
                opt.push_grad(name, &grad(rank, step, *numel))?;
            }
        }
        opt.step()?;
        opt.checkpoint_every(2, folder, step)?;
    }
    opt.finish_saves()?;
    let names = NUMELS.map(|(name, _)| name);
    let gathered = opt.gather(&names)?;
    Ok((0..names.len()).map(|at| gathered.bytes(at).to_vec()).collect())
}

#[test]
fn one_rank_and_three_end_with_the_bits_of_updates_in_the_step() -> Result<(), Error> {
    for zero in 0..=2 {
        let build = |in_backward: bool, world: usize| {
            let alone = || AdamW::new(1e-2);
            let builder = if world > 1 { alone().zero(zero).bucket_cap_mib(0.01) } else { alone() };
            let in_buckets = |builder: AdamW| builder.bucket_cap_mib(0.01).update_in_backward();
            if in_backward { in_buckets(builder) } else { builder }
        };
        let run = |in_backward, world: usize| -> Result<Vec<Vec<u8>>, Error> {
            let name = format!("in_backward-{zero}-{world}-{in_backward}");
            let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
            let _ = std::fs::remove_dir_all(&folder);
            if world == 1 {
                let built = build(in_backward, world).build(&params(), Cpu::new());
                return train(&mut built?, 0, &folder);
            }
            let ended = fusestep::threads(world, |comm| {
                let rank = comm.rank();
                let built = build(in_backward, world).on(comm).build(&params(), Cpu::new());
                train(&mut built?, rank, &folder)
            })?;
            assert!(ended.iter().all(|found| *found == ended[0]));
            Ok(ended[0].clone())
        };
        for world in [1, 3] {
            assert!(run(true, world)? == run(false, world)?, "{zero} {world}");
        }
    }
    Ok(())
}

#[test]
fn what_stands_against_it_is_refused_when_the_optimizer_is_built() {
    let clipped = AdamW::new(1e-3).clip_norm(1.0).update_in_backward();
    let error = clipped.build(&params(), Cpu::new()).unwrap_err();
    assert!(error.to_string().contains("update_in_backward"), "{error}");
    // One rank takes a tensor's norms where it updates it; several tell each other first.
    let lamb = || Lamb::new(1e-3).update_in_backward();
    assert!(lamb().build(&params(), Cpu::new()).is_ok());
    let many =
        fusestep::threads(2, |comm| lamb().on(comm).build(&params(), Cpu::new()).map(|_| ()));
    let error = many.unwrap_err().to_string();
    assert!(error.contains("lars or lamb"), "{error}");
}
