//! Families: all processes of a start, children of its ranks included, whatever their parent is
//! now.
//!
//! Their environment, which children inherit, names the session. So a process is found even if its
//! parent has ended or if it has a process group of its own.

use std::fs::read_dir;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::environment::SESSION;

/// Time between two looks at processes that were asked to end.
const LOOK: Duration = Duration::from_millis(20);

/// How long a process may take to end after SIGKILL: one that waits for a disk takes its time.
const KILL_TIME: Duration = Duration::from_secs(2);

/// How long a process that was asked to end may take.
pub(crate) const END_TIME: Duration = Duration::from_secs(5);

/// The processes of one start.
#[derive(Debug)]
pub(crate) struct Family {
    /// Variable that stands in the processes' environment.
    mark: Vec<u8>,
}

impl Family {
    pub(crate) fn of(session: &str) -> Self {
        Self { mark: format!("{SESSION}={session}").into_bytes() }
    }

    /// Members that run, without this process.
    fn members(&self) -> Vec<Pid> {
        let own = std::process::id();
        let numbers = read_dir("/proc").into_iter().flatten().flatten().filter_map(|entry| {
            let number: u32 = entry.file_name().to_str()?.parse().ok()?;
            (number != own).then_some(number)
        });
        let is_member = |number: &u32| {
            // Empty for processes that have ended; not readable for processes of other users.
            let variables = std::fs::read(format!("/proc/{number}/environ")).unwrap_or_default();
            variables.split(|&byte| byte == 0).any(|variable| variable == self.mark)
        };
        numbers.filter(is_member).filter_map(|number| Pid::from_raw(number as i32)).collect()
    }

    /// Ends the processes by SIGTERM, and by SIGKILL those that have not ended after `patience`.
    pub(crate) fn end(&self, patience: Duration) {
        let deadline = Instant::now() + patience;
        let mut asked = Vec::new();
        loop {
            let members = self.members();
            let now = Instant::now();
            if members.is_empty() || now > deadline + KILL_TIME {
                return;
            }
            for member in members {
                // The process may just have ended. A stopped process hears of SIGTERM when it goes
                // on.
                if now > deadline {
                    let _ = kill_process(member, Signal::KILL);
                } else if !asked.contains(&member) {
                    asked.push(member);
                    let _ = kill_process(member, Signal::TERM);
                    let _ = kill_process(member, Signal::CONT);
                }
            }
            std::thread::sleep(LOOK);
        }
    }
}
