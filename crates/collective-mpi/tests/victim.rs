//! A job in which one process stops, dies or goes: `victim HOW COLLECTIVE CULPRIT TIMEOUT_MS
//! FOLDER`, under mpirun. Every survivor prints one line with what it has found and after how many
//! milliseconds; `cargo xtask mpi` reads them.

use std::process::Command;
use std::time::{Duration, Instant};

use fusestep_collective::{Collectives, Communicator};
use fusestep_collective_mpi::{MpiCommunicator, MpiOptions};

// The scenarios in it are the suite's.
#[allow(dead_code)]
#[path = "../../../tests/collective/scenarios.rs"]
mod scenarios;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [how, name, culprit, timeout_ms, folder] = &arguments[..] else {
        println!("started by `cargo xtask mpi`; nothing to do without its arguments");
        return;
    };
    let culprit: usize = culprit.parse().expect("a rank");
    let timeout = Duration::from_millis(timeout_ms.parse().expect("milliseconds"));
    let options = MpiOptions {
        timeout,
        dump_folder: Some(folder.into()),
        share_memory: std::env::var_os("FUSESTEP_MPI_MESSAGES").is_none(),
        ..MpiOptions::default()
    };
    let mut comm = MpiCommunicator::world(&options).expect("started by mpirun");
    let mut collectives = scenarios::COLLECTIVES.into_iter();
    let collective = collectives.find(|(known, _)| known == name).expect("a collective").1;
    comm.barrier().expect("all ranks come");
    if comm.rank() == culprit {
        match how.as_str() {
            "leave" => return,
            "exit" => std::process::exit(0),
            "nap" => nap(timeout / 4),
            "stop" => signal("STOP"),
            "kill" => signal("KILL"),
            other => panic!("expected leave, exit, nap, stop or kill, found {other}"),
        }
    }
    let start = Instant::now();
    let outcome = collective(&mut comm).and_then(|()| comm.barrier());
    let after_ms = start.elapsed().as_millis();
    match outcome {
        Ok(()) => println!("survivor {} after {after_ms} ms: all is well", comm.rank()),
        Err(error) => println!("survivor {} after {after_ms} ms: {error}", comm.rank()),
    }
}

/// Sends this process a signal.
fn signal(name: &str) {
    let own = std::process::id().to_string();
    Command::new("kill").args([&format!("-{name}"), &own]).status().expect("kill");
    // A moment for the signal to arrive.
    std::thread::sleep(Duration::from_millis(20));
}

/// Stops this process and has it woken.
fn nap(time: Duration) {
    let script = format!("sleep {}; kill -CONT {}", time.as_secs_f64(), std::process::id());
    let mut waker = Command::new("sh").args(["-c", &script]).spawn().expect("sh");
    signal("STOP");
    waker.wait().expect("sh");
}
