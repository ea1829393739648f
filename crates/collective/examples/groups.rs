//! Split, communication streams and pending results: groups within a group, and calls that run
//! while the caller goes on.
//!
//! `cargo run --release -p fusestep-collective --example groups`

mod support;

use std::error::Error;

use fusestep_collective::{Collectives, Communicator, Membership, ReduceOp, communication_streams};
use support::on_ranks;

/// Runs every one of them.
pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    split()?;
    streams_with_handles()?;
    several_calls_on_a_stream()
}

/// Even and odd ranks sum apart, the odd ones in reverse order; rank 4 takes part in no group.
fn split() -> Result<(), Box<dyn Error>> {
    let sums = on_ranks("split, rank within the group and its sum", 5, |mut comm| {
        let rank = comm.rank();
        let membership = (rank < 4).then_some(Membership {
            colour: rank as u32 % 2,
            key: if rank % 2 == 0 { 0 } else { 4 - rank as u32 },
        });
        let Some(mut group) = comm.split(membership)? else {
            return Ok(None);
        };
        let mut sum = [rank as i64];
        group.all_reduce(&mut sum, ReduceOp::Sum)?;
        Ok(Some((group.rank(), sum[0])))
    })?;
    assert_eq!(sums, [Some((0, 2)), Some((1, 4)), Some((1, 2)), Some((0, 4)), None]);
    Ok(())
}

/// Two communication streams reduce two buckets at once. A buffer moves into its call and comes
/// back from `wait`, in any order.
fn streams_with_handles() -> Result<(), Box<dyn Error>> {
    let buckets = on_ranks("two communication streams, a bucket each", 2, |mut comm| {
        let two = communication_streams(&mut comm, 2)?;
        let first = two[0].all_reduce(vec![1.0f32; 3], ReduceOp::Sum);
        let second = two[1].all_reduce(vec![10.0f32; 3], ReduceOp::Average);
        // The gradients of the next layer would be computed here.
        let (second, first) = (second.wait()?, first.wait()?);
        Ok([first, second])
    })?;
    assert_eq!(buckets, vec![[vec![2.0; 3], vec![10.0; 3]]; 2]);
    Ok(())
}

/// Any call can be started, or several as one piece of work.
fn several_calls_on_a_stream() -> Result<(), Box<dyn Error>> {
    let gathered = on_ranks("scale, then gather on a communication stream", 2, |mut comm| {
        let stream = communication_streams(&mut comm, 1)?.remove(0);
        let start = vec![1.0 + comm.rank() as f64];
        let pending = stream.start("normalise and gather", start, |comm, own| {
            let mut sum = [0.0];
            comm.all_reduce_into(own, &mut sum, ReduceOp::Sum)?;
            own[0] /= sum[0];
            let mut all = vec![0.0; comm.world_size()];
            comm.all_gather(own, &mut all)?;
            *own = all;
            Ok(())
        });
        pending.wait()
    })?;
    assert_eq!(gathered, vec![vec![1.0 / 3.0, 2.0 / 3.0]; 2]);
    Ok(())
}
