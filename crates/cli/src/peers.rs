//! `fusestep bench --peers`: a step of AdamW beside steps of other implementations that this
//! machine has, all in turns in one run.

use std::fmt;
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use fusestep::{Section, StepOptions};
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::{Adam, SecondMoment};
use fusestep_launch::{Objective, StateDType};
use fusestep_planner::{Optimizer, Plan, Topology, html_page};
use fusestep_simd::PREFETCH_DISTANCES;
use fusestep_tensor::{DType, ParamDesc, Quoted, counted, grouped};
use fusestep_tensor_file::check_writable;
use serde::{Deserialize, Serialize};

use crate::bench::args::BenchArgs;
use crate::bench::subject::Subject;
use crate::ceiling::Ceiling;
use crate::options::pool;
use crate::output::{duration, progress, show, write_page};
use crate::places::require_apart;
use crate::planning::planner;
use chart::Measured;
use worker::{Request, Shaped, Turn, Worker};

mod candle;
mod chart;
mod worker;

pub(crate) use candle::{CandlePair, CandleTimes};

/// A pause between turns, in which the threads of the last turn stop to spin.
const PAUSE: Duration = Duration::from_millis(20);

/// The name that rows of our own times begin with.
const OUR_NAME: &str = "fusestep";

/// The result that `--json` prints. Times are the best of all rounds.
#[derive(Debug, Serialize)]
struct PeerSummary {
    parameters: usize,
    elements: u64,
    optimizer: &'static str,
    /// Type of the optimizer's state, ours and that of peers which have it.
    state_dtype: &'static str,
    simd: &'static str,
    threads: usize,
    ns_per_step: f64,
    /// Time to stream as many bytes, in the same run.
    ceiling_ns: f64,
    share_of_ceiling: f64,
    peers: Vec<PeerTime>,
    absent: Vec<Absent>,
}

/// The time of a peer.
#[derive(Debug, Serialize)]
struct PeerTime {
    name: String,
    version: String,
    ns_per_step: f64,
    /// The peer's time over ours.
    times_ours: f64,
}

/// A peer that could not be timed.
#[derive(Debug, Deserialize, Serialize)]
struct Absent {
    name: String,
    reason: String,
    /// How to add the peer.
    help: String,
}

/// A worker's peer with the best time so far.
struct Timed {
    worker: usize,
    number: usize,
    best: f64,
}

impl Timed {
    /// Every peer of every worker.
    fn all(workers: &[Worker]) -> Vec<Self> {
        let peers = workers.iter().enumerate().flat_map(|(worker, of)| {
            let numbers = 0..of.found.len();
            numbers.map(move |number| Self { worker, number, best: f64::INFINITY })
        });
        peers.collect()
    }

    /// The peer's best time beside ours.
    fn time(&self, workers: &[Worker], our_ns: f64) -> PeerTime {
        let found = workers[self.worker].found[self.number].clone();
        PeerTime {
            name: found.name,
            version: found.version,
            ns_per_step: self.best,
            times_ours: self.best / our_ns,
        }
    }
}

/// Times our step, the memory's ceiling and every peer in turns.
///
/// # Errors
/// Another rule than AdamW, parameters that are not f32, gradients that are clipped or scaled; a
/// peer that ends or whose parameters are not those of AdamW.
pub(crate) fn run(
    args: &BenchArgs,
    options: &StepOptions,
    params: &[ParamDesc],
) -> anyhow::Result<()> {
    let rule = options.rule;
    let request = request(args, options, params)?;
    let written = [("--report", args.peers.report.as_ref()), ("--svg", args.peers.svg.as_ref())];
    require_apart(("the model", args.model.as_ref()), &written)?;
    // A page that cannot be written is known before anything is timed and not after.
    for (flag, path) in written.into_iter().filter_map(|(flag, path)| Some((flag, path?))) {
        check_writable(path).context(flag)?;
    }
    let backend = CpuBackend::in_pool(pool(Some(args.threads()?))?);
    let plan = planner(options, params, Topology::SOLO, args.settings.limits())?.plan(params)?;
    let mut ours = Subject::new(&plan, &backend)?;
    let mut ceiling = Ceiling::new(&backend, &plan, plan.traffic_bytes())?;
    // Neither candle nor burn has state of 8 bits.
    let has_wide = request.state_dtype == StateDType::Compute.name();
    let pair = has_wide.then(|| CandlePair::new(params, rule, Some(args.threads()?)));
    let mut candle = pair.transpose()?;
    let mut absent = Vec::new();
    let python = Worker::python(&args.peers.python, &request, &mut absent);
    let burn = has_wide.then(|| Worker::burn(&request, &mut absent)).flatten();
    let mut workers: Vec<Worker> = python.into_iter().chain(burn).collect();
    let mut timed = Timed::all(&workers);
    for _ in progress(args.rounds as u64, "rounds").wrap_iter(0..args.rounds) {
        for stream in 0..PREFETCH_DISTANCES.len() {
            ours.sample()?;
            ceiling.sample(stream);
        }
        if let Some(candle) = &mut candle {
            candle.sample()?;
        }
        for timed in &mut timed {
            thread::sleep(PAUSE);
            let worker = &mut workers[timed.worker];
            let turn = worker.turn(timed.number)?;
            check(&worker.found[timed.number].name, &request, turn)?;
            timed.best = timed.best.min(turn.ns);
        }
        thread::sleep(PAUSE);
    }
    let ns = ours.timer.best;
    let of_worker = |timed: &Timed| timed.time(&workers, ns);
    let mut peers: Vec<PeerTime> = timed.iter().map(of_worker).collect();
    peers.extend(candle.into_iter().flat_map(|candle| of_candle(candle.times(), ns)));
    peers.sort_by(|a, b| a.ns_per_step.total_cmp(&b.ns_per_step));
    let ceiling_ns = plan.traffic_bytes() as f64 / ceiling.best().1;
    let summary = PeerSummary {
        parameters: params.len(),
        elements: plan.elements(),
        optimizer: rule.name(),
        state_dtype: request.state_dtype,
        simd: backend.level().name(),
        threads: backend.pool().threads(),
        ns_per_step: ns,
        ceiling_ns,
        share_of_ceiling: ceiling_ns / ns,
        peers,
        absent,
    };
    shown(args, &summary, &plan)
}

/// candle's time and that of ours in its place, beside ours.
fn of_candle(times: CandleTimes, our_ns: f64) -> [PeerTime; 2] {
    let timed = |name: &str, ns_per_step: f64| PeerTime {
        name: name.to_owned(),
        version: "0.11".to_owned(),
        ns_per_step,
        times_ours: ns_per_step / our_ns,
    };
    [
        timed("candle AdamW", times.candle_ns_per_step),
        timed("fusestep through candle", times.candle_adapter_ns_per_step),
    ]
}

/// Prints the times, and writes the page and the picture that were asked for.
fn shown(args: &BenchArgs, summary: &PeerSummary, plan: &Plan) -> anyhow::Result<()> {
    let measured = Measured::here();
    if let Some(path) = &args.peers.svg {
        write_page(path, &chart::picture(summary, &measured))?;
    }
    if let Some(path) = &args.peers.report {
        let body = format!("{}{}", chart::section(summary, &measured), plan.to_html_fragment());
        write_page(path, &html_page("fusestep bench --peers", &body))?;
    }
    show(args.json, summary)
}

/// The rule, if it and the other flags make a step that every peer can make. Settings of the names
/// `beside` are the peers', too.
pub(crate) fn plain_adamw(
    args: &BenchArgs,
    rule: Optimizer,
    flag: &str,
    beside: &[&str],
) -> anyhow::Result<Adam> {
    let adamw = match rule {
        Optimizer::Adam(adam) if rule.name() == "adamw" => adam,
        _ => bail!("{flag}: expected --optimizer adamw, found {}; leave {flag} out", rule.name()),
    };
    let of_rule = [
        ("--amsgrad", adamw.second_moment == SecondMoment::Largest),
        ("--maximize", adamw.objective == Objective::Maximize),
    ];
    let of_rule = of_rule.iter().find(|(_, is_asked)| *is_asked).map(|(flag, _)| flag.to_string());
    let asked = args.settings.changed_beyond(&[Section::Launches], beside);
    match of_rule.or(asked) {
        Some(asked) => bail!("{flag}: expected a plain step, found {asked}; leave it out"),
        None => Ok(adamw),
    }
}

/// The request that all peers are sent.
fn request(
    args: &BenchArgs,
    options: &StepOptions,
    params: &[ParamDesc],
) -> anyhow::Result<Request> {
    let state = options.precision.state;
    let beside: &[&str] = if state == StateDType::Int8 { &["state_dtype"] } else { &[] };
    let adamw = plain_adamw(args, options.rule, "--peers", beside)?;
    for param in params {
        ensure!(
            param.dtype == DType::F32,
            "--peers: expected parameters in f32, which all of them take, found {} in `{}`",
            param.dtype.name(),
            Quoted(&param.name)
        );
    }
    let shaped =
        |param: &ParamDesc| Shaped { name: param.name.clone(), shape: param.shape.dims().to_vec() };
    Ok(Request {
        params: params.iter().map(shaped).collect(),
        threads: args.threads()?.get(),
        state_dtype: state.name(),
        lr: adamw.lr,
        beta1: adamw.beta1,
        beta2: adamw.beta2,
        eps: adamw.eps,
        weight_decay: adamw.weight_decay.lambda(),
    })
}

/// Refuses a peer whose parameters are not where AdamW's are after as many steps on the same
/// gradients. Its time would be that of another step.
fn check(name: &str, request: &Request, turn: Turn) -> anyhow::Result<()> {
    let Some(found) = turn.value else {
        return Ok(());
    };
    let (mut param, grad) = (0.1f64, 0.01f64);
    let (mut m, mut v) = (0.0, 0.0);
    let (mut power1, mut power2) = (1.0, 1.0);
    let mut largest = param.abs();
    for _ in 0..turn.steps {
        m = request.beta1 * m + (1.0 - request.beta1) * grad;
        v = request.beta2 * v + (1.0 - request.beta2) * grad * grad;
        power1 *= request.beta1;
        power2 *= request.beta2;
        let root = (v / (1.0 - power2)).sqrt() + request.eps;
        param -= request.lr * (request.weight_decay * param + m / (1.0 - power1) / root);
        largest = largest.max(param.abs());
    }
    // A rounding of f32 for each of a handful of operations in every step.
    let bound = 1e-6 * (1.0 + turn.steps as f64) * (largest + request.lr);
    ensure!(
        (found - param).abs() <= bound,
        "{name}: expected {param} ± {bound:.1e} after {} steps of AdamW, found {found}",
        turn.steps
    );
    Ok(())
}

impl fmt::Display for PeerSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} on {}, {} elements of {}; {}, {}",
            self.optimizer,
            counted(self.parameters as u64, "parameter"),
            grouped(self.elements),
            self.kept(),
            counted(self.threads as u64, "thread"),
            self.simd
        )?;
        for (name, ns, note) in self.rows() {
            writeln!(f, "  {name:<40} {:>10}  {note}", duration(ns))?;
        }
        for absent in &self.absent {
            writeln!(
                f,
                "  {:<40} not timed: {}; to add it: {}",
                absent.name, absent.reason, absent.help
            )?;
        }
        Ok(())
    }
}

impl PeerSummary {
    /// Type of the parameters, and that of their state where it is another.
    fn kept(&self) -> String {
        let wide = StateDType::Compute.name();
        if self.state_dtype == wide {
            return wide.to_owned();
        }
        format!("{wide}, state in {}", self.state_dtype)
    }

    /// Name, nanoseconds and a note for each time.
    fn rows(&self) -> Vec<(String, f64, String)> {
        let share = format!("{:.2} of the memory bandwidth", self.share_of_ceiling);
        let bytes = "the memory bandwidth, as a plain loop has it".to_owned();
        let mut rows = vec![
            ("as many bytes streamed".to_owned(), self.ceiling_ns, bytes),
            (OUR_NAME.to_owned(), self.ns_per_step, share),
        ];
        rows.extend(self.peers.iter().map(|peer| {
            let name = format!("{} ({})", peer.name, peer.version);
            let note = format!("{:.2} times ours", peer.times_ours);
            (name, peer.ns_per_step, note)
        }));
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adamw() -> Request {
        Request {
            params: Vec::new(),
            threads: 1,
            state_dtype: "f32",
            lr: 0.001,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.01,
        }
    }

    #[test]
    fn a_peer_that_does_something_else_is_refused() {
        let turn = |steps, value| Turn { ns: 1.0, steps, value: Some(value) };
        // 0.1 · (1 − 10⁻⁵) − 0.001: the first step of AdamW is lr against the gradient's sign.
        assert!(check("theirs", &adamw(), turn(1, 0.098_999)).is_ok());
        let error = check("theirs", &adamw(), turn(1, 0.099)).unwrap_err();
        let expected = "theirs: expected 0.098999";
        assert!(error.to_string().starts_with(expected), "{error}");
        assert!(check("theirs", &adamw(), turn(2, 0.098_999)).is_err());
        let without = Turn { ns: 1.0, steps: 5, value: None };
        assert!(check("theirs", &adamw(), without).is_ok());
    }
}
