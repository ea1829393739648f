//! The step on a CUDA device: by its own events, with the host included, and beside a copy of as
//! many bytes in turn.
//!
//! `cargo xtask gpu` builds and runs this among all else that is to be shown on a GPU; `--list`
//! names what there is to time. Every line is the median of rounds in which steps and copies take
//! turns, after a warm-up. Small sets go round several states, so that none finds itself in the
//! cache. Compare within one run only.

use std::error::Error;
use std::process::{Command, ExitCode};
use std::time::Instant;

use fusestep_cuda::CudaBackend;

#[path = "device/arguments.rs"]
mod arguments;
#[path = "device/contest.rs"]
mod contest;
#[path = "device/copies.rs"]
mod copies;
#[path = "device/norm.rs"]
mod norm;
#[path = "device/report.rs"]
mod report;
#[path = "device/rules.rs"]
mod rules;
#[path = "device/sets.rs"]
mod sets;

use arguments::{Arguments, Asked, parse};
use contest::Bench;
use copies::Copies;
use report::Report;

/// The seed of all values.
const SEED: u64 = 7;

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<ExitCode, Box<dyn Error>> {
    let arguments = match parse(std::env::args().skip(1))? {
        Asked::List => {
            println!("sets:  {}", sets::NAMES.join(", "));
            println!("rules: {}", rules::names().join(", "));
            return Ok(ExitCode::SUCCESS);
        }
        Asked::Run(arguments) => arguments,
    };
    if let Some(module) = &arguments.warm {
        return warm(module);
    }
    let begun = Instant::now();
    let backend = CudaBackend::open(0)?;
    eprintln!("{}", backend.device_info());
    let mut report = Report::new(backend.device_info(), &arguments);
    for name in &arguments.sets {
        let mut bench = Bench::new(&backend, &arguments, begun);
        let done = match name.as_str() {
            sets::NORM => norm::measure(&mut bench, &mut report),
            name => all_rules(name, &mut bench, &arguments, &mut report),
        };
        if let Err(error) = done {
            report.fail(format!("{name}: {error}"));
        }
        report.save(&arguments)?;
    }
    report.save(&arguments)?;
    println!("{report}");
    Ok(if report.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// One set under every rule, in every dtype and way.
fn all_rules(
    name: &str,
    bench: &mut Bench<'_>,
    arguments: &Arguments,
    report: &mut Report,
) -> Result<(), Box<dyn Error>> {
    let set = sets::set(name, &arguments.shapes, arguments.scale)?;
    let most_bytes = set.elements() * rules::MOST_BYTES;
    let mut copies = Copies::new(bench.backend, most_bytes, arguments.scale)?;
    for entrant in rules::entrants() {
        if bench.is_over() {
            report.leave_out(format!("{name}: {entrant}, for want of time"));
            continue;
        }
        match bench.enter(&set, &entrant, &mut copies) {
            Ok(lines) => lines.into_iter().for_each(|line| report.add(line)),
            // Memory of one contender must not cost the others their lines.
            Err(error) => report.fail(format!("{name}: {entrant}: {error}")),
        }
        report.save(arguments)?;
    }
    Ok(())
}

/// One step of one kernel: a driver compiles PTX when it first meets it and keeps the outcome.
///
/// `all` starts a process for each kernel, because a process may compile one at a time.
fn warm(asked: &str) -> Result<ExitCode, Box<dyn Error>> {
    let modules = rules::one_of_each_module();
    if asked == "all" {
        let program = std::env::current_exe()?;
        let start = |name: &&str| Command::new(&program).args(["--warm", name]).spawn();
        let names = modules.iter().map(|module| module.0);
        let started: Vec<_> = names.collect::<Vec<_>>().iter().map(start).collect();
        let mut code = ExitCode::SUCCESS;
        for process in started {
            if !process?.wait()?.success() {
                code = ExitCode::FAILURE;
            }
        }
        return Ok(code);
    }
    let names: Vec<_> = modules.iter().map(|module| module.0).collect();
    let module = modules.into_iter().find(|module| module.0 == asked);
    let (name, planner) = module
        .ok_or_else(|| format!("--warm: expected all, {}, found {asked}", names.join(", ")))?;
    let begun = Instant::now();
    let loaded = contest::one_step(planner)?;
    let seconds = begun.elapsed().as_secs_f64();
    println!("{name}: opened, loaded and run once in {seconds:.2} s: {loaded}");
    Ok(ExitCode::SUCCESS)
}
