//! Ranks that die, stop or never come, as real processes: the others name them in time, and
//! nothing is left behind. This program starts itself as the ranks.

// The suite uses the rest.
#[allow(dead_code)]
#[path = "../../../tests/collective/scenarios.rs"]
mod scenarios;
#[allow(dead_code)]
#[path = "processes/start.rs"]
mod start;

use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use fusestep_collective::{
    CollectiveError, Collectives, Communicator, ReduceOp, ReduceUpdate, Replica, Replicas,
};
use fusestep_collective_processes::{ProcessCommunicator, ProcessOptions};
use fusestep_tensor::DType;

use start::{End, Started};

/// Whoever counts what is left behind must be alone.
static ALONE: Mutex<()> = Mutex::new(());

/// A limit for tests that must not wait for it.
const LONG_MS: &str = "20000";

/// What a rank does, told by the environment: the body of every process started here.
#[test]
fn a_rank() {
    if !start::is_rank() {
        return;
    }
    let told = |name: &str| std::env::var(name).unwrap_or_default();
    let number = |name: &str| told(name).parse().unwrap_or(0);
    let options = ProcessOptions {
        timeout: Duration::from_millis(number("TEST_TIMEOUT_MS")),
        dump_folder: std::env::var_os("TEST_FOLDER").map(Into::into),
        ..ProcessOptions::default()
    };
    let mut comm = match ProcessCommunicator::world(&options) {
        Ok(comm) => comm,
        Err(error) => return say(&format!("no world: {error}")),
    };
    comm.barrier().unwrap();
    let (rank, culprit) = (comm.rank(), number("TEST_CULPRIT") as usize);
    let (how, collective) = (told("TEST_HOW"), told("TEST_COLLECTIVE"));
    let begun = Instant::now();
    let outcome = match (how.as_str(), rank == culprit) {
        ("sum", _) => sums(&mut comm, number("TEST_CULPRIT")),
        ("kill-at-work" | "stop-at-work", is_culprit) => {
            let signal = how.trim_end_matches("-at-work").to_uppercase();
            update(&mut comm, || {
                if is_culprit {
                    raise(&signal)
                }
            })
        }
        ("exit", true) => std::process::exit(0),
        ("kill" | "stop", true) => {
            raise(&how.to_uppercase());
            Ok(())
        }
        ("kill-inside", true) => {
            std::thread::spawn(|| {
                std::thread::sleep(Duration::from_millis(60));
                raise("KILL");
            });
            call(&mut comm, &collective)
        }
        ("kill-inside", false) => {
            // The signal is sent by a program, which takes a while to start on a busy machine.
            std::thread::sleep(Duration::from_millis(500));
            call(&mut comm, &collective)
        }
        _ => call(&mut comm, &collective),
    };
    let after_ms = begun.elapsed().as_millis();
    match outcome {
        Ok(()) => say(&format!("survivor {rank}: all is well")),
        Err(error) => say(&format!("survivor {rank} after {after_ms} ms: {error}")),
    }
}

fn say(line: &str) {
    eprintln!("{line}");
}

fn raise(signal: &str) {
    let own = std::process::id().to_string();
    let sent = Command::new("kill").args([&format!("-{signal}"), &own]).status();
    assert!(sent.unwrap().success());
    // The signal may take a moment to reach this thread.
    std::thread::sleep(Duration::from_secs(1));
}

fn call(comm: &mut ProcessCommunicator, name: &str) -> Result<(), CollectiveError> {
    let mut known = scenarios::COLLECTIVES.into_iter();
    let (_, collective) = known.find(|(known, _)| *known == name).unwrap();
    collective(comm)?;
    comm.barrier()
}

/// Many sums that only ranks of the same session can agree on.
fn sums(comm: &mut ProcessCommunicator, own: u64) -> Result<(), CollectiveError> {
    for _ in 0..2000 {
        let mut sum = [own as i64; 5];
        comm.all_reduce(&mut sum, ReduceOp::Sum)?;
        assert_eq!(sum, [own as i64 * comm.world_size() as i64; 5]);
    }
    Ok(())
}

fn update(comm: &mut ProcessCommunicator, at_work: impl Fn()) -> Result<(), CollectiveError> {
    let mut arena = comm.allocate(24)?;
    let counts = vec![1; comm.world_size()];
    let (grads, params) = arena.bytes_mut().split_at_mut(12);
    let call = ReduceUpdate {
        grad_dtype: DType::F32,
        grads,
        replicas: Replicas::from_iter([Replica { dtype: DType::F32, elements: 1, bytes: params }]),
        counts: &counts,
    };
    comm.reduce_update(call, &mut |_| at_work())
}

const ARGUMENTS: [&str; 3] = ["a_rank", "--exact", "--nocapture"];

fn environment<'a>(how: &'a str, culprit: &'a str, timeout_ms: &'a str) -> [(&'a str, &'a str); 3] {
    [("TEST_HOW", how), ("TEST_CULPRIT", culprit), ("TEST_TIMEOUT_MS", timeout_ms)]
}

/// Starts three ranks, waits for all but the culprit, and ends that.
fn three(how: &str, collective: &str, culprit: usize, timeout_ms: &str) -> Vec<End> {
    let culprit_text = culprit.to_string();
    let mut environment = environment(how, &culprit_text, timeout_ms).to_vec();
    environment.push(("TEST_COLLECTIVE", collective));
    let mut started = start::ranks(3, &start::session(how), &ARGUMENTS, &environment);
    let stopped = started.0.remove(culprit);
    let ends = started.wait(Duration::from_secs(60));
    // Also when it is stopped.
    drop(Started(vec![stopped]));
    ends
}

#[track_caller]
fn named(ends: &[End], expected: &str, within_ms: u64) {
    for end in ends {
        let line = end.output.lines().find(|line| line.starts_with("survivor"));
        let line = line.unwrap_or_else(|| panic!("{}", end.output));
        let (head, error) = line.split_once(": ").unwrap();
        assert!(error.contains(expected), "{line}");
        let after = head.split(' ').nth(3).unwrap();
        assert!(after.parse::<u64>().unwrap() < within_ms, "{line}");
    }
}

fn nothing_is_left() {
    assert_eq!(start::left_behind(), Vec::<String>::new());
}

#[test]
fn a_rank_that_dies_in_any_collective_is_named_soon() {
    let _alone = ALONE.lock();
    for (index, (name, _)) in scenarios::COLLECTIVES.iter().enumerate() {
        let culprit = index % 3;
        for how in ["kill", "kill-inside", "exit"] {
            let ends = three(how, name, culprit, LONG_MS);
            named(&ends, &format!("rank {culprit} died after"), 2000);
        }
    }
    nothing_is_left();
}

#[test]
fn a_rank_that_dies_at_work_on_the_others_memory_is_named_soon() {
    let _alone = ALONE.lock();
    let ends = three("kill-at-work", "", 1, LONG_MS);
    named(&ends, "rank 1 died after 2 calls", 2000);
    nothing_is_left();
}

#[test]
fn a_rank_that_stops_is_late() {
    let _alone = ALONE.lock();
    for (name, culprit) in [("all-reduce", 2), ("barrier", 0), ("transfers around", 1)] {
        let ends = three("stop", name, culprit, "700");
        let expected = format!("within 700 ms, found none of [{culprit}]");
        named(&ends, &expected, 2000);
    }
    nothing_is_left();
}

#[test]
fn a_rank_that_stops_at_work_ends_those_whose_memory_it_has() {
    let _alone = ALONE.lock();
    let folder = tempfile::tempdir().unwrap();
    let mut environment = environment("stop-at-work", "1", "500").to_vec();
    environment.push(("TEST_FOLDER", folder.path().to_str().unwrap()));
    let mut started = start::ranks(3, &start::session("stop"), &ARGUMENTS, &environment);
    let stopped = started.0.remove(1);
    for end in started.wait(Duration::from_secs(60)) {
        assert!(!end.is_success);
        let expected = "found none of [1]; see what these ranks did last, or raise the timeout if \
                        they are only slow; data was under way, so the process ends; the flight \
                        recorder is";
        assert!(end.output.contains(expected), "{}", end.output);
    }
    drop(Started(vec![stopped]));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    nothing_is_left();
}

#[test]
fn ranks_that_never_come_are_named() {
    let _alone = ALONE.lock();
    let environment = environment("", "9", "500");
    for missing in 0..3usize {
        let session = start::session("missing");
        let come = (0..3).filter(|&rank| rank != missing);
        let start = |rank| start::rank(rank, 3, &session, &ARGUMENTS, &environment);
        for end in Started(come.map(start).collect()).wait(Duration::from_secs(60)) {
            let expected = format!("within 500 ms, found none of [{missing}]");
            assert!(end.output.contains(&expected), "{}", end.output);
        }
    }
    nothing_is_left();
}

#[test]
fn a_rank_that_dies_before_all_have_come_is_named() {
    let _alone = ALONE.lock();
    let environment = environment("", "9", LONG_MS);
    for dies in [0, 1] {
        let session = start::session("early");
        let start = |rank| start::rank(rank, 3, &session, &ARGUMENTS, &environment);
        let mut both = Started(vec![start(dies), start(1 - dies)]);
        std::thread::sleep(Duration::from_millis(500));
        both.0[0].kill().unwrap();
        both.0[0].wait().unwrap();
        let end = both.wait(Duration::from_secs(10)).remove(1);
        let expected = format!("found rank {dies} dead before all had come");
        assert!(end.output.contains(&expected), "{}", end.output);
    }
    nothing_is_left();
}

#[test]
fn what_a_dead_creator_has_left_is_not_joined() {
    let _alone = ALONE.lock();
    let session = start::session("stale");
    let environment = environment("sum", "3", LONG_MS);
    let start = |rank| start::rank(rank, 2, &session, &ARGUMENTS, &environment);
    let mut creator = Started(vec![start(0)]);
    std::thread::sleep(Duration::from_millis(400));
    creator.0[0].kill().unwrap();
    creator.0[0].wait().unwrap();
    // Rank 1 finds the stale file first.
    let first = start(1);
    std::thread::sleep(Duration::from_millis(200));
    for end in Started(vec![start(0), first]).wait(Duration::from_secs(20)) {
        assert!(end.output.contains("all is well"), "{}", end.output);
    }
    nothing_is_left();
}

#[test]
fn two_sessions_at_once_do_not_disturb_each_other() {
    let sessions = [start::session("one"), start::session("two")];
    let environments = ["5", "7"].map(|own| environment("sum", own, LONG_MS));
    let begin = |index: usize| start::ranks(3, &sessions[index], &ARGUMENTS, &environments[index]);
    for mut started in [begin(0), begin(1)] {
        for end in started.wait(Duration::from_secs(60)) {
            assert!(end.output.contains("all is well"), "{}", end.output);
        }
    }
}

#[test]
fn a_wrong_place_is_refused() {
    let _alone = ALONE.lock();
    let environment = environment("", "9", "700");
    let session = start::session("wrong");
    let start = |rank, ranks| start::rank(rank, ranks, &session, &ARGUMENTS, &environment);
    let ends = Started(vec![start(0, 2), start(1, 3)]).wait(Duration::from_secs(20));
    let expected = "expected 2 ranks as rank 0 says, found 3 on rank 1";
    assert!(ends[1].output.contains(expected), "{}", ends[1].output);
    let ends = Started(vec![start(0, 3), start(1, 3), start(1, 3)]).wait(Duration::from_secs(20));
    let outputs: String = ends.iter().map(|end| end.output.as_str()).collect();
    assert!(outputs.contains("expected no other rank 1 in session"), "{outputs}");
    assert!(outputs.contains("found none of [2]"), "{outputs}");
    nothing_is_left();
}
