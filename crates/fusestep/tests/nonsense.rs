//! Numbers that no run means are errors, which name what was given and what would work.

use fusestep::{AdamW, Cpu, DType, Error, Initial, Lion, ParamDesc, Session, Shape, lion};

fn params() -> [ParamDesc; 1] {
    [ParamDesc::new("a", Shape::new([3]).unwrap(), DType::F32)]
}

fn optimizer() -> Session<'static> {
    AdamW::new(1e-2).build(&params(), Cpu::new()).unwrap()
}

#[test]
fn a_save_after_every_0_steps_is_refused_and_none_after_the_last_step_is_lost() {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("nonsense");
    let _ = std::fs::remove_dir_all(&folder);
    let error = optimizer().checkpoint_every(0, &folder, 4).unwrap_err();
    assert!(error.to_string().contains("1 step or more"), "{error}");
    assert!(!folder.exists());
    let mut last = optimizer();
    assert!(last.checkpoint_every(1, &folder, usize::MAX).unwrap());
    drop(last);
    assert_eq!(optimizer().resume(&folder).unwrap(), usize::MAX);
}

#[test]
fn a_folder_that_is_spelt_in_two_ways_is_the_runs_own() {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("spelt");
    let _ = std::fs::remove_dir_all(&folder);
    let mut run = optimizer();
    for (spelt, steps) in [(folder.clone(), 1), (folder.join("../spelt"), 2), (folder.clone(), 3)] {
        run.save(spelt, steps).unwrap();
        let refused = optimizer().save(&folder, 9).unwrap_err().to_string();
        assert!(refused.contains("another run"), "{refused}");
    }
    assert_eq!(optimizer().resume(&folder).unwrap(), 3);
}

#[test]
fn a_save_to_an_empty_path_is_refused_before_anything_is_written() {
    let current = || {
        let names = std::fs::read_dir(".").unwrap().map(|entry| entry.unwrap().file_name());
        names.collect::<std::collections::BTreeSet<_>>()
    };
    let before = current();
    let refused = optimizer().save("", 1).unwrap_err().to_string();
    let refused_every = optimizer().checkpoint_every(1, "", 0).unwrap_err().to_string();
    let told = "checkpoint: `folder`: expected the path of one; `.` is the current folder, found \
                an empty path";
    assert_eq!([refused.as_str(), refused_every.as_str()], [told; 2]);
    assert_eq!(current(), before);
}

#[test]
fn a_step_that_has_been_done_is_no_error_of_a_save() {
    let root = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("save-behind");
    for zero in 0..=3 {
        let folder = root.join(zero.to_string());
        std::fs::create_dir_all(&folder).unwrap();
        // Of nobody, in the place of both folders that a save of step 1 may have.
        for name in ["step-00000001-a", "step-00000001-b"] {
            std::fs::write(folder.join(name), "").unwrap();
        }
        let run = fusestep::threads(2, |comm| {
            let built = AdamW::new(1e-2).zero(zero).on(comm);
            let (mut opt, mut told) = (built.build(&params(), Cpu::new())?, 0);
            for step in 0..50 {
                opt.push_grad("a", &[1.0_f32; 3])?;
                if opt.step().is_err() {
                    told += 1;
                    opt.step()?;
                }
                if step == 0 {
                    opt.checkpoint_every(1, &folder, 0)?;
                }
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
            told += usize::from(opt.finish_saves().is_err());
            Ok((told, opt.state().step(), opt.state().step_of("a")?))
        });
        assert_eq!(run.unwrap(), [(1, 50, 50); 2], "zero stage {zero}");
    }
}

#[test]
fn more_streams_than_a_rank_can_have_are_refused() {
    let run = fusestep::threads(2, |comm| {
        let asked = AdamW::new(1e-2).comm_streams(usize::MAX);
        asked.on(comm).build(&params(), Cpu::new())?.step()?;
        Ok::<(), Error>(())
    });
    let error = run.unwrap_err().to_string();
    assert!(error.contains("comm_streams: expected a whole number from 0 to 64"), "{error}");
}

#[test]
fn no_ranks_are_refused() {
    let error = fusestep::threads(0, |_| Ok::<(), Error>(())).unwrap_err();
    assert!(error.to_string().contains("expected 1 or more, found 0"), "{error}");
}

#[test]
fn a_rank_that_was_refused_a_view_is_named_by_ranks_that_go_on() {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("refused-view");
    for on_device in [true, false] {
        let _ = std::fs::remove_dir_all(&folder);
        let told = fusestep::threads(2, |comm| {
            let rank = comm.rank();
            let mut opt = AdamW::new(1e-2).on(comm).build(&params(), Cpu::new())?;
            opt.push_grad("a", &[1.0_f32; 3])?;
            opt.step()?;
            opt.checkpoint_every(1, &folder, 0)?;
            if rank == 0 {
                // Memory of the host, and no parameter.
                let refused = if on_device {
                    opt.grad_on_device("a").map(drop)
                } else {
                    opt.grad_mut::<f32>("b").map(drop)
                };
                assert!(refused.is_err());
                return Ok(None);
            }
            opt.push_grad("a", &[1.0_f32; 3])?;
            Ok(opt.step().err().map(|error| error.to_string()))
        });
        let told = told.unwrap().pop().flatten().unwrap();
        assert!(told.starts_with("rank 0 left the group"), "{told}");
    }
}

#[test]
fn a_parameter_of_two_groups_is_named() {
    let twice = AdamW::new(1e-2).group(["a", "a"], lion::Lion::default());
    let error = twice.build(&params(), Cpu::new()).unwrap_err().to_string();
    assert!(error.contains("`a`: the group of lion"), "{error}");
    let own = lion::Lion { lr: 1e-2, ..lion::Lion::default() };
    let twice = Lion::new(1e-2).group(["a"], own).group(["a"], lion::Lion::default());
    let error = twice.build(&params(), Cpu::new()).unwrap_err().to_string();
    assert!(error.contains("`a`: the group of lion"), "{error}");
}

#[test]
fn a_refusal_before_a_save_does_not_cost_the_save_when_the_optimizer_is_dropped() {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("refused-then-saved");
    let _ = std::fs::remove_dir_all(&folder);
    let run = fusestep::threads(2, |comm| {
        let mut opt = AdamW::new(1e-2).on(comm).build(&params(), Cpu::new())?;
        assert!(opt.push_grad("of no parameter", &[1.0_f32]).is_err());
        opt.push_grad("a", &[1.0_f32; 3])?;
        opt.step()?;
        opt.checkpoint_every(1, &folder, 0)?;
        Ok(())
    });
    run.unwrap();
    assert_eq!(optimizer().resume(&folder).unwrap(), 1);
}

#[test]
fn a_rate_that_f32_has_as_infinite_is_refused_and_f64_takes_it() {
    for (dtype, taken) in [(DType::F32, false), (DType::BF16, false), (DType::F64, true)] {
        let params = [ParamDesc::new("a", Shape::new([3]).unwrap(), dtype)];
        let built = AdamW::new(1e300).build(&params, Cpu::new());
        assert_eq!(built.is_ok(), taken, "{dtype}");
        let mut opt = AdamW::new(1e-2).build(&params, Cpu::new()).unwrap();
        let set = opt.state_mut().set_lr(1e300);
        assert_eq!(set.is_ok(), taken, "{dtype}");
        if let Err(error) = set {
            assert!(error.to_string().contains("lr: expected at most 3.4e38"), "{error}");
            assert!(error.to_string().ends_with("found 1e300"), "{error}");
        }
    }
}

#[test]
fn one_parameter_is_one() {
    let error = optimizer().push_grad("b", &[1.0_f32]).unwrap_err().to_string();
    assert!(error.contains("one of the plan's 1 parameter,"), "{error}");
}

#[test]
fn what_only_ranks_do_is_refused_by_name_without_any() {
    let asked = || AdamW::new(1e-2);
    type Ask = fn(AdamW) -> AdamW;
    let cases: [(Ask, &str, &str); 6] = [
        (|asked| asked.zero(2), "zero", "2"),
        (|asked| asked.local_sgd(4), "local_sgd", "4"),
        (|asked| asked.distributed(["a"]), "distributed", "a"),
        (|asked| asked.comm_streams(1), "comm_streams", "1"),
        (|asked| asked.bucket_cap_mib(0.5), "bucket_cap_mib", "0.5"),
        (|asked| asked.initial(Initial::OwnAndEqual), "initial", "own_and_equal"),
    ];
    for (ask, option, found) in cases {
        let alone = ask(asked()).build(&params(), Cpu::new());
        let told = alone.unwrap_err().to_string();
        let expected = format!("{option} of {found}: expected an optimizer on ranks");
        assert!(told.starts_with(&expected), "{told}");
        // A group of one rank takes it.
        let mut solo = fusestep::collective::Solo::new();
        let on_one = ask(asked()).on(&mut solo);
        let mut on_one = on_one.build(&params(), Cpu::new()).unwrap();
        on_one.push_grad("a", &[1.0_f32; 3]).unwrap();
        on_one.step().unwrap();
    }
    // Here it means something.
    let in_backward = asked().update_in_backward().bucket_cap_mib(0.5);
    in_backward.build(&params(), Cpu::new()).unwrap().step().unwrap();
}
