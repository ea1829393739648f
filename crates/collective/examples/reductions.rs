//! All-reduce, reduce and reduce-scatter: elements of all ranks become one, on all ranks, on one,
//! or a part on each.
//!
//! `cargo run --release -p fusestep-collective --example reductions`

mod support;

use std::error::Error;

use fusestep_collective::{Collectives, Communicator, ReduceOp};
use support::on_ranks;

/// Runs every one of them.
pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    all_reduce()?;
    reduce()?;
    reduce_scatter()?;
    reduce_scatter_counts()
}

/// The average gradient on every rank, in the buffer that held its own.
fn all_reduce() -> Result<(), Box<dyn Error>> {
    let averages = on_ranks("all-reduce, average", 4, |mut comm| {
        let mut gradient = vec![comm.rank() as f32, 1.0];
        comm.all_reduce(&mut gradient, ReduceOp::Average)?;
        Ok(gradient)
    })?;
    assert_eq!(averages, vec![vec![1.5, 1.0]; 4]);

    // Sums are formed in rank order on every rank: 1 is lost in 1e8 and not in what is left of it.
    let terms = [1e8f32, 1.0, -1e8, 1.0];
    let sums = on_ranks("all-reduce, sum in rank order", 4, |mut comm| {
        let mut sum = [0.0];
        comm.all_reduce_into(&[terms[comm.rank()]], &mut sum, ReduceOp::Sum)?;
        Ok(sum)
    })?;
    assert_eq!(sums, [[terms.iter().sum::<f32>()]; 4]);
    assert_eq!(sums[0], [1.0]);
    Ok(())
}

/// The largest loss on rank 0; the others keep their own.
fn reduce() -> Result<(), Box<dyn Error>> {
    let largest = on_ranks("reduce, max to rank 0", 3, |mut comm| {
        let mut loss = [0.25 * comm.rank() as f64];
        comm.reduce(&mut loss, ReduceOp::Max, 0)?;
        Ok(loss)
    })?;
    assert_eq!(largest, [[0.5], [0.25], [0.5]]);
    Ok(())
}

/// A part of the sum on each rank. Five elements between two ranks: the first gets one more.
fn reduce_scatter() -> Result<(), Box<dyn Error>> {
    let parts = on_ranks("reduce-scatter, sum", 2, |mut comm| {
        let mut part = vec![0i64; [3, 2][comm.rank()]];
        comm.reduce_scatter(&[1, 2, 3, 4, 5], &mut part, ReduceOp::Sum)?;
        Ok(part)
    })?;
    assert_eq!(parts, [vec![2, 4, 6], vec![8, 10]]);
    Ok(())
}

/// Parts may have any length, 0 included.
fn reduce_scatter_counts() -> Result<(), Box<dyn Error>> {
    let counts = [1, 0, 4];
    let parts = on_ranks("reduce-scatter of 1, 0 and 4 elements", 3, |mut comm| {
        let mut part = vec![0i32; counts[comm.rank()]];
        comm.reduce_scatter_counts(&counts, &[1, 2, 3, 4, 5], &mut part, ReduceOp::Prod)?;
        Ok(part)
    })?;
    assert_eq!(parts, [vec![1], vec![], vec![8, 27, 64, 125]]);
    Ok(())
}
