//! What ranks of the facade begin with, and slices that are each rank's own.

use fusestep::{
    AdamW, Communicator, Cpu, DType, Error, Initial, Lars, Lion, ParamDesc, ScheduleFree, Session,
    Sgd, Shape,
};

fn desc(name: &str, numel: u64) -> ParamDesc {
    ParamDesc::new(name, Shape::new([numel]).unwrap(), DType::F32)
}

fn step(opt: &mut Session<'_>) -> Result<(), Error> {
    opt.push_grad("a", &[1.0_f32; 5])?;
    opt.push_grad("b", &[1.0_f32; 5])?;
    opt.step()?;
    Ok(())
}

/// Both parameters, whole.
fn whole(opt: &mut Session<'_>) -> Result<[Vec<u8>; 2], Error> {
    let gathered = opt.gather(&["a", "b"])?;
    Ok([0, 1].map(|at| gathered.bytes(at).to_vec()))
}

#[test]
fn ranks_begin_with_the_parameters_of_rank_0_unless_told_otherwise() {
    for (zero, local_sgd) in [(0, false), (1, false), (2, false), (3, false), (0, true)] {
        for world in [1, 2, 3] {
            // By itself, from another rank, and each its own.
            for (root, initial) in [
                (0, Initial::OfRankZero),
                (world - 1, Initial::OfRankZero),
                (0, Initial::OwnAndEqual),
            ] {
                let outcomes = fusestep::threads(world, |comm| {
                    let rank = comm.rank();
                    let mut asked = AdamW::new(0.0).zero(zero).initial(initial);
                    if local_sgd {
                        asked = asked.local_sgd(2);
                    }
                    let params = [desc("a", 5), desc("b", 5)];
                    let mut opt = asked.on(comm).build(&params, Cpu::new())?;
                    opt.set_param("a", &[rank as f32 + 1.0; 5])?;
                    opt.set_param("b", &[7.0_f32; 5])?;
                    if root > 0 {
                        opt.broadcast_parameters(root)?;
                    }
                    let stepped = step(&mut opt).map_err(|error| error.to_string());
                    let params = if stepped.is_ok() { Some(whole(&mut opt)?) } else { None };
                    Ok((stepped, params))
                });
                let first = [root as f32 + 1.0; 5].map(f32::to_le_bytes).concat();
                for (stepped, params) in outcomes.unwrap() {
                    if initial == Initial::OfRankZero || world == 1 {
                        stepped.unwrap();
                        assert_eq!(params.unwrap()[0], first, "{zero} {world} {root}");
                        continue;
                    }
                    let told = stepped.unwrap_err();
                    assert!(told.starts_with("values of `a`: expected hash "), "{zero}: {told}");
                }
            }
        }
    }
}

#[test]
fn rank_0_alone_may_set_the_first_parameters_at_every_stage() {
    for zero in 0..=3 {
        let outcomes = fusestep::threads(2, |comm| {
            let rank = comm.rank();
            let params = [desc("a", 5), desc("b", 5)];
            let mut opt = AdamW::new(0.0).zero(zero).on(comm).build(&params, Cpu::new())?;
            if rank == 0 {
                opt.set_param("a", &[3.0_f32; 5])?;
            }
            step(&mut opt)?;
            whole(&mut opt)
        });
        for [a, b] in outcomes.unwrap() {
            assert_eq!(a, [3.0_f32; 5].map(f32::to_le_bytes).concat(), "{zero}");
            assert_eq!(b, [0; 20]);
        }
    }
}

/// An optimizer whose ranks have slices of 5, 4 and 3 elements.
fn with_slices(zero: u8, comm: &mut dyn Communicator) -> Result<Session<'_>, Error> {
    let params = [desc("a", 5), desc("slice", 5 - comm.rank() as u64)];
    let asked = Sgd::new(0.5).zero(zero).clip_norm(1e6).distributed(["slice"]);
    asked.on(comm).build(&params, Cpu::new())
}

#[test]
fn slices_that_are_named_stay_each_ranks_own() {
    for zero in 0..=3 {
        let folder = tempfile::tempdir().unwrap();
        let outcomes = fusestep::threads(3, |comm| {
            let rank = comm.rank();
            let own = vec![rank as f32; 5 - rank];
            let step = |opt: &mut Session<'_>| -> Result<f64, Error> {
                opt.push_grad("a", &[3.0_f32 * rank as f32; 5])?;
                opt.push_grad("slice", &vec![2.0 * rank as f32; 5 - rank])?;
                Ok(opt.step()?.update.and_then(|report| report.grad_norm).unwrap_or(0.0))
            };
            let norm = {
                let mut opt = with_slices(zero, &mut *comm)?;
                opt.set_param("slice", &own)?;
                let norm = step(&mut opt)?;
                opt.save(folder.path(), 1)?;
                norm
            };
            let mut opt = with_slices(zero, comm)?;
            assert_eq!(opt.resume(folder.path())?, 1);
            step(&mut opt)?;
            let gathered = opt.gather(&["a", "slice"])?;
            Ok((norm, [0, 1].map(|at| gathered.bytes(at).to_vec())))
        });
        // Mean 3 of 5 elements, and 4 elements of 2, 3 of 4.
        let expected = (5.0 * 9.0 + 4.0 * 4.0 + 3.0 * 16.0_f64).sqrt();
        for (rank, (norm, [a, slice])) in outcomes.unwrap().into_iter().enumerate() {
            assert!((norm - expected).abs() < 1e-6, "{norm} {expected}");
            assert_eq!(a, [-3.0_f32; 5].map(f32::to_le_bytes).concat());
            let own = vec![rank as f32 - 2.0 * rank as f32; 5 - rank];
            let own: Vec<u8> = own.into_iter().flat_map(f32::to_le_bytes).collect();
            assert_eq!(slice, own, "{zero}, rank {rank}");
        }
    }
}

#[test]
fn ranks_that_name_other_slices_are_told_so() {
    let outcomes = fusestep::threads(2, |comm| {
        let params = [desc("a", 5), desc("b", 5)];
        let mut asked = Lion::new(0.1);
        if comm.rank() == 1 {
            asked = asked.distributed(["b"]);
        }
        let opt = asked.on(comm).build(&params, Cpu::new());
        let told = opt.and_then(|mut opt| step(&mut opt)).unwrap_err();
        Ok(told.to_string())
    });
    for told in outcomes.unwrap() {
        let named = "distributed parameters: expected none as on rank 0, found b on rank 1";
        assert!(told.starts_with(named), "{told}");
    }
}

#[test]
fn an_optimizer_may_be_built_on_one_thread_and_stepped_on_another() {
    let mut opt = ScheduleFree::new(0.1).build(&[desc("a", 5), desc("b", 5)], Cpu::new()).unwrap();
    let handle = std::thread::spawn(move || {
        step(&mut opt).unwrap();
        opt
    });
    let mut opt = handle.join().unwrap();
    step(&mut opt).unwrap();
    assert_eq!(opt.state().step(), 2);
}

#[test]
fn gradients_that_are_added_to_begin_with_zeros_at_every_stage() {
    let mut expected = None;
    for zero in 0..=3 {
        let outcomes = fusestep::threads(2, |comm| {
            let params = [desc("a", 5), desc("b", 5)];
            let mut opt = Lars::new(0.1).zero(zero).on(comm).build(&params, Cpu::new())?;
            for step in 0..3 {
                for name in ["b", "a"] {
                    let mut grad = opt.grad_mut::<f32>(name)?;
                    grad.as_mut_slice()[step] += 1.0;
                }
                opt.step()?;
            }
            whole(&mut opt)
        });
        for params in outcomes.unwrap() {
            assert_eq!(params, *expected.get_or_insert_with(|| params.clone()), "{zero}");
        }
    }
}

/// An optimizer whose ranks have set other values of `a`, and of which rank 0 alone has set `b`.
fn begun_apart(zero: u8, comm: &mut dyn Communicator) -> Result<Session<'_>, Error> {
    let rank = comm.rank();
    let params = [desc("a", 5), desc("b", 5)];
    let mut opt = ScheduleFree::new(0.0).zero(zero).on(comm).build(&params, Cpu::new())?;
    opt.set_param("a", &[rank as f32 + 1.0; 5])?;
    if rank == 0 {
        opt.set_param("b", &[7.0_f32; 5])?;
    }
    Ok(opt)
}

#[test]
fn what_ranks_gather_and_save_before_the_first_step_is_what_they_train() {
    let first = [1.0_f32, 7.0].map(|value| [value; 5].map(f32::to_le_bytes).concat());
    for zero in 0..=3 {
        let folder = tempfile::tempdir().unwrap();
        let outcomes = fusestep::threads(2, |comm| {
            let gathered = whole(&mut begun_apart(zero, &mut *comm)?)?;
            let averages = begun_apart(zero, &mut *comm)?.gather_averages(&["a", "b"])?;
            let averages = [0, 1].map(|at| averages.bytes(at).to_vec());
            let mut opt = begun_apart(zero, comm)?;
            opt.save(folder.path(), 0)?;
            step(&mut opt)?;
            Ok([gathered, averages, whole(&mut opt)?])
        });
        for found in outcomes.unwrap().into_iter().flatten() {
            assert_eq!(found, first, "{zero}");
        }
        let params = [desc("a", 5), desc("b", 5)];
        let mut opt = ScheduleFree::new(0.0).build(&params, Cpu::new()).unwrap();
        opt.resume(folder.path()).unwrap();
        assert_eq!(whole(&mut opt).unwrap(), first, "saved at {zero}");
    }
}

#[test]
fn ranks_that_would_begin_in_other_ways_are_told_so() {
    let outcomes = fusestep::threads(2, |comm| {
        let initial = [Initial::OfRankZero, Initial::OwnAndEqual][comm.rank()];
        let params = [desc("a", 5), desc("b", 5)];
        let built = Lion::new(0.1).initial(initial).on(comm).build(&params, Cpu::new());
        Ok(built.unwrap_err().to_string())
    });
    for told in outcomes.unwrap() {
        let named = "initial: expected of rank 0 as on rank 0, found own and equal on rank 1";
        assert!(told.starts_with(named), "{told}");
    }
}
