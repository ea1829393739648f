//! Sessions whose gradients are added along lanes: ranks differ in micro-steps, not in updates.

use fusestep::{AdamW, Cpu, DType, Error, ParamDesc, Session, Shape};

const LANES: u32 = 8;
const UPDATES: usize = 4;

fn params() -> Vec<ParamDesc> {
    [("a", 300), ("b", 17), ("c", 1)]
        .map(|(name, numel)| ParamDesc::new(name, Shape::new([numel]).unwrap(), DType::F32))
        .to_vec()
}

/// How a program steps.
#[derive(Clone, Copy, Debug)]
struct Way {
    /// Whether it hears of saves before it gives gradients.
    begins: bool,
    comm_streams: usize,
    in_backward: bool,
}

/// One update, of gradients that follow from the number of their micro-batch.
fn update(opt: &mut Session<'_>, way: Way, at: usize) -> Result<(), Error> {
    loop {
        if way.begins {
            opt.begin_step()?;
        }
        let micro_batch = opt.state().micro_batch().ok_or("expected a micro-batch of this rank")?;
        for param in params() {
            let value =
                |element| (element as f32 + 1.0).sin() / (1.0 + at as f32) + micro_batch as f32;
            opt.push_grad(&param.name, &(0..param.numel()).map(value).collect::<Vec<f32>>())?;
        }
        if opt.step()?.update.is_some() {
            return Ok(());
        }
    }
}

/// Parameters behind the last update, of a run that may begin a save before each of them.
fn train(world: usize, way: Way, saves: bool) -> Result<Vec<Vec<Vec<u8>>>, Error> {
    let folder = tempfile::tempdir()?;
    fusestep::threads(world, |comm| {
        let built = AdamW::new(1e-2).lanes(LANES).zero(1).options(|step| {
            step.update_in_backward = way.in_backward;
            step.bucket_cap_mib = Some(0.0005);
            step.comm_streams = (!way.in_backward).then_some(way.comm_streams);
        });
        let mut opt = built.on(comm).build(&params(), Cpu::new())?;
        for at in 0..UPDATES {
            if saves {
                opt.begin_save(folder.path(), at)?;
            }
            update(&mut opt, way, at)?;
        }
        opt.finish_saves()?;
        let gathered = opt.gather(&["a", "b", "c"])?;
        Ok((0..3).map(|at| gathered.bytes(at).to_vec()).collect())
    })
}

#[test]
fn a_save_is_written_while_ranks_differ_in_micro_steps() -> Result<(), Error> {
    let usual = Way { begins: false, comm_streams: 0, in_backward: false };
    let [expected]: [_; 1] = train(1, usual, false)?.try_into().map_err(|_| "one rank")?;
    let ways = [
        usual,
        Way { begins: true, ..usual },
        Way { comm_streams: 2, ..usual },
        Way { begins: true, comm_streams: 2, ..usual },
        Way { in_backward: true, ..usual },
        Way { begins: true, in_backward: true, ..usual },
    ];
    for way in ways {
        for world in [2, 3, 5] {
            for found in train(world, way, true)? {
                assert!(found == expected, "{way:?} on {world} ranks");
            }
        }
    }
    Ok(())
}
