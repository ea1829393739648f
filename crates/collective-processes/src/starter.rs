//! The starter: the launcher that has started a rank. Once it has gone, nobody ends the ranks of a
//! start together or tells how they ended, so they end too.

use std::io::Write;
use std::sync::Once;
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};

use crate::family::END_TIME;
use crate::life::Life;
use crate::once::remove_notes;

/// Variable that names the launcher's process; set by `fusestep launch`.
pub(crate) const STARTER: &str = "FUSESTEP_STARTER";

/// Time between two looks whether the launcher lives.
const LOOK: Duration = Duration::from_millis(500);

/// This process, as it names itself to ranks that it starts.
pub(crate) fn own() -> String {
    let Life { process, began } = Life::own();
    format!("{process} {began} {}", numbers())
}

/// Namespace of process numbers: within it a number means one process.
fn numbers() -> String {
    let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    namespace.display().to_string()
}

/// The process that this text names, if this process can see it.
fn read(text: &str) -> Option<Life> {
    let mut words = text.splitn(3, ' ');
    let mut number = || words.next()?.parse().ok();
    let (process, began) = (number()?, number()?);
    let seen = words.next().is_some_and(|word| word == numbers());
    seen.then_some(Life { process, began })
}

/// Ends this process, as its launcher would, when the launcher has gone. Does nothing under other
/// launchers.
pub(crate) fn follow() {
    static FOLLOWED: Once = Once::new();
    FOLLOWED.call_once(|| {
        let told = std::env::var(STARTER).ok();
        let Some(starter) = told.and_then(|text| read(&text)) else {
            return;
        };
        let look = move || {
            while starter.is_alive() {
                std::thread::sleep(LOOK);
            }
            end(starter);
        };
        let named = std::thread::Builder::new().name("fusestep-starter".to_owned());
        // Without the thread this rank goes on as under any other launcher.
        let _ = named.spawn(look);
    });
}

fn end(starter: Life) {
    say(&format!(
        "error: expected the launcher, process {}, to look after this rank, found it gone; process \
         {} ends",
        starter.process,
        std::process::id()
    ));
    remove_notes();
    // The program may have something to save first.
    let _ = kill_process(getpid(), Signal::TERM);
    std::thread::sleep(END_TIME);
    let _ = kill_process(getpid(), Signal::KILL);
}

/// Writes a line to standard error in one piece: other ranks write there, too.
pub(crate) fn say(line: &str) {
    // If the line cannot be written, nobody is left to tell.
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_starter_is_known_by_its_number_its_beginning_and_where_numbers_mean_the_same() {
        assert_eq!(read(&own()), Some(Life::own()));
        let Life { process, began } = Life::own();
        for other in ["", "1", "1 2", "x 2 y", &format!("{process} {began} pid:[1]")] {
            assert_eq!(read(other), None, "{other}");
        }
    }
}
