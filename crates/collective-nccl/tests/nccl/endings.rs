//! A group that fails ends all groups of its GPU: an operation that does not come through keeps the
//! GPU from giving back the memory of any of them.

use std::time::{Duration, Instant};

use fusestep_collective::{
    CollectiveError, Collectives, CommStream, Communicator, Membership, Options, ReduceOp,
    communication_streams, run_ranks,
};
use fusestep_collective_nccl::{NcclCommunicator, NcclOptions};

use super::stand_in::{Fault, STALL};
use super::worlds::{SHORT, group, options, short, sizes, turn, within};

/// The stand-in with its first operations stalled on rank 1, and GPUs enough.
fn stalled() -> Option<Fault> {
    let fault = Fault::new(STALL, 1, 1).filter(|_| sizes().len() >= 2);
    if fault.is_none() {
        eprintln!("skipped: faults take the stand-in and two GPUs");
    }
    fault
}

/// Whether an error says that data did not come, or that another group's data did not.
fn is_named(error: &CollectiveError) -> bool {
    let text = error.to_string();
    let own = "data of call 1 not through after 1000 ms, though every rank has come";
    text.contains(own)
        && match error {
            CollectiveError::Engine { .. } => true,
            CollectiveError::Aborted { reason, .. } => {
                reason.starts_with("its GPU, ")
                    && reason.contains(", ended all groups with another one, which said: ")
            }
            _ => false,
        }
}

#[test]
fn two_streams_that_are_stuck_end_with_everything_else_of_their_gpus() {
    let _turn = turn();
    let Some(fault) = stalled() else { return };
    let begun = Instant::now();
    let errors = within(Duration::from_secs(40), || {
        group(2, &short(), |mut comm| {
            let two = communication_streams(&mut comm, 2).unwrap();
            let started = [0, 1].map(|stream| {
                let buffer = vec![1.0f32; 1000];
                two[stream].all_reduce(buffer, ReduceOp::Sum)
            });
            let mut errors = started.map(|pending| pending.wait().unwrap_err()).to_vec();
            errors.push(comm.barrier().unwrap_err());
            errors
        })
    });
    let elapsed = begun.elapsed();
    assert!(elapsed < 2 * SHORT + Duration::from_secs(5), "{elapsed:?}");
    for error in errors.iter().flatten() {
        assert!(is_named(error), "{error}");
    }
    assert_eq!(fault.live(), 0, "every communicator was given back");
}

/// Whoever ended one communicator after the other would wait with the first for the second, whose
/// own deadline is far away.
#[test]
fn a_group_with_a_long_deadline_does_not_keep_another_ones_end() {
    let _turn = turn();
    let Some(fault) = stalled() else { return };
    let begun = Instant::now();
    let errors = within(Duration::from_secs(40), || {
        let control = Options { timeout: Duration::from_secs(60), ..Options::default() };
        let ranks = run_ranks(2, &control, |mut control| {
            let rank = control.rank();
            let everyone = Membership { colour: 0, key: 0 };
            // The short one is the subgroup, whose end is not the whole group's by itself.
            let subgroup = control.split(Some(everyone)).unwrap().unwrap();
            let long = NcclOptions { timeout: Duration::from_secs(60), ..options() };
            let long = NcclCommunicator::new(Box::new(control), rank, &long).unwrap();
            let mut short = NcclCommunicator::new(subgroup, rank, &short()).unwrap();
            let stream = CommStream::new(Box::new(long)).unwrap();
            let pending = stream.all_reduce(vec![1.0f32; 1000], ReduceOp::Sum);
            std::thread::sleep(Duration::from_millis(300));
            let own = short.all_reduce(&mut [1.0f32; 9], ReduceOp::Sum);
            [own.unwrap_err(), pending.wait().unwrap_err()]
        });
        let ranks = ranks.unwrap().into_iter();
        ranks.map(Result::unwrap).collect::<Vec<_>>()
    });
    let elapsed = begun.elapsed();
    assert!(elapsed < 2 * SHORT + Duration::from_secs(5), "{elapsed:?}");
    for [own, other] in &errors {
        assert!(is_named(own) && matches!(own, CollectiveError::Engine { .. }), "{own}");
        assert!(is_named(other) && matches!(other, CollectiveError::Aborted { .. }), "{other}");
    }
    assert_eq!(fault.live(), 0, "every communicator was given back");
}

#[test]
fn memory_that_is_dropped_during_a_call_is_given_back_after_it() {
    let _turn = turn();
    let Some(_fault) = stalled() else { return };
    let loaded = super::stand_in::counts().expect("the stand-in runs on the emulated driver");
    within(Duration::from_secs(40), || {
        let long = NcclOptions { timeout: Duration::from_secs(60), ..options() };
        group(2, &long, |mut comm| {
            let stream = communication_streams(&mut comm, 1).unwrap().remove(0);
            let buffer = comm.device_buffer(1000).unwrap();
            let pending = stream.all_reduce(vec![7.0f32; 9], ReduceOp::Sum);
            // Long enough for the operation to be enqueued, which then waits for ever.
            std::thread::sleep(Duration::from_millis(300));
            let begun = Instant::now();
            drop(buffer);
            let elapsed = begun.elapsed();
            assert!(elapsed < Duration::from_secs(10), "{elapsed:?}");
            comm.barrier().unwrap();
            stream.aborter().abort("enough");
            let text = pending.wait().unwrap_err().to_string();
            assert!(text.contains("enough"), "{text}");
        });
    });
    let after = super::stand_in::counts().expect("as before");
    let [allocations, frees, ..] = after.made;
    let [allocations_before, frees_before, ..] = loaded.made;
    assert_eq!(frees - frees_before, allocations - allocations_before);
    assert_eq!(allocations - allocations_before, 2 * (2 + 2 + 1));
}
