//! Variables by which a launcher tells each process its place.

use std::hash::{BuildHasher, Hasher, RandomState};

use fusestep_collective::{alone_on_purpose, started_together};

use crate::{MAX_RANKS, ProcessError};

/// Variable that names a start of the program, the same for all of its ranks; set by `fusestep
/// launch`.
pub(crate) const SESSION: &str = "FUSESTEP_SESSION";

/// Place at which a rank finds the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendezvous {
    /// This rank.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
    /// Name of the start, equal on all ranks. Every other start that runs on the machine at the
    /// same time has another name.
    pub session: String,
}

impl Rendezvous {
    /// Place that `fusestep launch` or `torchrun` has put into the environment. A world of one
    /// where [`ALONE`](fusestep_collective::ALONE) is set.
    ///
    /// # Errors
    /// [`ProcessError::Environment`] naming the variable, [`ProcessError::SeveralMachines`] and
    /// [`ProcessError::OtherLauncher`].
    pub fn from_environment() -> Result<Self, ProcessError> {
        if alone_on_purpose() {
            return Ok(Self { rank: 0, world_size: 1, session: token() });
        }
        let found = Self::from_variables(|name| std::env::var(name).ok());
        let is_told = |name| std::env::var_os(name).is_some();
        let is_alone = match &found {
            Ok(place) => place.world_size == 1,
            Err(_) => !is_told("RANK") && !is_told("WORLD_SIZE"),
        };
        match started_together().filter(|_| is_alone) {
            Some(started) => Err(ProcessError::OtherLauncher { started: Box::new(started) }),
            None => found,
        }
    }

    fn from_variables(of: impl Fn(&str) -> Option<String>) -> Result<Self, ProcessError> {
        let world_size = number(&of, "WORLD_SIZE")?.unwrap_or(0);
        if !(1..=MAX_RANKS).contains(&world_size) {
            let expected = format!("the number of ranks, from 1 to {MAX_RANKS}");
            return Err(refused(&of, "WORLD_SIZE", &expected));
        }
        let rank = number(&of, "RANK")?.filter(|rank| *rank < world_size);
        let Some(rank) = rank else {
            let expected = format!("a rank below {world_size}");
            return Err(refused(&of, "RANK", &expected));
        };
        let machines = number(&of, "GROUP_WORLD_SIZE")?.unwrap_or(1).max(1);
        let local = number(&of, "LOCAL_WORLD_SIZE")?.unwrap_or(world_size / machines);
        if local > world_size {
            let expected = format!("at most WORLD_SIZE, which is {world_size}");
            return Err(refused(&of, "LOCAL_WORLD_SIZE", &expected));
        }
        if local != world_size {
            return Err(ProcessError::SeveralMachines { world_size, local });
        }
        let Some(session) = session(&of) else {
            let expected = "a name of this start, or MASTER_ADDR and MASTER_PORT as of torchrun";
            return Err(refused(&of, SESSION, expected));
        };
        Ok(Self { rank, world_size, session })
    }
}

/// Number of ranks that a launcher has started for this engine, this process among them; `None`
/// where no launcher has started several processes.
///
/// # Errors
/// As [`Rendezvous::from_environment`] where a launcher has started several processes that this
/// engine cannot bring together: each would take itself for the whole.
pub fn launched_processes() -> Result<Option<usize>, ProcessError> {
    match started_together() {
        None => Ok(None),
        Some(_) => Rendezvous::from_environment().map(|place| Some(place.world_size)),
    }
}

/// A name that no other start has.
pub(crate) fn token() -> String {
    let random = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", random(), random())
}

fn number(
    of: &impl Fn(&str) -> Option<String>,
    variable: &'static str,
) -> Result<Option<usize>, ProcessError> {
    match of(variable) {
        None => Ok(None),
        Some(text) => match text.trim().parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(refused(of, variable, "a number")),
        },
    }
}

fn refused(
    of: &impl Fn(&str) -> Option<String>,
    variable: &'static str,
    expected: &str,
) -> ProcessError {
    ProcessError::Environment {
        variable,
        expected: format!("{variable} to be {expected}"),
        found: of(variable).map_or_else(|| "(not set)".to_owned(), |text| format!("`{text}`")),
    }
}

/// Our launcher's token; otherwise variables that tell one start by torchrun from another, restarts
/// included.
fn session(of: &impl Fn(&str) -> Option<String>) -> Option<String> {
    let token = of(SESSION).filter(|token| !token.is_empty());
    token.or_else(|| {
        let (address, port) = (of("MASTER_ADDR")?, of("MASTER_PORT")?);
        let optional = |name| of(name).unwrap_or_default();
        Some(format!(
            "{address}:{port}/{}/{}",
            optional("TORCHELASTIC_RUN_ID"),
            optional("TORCHELASTIC_RESTART_COUNT")
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Rendezvous, ProcessError> {
        Rendezvous::from_variables(|name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn both_launchers_are_understood() {
        let ours = read(&[("RANK", "1"), ("WORLD_SIZE", "2"), (SESSION, "x")]).unwrap();
        assert_eq!((ours.rank, ours.world_size, &*ours.session), (1, 2, "x"));
        let torch = [
            ("RANK", "0"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_WORLD_SIZE", "4"),
            ("MASTER_ADDR", "h"),
            ("MASTER_PORT", "29500"),
            ("TORCHELASTIC_RUN_ID", "none"),
            ("TORCHELASTIC_RESTART_COUNT", "2"),
        ];
        assert_eq!(read(&torch).unwrap().session, "h:29500/none/2");
    }

    #[test]
    fn a_wrong_environment_is_named() {
        for (variables, expected) in [
            (&[][..], "found WORLD_SIZE=(not set)"),
            (&[("WORLD_SIZE", "two")][..], "found WORLD_SIZE=`two`"),
            (&[("WORLD_SIZE", "2")][..], "RANK to be a rank below 2"),
            (&[("WORLD_SIZE", "2"), ("RANK", "2")][..], "RANK=`2`"),
            (&[("WORLD_SIZE", "2"), ("RANK", "1")][..], "FUSESTEP_SESSION=(not set)"),
            (
                &[("WORLD_SIZE", "4"), ("RANK", "1"), ("LOCAL_WORLD_SIZE", "2")][..],
                "expected all 4 ranks on this machine, found 2 here",
            ),
            (
                &[("WORLD_SIZE", "4"), ("RANK", "1"), ("GROUP_WORLD_SIZE", "2")][..],
                "expected all 4 ranks on this machine, found 2 here",
            ),
            (
                &[("WORLD_SIZE", "1025"), ("RANK", "0")][..],
                "from 1 to 1024, found WORLD_SIZE=`1025`",
            ),
            (
                &[("WORLD_SIZE", "2"), ("RANK", "1"), ("LOCAL_WORLD_SIZE", "4")][..],
                "LOCAL_WORLD_SIZE to be at most WORLD_SIZE, which is 2, found LOCAL_WORLD_SIZE=`4`",
            ),
        ] {
            let text = read(variables).unwrap_err().to_string();
            assert!(text.contains(expected), "{text}");
        }
    }
}
