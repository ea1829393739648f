//! Launchers: whether one has started this process as one of several.
//!
//! A program that does not ask runs once for each process, and each run takes itself for the whole.

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use fusestep_tensor::Quoted;

/// Variable that makes a process of a launcher run alone on purpose: variables of launchers are
/// then not looked at.
pub const ALONE: &str = "FUSESTEP_ALONE";

/// How processes of a launcher run alone.
pub const ALONE_REMEDY: &str = "set FUSESTEP_ALONE=1 where each process is to run alone (behind \
                                `fusestep launch`, as `-- env FUSESTEP_ALONE=1 PROGRAM`)";

/// Carrier of calls between the processes of a launcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carrier {
    /// MPI, whose processes find each other by themselves.
    Mpi,
    /// RANK, WORLD_SIZE and an address, as `fusestep launch` and torchrun tell them.
    Addresses,
}

/// A launcher and the variables in which it tells a process its place.
struct Launcher {
    name: &'static str,
    carrier: Carrier,
    /// Variables of the number of all processes.
    sizes: &'static [&'static str],
    /// Variables of the place of a process, from 0. Each says that there is a launcher.
    ranks: &'static [&'static str],
    /// Variables of the number of some of the processes, or of machines: a number above 1 says that
    /// there are several.
    parts: &'static [&'static str],
    /// Variables that only processes of the launcher have.
    marks: &'static [&'static str],
}

/// All launchers. First come those of MPI: Open MPI, Spectrum MPI and Fujitsu's; MPICH's Hydra,
/// Intel's and others that speak PMI; MVAPICH's own; Platform MPI. Launchers that tell addresses
/// follow, then schedulers, which tell a batch script less than a process of a job step.
static LAUNCHERS: [Launcher; 14] = [
    Launcher {
        name: "mpirun of Open MPI",
        carrier: Carrier::Mpi,
        sizes: &["OMPI_COMM_WORLD_SIZE"],
        ranks: &["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_NODE_RANK"],
        parts: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        marks: &[],
    },
    Launcher {
        name: "mpirun of MPICH, Intel MPI or another launcher that speaks PMI",
        carrier: Carrier::Mpi,
        sizes: &["PMI_SIZE"],
        ranks: &["PMI_RANK", "PMI_ID", "PMI_LOCAL_RANK", "MPI_LOCALRANKID"],
        parts: &["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"],
        marks: &["PMI_FD", "PMI_PORT"],
    },
    Launcher {
        name: "mpirun of MVAPICH",
        carrier: Carrier::Mpi,
        sizes: &["MV2_COMM_WORLD_SIZE", "MVP_COMM_WORLD_SIZE", "MPIRUN_NPROCS"],
        ranks: &[
            "MV2_COMM_WORLD_RANK",
            "MVP_COMM_WORLD_RANK",
            "MV2_COMM_WORLD_LOCAL_RANK",
            "MVP_COMM_WORLD_LOCAL_RANK",
            "MPIRUN_RANK",
        ],
        parts: &["MV2_COMM_WORLD_LOCAL_SIZE", "MVP_COMM_WORLD_LOCAL_SIZE"],
        marks: &[],
    },
    Launcher {
        name: "mpirun of Platform MPI",
        carrier: Carrier::Mpi,
        sizes: &["MPI_NRANKS"],
        ranks: &["MPI_RANKID"],
        parts: &[],
        marks: &[],
    },
    Launcher {
        name: "torchrun or `fusestep launch`",
        carrier: Carrier::Addresses,
        sizes: &["WORLD_SIZE"],
        ranks: &["RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"],
        parts: &["LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"],
        marks: &[
            "FUSESTEP_SESSION",
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_RESTART_COUNT",
            "TORCHELASTIC_MAX_RESTARTS",
        ],
    },
    Launcher {
        name: "horovodrun",
        carrier: Carrier::Addresses,
        sizes: &["HOROVOD_SIZE"],
        ranks: &["HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "HOROVOD_CROSS_RANK"],
        parts: &["HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_SIZE"],
        marks: &[],
    },
    Launcher {
        name: "mpiexec of PALS",
        carrier: Carrier::Mpi,
        sizes: &["PALS_SIZE", "PALS_WORLD_SIZE"],
        ranks: &["PALS_RANKID", "PALS_LOCAL_RANKID", "PALS_NODEID"],
        parts: &["PALS_LOCAL_SIZE"],
        marks: &["PALS_APID"],
    },
    Launcher {
        name: "flux run",
        carrier: Carrier::Mpi,
        sizes: &["FLUX_JOB_SIZE"],
        ranks: &["FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"],
        parts: &["FLUX_JOB_NNODES"],
        marks: &[],
    },
    Launcher {
        name: "jsrun",
        carrier: Carrier::Mpi,
        sizes: &["JSM_NAMESPACE_SIZE"],
        ranks: &["JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK"],
        parts: &["JSM_NAMESPACE_LOCAL_SIZE"],
        marks: &[],
    },
    SRUN,
    // A step whose number of tasks is that of the job.
    Launcher { sizes: &["SLURM_NTASKS", "SLURM_NPROCS"], marks: SLURM_STEP, ..SRUN },
    Launcher {
        name: "aprun",
        carrier: Carrier::Mpi,
        sizes: &[],
        ranks: &["ALPS_APP_PE"],
        parts: &[],
        marks: &[],
    },
    Launcher {
        name: "poe",
        carrier: Carrier::Mpi,
        sizes: &["MP_PROCS"],
        ranks: &["MP_CHILD"],
        parts: &[],
        marks: &[],
    },
    PMIX,
];

/// Slurm's launcher, for a task of a step. A batch script and the shell of an allocation have the
/// job's number of tasks and rank 0, too, and are alone.
const SRUN: Launcher = Launcher {
    name: "srun",
    carrier: Carrier::Mpi,
    sizes: &["SLURM_STEP_NUM_TASKS"],
    ranks: &[],
    parts: &["SLURM_STEP_NUM_NODES"],
    marks: &[],
};

/// Launchers that speak PMIx. PMIx tells no number of processes; other variables often do.
const PMIX: Launcher = Launcher {
    name: "a launcher that speaks PMIx",
    carrier: Carrier::Mpi,
    sizes: &["PMIX_SIZE"],
    ranks: &["PMIX_RANK", "PMIX_LOCAL_RANK"],
    parts: &["PMIX_LOCAL_SIZE"],
    marks: &[PMIX_NAMESPACE],
};

/// The variable with the name of a start by PMIx.
const PMIX_NAMESPACE: &str = "PMIX_NAMESPACE";

/// Beginning of Slurm's own names of starts.
const SLURM_NAMESPACE: &str = "slurm.";

/// Variables that a task of a step has, and neither a batch script nor the shell of an allocation.
const SLURM_STEP: &[&str] = &["SLURM_STEP_ID", "SLURM_STEPID"];

/// Variables of places that a batch script, which is number 0, has as well.
const SLURM_RANKS: [&str; 3] = ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"];

/// The first number of steps without tasks: a batch script, an interactive shell.
const SLURM_FIRST_SPECIAL_STEP: u64 = 0xffff_fff0;

/// Words of a launcher about this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Started {
    /// The launcher.
    pub launcher: &'static str,
    /// Number of processes, if that is told.
    pub ranks: Option<usize>,
    /// Carrier of calls between the processes.
    pub carrier: Carrier,
    /// The variable that tells of several processes.
    pub variable: &'static str,
    /// Value of the variable.
    pub value: String,
}

impl fmt::Display for Started {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.ranks {
            Some(ranks) => write!(f, "{ranks} processes were started together")?,
            None => f.write_str("processes, nobody says how many, were started together")?,
        }
        write!(f, " by {} ({}={})", self.launcher, self.variable, Quoted(&self.value))
    }
}

/// The launcher that has started this process as one of several. `None` if this process stands
/// alone, as a batch script of a scheduler does, or is told by [`ALONE`] to run as if it did.
///
/// All variables of a launcher count: a rank without a number of ranks is one of several.
pub fn started_together() -> Option<Started> {
    started_in(&read_variable)
}

/// Whether [`ALONE`] is set.
pub fn alone_on_purpose() -> bool {
    is_alone(&read_variable)
}

/// Whether [`ALONE`] has a value other than nothing and 0.
fn is_alone(of: &impl Fn(&str) -> Option<String>) -> bool {
    of(ALONE).is_some_and(|value| !matches!(value.trim(), "" | "0"))
}

/// The value of a variable of this process, with bytes that are no text replaced.
fn read_variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// Whether this process has joined others by an engine.
static JOINED: AtomicBool = AtomicBool::new(false);

/// Notes, for engines, that this process has joined the others that a launcher has started. Work
/// that it does by itself from now on is done on purpose.
pub fn mark_joined() {
    JOINED.store(true, Ordering::Relaxed);
}

/// Refuses to work as if this process were the only one, where a launcher has started several and
/// this process has joined none of the others.
///
/// # Errors
/// [`TakenForWhole`], which says how to run on all of them and how to run alone.
pub fn require_alone() -> Result<(), TakenForWhole> {
    // Each step of a process asks, so the environment is read once.
    static STARTED: OnceLock<Option<Started>> = OnceLock::new();
    match STARTED.get_or_init(started_together) {
        Some(started) if !JOINED.load(Ordering::Relaxed) => {
            Err(TakenForWhole { started: Box::new(started.clone()) })
        }
        _ => Ok(()),
    }
}

/// A process of several that would take itself for the whole.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{started}, and each would take itself for the whole; make the communicator of an engine first \
     (`ProcessCommunicator::world`, `MpiCommunicator::world`), or {ALONE_REMEDY}"
)]
pub struct TakenForWhole {
    /// Words of the launcher.
    pub started: Box<Started>,
}

/// All variables in which launchers tell a process its place. A program that starts ranks of its
/// own takes them out of the ranks' environment.
pub fn launcher_variables() -> impl Iterator<Item = &'static str> {
    let lists = |launcher: &'static Launcher| {
        [launcher.sizes, launcher.ranks, launcher.parts, launcher.marks].into_iter().flatten()
    };
    let own = [ALONE].into_iter().chain(SLURM_RANKS);
    LAUNCHERS.iter().flat_map(lists).copied().chain(own)
}

/// This process's number among the processes of its machine, as launchers tell it.
pub fn local_rank() -> Option<usize> {
    [
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "MPI_LOCALRANKID",
        "PMI_LOCAL_RANK",
        "PALS_LOCAL_RANKID",
        "FLUX_TASK_LOCAL_ID",
        "JSM_NAMESPACE_LOCAL_RANK",
        "SLURM_LOCALID",
        "LOCAL_RANK",
    ]
    .into_iter()
    .find_map(|name| read_variable(name)?.trim().parse().ok())
}

/// Answer of one launcher.
enum Said {
    Nothing,
    /// This process is the only one.
    Alone,
    /// This process has been started, as the first or as one of an unknown place.
    Perhaps(Started),
    Several(Started),
}

fn started_in(of: &impl Fn(&str) -> Option<String>) -> Option<Started> {
    if is_alone(of) {
        return None;
    }
    let set = |name: &str| of(name).map(|value| value.trim().to_owned()).filter(|v| !v.is_empty());
    let (mut several, mut perhaps, mut alone) = (Vec::new(), Vec::new(), Vec::new());
    for launcher in &LAUNCHERS {
        let is_step = launcher.marks != SLURM_STEP || is_slurm_step(&set);
        match if is_step { said(launcher, &set) } else { Said::Nothing } {
            Said::Nothing => {}
            // Variables of addresses may stand in the environment of every process of another
            // launcher.
            Said::Alone if launcher.carrier == Carrier::Addresses => {}
            Said::Alone => alone.push(launcher.name),
            Said::Perhaps(started) => perhaps.push(started),
            Said::Several(started) => several.push(started),
        }
    }
    several.extend(slurm_rank(&set));
    // A task that srun has started alone may start others: prterun gives these a namespace of its
    // own.
    let is_slurms = set(PMIX_NAMESPACE).is_none_or(|name| name.starts_with(SLURM_NAMESPACE));
    let is_of_alone = |started: &Started| {
        let others = started.launcher == PMIX.name && !is_slurms;
        alone.iter().any(|&name| name != SRUN.name || !others)
    };
    several.extend(perhaps.into_iter().filter(|started| !is_of_alone(started)));
    let known = several.iter().position(|started| started.ranks.is_some()).unwrap_or(0);
    several.into_iter().nth(known)
}

fn said(launcher: &Launcher, set: &impl Fn(&str) -> Option<String>) -> Said {
    let started = |variable: &'static str, value: String, ranks: Option<usize>| {
        let (launcher, carrier) = (launcher.name, launcher.carrier);
        Started { launcher, ranks, carrier, variable, value }
    };
    let find = |names: &[&'static str]| names.iter().find_map(|&name| Some((name, set(name)?)));
    let size = find(launcher.sizes);
    if let Some((name, value)) = &size {
        let ranks = value.parse::<usize>().ok();
        if ranks != Some(1) {
            let ranks = ranks.filter(|&ranks| ranks > 1);
            return Said::Several(started(name, value.clone(), ranks));
        }
    }
    // A process with another place than the first, or with others beside it, is not alone, whatever
    // the size says.
    let most = |names: &[&'static str], most: usize| {
        let is_more = |value: &String| value.parse().map_or(true, |number: usize| number > most);
        names.iter().find_map(|&name| Some((name, set(name).filter(is_more)?)))
    };
    if let Some((name, value)) = most(launcher.ranks, 0).or_else(|| most(launcher.parts, 1)) {
        return Said::Several(started(name, value, None));
    }
    if size.is_some() {
        return Said::Alone;
    }
    match find(launcher.ranks).or_else(|| find(launcher.marks)) {
        Some((name, value)) => Said::Perhaps(started(name, value, None)),
        None => Said::Nothing,
    }
}

/// Whether this is a task of a step whose number of tasks only the job tells.
fn is_slurm_step(set: &impl Fn(&str) -> Option<String>) -> bool {
    let number = SLURM_STEP.iter().find_map(|name| set(name));
    let is_task =
        |number: String| number.parse().map_or(true, |n: u64| n < SLURM_FIRST_SPECIAL_STEP);
    number.is_some_and(is_task) && set("SLURM_STEP_NUM_TASKS").is_none()
}

/// The rank of a Slurm task in a place that no batch script has.
fn slurm_rank(set: &impl Fn(&str) -> Option<String>) -> Option<Started> {
    SLURM_RANKS.into_iter().find_map(|variable| {
        let value = set(variable)?;
        let ranks = set("SLURM_STEP_NUM_TASKS").or_else(|| set("SLURM_NTASKS"));
        let ranks = ranks.and_then(|ranks| ranks.parse().ok()).filter(|&ranks| ranks > 1);
        let (launcher, carrier) = (SRUN.name, SRUN.carrier);
        let started = Started { launcher, ranks, carrier, variable, value };
        (started.value != "0").then_some(started)
    })
}

#[cfg(test)]
#[path = "launcher_tests.rs"]
mod tests;
