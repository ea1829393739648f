//! Reports of updates: values that a program reads after a step, and a hook that hears of each.

use std::num::NonZeroUsize;
use std::sync::mpsc::channel;

use fusestep::{AdamW, Cpu, DType, Error, LossScaling, ParamDesc, Report, Schedule, Shape};

const NUMEL: usize = 5_000;

fn params() -> Vec<ParamDesc> {
    ["a", "b"]
        .map(|name| ParamDesc::new(name, Shape::new([NUMEL as u64]).unwrap(), DType::F32))
        .to_vec()
}

#[test]
fn a_report_has_what_the_update_did() {
    let (tell, told) = channel::<Report>();
    let rule = AdamW::new(0.1).schedule(Schedule::warmup(4)).clip_norm(1.0).accumulate(2);
    let rule = rule.options(|step| step.update_norms = true);
    let mut opt = rule.build(&params(), Cpu::with_threads(NonZeroUsize::MIN)).unwrap();
    opt.on_step(move |report| tell.send(*report).unwrap());
    assert!(opt.report().is_none() && opt.is_heard());
    for micro_step in 0..8 {
        opt.push_grad("a", &vec![0.1f32; NUMEL]).unwrap();
        opt.set_loss(f64::from(micro_step));
        let ended = opt.step().unwrap();
        assert_eq!(ended.update.is_some(), micro_step % 2 == 1);
    }
    let all: Vec<Report> = told.try_iter().collect();
    assert_eq!(all.len(), 4);
    for (at, report) in all.iter().enumerate() {
        let update = at as f64;
        assert_eq!((report.step, report.loss), (at as u64 + 1, Some(2.0 * update + 0.5)));
        // A warm-up of four updates is at the whole rate in the fifth.
        assert!((report.lr - 0.1 * (update + 1.0) / 5.0).abs() < 1e-9, "{report:?}");
        let norm = 0.1 * (NUMEL as f64).sqrt();
        assert!((report.grad_norm.unwrap() / norm - 1.0).abs() < 1e-4, "{report:?}");
        assert!(report.update_norm.unwrap() > 0.0, "{report:?}");
        assert_eq!((report.elements, report.without_gradient), (NUMEL as u64, 1));
        assert_eq!((report.calls, report.bytes_sent, report.loss_scale), (0, 0, None));
        assert_eq!((report.skipped, report.seconds), (false, None));
    }
    assert_eq!(opt.report(), all.last());
}

#[test]
fn an_update_that_is_skipped_says_so_and_at_which_scale_the_next_one_is() {
    let scaling = LossScaling::dynamic();
    let mut opt = AdamW::new(0.1).loss_scale(scaling).build(&params(), Cpu::new()).unwrap();
    opt.push_grad("a", &vec![f32::INFINITY; NUMEL]).unwrap();
    opt.step().unwrap();
    let report = opt.report().unwrap();
    assert_eq!((report.step, report.skipped, report.elements), (0, true, 0));
    assert_eq!((report.non_finite, report.dropped_micro_steps), (NUMEL as u64, 1));
    assert_eq!(report.loss_scale, Some(opt.loss_scale()));
    assert_eq!((report.loss, report.grad_norm), (None, Some(f64::INFINITY)));
}

#[test]
fn parts_of_a_step_are_measured_where_they_are_asked_for() {
    let whole = std::time::Instant::now();
    let found = fusestep::threads(2, |comm| {
        let rule = AdamW::new(0.1).zero(1).clip_norm(1.0);
        let mut opt = rule.on(comm).build(&params(), Cpu::with_threads(NonZeroUsize::MIN))?;
        opt.time_steps();
        let mut seconds = Vec::new();
        for step in 0..3 {
            for name in ["b", "a"] {
                opt.push_grad(name, &vec![0.1f32; NUMEL])?;
            }
            opt.step()?;
            let report = *opt.report().ok_or("expected a report")?;
            // The handshake's calls are no update's.
            let calls = opt.plan().calls().len() as u64;
            assert!(report.calls >= calls && report.bytes_sent > 0, "{step}: {report:?}");
            seconds.push((report.calls, report.seconds.ok_or("expected seconds")?));
        }
        // Every update has as many calls as the one before.
        assert!(seconds.windows(2).all(|pair| pair[0].0 == pair[1].0), "{seconds:?}");
        Ok(seconds)
    })
    .unwrap();
    for (_, parts) in found.into_iter().flatten() {
        for (part, seconds) in parts.parts() {
            let runs = ["give", "agree", "norm", "update", "gather", "rest"].contains(&part);
            let other = ["trust", "average"].contains(&part);
            assert!(if runs { seconds > 0.0 } else { !other || seconds == 0.0 }, "{parts:?}");
        }
        assert!(parts.total() <= whole.elapsed().as_secs_f64(), "{parts:?}");
    }
}

#[test]
fn a_flush_is_reported_and_one_without_gradients_is_not() -> Result<(), Error> {
    let (tell, told) = channel();
    let mut opt = AdamW::new(0.1).accumulate(3).build(&params(), Cpu::new())?;
    opt.on_step(move |report| tell.send(report.step).unwrap());
    opt.push_grad("a", &vec![0.1f32; NUMEL])?;
    opt.step()?;
    opt.flush()?;
    opt.flush()?;
    assert_eq!(told.try_iter().collect::<Vec<u64>>(), [1]);
    Ok(())
}
