//! Launchers of every make: nobody trains alone without a word, and nothing outlives its launcher.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::{Folder, refused, text};

/// Runs the command with a launcher's variables and no other's.
fn under(variables: &str, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fusestep"));
    command.args(args);
    for variable in variables.split_whitespace() {
        let (name, value) = variable.split_once('=').unwrap();
        command.env(name, value);
    }
    command.output().unwrap()
}

const TRAIN: [&str; 4] = ["train", "--epochs", "1", "--json"];

#[test]
fn one_process_of_several_never_trains_alone_whatever_its_launcher_tells() {
    // One process of four, and what is told with it or without the rest.
    for (variables, works) in [
        ("RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500", "mpirun"),
        ("RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=10.0.0.1", "mpirun"),
        ("RANK=0 WORLD_SIZE=4", "mpirun"),
        ("WORLD_SIZE=4", "mpirun"),
        ("RANK=1", "mpirun"),
        ("LOCAL_RANK=1", "mpirun"),
        ("GROUP_RANK=1 GROUP_WORLD_SIZE=2", "mpirun"),
        ("TORCHELASTIC_RUN_ID=none", "mpirun"),
        ("RANK=0 WORLD_SIZE=5000 MASTER_ADDR=a MASTER_PORT=1", "mpirun"),
        ("OMPI_COMM_WORLD_RANK=1", "--engine mpi"),
        ("PMI_SIZE=4 PMI_RANK=0", "--engine mpi"),
        ("PMI_RANK=2", "--engine mpi"),
        ("MPI_LOCALNRANKS=2 MPI_LOCALRANKID=0", "--engine mpi"),
        ("PMIX_RANK=0 PMIX_NAMESPACE=prte@1", "--engine mpi"),
        ("SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=0 SLURM_NTASKS=4", "--engine mpi"),
        ("SLURM_PROCID=3 SLURM_NTASKS=4", "--engine mpi"),
        ("PALS_RANKID=1 PALS_LOCAL_RANKID=1", "--engine mpi"),
        ("FLUX_JOB_SIZE=4 FLUX_TASK_RANK=0", "--engine mpi"),
        ("JSM_NAMESPACE_SIZE=4 JSM_NAMESPACE_RANK=0", "--engine mpi"),
        ("RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1", "processes"),
    ] {
        for engine in [&[][..], &["--engine", "thread"], &["--ranks", "2"]] {
            let ended = under(variables, &[&TRAIN[..], engine].concat());
            let error = String::from_utf8_lossy(&ended.stderr);
            assert!(!ended.status.success() && ended.stdout.is_empty(), "{variables}: {error}");
            let said = ["were started together by", works, "set FUSESTEP_ALONE=1"];
            assert!(said.iter().all(|said| error.contains(said)), "{variables}: {error}");
        }
    }
}

#[test]
fn processes_on_several_machines_are_told_what_works() {
    let torchrun = "RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500";
    let ended = under(torchrun, &[&TRAIN[..], &["--engine", "processes"]].concat());
    let error = String::from_utf8_lossy(&ended.stderr);
    let named = "expected all 4 ranks on this machine, found 2 here";
    assert!(error.contains(named) && error.contains("start the program with mpirun"), "{error}");
    let ended = under(
        "RANK=0 WORLD_SIZE=1025 MASTER_ADDR=a MASTER_PORT=1",
        &[&TRAIN[..], &["--engine", "processes"]].concat(),
    );
    let error = String::from_utf8_lossy(&ended.stderr);
    assert!(error.contains("from 1 to 1024, found WORLD_SIZE=`1025`"), "{error}");
}

#[test]
fn a_process_alone_a_batch_script_and_whoever_asks_for_it_train() {
    for variables in [
        "MASTER_ADDR=10.0.0.1 MASTER_PORT=29500",
        "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=a MASTER_PORT=1",
        "OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=0 PMIX_RANK=0",
        "SLURM_JOB_ID=7 SLURM_NTASKS=8 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0",
        "OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=3 FUSESTEP_ALONE=1",
        "RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 FUSESTEP_ALONE=1",
    ] {
        for engine in [&[][..], &["--ranks", "2"], &["--ranks", "2", "--engine", "processes"]] {
            let processes = variables.contains("RANK=0 WORLD_SIZE=1") && engine.len() == 4;
            if processes {
                continue;
            }
            let ended = under(variables, &[&TRAIN[..], engine].concat());
            let error = String::from_utf8_lossy(&ended.stderr);
            assert!(ended.status.success(), "{variables} {engine:?}: {error}");
        }
    }
}

#[test]
fn a_launcher_of_programs_whose_ranks_are_threads_says_so() {
    let program = env!("CARGO_BIN_EXE_fusestep");
    let start = ["launch", "-n", "2", "--", program];
    let threads = ["--ranks", "2", "--engine", "thread"];
    let error = refused(&[&start[..], &TRAIN, &threads].concat());
    // Both ranks find it, and one says it.
    let named = "2 processes were started together by torchrun or `fusestep launch`";
    assert_eq!(error.matches(named).count(), 1, "{error}");
}

/// Whether processes run whose numbers stand in the files of a folder.
fn running(folder: &Path) -> usize {
    let files = std::fs::read_dir(folder).unwrap();
    let numbers = files.map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap());
    let is_running = |number: &String| {
        let state = std::fs::read_to_string(format!("/proc/{}/stat", number.trim()));
        state.is_ok_and(|state| !state.contains(") Z "))
    };
    numbers.filter(is_running).count()
}

#[test]
#[cfg(target_os = "linux")]
fn children_of_wrappers_end_when_the_launcher_is_killed() {
    let folder = Folder::new();
    let script = "sleep 300 & echo $! > \"$0/$RANK\"; wait; true";
    let mut launcher = Command::new(env!("CARGO_BIN_EXE_fusestep"))
        .args(["launch", "-n", "2", "--", "sh", "-c", script, text(folder.0.path())])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let wait_for = |count: usize, limit: Duration| {
        let begun = Instant::now();
        while running(folder.0.path()) != count {
            assert!(begun.elapsed() < limit, "{count} processes expected");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    wait_for(2, Duration::from_secs(20));
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    wait_for(0, Duration::from_secs(20));
}
