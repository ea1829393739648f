//! Broadcast, scatter, gather, all-gather and all-to-all: elements go from rank to rank and stay as
//! they are.
//!
//! `cargo run --release -p fusestep-collective --example movements`

mod support;

use std::error::Error;

use fusestep_collective::{Collectives, Communicator};
use support::on_ranks;

/// Runs every one of them.
pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    broadcast()?;
    scatter()?;
    gather()?;
    all_gather()?;
    all_gather_counts()?;
    all_to_all()
}

/// All ranks start from rank 0's parameters.
fn broadcast() -> Result<(), Box<dyn Error>> {
    let parameters = on_ranks("broadcast from rank 0", 3, |mut comm| {
        let mut parameters = [0.5 + comm.rank() as f32, 7.0];
        comm.broadcast(&mut parameters, 0)?;
        Ok(parameters)
    })?;
    assert_eq!(parameters, [[0.5, 7.0]; 3]);
    Ok(())
}

/// Rank 1 deals its samples out; what the others pass to be sent is not looked at.
fn scatter() -> Result<(), Box<dyn Error>> {
    let samples = on_ranks("scatter from rank 1", 3, |mut comm| {
        let all: Vec<u8> = match comm.rank() {
            1 => (10..16).collect(),
            _ => Vec::new(),
        };
        let mut own = [0; 2];
        comm.scatter(&all, &mut own, 1)?;
        Ok(own)
    })?;
    assert_eq!(samples, [[10, 11], [12, 13], [14, 15]]);
    Ok(())
}

/// Rank 2 collects what all have; the others need no room for it.
fn gather() -> Result<(), Box<dyn Error>> {
    let counts = on_ranks("gather to rank 2", 3, |mut comm| {
        let mut all = vec![0i64; if comm.rank() == 2 { 3 } else { 0 }];
        comm.gather(&[100 + comm.rank() as i64], &mut all, 2)?;
        Ok(all)
    })?;
    assert_eq!(counts, [vec![], vec![], vec![100, 101, 102]]);
    Ok(())
}

/// Every rank gets the shards of all.
fn all_gather() -> Result<(), Box<dyn Error>> {
    let whole = on_ranks("all-gather", 2, |mut comm| {
        let shard = [2.0 * comm.rank() as f32, 2.0 * comm.rank() as f32 + 1.0];
        let mut whole = [0.0; 4];
        comm.all_gather(&shard, &mut whole)?;
        Ok(whole)
    })?;
    assert_eq!(whole, [[0.0, 1.0, 2.0, 3.0]; 2]);
    Ok(())
}

/// Shards may have any length that all ranks know.
fn all_gather_counts() -> Result<(), Box<dyn Error>> {
    let counts = [2, 0, 1];
    let whole = on_ranks("all-gather of 2, 0 and 1 elements", 3, |mut comm| {
        let shard = vec![comm.rank() as i32; counts[comm.rank()]];
        let mut whole = [-1; 3];
        comm.all_gather_counts(&counts, &shard, &mut whole)?;
        Ok(whole)
    })?;
    assert_eq!(whole, [[0, 0, 2]; 3]);
    Ok(())
}

/// Rows become columns: element `to` of rank `from` becomes element `from` of rank `to`.
fn all_to_all() -> Result<(), Box<dyn Error>> {
    let columns = on_ranks("all-to-all", 3, |mut comm| {
        let row = [0, 1, 2].map(|to| 10 * comm.rank() as i32 + to);
        let mut column = [0; 3];
        comm.all_to_all(&row, &mut column)?;
        Ok(column)
    })?;
    assert_eq!(columns, [[0, 10, 20], [1, 11, 21], [2, 12, 22]]);
    Ok(())
}
