//! Programs that a launcher has started as several processes and that train as one.

use std::process::{Command, Output};

use fusestep::collective::{Options, run_ranks};
use fusestep::{AdamW, Cpu, DType, Error, ParamDesc, Shape};

/// The body of the programs that the test below starts.
#[test]
fn a_program() {
    let Ok(how) = std::env::var("TEST_HOW") else {
        return;
    };
    let step = || -> Result<(), Error> {
        let params = [ParamDesc::new("w", Shape::new([4u64])?, DType::F32)];
        let mut optimizer = AdamW::new(0.1).build(&params, Cpu::new())?;
        optimizer.grad_mut::<f32>("w")?.fill(1.0);
        optimizer.step()?;
        Ok(())
    };
    let ended = match how.as_str() {
        "threads" => run_ranks(2, &Options::default(), |_| ()).map(|_| ()).map_err(Error::from),
        _ => step(),
    };
    if let Err(error) = ended {
        eprintln!("{error}");
        std::process::exit(3);
    }
}

fn program(how: &str, variables: &str) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "a_program", "--nocapture"]).env("TEST_HOW", how);
    command.envs(variables.split_whitespace().filter_map(|variable| variable.split_once('=')));
    command.output().unwrap()
}

#[test]
fn one_process_of_several_does_not_step_alone_without_a_word() {
    for how in ["one", "threads"] {
        for several in [
            "RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=10.0.0.1",
            "RANK=0 WORLD_SIZE=2 FUSESTEP_SESSION=x",
            "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0",
            "PMI_RANK=0",
            "SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=0",
        ] {
            let ended = program(how, several);
            let error = String::from_utf8_lossy(&ended.stderr);
            assert_eq!(ended.status.code(), Some(3), "{how} {several}: {error}");
            let named = "each would take itself for the whole";
            assert!(error.contains(named) && error.contains("FUSESTEP_ALONE=1"), "{error}");
            assert!(program(how, &format!("{several} FUSESTEP_ALONE=1")).status.success());
        }
        for alone in ["", "RANK=0 WORLD_SIZE=1", "SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_JOB_ID=1"] {
            let ended = program(how, alone);
            assert!(ended.status.success(), "{how} {alone}: {ended:?}");
        }
    }
}
