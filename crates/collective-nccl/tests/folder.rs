//! Ranks that have nothing in common but a folder. Threads here; to a folder they are as good as
//! processes.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fusestep_collective::{
    CallState, CollectiveError, Collectives, Communicator, Membership, Options, ReduceOp, run_ranks,
};
use fusestep_collective_nccl::{FolderControl, Meeting, NcclError};

const SHORT: Duration = Duration::from_millis(400);

/// A folder that is not there yet.
fn folder() -> PathBuf {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("fusestep-meeting-{}-{count}", std::process::id()))
}

fn meeting(folder: &PathBuf, rank: usize, world_size: usize) -> Meeting {
    Meeting { rank, world_size, timeout: Duration::from_secs(20), ..Meeting::at(folder) }
}

/// Runs `body` on every rank; the folder must be gone afterwards.
fn world<R: Send>(
    ranks: usize,
    timeout: Duration,
    body: impl Fn(FolderControl) -> R + Sync,
) -> Vec<std::thread::Result<R>> {
    let (folder, body) = (folder(), &body);
    let outcomes = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                let meeting = Meeting { timeout, ..meeting(&folder, rank, ranks) };
                scope.spawn(move || body(meeting.join().unwrap()))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join()).collect()
    });
    assert!(!folder.exists(), "the last rank removes {}", folder.display());
    outcomes
}

fn all<R>(outcomes: Vec<std::thread::Result<R>>) -> Vec<R> {
    outcomes.into_iter().map(Result::unwrap).collect()
}

#[test]
fn ranks_hear_each_other_in_worlds_of_one_to_four() {
    for ranks in 1..=4 {
        all(world(ranks, Duration::from_secs(20), |mut comm| {
            let rank = comm.rank();
            for round in 0..5i64 {
                let mut everyone = vec![0i64; ranks];
                comm.all_gather(&[10 * round + rank as i64], &mut everyone).unwrap();
                let expected: Vec<i64> = (0..ranks as i64).map(|rank| 10 * round + rank).collect();
                assert_eq!(everyone, expected);
                let mut word = [rank as i32; 3];
                comm.broadcast(&mut word, ranks - 1).unwrap();
                assert_eq!(word, [ranks as i32 - 1; 3]);
                comm.barrier().unwrap();
            }
            let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
            let mut found = [0u8; 2];
            match rank {
                _ if ranks == 1 => return,
                0 => {
                    comm.send(&[0u8, 7], next).unwrap();
                    comm.receive(&mut found, before).unwrap();
                }
                _ => {
                    comm.receive(&mut found, before).unwrap();
                    comm.send(&[rank as u8, 7], next).unwrap();
                }
            }
            assert_eq!(found, [before as u8, 7]);
        }));
    }
}

#[test]
fn subgroups_are_ordered_by_key_and_outlive_their_parent() {
    all(world(4, Duration::from_secs(20), |mut comm| {
        let rank = comm.rank();
        let membership = Membership { colour: rank as u32 % 2, key: 9 - rank as u32 };
        let joined = comm.split((rank != 3).then_some(membership)).unwrap();
        drop(comm);
        let Some(mut group) = joined else {
            assert_eq!(rank, 3);
            return;
        };
        let mut members = vec![0i64; group.world_size()];
        group.all_gather(&[rank as i64], &mut members).unwrap();
        assert_eq!(members, [vec![2, 0], vec![1]][rank % 2]);
    }));
}

#[test]
fn a_rank_that_does_not_come_is_named_by_all_others() {
    let outcomes = all(world(3, SHORT, |mut comm| {
        if comm.rank() == 1 {
            std::thread::sleep(3 * SHORT);
        }
        comm.barrier().unwrap_err()
    }));
    for error in outcomes {
        let expected = CollectiveError::Late {
            ranks: vec![1],
            operation: "barrier",
            sequence: 1,
            bucket: None,
            timeout_ms: SHORT.as_millis() as u64,
        };
        assert_eq!(error, expected);
    }
}

#[test]
fn leaving_panicking_and_aborting_end_the_calls_of_all_at_once() {
    let long = Duration::from_secs(20);
    let begun = Instant::now();
    let left = all(world(3, long, |mut comm| match comm.rank() {
        2 => None,
        _ => comm.barrier().err(),
    }));
    let error = Some(CollectiveError::Left { rank: 2, calls: 0 });
    assert_eq!(left, [error.clone(), error, None]);
    let panicked = world(2, long, |mut comm| match comm.rank() {
        0 => panic!("on purpose"),
        _ => comm.barrier().unwrap_err(),
    });
    let error = panicked.into_iter().nth(1).unwrap().unwrap();
    assert_eq!(error, CollectiveError::Panicked { rank: 0, calls: 0 });
    let aborted = all(world(2, long, |mut comm| {
        if comm.rank() == 1 {
            comm.aborter().abort("enough");
        }
        comm.barrier().unwrap_err()
    }));
    let reason = "enough".to_owned();
    assert_eq!(aborted, vec![CollectiveError::Aborted { rank: 1, reason }; 2]);
    assert!(begun.elapsed() < long, "found at a deadline only");
}

#[test]
fn different_calls_and_calls_that_it_does_not_carry_are_refused() {
    let errors = all(world(3, Duration::from_secs(20), |mut comm| {
        let mut all = vec![0f32; 3 * (1 + comm.rank() / 2)];
        let own = vec![0f32; all.len() / 3];
        comm.all_gather(&own, &mut all).unwrap_err()
    }));
    let text = errors[0].to_string();
    assert!(
        text.contains("length in elements: expected `3` as on rank 0, found `6` on rank 2"),
        "{text}"
    );
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    let errors = all(world(2, Duration::from_secs(20), |mut comm| {
        comm.barrier().unwrap();
        let error = comm.all_reduce(&mut [1f32], ReduceOp::Sum).unwrap_err();
        let states: Vec<_> = comm.recorder().calls().map(|call| call.state).collect();
        assert_eq!(states, [CallState::Done], "what was refused was not begun");
        error
    }));
    assert!(errors[0].to_string().contains("no gradients"), "{errors:?}");
}

/// The error of a rank that joins alone.
fn refused(meeting: Meeting) -> String {
    let error = Meeting { timeout: SHORT, ..meeting }.join().unwrap_err();
    assert!(matches!(error, NcclError::Meeting { .. }), "{error}");
    error.to_string()
}

#[test]
fn what_an_earlier_run_has_left_is_refused_by_every_rank() {
    let folder = folder();
    std::thread::scope(|scope| {
        let threads = [0, 1].map(|rank| {
            let meeting = meeting(&folder, rank, 2);
            scope.spawn(move || meeting.join().unwrap())
        });
        // As processes that were killed: nobody says goodbye.
        for thread in threads {
            std::mem::forget(thread.join().unwrap());
        }
    });
    let text = refused(meeting(&folder, 0, 2));
    assert!(
        text.contains(
            "expected an empty folder, found `welcome` of an earlier run; remove the folder"
        ),
        "{text}"
    );
    let text = refused(meeting(&folder, 1, 2));
    assert!(text.contains("found one to another; the folder is of an earlier run"), "{text}");
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn what_cannot_meet_says_why() {
    let folder = folder();
    let text = refused(meeting(&folder, 2, 2));
    assert!(text.contains("rank 2 in") && text.contains("expected a rank below 2"), "{text}");
    let text = refused(meeting(&folder, 0, 3));
    assert!(text.contains("within 400 ms, found none of ranks [1, 2]"), "{text}");
    let text = refused(meeting(&folder, 1, 3));
    assert!(text.contains("found none of rank 0"), "{text}");
    let texts = std::thread::scope(|scope| {
        let threads = [(0, 2), (1, 3)].map(|(rank, world_size)| {
            let meeting = meeting(&folder, rank, world_size);
            scope.spawn(move || meeting.join().unwrap_err().to_string())
        });
        threads.map(|thread| thread.join().unwrap())
    });
    for text in texts {
        assert!(text.contains("expected 2 ranks as rank 0 does, found 3 on rank 1"), "{text}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Body of the process that the test below starts as launchers do.
#[test]
fn a_world_of_one() {
    let Some(folder) = std::env::var_os("TEST_FOLDER") else {
        return;
    };
    let error = Meeting::at(folder).join().map(drop).unwrap_err().to_string();
    assert!(error.contains("4 processes were started together by torchrun"), "{error}");
    assert!(error.contains("FUSESTEP_ALONE=1"), "{error}");
    // The refusal has not made it one of those that have joined others.
    let ranks = run_ranks(1, &Options::default(), |comm| comm.rank());
    assert!(ranks.unwrap_err().to_string().contains("4 processes were started together"));
}

#[test]
fn one_of_several_processes_meets_nobody_as_the_whole() {
    let folder = folder();
    let ended = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_world_of_one", "--nocapture"])
        .envs([("RANK", "0"), ("WORLD_SIZE", "4")])
        .env("TEST_FOLDER", &folder)
        .output()
        .unwrap();
    let said = [ended.stdout, ended.stderr].concat();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&said));
    assert!(!folder.exists(), "nothing was made");
}
