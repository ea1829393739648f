//! Starts a program as several ranks and looks after them.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use fusestep_collective::launcher_variables;
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::environment::{SESSION, token};
use crate::family::{END_TIME, Family};
use crate::files::remove_leftovers;
use crate::guard::{self, not_started};
use crate::launched::{LaunchOptions, Launched};
use crate::lines::{Led, Lines};
use crate::once::take_met;
use crate::starter::{self, STARTER};

/// Time between two looks at the processes.
const LOOK: Duration = Duration::from_millis(2);

/// Starts all ranks, passes SIGINT, SIGTERM, SIGHUP and SIGQUIT on to them, and waits until all
/// have ended. A signal that this process ignores, as under `nohup`, stays ignored by the ranks as
/// well.
///
/// Each rank finds its place in RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and
/// FUSESTEP_SESSION. When one rank fails, the others have [`LaunchOptions::grace`] to end by
/// themselves. Then they get SIGTERM, and ranks that have not ended 5 s later are killed. After a
/// signal that was passed on, ranks that have not ended within [`LaunchOptions::patience`] are
/// killed, too. Standard input goes to rank 0.
///
/// Processes that ranks have started and left end with the ranks. All with FUSESTEP_SESSION in
/// their environment get SIGTERM and, 5 s later, SIGKILL. Where a signal was passed on, SIGKILL
/// follows after [`LaunchOptions::patience`], since a program behind a wrapper may hear of the
/// signal only then. If this process is killed, [`LaunchOptions::guard`] ends them. Ranks of this
/// engine end in any case when the launcher has gone, whose process FUSESTEP_STARTER names. Files
/// of killed ranks in shared memory are removed.
///
/// # Errors
/// The system's error, with the program that cannot be started, which may be the guard. All that
/// was started is ended then.
pub fn launch(options: &LaunchOptions) -> io::Result<Launched> {
    let mut signals = Signals::new(signals_without(&[Disposition::Ignored]))?;
    let session = token();
    let guard = options.guard.as_deref().map(|program| guard::start(program, &session));
    let guard = guard.transpose()?;
    let mut job = Job { session, guard, ranks: Vec::new(), ended: Vec::new(), end_time: END_TIME };
    let mut lines = Lines::default();
    for rank in 0..options.ranks {
        let mut command = job.command(options, rank);
        let led = Led::of(&mut command, options, rank)?;
        let program = options.program.to_string_lossy();
        let started = command.spawn().map_err(|error| not_started(&program, &error))?;
        job.ranks.push(started);
        job.ended.push(None);
        lines.pass_on(&mut job.ranks[rank], led)?;
    }
    let (mut failed, mut met) = (None, false);
    // The signal that is sent next to ranks that still run, and its time.
    let mut next: Option<(Instant, Signal)> = None;
    while !job.look()? {
        for signal in signals.pending() {
            if let Some(signal) = Signal::from_named_raw(signal) {
                job.pass_on(signal);
                job.end_time = options.patience;
                let limit = Instant::now() + options.patience;
                next = next.filter(|(earlier, _)| *earlier < limit).or(Some((limit, Signal::KILL)));
            }
        }
        // Each rank leaves the note, after it was taken as well.
        met |= take_met(&job.session);
        failed = failed.or_else(|| job.first_failed());
        if failed.is_some() {
            next = next.or_else(|| Some((Instant::now() + options.grace, Signal::TERM)));
        }
        if let Some((_, signal)) = next.filter(|(limit, _)| Instant::now() > *limit) {
            job.pass_on(signal);
            next = Some((Instant::now() + END_TIME, Signal::KILL));
        }
        std::thread::sleep(LOOK);
    }
    failed = failed.or_else(|| job.first_failed());
    let code = failed.and_then(|rank| job.ended[rank]).map_or(0, code_of);
    met |= take_met(&job.session);
    // Ends what ranks have left, so that nothing prints any more.
    drop(job);
    lines.finish();
    Ok(Launched { code, failed, met })
}

/// Decision of a process about a signal, which does not end it then.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Disposition {
    Ignored,
    Heard,
}

impl Disposition {
    /// The line of the process's status that has these signals.
    fn line(self) -> &'static str {
        match self {
            Self::Ignored => "SigIgn:",
            Self::Heard => "SigCgt:",
        }
    }
}

/// The signals that end a job, but those that this process has decided about. A handler for an
/// ignored signal would end the ignoring in this process and, since programs begin without
/// handlers, in its ranks.
pub(crate) fn signals_without(decided: &[Disposition]) -> impl Iterator<Item = i32> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let masks = decided.iter().filter_map(|decided| {
        let mask = status.lines().find_map(|line| line.strip_prefix(decided.line()))?;
        u64::from_str_radix(mask.trim(), 16).ok()
    });
    let mask = masks.fold(0, |all, mask| all | mask);
    let all = [SIGINT, SIGTERM, SIGHUP, SIGQUIT].into_iter();
    all.filter(move |signal| (mask >> (signal - 1)) & 1 == 0)
}

/// The exit code of a process with this status, as shells have it.
fn code_of(status: ExitStatus) -> u8 {
    let code = match (status.code(), status.signal()) {
        (Some(code), _) => code,
        (None, signal) => 128 + signal.unwrap_or(0),
    };
    u8::try_from(code).unwrap_or(1)
}

/// Processes that do not outlive this value.
struct Job {
    session: String,
    guard: Option<Child>,
    ranks: Vec<Child>,
    /// The status of each rank that has ended.
    ended: Vec<Option<ExitStatus>>,
    /// Time that processes started by ranks have to end after SIGTERM.
    end_time: Duration,
}

impl Job {
    fn command(&self, options: &LaunchOptions, rank: usize) -> Command {
        let mut command = Command::new(&options.program);
        let (rank_text, ranks) = (rank.to_string(), options.ranks.to_string());
        // Variables of other launchers are not about these ranks.
        for variable in launcher_variables() {
            command.env_remove(variable);
        }
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

    /// Looks which ranks have ended; says whether all have.
    fn look(&mut self) -> io::Result<bool> {
        for (child, ended) in self.ranks.iter_mut().zip(&mut self.ended) {
            if ended.is_none() {
                *ended = child.try_wait()?;
            }
        }
        Ok(self.ended.iter().all(Option::is_some))
    }

    /// The lowest rank that has failed. Ranks that a signal has ended come first, since others fail
    /// because of them.
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
            // The rank may just have ended; it is waited for in any case, so the number is still
            // its own. A stopped rank hears of the signal only when it goes on.
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
                // The rank was just killed; nothing can be done about an error.
                let _ = child.wait();
            }
        }
        Family::of(&self.session).end(self.end_time);
        remove_leftovers(&self.session);
        if let Some(guard) = self.guard.take() {
            guard::dismiss(guard);
        }
    }
}
