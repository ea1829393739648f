//! Every collective once, with a known result.

use crate::{CollectiveError, Collectives, Communicator, Membership, ReduceOp};

/// Elements of each rank's block.
const BLOCK: usize = 1003;

/// Makes every collective once on the ranks of `comm` and compares its result with the expected
/// one; all ranks call it.
///
/// Returns the names of the collectives whose results are right, which is all of them.
///
/// # Errors
/// [`CollectiveError`] of a call, or [`CollectiveError::Refused`] naming the collective whose
/// result is wrong.
pub fn self_test(comm: &mut dyn Communicator) -> Result<Vec<&'static str>, CollectiveError> {
    let mut right = Vec::new();
    let tests: [(&'static str, Test); 6] = [
        ("all-reduce, reduce, reduce-scatter", reductions),
        ("broadcast, scatter, gather", rooted),
        ("all-gather, all-to-all", unrooted),
        ("send, receive", transfers),
        ("barrier", |comm| comm.barrier().map(|()| true)),
        ("split", subgroups),
    ];
    for (name, test) in tests {
        if !test(comm)? {
            let reason = format!(
                "expected the sums and blocks that this engine must give in {name}, found others"
            );
            return Err(CollectiveError::refused(comm.rank(), "self-test", reason));
        }
        right.push(name);
    }
    Ok(right)
}

type Outcome = Result<bool, CollectiveError>;

type Test = fn(&mut dyn Communicator) -> Outcome;

/// What `rank` contributes at `index`: small integers, so that sums are exact in every type.
fn value(rank: usize, index: usize) -> f32 {
    ((index % 61) + rank) as f32
}

fn values(rank: usize, numel: usize) -> Vec<f32> {
    (0..numel).map(|index| value(rank, index)).collect()
}

fn reductions(comm: &mut dyn Communicator) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let own = values(rank, BLOCK * ranks);
    let sum = |index: usize| (0..ranks).map(|rank| value(rank, index)).sum::<f32>();
    let mut all = own.clone();
    comm.all_reduce(&mut all, ReduceOp::Sum)?;
    let mut right = all.iter().enumerate().all(|(index, &x)| x == sum(index));
    let mut most = own.clone();
    comm.reduce(&mut most, ReduceOp::Max, ranks - 1)?;
    let highest = |index: usize| value(if rank == ranks - 1 { ranks - 1 } else { rank }, index);
    right &= most.iter().enumerate().all(|(index, &x)| x == highest(index));
    let mut block = vec![0.0; BLOCK];
    comm.reduce_scatter(&own, &mut block, ReduceOp::Sum)?;
    right &= block.iter().enumerate().all(|(index, &x)| x == sum(rank * BLOCK + index));
    Ok(right)
}

fn rooted(comm: &mut dyn Communicator) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let root = ranks - 1;
    let mut buffer = values(rank, BLOCK);
    comm.broadcast(&mut buffer, root)?;
    let mut right = buffer == values(root, BLOCK);
    let at_root = if rank == root { BLOCK * ranks } else { 0 };
    let mut block = vec![0.0; BLOCK];
    comm.scatter(&values(root, at_root), &mut block, root)?;
    right &= block == values(root, BLOCK * ranks)[rank * BLOCK..][..BLOCK];
    let mut gathered = vec![0.0; at_root];
    comm.gather(&values(rank, BLOCK), &mut gathered, root)?;
    let mut blocks = gathered.chunks(BLOCK).enumerate();
    right &= blocks.all(|(from, block)| block == values(from, BLOCK));
    Ok(right)
}

fn unrooted(comm: &mut dyn Communicator) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let mut all = vec![0.0; BLOCK * ranks];
    comm.all_gather(&values(rank, BLOCK), &mut all)?;
    let mut right = all.chunks(BLOCK).enumerate().all(|(from, block)| block == values(from, BLOCK));
    comm.all_to_all(&values(rank, BLOCK * ranks), &mut all)?;
    right &= all
        .chunks(BLOCK)
        .enumerate()
        .all(|(from, block)| block == &values(from, BLOCK * ranks)[rank * BLOCK..][..BLOCK]);
    Ok(right)
}

/// A transfer around the ring of ranks; rank 0 begins.
fn transfers(comm: &mut dyn Communicator) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    if ranks == 1 {
        return Ok(true);
    }
    let (next, last) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let mut received = vec![0.0; BLOCK];
    if rank == 0 {
        comm.send(&values(rank, BLOCK), next)?;
        comm.receive(&mut received, last)?;
    } else {
        comm.receive(&mut received, last)?;
        comm.send(&values(rank, BLOCK), next)?;
    }
    Ok(received == values(last, BLOCK))
}

fn subgroups(comm: &mut dyn Communicator) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let membership = Membership { colour: (rank % 2) as u32, key: 0 };
    let Some(mut group) = comm.split(Some(membership))? else {
        return Ok(false);
    };
    let mut sum = [rank as i64];
    group.all_reduce(&mut sum, ReduceOp::Sum)?;
    let members = (0..ranks).filter(|other| other % 2 == rank % 2);
    Ok(sum == [members.sum::<usize>() as i64])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Fault, FaultKind, Faulty, Options, Solo, run_ranks};

    #[test]
    fn every_engine_passes_and_a_corrupt_one_does_not() {
        assert_eq!(self_test(&mut Solo::new()).map(|names| names.len()), Ok(6));
        for ranks in [1, 2, 3, 5] {
            let outcomes = run_ranks(ranks, &Options::default(), |mut comm| self_test(&mut comm));
            for outcome in outcomes.unwrap() {
                assert_eq!(outcome.unwrap().map(|names| names.len()), Ok(6));
            }
        }
        let corrupt = [Fault { rank: 1, call: 1, kind: FaultKind::Corrupt(2) }];
        let outcomes =
            run_ranks(2, &Options::default(), |comm| self_test(&mut Faulty::new(comm, &corrupt)));
        let mut errors = outcomes.unwrap().into_iter().map(|outcome| outcome.unwrap().unwrap_err());
        assert!(errors.all(|error| error.to_string().contains("all-reduce, reduce")));
    }
}
