//! Starts a program as several ranks and looks after them.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::environment::SESSION;
use crate::files::remove_leftovers;
use crate::launched::{LaunchOptions, Launched};
use crate::starter::{self, STARTER};

/// Time between two looks at the processes.
const LOOK: Duration = Duration::from_millis(2);

/// How long a process that was asked to end may take.
pub(crate) const END_TIME: Duration = Duration::from_secs(5);

/// Starts all ranks, passes SIGINT, SIGTERM and SIGHUP on to them, and waits until all have ended.
/// One of these that this process ignores, as under `nohup`, stays ignored, by the ranks as well.
///
/// Each finds its place in RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and FUSESTEP_SESSION.
/// When one fails, the others have [`LaunchOptions::grace`] to end by themselves; then they get
/// SIGTERM, and those that have not ended of it 5 s later are killed. Ranks of this engine end as
/// well when this process is killed, which FUSESTEP_STARTER names. Standard input goes to rank 0.
/// What killed ranks have left in shared memory is removed.
///
/// # Errors
/// The system's, if a process cannot be started; those that were started are ended then.
pub fn launch(options: &LaunchOptions) -> io::Result<Launched> {
    let mut signals = Signals::new(heeded())?;
    let mut job = Job { session: token(), ranks: Vec::new(), ended: Vec::new() };
    for rank in 0..options.ranks {
        let started = job.command(options, rank).spawn();
        job.ranks.push(started?);
        job.ended.push(None);
    }
    let (mut failed, mut deadline, mut asked) = (None, None, false);
    while !job.look()? {
        for signal in signals.pending() {
            if let Some(signal) = Signal::from_named_raw(signal) {
                job.pass_on(signal);
            }
        }
        failed = failed.or_else(|| job.first_failed());
        if failed.is_some() {
            let now = Instant::now();
            let limit = *deadline.get_or_insert(now + options.grace);
            if now > limit {
                job.pass_on(if asked { Signal::KILL } else { Signal::TERM });
                (asked, deadline) = (true, Some(now + END_TIME));
            }
        }
        std::thread::sleep(LOOK);
    }
    failed = failed.or_else(|| job.first_failed());
    let code = failed.and_then(|rank| job.ended[rank]).map_or(0, code_of);
    Ok(Launched { code, failed })
}

/// The signals that are passed on: a handler for one that is ignored would take that from this
/// process and, since programs begin without handlers, from its ranks.
fn heeded() -> impl Iterator<Item = i32> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    let ignored = mask.unwrap_or(0);
    let all = [SIGINT, SIGTERM, SIGHUP].into_iter();
    all.filter(move |signal| (ignored >> (signal - 1)) & 1 == 0)
}

/// The code of a process that ended so, as shells have it.
fn code_of(status: ExitStatus) -> u8 {
    let code = match (status.code(), status.signal()) {
        (Some(code), _) => code,
        (None, signal) => 128 + signal.unwrap_or(0),
    };
    u8::try_from(code).unwrap_or(1)
}

/// A name that no other start has.
fn token() -> String {
    let random = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", random(), random())
}

/// Processes that do not outlive this value.
struct Job {
    session: String,
    ranks: Vec<Child>,
    /// How each has ended.
    ended: Vec<Option<ExitStatus>>,
}

impl Job {
    fn command(&self, options: &LaunchOptions, rank: usize) -> Command {
        let mut command = Command::new(&options.program);
        let (rank_text, ranks) = (rank.to_string(), options.ranks.to_string());
        command
            .args(&options.arguments)
            .env("RANK", &rank_text)
            .env("LOCAL_RANK", &rank_text)
            .env("WORLD_SIZE", &ranks)
            .env("LOCAL_WORLD_SIZE", &ranks)
            .env(SESSION, &self.session)
            .env(STARTER, starter::own());
        if rank > 0 {
            command.stdin(Stdio::null());
        }
        command
    }

    /// Looks who has ended; says whether all have.
    fn look(&mut self) -> io::Result<bool> {
        for (child, ended) in self.ranks.iter_mut().zip(&mut self.ended) {
            if ended.is_none() {
                *ended = child.try_wait()?;
            }
        }
        Ok(self.ended.iter().all(Option::is_some))
    }

    /// The lowest rank that has failed; of those that a signal has ended, if there are any, since
    /// others fail because of them.
    fn first_failed(&self) -> Option<usize> {
        let signalled = |status: &ExitStatus| status.signal().is_some();
        let failed = |status: &ExitStatus| !status.success();
        let find = |is: &dyn Fn(&ExitStatus) -> bool| {
            let mut ended = self.ended.iter();
            ended.position(|status| status.as_ref().is_some_and(is))
        };
        find(&signalled).or_else(|| find(&failed))
    }

    fn pass_on(&self, signal: Signal) {
        for (child, _) in self.running() {
            // It may just have ended; it is waited for in any case, so the number is still its own.
            // One that is stopped hears of the signal only when it goes on.
            for signal in [signal, Signal::CONT] {
                let _ = kill_process(Pid::from_child(child), signal);
            }
        }
    }

    fn running(&self) -> impl Iterator<Item = (&Child, &Option<ExitStatus>)> {
        let all = self.ranks.iter().zip(&self.ended);
        all.filter(|(_, ended)| ended.is_none())
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.pass_on(Signal::KILL);
        for (child, ended) in self.ranks.iter_mut().zip(&self.ended) {
            if ended.is_none() {
                // It was just killed; nothing can be done about an error.
                let _ = child.wait();
            }
        }
        remove_leftovers(&self.session);
    }
}
