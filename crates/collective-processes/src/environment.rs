//! What a launcher tells each process.

use crate::ProcessError;

/// Names a start of the program, the same for all of its ranks; set by `fusestep launch`.
pub(crate) const SESSION: &str = "FUSESTEP_SESSION";

/// Where a rank finds the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendezvous {
    /// This rank.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
    /// Equal on all ranks of a start of the program, and another for every other start that runs
    /// on the machine at the same time.
    pub session: String,
}

impl Rendezvous {
    /// What `fusestep launch` or `torchrun` has put into the environment.
    ///
    /// # Errors
    /// [`ProcessError::Environment`] naming the variable, and [`ProcessError::SeveralMachines`].
    pub fn from_environment() -> Result<Self, ProcessError> {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    fn from_variables(of: impl Fn(&str) -> Option<String>) -> Result<Self, ProcessError> {
        let world_size = number(&of, "WORLD_SIZE")?.unwrap_or(0);
        if world_size == 0 {
            return Err(refused(&of, "WORLD_SIZE", "the number of ranks, 1 or more"));
        }
        let rank = number(&of, "RANK")?.filter(|rank| *rank < world_size);
        let Some(rank) = rank else {
            let expected = format!("a rank below {world_size}");
            return Err(refused(&of, "RANK", &expected));
        };
        let local = number(&of, "LOCAL_WORLD_SIZE")?.unwrap_or(world_size);
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

/// Whether a launcher has started this process as one of several ranks, and of how many.
pub fn launched_processes() -> Option<usize> {
    let found = Rendezvous::from_environment().ok()?;
    (found.world_size > 1).then_some(found.world_size)
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

/// Our launcher's token; else what tells a start by torchrun from others, restarts included.
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
        ] {
            let text = read(variables).unwrap_err().to_string();
            assert!(text.contains(expected), "{text}");
        }
    }
}
