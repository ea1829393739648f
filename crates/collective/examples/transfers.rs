//! Send, receive and barrier: two ranks at a time, and all of them with nothing to say.
//!
//! `cargo run --release -p fusestep-collective --example transfers`

mod support;

use std::error::Error;
use std::sync::atomic::{AtomicUsize, Ordering};

use fusestep_collective::{Collectives, Communicator};
use support::on_ranks;

/// Runs every one of them.
pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    send_and_receive()?;
    exchange()?;
    barrier()
}

/// A token goes around: each rank adds itself. Both sides wait for each other, so somebody has to
/// receive first.
fn send_and_receive() -> Result<(), Box<dyn Error>> {
    let tokens = on_ranks("send and receive, around", 4, |mut comm| {
        let (rank, last) = (comm.rank(), comm.world_size() - 1);
        let mut token = [rank as i64];
        if rank > 0 {
            comm.receive(&mut token, rank - 1)?;
            token[0] = 10 * token[0] + rank as i64;
        }
        if rank < last {
            comm.send(&token, rank + 1)?;
        }
        Ok(token)
    })?;
    assert_eq!(tokens, [[0], [1], [12], [123]]);
    Ok(())
}

/// Two ranks exchange elements: the even one sends first, the odd one receives first.
fn exchange() -> Result<(), Box<dyn Error>> {
    let swapped = on_ranks("send and receive, exchanged", 2, |mut comm| {
        let (own, other) = ([0.5 + comm.rank() as f32], 1 - comm.rank());
        let mut theirs = [0.0f32];
        if comm.rank() % 2 == 0 {
            comm.send(&own, other)?;
            comm.receive(&mut theirs, other)?;
        } else {
            comm.receive(&mut theirs, other)?;
            comm.send(&own, other)?;
        }
        Ok(theirs)
    })?;
    assert_eq!(swapped, [[1.5], [0.5]]);
    Ok(())
}

/// Nobody goes on before everybody has come: behind the barrier all have been counted.
fn barrier() -> Result<(), Box<dyn Error>> {
    let come = AtomicUsize::new(0);
    let seen = on_ranks("barrier, ranks seen behind it", 3, |mut comm| {
        come.fetch_add(1, Ordering::Relaxed);
        comm.barrier()?;
        Ok(come.load(Ordering::Relaxed))
    })?;
    assert_eq!(seen, [3; 3]);
    Ok(())
}
