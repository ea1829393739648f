//! Settings that nobody has given, chosen from a machine's figures and cores: never a step that is
//! predicted to be slower, never another bit, and the same on all ranks.

use std::fs;

use fusestep::collective::{Costs, Link};
use fusestep::planner::{CostModel, Reach, Topology};
use fusestep::{
    AdamW, Chosen, Cpu, DType, Figures, FiguresError, LaunchLimits, ParamDesc, RankCores, Session,
    Shape, StepOptions, ThreadFigures, WorldFigures,
};

/// Figures of two ranks by both ways to reach each other.
fn figures(latency_us: f64, gbs: f64) -> Figures {
    let link = |factor: f64| Link {
        alpha_seconds: latency_us * 1e-6,
        beta_bytes_per_second: factor * gbs * 1e9,
    };
    let costs = Costs {
        all_reduce: link(1.0),
        reduce_scatter: link(2.0),
        all_gather: link(1.9),
        memory_bytes_per_second: 12e9,
        fresh_bytes_per_second: 3e9,
    };
    let mut figures = Figures::unmeasured();
    for (engine, shares_memory) in [("thread", true), ("mpi", false)] {
        let (engine, measured) = (engine.to_owned(), "2026-11-29".to_owned());
        figures.add(WorldFigures { engine, ranks: 2, shares_memory, measured, costs });
    }
    figures
}

/// A model of so many MiB of gradients, in tensors of 3 MiB and a bit.
fn model(mib: usize) -> Vec<ParamDesc> {
    let tensor = |index: usize| {
        let shape = Shape::new([3, 262_144 + 64]).expect("a shape");
        ParamDesc::new(format!("layer{index}.weight"), shape, DType::F32)
    };
    (0..mib.div_ceil(3)).map(tensor).collect()
}

fn topology(reach: Reach, world: usize) -> Topology {
    Topology { reach, ..Topology::new(0, world).expect("ranks") }
}

fn chosen(options: &StepOptions, params: &[ParamDesc], topology: Topology) -> Chosen {
    options.chosen(params, topology, LaunchLimits::default()).expect("settings")
}

/// The time that `plan` predicts.
fn predicted(options: &StepOptions, params: &[ParamDesc], on: Topology, known: &Figures) -> f64 {
    let plan = options.planner(params, on, LaunchLimits::default()).expect("settings");
    let plan = plan.plan_for(params, on).expect("a plan");
    let model = CostModel {
        streams: options.streams(on),
        backward_seconds: known.backward_seconds.unwrap_or(0.0),
        ..known.world(on).expect("a world").model()
    };
    plan.rank_summary(model).predicted_step_ns
}

#[test]
fn a_choice_is_never_predicted_to_be_slower() {
    let mut changed = 0;
    for mib in [1, 30, 200] {
        let params = model(mib);
        for (reach, world, zero) in [
            (Reach::SharedMemory, 2, 0),
            (Reach::SharedMemory, 4, 2),
            (Reach::Calls, 2, 0),
            (Reach::Calls, 4, 1),
            (Reach::Calls, 4, 3),
        ] {
            for (latency_us, gbs) in [(0.0, 8.0), (2.0, 8.0), (30.0, 1.0), (1_000.0, 10.0)] {
                for backward in [None, Some(0.005), Some(0.2)] {
                    let plain = StepOptions { zero, ..StepOptions::default() };
                    let mut known = figures(latency_us, gbs);
                    known.backward_seconds = backward;
                    let on = topology(reach, world);
                    let with = StepOptions { figures: Some(known.clone()), ..plain.clone() };
                    let chosen = chosen(&with, &params, on);
                    assert!(mib < 25 || !chosen.notes.is_empty());
                    changed += usize::from(chosen.options != plain);
                    let times =
                        [&chosen.options, &plain].map(|of| predicted(of, &params, on, &known));
                    let told = (mib, on, zero, latency_us, gbs, backward, &chosen.notes);
                    assert!(times[0] <= times[1] * (1.0 + 1e-6), "{times:?} {told:?}");
                }
            }
        }
    }
    assert!(changed > 20, "{changed} choices of 180");
}

#[test]
fn a_given_setting_is_kept_and_one_without_figures_is_the_default() {
    let params = model(100);
    let known = figures(30.0, 1.0).with_backward_seconds(0.1);
    for reach in [Reach::SharedMemory, Reach::Calls] {
        let on = topology(reach, 2);
        let given = StepOptions {
            bucket_cap_mib: Some(7.0),
            comm_streams: Some(3),
            ..StepOptions::default()
        };
        let with = StepOptions { figures: Some(known.clone()), ..given.clone() };
        assert_eq!(chosen(&with, &params, on).options, given);
        let separate = StepOptions { separate: true, ..StepOptions::default() };
        let with = StepOptions { figures: Some(known.clone()), ..separate };
        assert!(chosen(&with, &params, on).options.separate);
        for plain in [StepOptions::default(), StepOptions { naive: true, ..StepOptions::default() }]
        {
            let unknown = chosen(&plain, &params, on);
            assert_eq!((unknown.options, unknown.notes.len()), (plain, 0));
        }
        let naive = StepOptions { naive: true, ..StepOptions::default() };
        let with = StepOptions { figures: Some(known.clone()), ..naive.clone() };
        assert_eq!(chosen(&with, &params, on).options, naive);
    }
    let with = StepOptions { figures: Some(known), ..StepOptions::default() };
    assert_eq!(chosen(&with, &params, Topology::SOLO).options, StepOptions::default());
    let none = StepOptions { figures: Some(Figures::unmeasured()), ..StepOptions::default() };
    let unknown = chosen(&none, &params, topology(Reach::Calls, 2));
    assert_eq!(unknown.options, StepOptions::default());
    assert!(unknown.notes[0].reason.contains("no figures of ranks that reach each other by calls"));
}

#[test]
fn slow_calls_take_larger_buckets_and_the_plan_says_so() {
    let params = model(200);
    let with = |known| StepOptions { figures: Some(known), ..StepOptions::default() };
    let on = topology(Reach::Calls, 2);
    let fast = chosen(&with(figures(2.0, 8.0)), &params, on);
    let cap = fast.options.bucket_cap_mib.expect("a cap");
    assert!(cap < 25.0, "{cap}");
    let planner = with(figures(2.0, 8.0)).planner(&params, on, LaunchLimits::default());
    let text = planner.expect("settings").plan_for(&params, on).expect("a plan").to_string();
    let told = format!("note figures applied: buckets of {cap} MiB in place of 25: a step of ");
    assert!(text.contains(&told), "{text}");
    assert!(text.contains("figures of 2 ranks, engine mpi, measured 2026-11-29"), "{text}");
    let memory = topology(Reach::SharedMemory, 2);
    let slow = chosen(&with(figures(5_000.0, 8.0)), &params, memory);
    assert!(slow.options.bucket_cap_mib.expect("a cap") > 25.0, "{:?}", slow.notes);
    let shared = StepOptions { zero: 2, ..with(figures(5_000.0, 8.0)) };
    let shared = chosen(&shared, &params, memory).options.bucket_cap_mib;
    assert!(shared.is_none_or(|cap| cap <= 25.0), "memory that was to be saved: {shared:?}");
}

#[test]
fn ranks_that_share_memory_reduce_apart_only_where_that_saves_much() {
    let params = model(100);
    let on = topology(Reach::SharedMemory, 2);
    let found = |gather_seconds: f64| {
        let mut known = figures(2.0, 8.0);
        known.worlds[0].costs.all_gather.alpha_seconds = gather_seconds;
        let given = StepOptions { figures: Some(known), ..StepOptions::default() };
        chosen(&given, &params, on)
    };
    let usual = found(2e-6);
    assert_eq!(usual.options.streams(on), 0);
    assert!(!usual.options.separate, "{:?}", usual.notes);
    let slow = found(0.1);
    assert!(slow.options.separate, "{:?}", slow.notes);
    assert!(slow.notes[0].reason.starts_with("reduction, update and gather stay apart: a step"));
}

/// Parameters after some steps of two ranks, and the hashes of their plans; `known` are the figures
/// of each rank.
fn trained(known: [Option<Figures>; 2], zero: u8) -> Vec<(Vec<u8>, u64)> {
    let params = model(30);
    let ranks = fusestep::threads(2, |comm| {
        let rank = comm.rank();
        let built = AdamW::new(1e-2).zero(zero);
        let built = match &known[rank] {
            Some(known) => built.figures(known.clone()),
            None => built,
        };
        let mut session = built.on(comm).build(&params, Cpu::new())?;
        for step in 0..2 {
            for param in &params {
                let numel = param.numel() as usize;
                let gradient = |at: usize| ((at + rank) % 97) as f32 * 0.01 - step as f32 * 0.3;
                let gradient: Vec<f32> = (0..numel).map(gradient).collect();
                session.push_grad(&param.name, &gradient)?;
            }
            session.step()?;
        }
        let values = session.gather(&["layer3.weight"])?.bytes(0).to_vec();
        Ok::<_, fusestep::Error>((values, session.plan().hash()))
    });
    ranks.expect("two ranks")
}

#[test]
fn ranks_take_the_choice_of_rank_0_and_bits_stay() {
    for zero in [0, 2] {
        let plain = trained([None, None], zero);
        let (slow, fast) = (figures(5_000.0, 8.0), figures(0.0, 8.0));
        for known in [
            [Some(slow.clone()), None],
            [None, Some(slow.clone())],
            [Some(slow.clone()), Some(fast.clone())],
            [Some(fast.clone()), Some(slow.clone())],
        ] {
            let is_known = known[0].is_some();
            let found = trained(known, zero);
            assert_eq!(found[0].1, found[1].1, "ranks have one plan");
            assert_eq!((&found[0].0, &found[1].0), (&plain[0].0, &plain[1].0));
            assert!(is_known || found[0].1 == plain[0].1, "rank 0 chooses");
        }
    }
}

/// Plans of two ranks with these streams and numbers of cores.
fn on_cores(given: [Option<usize>; 2], cores: [usize; 2]) -> Result<Vec<String>, fusestep::Error> {
    let params = model(30);
    fusestep::threads(2, |comm| {
        let rank = comm.rank();
        let own = RankCores { cores: cores[rank], threads: 1, ranks: None };
        let options = StepOptions {
            comm_streams: given[rank],
            rank_cores: Some(own),
            ..StepOptions::default()
        };
        let session = Session::on(&options, &params, Box::new(Cpu::new()), comm)?;
        Ok::<_, fusestep::Error>(session.plan().to_string())
    })
}

#[test]
fn streams_follow_the_cores_of_rank_0_on_all_ranks() {
    for (cores, expected) in [
        ([2, 8], "0 communication streams: 2 ranks on the machine of rank 0, on 1 thread each"),
        ([8, 2], "2 communication streams: 2 ranks on the machine of rank 0, on 1 thread each"),
    ] {
        let plans = on_cores([None, None], cores).expect("two ranks");
        // Ranks compare their streams, too.
        let told = format!("note comm_streams applied: {expected}");
        assert!(plans.iter().all(|plan| plan.contains(&told)), "{told}: {plans:?}");
    }
    // A number that rank 0 was given is that of ranks without one, and chosen by nobody.
    for given in [[Some(3), None], [Some(3), Some(3)]] {
        let plans = on_cores(given, [2, 2]).expect("two ranks");
        assert!(plans.iter().all(|plan| !plan.contains("note comm_streams")), "{plans:?}");
    }
    for given in [[None, Some(2)], [Some(0), Some(2)]] {
        let error = on_cores(given, [2, 2]).expect_err("other streams").to_string();
        assert!(error.contains("comm_streams"), "{error}");
    }
}

#[test]
fn cores_choose_no_streams_where_settings_leave_none() {
    let params = model(30);
    let topology = Topology::new(0, 2).expect("two ranks");
    let own = Some(RankCores { cores: 8, threads: 1, ranks: None });
    let usual = || StepOptions { rank_cores: own, ..StepOptions::default() };
    let chosen = |options: StepOptions| {
        let chosen = options.chosen(&params, topology, LaunchLimits::default()).expect("settings");
        chosen.planner(&params, topology, LaunchLimits::default()).expect("a planner");
        chosen.options.comm_streams
    };
    assert_eq!(chosen(usual()), Some(2));
    assert_eq!(chosen(StepOptions { local_sgd: Some(2), ..usual() }), None);
    assert_eq!(chosen(StepOptions { naive: true, ..usual() }), None);
    assert_eq!(chosen(StepOptions { separate: true, ..usual() }), None);
    assert_eq!(chosen(StepOptions { update_in_backward: true, ..usual() }), None);
}

#[test]
fn files_are_read_as_they_were_written_and_others_are_told_from_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("cache").join("fusestep").join("figures.json");
    assert!(matches!(Figures::read(&path), Err(FiguresError::Unmeasured)));
    let mut known = figures(0.0, 3.0);
    known.threads = vec![ThreadFigures { threads: 1, bytes_per_second: 1e10 }];
    known.write(&path).expect("a file");
    assert_eq!(Figures::read(&path).expect("figures"), known);
    let text = fs::read_to_string(&path).expect("a text");
    let spoilt = |from: &str, to: &str| {
        assert!(text.contains(from), "{from}: {text}");
        fs::write(&path, text.replace(from, to)).expect("a file");
        Figures::read(&path).expect_err(to).to_string()
    };
    let version = format!("\"version\": \"{}\"", known.version);
    for (from, to, expected) in [
        ("\"format\": 1", "\"format\": 2", "found format 2 by fusestep"),
        (version.as_str(), "\"version\": \"0.0.9\"", "found format 1 by fusestep 0.0.9"),
        (version.as_str(), "\"version\": 7", "found neither `format` nor `version`"),
        ("12000000000.0", "0.0", "found costs out of range of 2 ranks"),
        ("12000000000.0", "-1e400", "found no JSON"),
        ("10000000000.0", "null", "found "),
        ("\"processor\"", "\"prozessor\"", "missing field `processor`"),
        ("{", "", "found no JSON"),
    ] {
        let found = spoilt(from, to);
        assert!(found.contains(expected), "{from} {to}: {found}");
        assert!(found.contains("fusestep check"), "{found}");
    }
    fs::write(&path, [0xff; 64]).expect("a file");
    assert!(matches!(Figures::read(&path), Err(FiguresError::Damaged { .. })));
    assert!(matches!(Figures::read(folder.path()), Err(FiguresError::Damaged { .. })));
    fs::write(folder.path().join("file"), "").expect("a file");
    let under_file = folder.path().join("file").join("figures.json");
    assert!(matches!(known.write(&under_file), Err(FiguresError::Unwritten(_))));
    known.worlds[0].costs.memory_bytes_per_second = f64::NAN;
    assert!(matches!(known.write(&path), Err(FiguresError::Damaged { .. })));
}

#[test]
fn the_fewest_threads_are_taken_that_memory_is_as_fast_with() {
    let mut known = Figures::unmeasured();
    let rates = [(1, 10e9), (2, 19e9), (4, 20e9), (8, 20.2e9)];
    known.threads =
        rates.map(|(threads, bytes_per_second)| ThreadFigures { threads, bytes_per_second }).into();
    assert_eq!([1, 2, 3, 4, 8, 64].map(|most| known.threads(most)), {
        [1, 2, 2, 4, 4, 4].map(Some)
    });
    assert_eq!(known.threads(0), None);
    assert_eq!(Figures::unmeasured().threads(4), None);
}
