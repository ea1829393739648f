//! Lives: whether a process is alive, and still the one that it was.

use std::sync::OnceLock;

/// A process, told from a later process of the same number by the time of its beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Life {
    pub(crate) process: u64,
    /// Beginning of the process, in ticks of the system's clock.
    pub(crate) began: u64,
}

impl Life {
    /// This process.
    pub(crate) fn own() -> Self {
        static OWN: OnceLock<Life> = OnceLock::new();
        *OWN.get_or_init(|| {
            let process = u64::from(std::process::id());
            let began = State::of(process).map_or(0, |state| state.began);
            Self { process, began }
        })
    }

    /// Whether the process runs, or could. A process that has ended and waits for its parent to
    /// look is dead.
    pub(crate) fn is_alive(self) -> bool {
        if self == Self::own() {
            return true;
        }
        let state = State::of(self.process);
        state.is_some_and(|state| state.began == self.began && !matches!(state.code, b'Z' | b'X'))
    }
}

/// The system's entry about a process.
struct State {
    code: u8,
    began: u64,
}

impl State {
    fn of(process: u64) -> Option<Self> {
        let text = std::fs::read(format!("/proc/{process}/stat")).ok()?;
        Self::read(&text)
    }

    /// The state in the text of a `stat` file; `None` for any other text. The process's name, in
    /// brackets, may have any bytes.
    fn read(text: &[u8]) -> Option<Self> {
        let after = text.iter().rposition(|&byte| byte == b')')? + 1;
        let text = std::str::from_utf8(&text[after..]).ok()?;
        // The state is field 3 of the manual, the beginning of the process field 22.
        let mut fields = text.split_ascii_whitespace();
        let code = *fields.next()?.as_bytes().first()?;
        let began = fields.nth(18)?.parse().ok()?;
        Some(Self { code, began })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_is_read_behind_any_name() {
        let fields: Vec<String> = (4..=40).map(|field| field.to_string()).collect();
        let text = format!("17 (a) Z (b) S {}", fields.join(" "));
        let state = State::read(text.as_bytes()).unwrap();
        assert_eq!((state.code, state.began), (b'S', 22));
        assert!(State::read(b"17 (a) S 4 5").is_none());
        assert!(State::read(b"").is_none());
    }

    #[test]
    fn a_process_that_has_ended_is_dead_before_and_after_its_parent_looks() {
        let own = Life::own();
        assert!(own.is_alive() && own.began > 0);
        let later = Life { began: own.began + 1, ..own };
        assert!(!later.is_alive(), "another process of the same number");
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let process = u64::from(child.id());
        let began = State::of(process).unwrap().began;
        let life = Life { process, began };
        assert!(life.is_alive());
        child.kill().unwrap();
        while life.is_alive() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        child.wait().unwrap();
        assert!(!life.is_alive());
    }
}
