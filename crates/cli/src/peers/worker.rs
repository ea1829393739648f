//! Peers in programs of their own, which answer one line for each line they are sent.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use serde::{Deserialize, Serialize};

use super::Absent;

/// Steps of Python's optimizers, for `python3 -c`.
const PYTHON: &str = include_str!("peers.py");

/// Name, in a path of programs, of a peer in Rust: see `benches/peers/burn`.
const BURN: &str = "fusestep-peer-burn";

/// How long a peer may take for one answer; DeepSpeed compiles its kernels within the first.
const PATIENCE: Duration = Duration::from_secs(300);

/// The step that peers are asked to time.
#[derive(Debug, Serialize)]
pub(super) struct Request {
    pub(super) params: Vec<Shaped>,
    pub(super) threads: usize,
    /// Type of the state: `f32`, or `int8` of peers that have state of 8 bits.
    pub(super) state_dtype: &'static str,
    pub(super) lr: f64,
    pub(super) beta1: f64,
    pub(super) beta2: f64,
    pub(super) eps: f64,
    pub(super) weight_decay: f64,
}

/// A parameter in f32.
#[derive(Debug, Serialize)]
pub(super) struct Shaped {
    pub(super) name: String,
    pub(super) shape: Vec<u64>,
}

/// A peer that a program has.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Found {
    pub(super) name: String,
    pub(super) version: String,
}

#[derive(Debug, Deserialize)]
struct Inventory {
    found: Vec<Found>,
    absent: Vec<Absent>,
}

/// One turn of a peer.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct Turn {
    /// Nanoseconds of a step.
    pub(super) ns: f64,
    /// Steps taken so far, those of the first call included.
    pub(super) steps: u64,
    /// The first element of the first parameter that has one.
    pub(super) value: Option<f64>,
}

/// A program with peers.
pub(super) struct Worker {
    child: Child,
    requests: Option<ChildStdin>,
    answers: Receiver<String>,
    pub(super) found: Vec<Found>,
}

impl Worker {
    /// A worker with the peers of this Python.
    pub(super) fn python(
        python: &Path,
        request: &Request,
        absent: &mut Vec<Absent>,
    ) -> Option<Self> {
        let mut command = Command::new(python);
        command.args(["-c", PYTHON]);
        let packages = match request.state_dtype {
            "int8" => "bitsandbytes, torchao and PyTorch",
            _ => "PyTorch and DeepSpeed",
        };
        let name = format!("{packages} ({})", python.display());
        let help = "name a Python with --python";
        Self::start(&mut command, &name, help, request, absent)
    }

    /// A worker with burn's AdamW.
    pub(super) fn burn(request: &Request, absent: &mut Vec<Absent>) -> Option<Self> {
        let help = "cargo install --path benches/peers/burn";
        Self::start(&mut Command::new(BURN), "burn AdamW", help, request, absent)
    }

    /// Starts a program and reads which peers it has; a program that cannot be started is absent.
    fn start(
        command: &mut Command,
        name: &str,
        help: &str,
        request: &Request,
        absent: &mut Vec<Absent>,
    ) -> Option<Self> {
        match Self::started(command, request) {
            Ok((worker, missing)) => {
                absent.extend(missing);
                Some(worker)
            }
            Err(error) => {
                absent.push(Absent {
                    name: name.to_owned(),
                    reason: format!("{error:#}"),
                    help: help.to_owned(),
                });
                None
            }
        }
    }

    fn started(command: &mut Command, request: &Request) -> anyhow::Result<(Self, Vec<Absent>)> {
        let program = command.get_program().to_string_lossy().into_owned();
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {program}"))?;
        let requests = child.stdin.take();
        let output = BufReader::new(child.stdout.take().context("no standard output")?);
        let (sender, answers) = mpsc::channel();
        let read = move || {
            for line in output.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        };
        let reader = thread::Builder::new().name("answers".to_owned()).spawn(read);
        if let Err(error) = reader {
            let _ = child.kill();
            let _ = child.wait();
            return Err(error).context("cannot start a thread that reads a peer's answers");
        }
        let mut worker = Self { child, requests, answers, found: Vec::new() };
        let inventory: Inventory = worker.ask(&serde_json::to_string(request)?)?;
        worker.found = inventory.found;
        Ok((worker, inventory.absent))
    }

    /// A turn of the peer with this number.
    pub(super) fn turn(&mut self, number: usize) -> anyhow::Result<Turn> {
        let name = &self.found[number].name;
        let context = format!("{name} ended while it was timed");
        let turn: Turn = self.ask(&number.to_string()).context(context)?;
        ensure!(
            turn.ns > 0.0 && turn.ns.is_finite(),
            "{}: expected a time, found {} ns",
            self.found[number].name,
            turn.ns
        );
        Ok(turn)
    }

    fn ask<T: for<'a> Deserialize<'a>>(&mut self, line: &str) -> anyhow::Result<T> {
        let requests = self.requests.as_mut().context("no standard input")?;
        // A program that ended is noticed below, by the answer that does not come.
        let _ = writeln!(requests, "{line}").and_then(|()| requests.flush());
        let answer = match self.answers.recv_timeout(PATIENCE) {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Timeout) => {
                bail!("no answer within {} s", PATIENCE.as_secs())
            }
            Err(RecvTimeoutError::Disconnected) => {
                let status = self.child.wait().context("cannot wait for a peer")?;
                bail!("it ended without an answer: {status}");
            }
        };
        serde_json::from_str(&answer).with_context(|| {
            let start: String = answer.chars().take(80).collect();
            format!("expected an answer in JSON, found {start:?}")
        })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // The end of its input ends a program that listens; any other program is killed.
        self.requests = None;
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
