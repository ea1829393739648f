//! `fusestep train`: a small model learns with the planned optimizer.

pub(crate) mod args;
pub(crate) mod summary;

use std::sync::Mutex;

use anyhow::{Context, ensure};
use fusestep::StepOptions;
use fusestep_models::Task;
use fusestep_tensor::{ParamDesc, power_of_two};
use fusestep_tensor_file::check_writable;

use self::args::TrainArgs;
use self::summary::TrainSummary;
use crate::engine::{Engine, Ranks};
use crate::options::{require_candle_threads, start_compute_threads};
use crate::output::{is_first_process, note, show, warn, write_page};
use crate::places::{require_beside, require_folder};
use crate::report::{page_of_stopped, report_page};
use crate::tasks::{Model, plain_rates, rate};
use crate::training::recorder::Stopped;
use crate::training::{self, Asked, Trained};
use crate::values::descs;
use crate::words::in_words;

/// Trains on all ranks; rank 0 prints.
pub(crate) fn run(args: &TrainArgs) -> anyhow::Result<()> {
    let engine = args.engine.unwrap_or_default();
    let ranks = Ranks::new(args.ranks, args.watch.clone());
    if engine.is_one(&ranks) {
        args.require_several()?;
    }
    ensure!(
        args.compare_parameters.is_none() || args.settings.zero() < 3,
        "--compare-parameters: expected ranks that hold all parameters, found --zero 3, where \
         each holds its part; give another stage or leave the comparison out"
    );
    let lr = rate(args.task.model, args.optimizer.optimizer);
    let rule = args.optimizer.clone().with_default_lr(lr).rule()?;
    if args.task.model == Model::Transformer {
        require_candle_threads()?;
    }
    let task = args.task.task(args.seed)?;
    let task = task.as_ref();
    let mut params = descs(task, args.dtype)?;
    args.optimizer.check(&args.settings, &params)?;
    let mut options = args.settings.of_model(rule, &mut params)?;
    let known = args.figures.known()?;
    options.figures = known.figures(0.0);
    if engine.is_one(&ranks) {
        options = of_one(args, options);
    }
    plain_rates(&args.optimizer, args.task.model, &mut params);
    // A page that cannot be written is known before the training and not after.
    if let Some(path) = &args.report {
        require_folder("--report", path)?;
        check_writable(path).context("--report")?;
        if let Some(folder) = &args.checkpoint {
            require_beside("--report", path, "--checkpoint", folder)?;
        }
    }
    if is_first_process() {
        args.records.check(args.report.as_ref(), args.checkpoint.as_ref(), args.resume)?;
    }
    args.backend.is_built()?;
    args.backend.require_threads(args.threads)?;
    // Ranks that are threads need more than the caller's.
    let one = args.threads.filter(|_| engine != Engine::Thread || engine.is_one(&ranks));
    start_compute_threads(one)?;
    let stopped = Mutex::new(None);
    let trained = engine.run(&ranks, |comm| {
        let (options, known, params, stopped) = (&options, &known, &params[..], &stopped);
        training::train(Asked { args, options, known, params, stopped }, task, comm)
    });
    let trained = trained.inspect_err(|error| report_stopped(args, stopped, error))?;
    // Other ranks have nothing to say.
    let Some(Trained { summary, plan, recorded }) = trained else {
        return Ok(());
    };
    if let Some(path) = &args.report {
        write_page(path, &report_page(&summary, &plan, recorded.as_ref()))?;
    }
    warn_of_outcome(&summary, &options, task, &params);
    show(args.json, &summary)
}

/// Settings of one rank. A checkpoint keeps averages, since several ranks may go on from it.
fn of_one(args: &TrainArgs, options: StepOptions) -> StepOptions {
    if args.checkpoint.is_none() {
        return options.of_one();
    }
    if args.settings.averages() {
        note("note: --local-sgd: planned for the checkpoint, from which several ranks may go on");
    }
    StepOptions { shard_group: None, ..options }
}

/// Writes the page of a run that has ended early, with what there is; the error stays the run's.
fn report_stopped(args: &TrainArgs, stopped: Mutex<Option<Stopped>>, error: &anyhow::Error) {
    let (Some(path), Ok(Some(stopped))) = (&args.report, stopped.into_inner()) else {
        return;
    };
    let page = page_of_stopped(&stopped, &in_words(error), args.config.given.as_deref());
    if let Err(error) = write_page(path, &page) {
        warn(&format!("warning: --report {}: cannot write ({error:#})", path.display()));
    }
}

/// Warns of a run that has changed nothing or learned nothing.
fn warn_of_outcome(
    summary: &TrainSummary,
    options: &StepOptions,
    task: &dyn Task,
    params: &[ParamDesc],
) {
    if summary.steps > 0 && summary.skipped_steps == summary.steps {
        let what = match options.loss_scale.filter(|scale| scale.policy().is_fixed()) {
            Some(scale) => format!(
                "with --loss-scale {} a gradient is not finite in each; give --loss-scale dynamic, \
                 or a smaller constant",
                power_of_two(scale.scale())
            ),
            None => "a gradient was not finite in each; give more --epochs if the loss scale is \
                     still going down, or --dtype bf16"
                .to_owned(),
        };
        warn(&format!("warning: every step was skipped: {what}"));
        return;
    }
    // Guesses among equals have this loss.
    let guessed = (task.answers() as f64).ln();
    if summary.steps > 0 && summary.test_loss >= guessed {
        let advice = rate_of_0(summary, options, params)
            .unwrap_or_else(|| "try another --lr, or more --epochs".to_owned());
        warn(&format!(
            "warning: the model has learned nothing: its test loss is {:.4}, and that of guesses \
             {guessed:.4}; {advice}",
            summary.test_loss
        ));
    }
}

/// The flag by which every step had the rate 0, and advice; `None` where one had another.
fn rate_of_0(
    summary: &TrainSummary,
    options: &StepOptions,
    params: &[ParamDesc],
) -> Option<String> {
    let is_0 = |flag: &str| format!("with {flag} the rate of every step is 0; give another");
    if summary.lr == 0.0 {
        return Some(is_0("--lr 0"));
    }
    if params.iter().all(|param| param.lr_scale == 0.0) {
        return Some(is_0("--lr-scale"));
    }
    // How many steps a checkpoint had seen is not known here.
    let schedule = options.schedule.as_ref().filter(|_| summary.resumed_epochs.is_none())?;
    let all_0 = (0..summary.steps).all(|step| schedule.factor(step) == 0.0);
    all_0.then(|| is_0(&format!("--schedule {schedule}")))
}
