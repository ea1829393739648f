//! The guard: a process beside a launcher that ends the launcher's processes if the launcher is
//! killed.

use std::ffi::OsStr;
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use fusestep_collective::launcher_variables;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

use crate::family::{END_TIME, Family};
use crate::files::remove_leftovers;

/// Variable that names the session of a guard.
const GUARD: &str = "FUSESTEP_GUARD";

/// How long ranks have to say that their launcher has gone.
const WORDS_TIME: Duration = Duration::from_secs(1);

/// Does the work of a guard and ends the process, if [`launch`](crate::launch) has started it as a
/// guard; otherwise does nothing. The `main` of
/// [`LaunchOptions::guard`](crate::LaunchOptions::guard) calls it first.
pub fn guard() {
    let Ok(session) = std::env::var(GUARD) else {
        return;
    };
    // Somebody who ends a whole job by a signal means the launcher's ranks, and leaves the launcher
    // time.
    for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM] {
        let heard = Arc::new(AtomicBool::new(false));
        let _ = signal_hook::flag::register(signal, heard);
    }
    // The launcher holds the other end until it has ended everything itself, or has died.
    let launcher_has_ended = io::stdin().lock().read_exact(&mut [0]).is_ok();
    if !launcher_has_ended {
        std::thread::sleep(WORDS_TIME);
        Family::of(&session).end(END_TIME);
        remove_leftovers(&session);
    }
    std::process::exit(0);
}

/// Starts a guard of a session, in a process group of its own, out of the terminal's reach.
pub(crate) fn start(program: &OsStr, session: &str) -> io::Result<Child> {
    let mut command = Command::new(program);
    for variable in launcher_variables() {
        command.env_remove(variable);
    }
    let command = command.env(GUARD, session).process_group(0);
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    let role = format!("{} as the guard of the ranks", program.to_string_lossy());
    piped.spawn().map_err(|error| not_started(&role, &error))
}

/// Lets a guard go, since everything has ended.
pub(crate) fn dismiss(mut guard: Child) {
    if let Some(mut pipe) = guard.stdin.take() {
        // The guard may have been killed.
        let _ = io::Write::write_all(&mut pipe, &[0]);
    }
    let _ = guard.wait();
}

/// Error of a program that the system does not start, with what would help.
pub(crate) fn not_started(program: &str, error: &io::Error) -> io::Error {
    let helps = match error.kind() {
        io::ErrorKind::NotFound if program.starts_with("/proc/") => "; mount /proc",
        io::ErrorKind::WouldBlock => {
            "; allow more processes (ulimit -u, a container's limit on pids)"
        }
        _ => "",
    };
    io::Error::new(error.kind(), format!("cannot start {program}: {error}{helps}"))
}
