//! What goes wrong on purpose: late, killed, aborted and disagreeing ranks, a corrupted bit, and
//! the flight recorder's account.
//!
//! `cargo run --release -p fusestep-collective --example failures`

use std::error::Error;
use std::time::Duration;

use fusestep_collective::{
    CallState, CollectiveError, Collectives, Communicator, Fault, FaultKind, Faulty, Options,
    ReduceOp, run_ranks,
};

/// How two all-reduces between three ranks end, on each; `None` for a rank that panicked.
type Ends = Vec<Option<Result<[i32; 1], CollectiveError>>>;

/// Runs every one of them.
pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let ends = with_a_fault("delayed by 20 ms", FaultKind::DelayMs(20))?;
    assert_eq!(ends, vec![Some(Ok([9])); 3]);

    let ends = with_a_fault("late", FaultKind::StallMs(2200))?;
    assert!(matches!(
        &ends[0],
        Some(Err(CollectiveError::Late { ranks, sequence: 2, .. })) if ranks == &[1]
    ));

    let ends = with_a_fault("killed", FaultKind::Kill)?;
    let killed = CollectiveError::Panicked { rank: 1, calls: 1 };
    assert_eq!(ends, [Some(Err(killed.clone())), None, Some(Err(killed))]);

    let ends = with_a_fault("out of order", FaultKind::Reorder)?;
    assert!(matches!(&ends[2], Some(Err(CollectiveError::Mismatch { found_rank: 1, .. }))));

    // Nothing notices a flipped bit but the result: all ranks agree on a wrong sum.
    let ends = with_a_fault("corrupted", FaultKind::Corrupt(0))?;
    assert_eq!(ends, vec![Some(Ok([8])); 3]);

    abort()?;
    flight_recorder()
}

/// Rank 1 misbehaves at its second call.
fn with_a_fault(title: &str, kind: FaultKind) -> Result<Ends, Box<dyn Error>> {
    let scenario = [Fault { rank: 1, call: 2, kind }];
    let options = Options { timeout: Duration::from_millis(1000), ..Options::default() };
    let ends: Ends = run_ranks(3, &options, |comm| {
        let mut comm = Faulty::new(comm, &scenario);
        let mut sum = [1];
        comm.all_reduce(&mut sum, ReduceOp::Sum)?;
        comm.all_reduce(&mut sum, ReduceOp::Sum)?;
        Ok(sum)
    })?
    .into_iter()
    .map(Result::ok)
    .collect();
    println!("rank 1 is {title}");
    for (rank, end) in ends.iter().enumerate() {
        match end {
            Some(Ok(sum)) => println!("    rank {rank}: {sum:?}"),
            Some(Err(error)) => println!("    rank {rank}: {error}"),
            None => println!("    rank {rank}: gone"),
        }
    }
    Ok(ends)
}

/// A thread beside the ranks ends a wait that would last a minute.
fn abort() -> Result<(), Box<dyn Error>> {
    let ends = run_ranks(2, &Options::default(), |mut comm| {
        if comm.rank() == 1 {
            let aborter = comm.aborter();
            let other = std::thread::spawn(move || aborter.abort("the user pressed a key"));
            other.join().expect("it only aborts");
        }
        comm.barrier()
    })?;
    println!("aborted by a thread of rank 1");
    for end in ends {
        let error = end.map_err(|_| "a rank panicked")?.expect_err("aborted");
        println!("    {error}");
        assert!(matches!(error, CollectiveError::Aborted { rank: 1, .. }));
    }
    Ok(())
}

/// What a rank did last, and who kept it waiting; `Options::dump_folder` has it written to a file
/// on the first error.
fn flight_recorder() -> Result<(), Box<dyn Error>> {
    let slow = [Fault { rank: 1, call: 1, kind: FaultKind::DelayMs(30) }];
    let recorded = run_ranks(2, &Options::default(), |comm| {
        let mut comm = Faulty::new(comm, &slow);
        comm.broadcast(&mut [0u8; 16], 0)?;
        comm.barrier()?;
        let first = comm.recorder().calls().next();
        Ok::<_, CollectiveError>((first, comm.recorder().to_json()))
    })?;
    let rank0 = recorded.into_iter().next().ok_or("there are two ranks")?;
    let (first, json) = rank0.map_err(|_| "a rank panicked")??;
    let first = first.ok_or("two calls were made")?;
    assert_eq!((first.operation, first.len_bytes), ("broadcast", 16));
    assert_eq!((first.straggler, &first.state), (Some(1), &CallState::Done));
    assert!(first.waited_ns > 0);
    println!("flight recorder of rank 0\n{json}");
    Ok(())
}
