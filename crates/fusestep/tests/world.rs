//! Programs that take their world from the launcher: one process, and several of one machine.

use std::process::{Child, Command, Output, Stdio};

use fusestep::{AdamW, Cpu, DType, Error, ParamDesc, Shape};

/// The body of the programs that the tests below start.
#[test]
fn a_program() {
    if std::env::var_os("TEST_WORLD").is_none() {
        return;
    }
    let train = || -> Result<(usize, f32), Error> {
        let mut world = fusestep::world()?;
        let (rank, ranks) = (world.rank(), world.world_size());
        let params = [ParamDesc::new("w", Shape::new([4])?, DType::F32)];
        let mut opt = AdamW::new(0.1).zero(1).on(world.as_mut()).build(&params, Cpu::new())?;
        // Gradients whose mean is 1, whatever the number of ranks.
        opt.push_grad("w", &[(2 * rank + 1) as f32 / ranks as f32; 4])?;
        opt.step()?;
        Ok((ranks, opt.gather(&["w"])?.bytes(0)[..4].try_into().map(f32::from_le_bytes)?))
    };
    match train() {
        Ok((ranks, value)) => println!("trained on {ranks}: {value}"),
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(3);
        }
    }
}

fn program(variables: &[(&str, &str)]) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    for name in fusestep::collective::launcher_variables() {
        command.env_remove(name);
    }
    command.args(["--exact", "a_program", "--nocapture"]).env("TEST_WORLD", "1");
    command.envs(variables.iter().copied()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

fn said(ended: &Output) -> (bool, String) {
    let text = [&ended.stdout[..], &ended.stderr[..]].concat();
    (ended.status.success(), String::from_utf8_lossy(&text).into_owned())
}

#[test]
fn a_process_that_was_started_by_itself_is_a_world_of_one() {
    let (well, told) = said(&program(&[]).wait_with_output().unwrap());
    assert!(well && told.contains("trained on 1: -0.09999999"), "{told}");
}

#[test]
#[cfg(target_os = "linux")]
fn processes_of_one_machine_are_one_world_and_train_alike() {
    let session = format!("world-test-{}", std::process::id());
    let started: Vec<Child> = ["0", "1", "2"]
        .map(|rank| {
            program(&[
                ("RANK", rank),
                ("LOCAL_RANK", rank),
                ("WORLD_SIZE", "3"),
                ("LOCAL_WORLD_SIZE", "3"),
                ("FUSESTEP_SESSION", &session),
            ])
        })
        .into();
    for process in started {
        let (well, told) = said(&process.wait_with_output().unwrap());
        assert!(well && told.contains("trained on 3: -0.09999999"), "{told}");
    }
}

#[test]
#[cfg(not(feature = "mpi"))]
fn a_launcher_whose_engine_is_left_out_is_named() {
    let variables = [("OMPI_COMM_WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_RANK", "0")];
    let (well, told) = said(&program(&variables).wait_with_output().unwrap());
    assert!(!well && told.contains("the feature `mpi`"), "{told}");
    assert!(told.contains("FUSESTEP_ALONE=1"), "{told}");
}
