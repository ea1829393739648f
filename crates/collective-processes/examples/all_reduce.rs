//! Times an all-reduce between the processes that a launcher has started, or, started plainly,
//! between two threads: `all_reduce 4096 67108864`.

use fusestep_collective::{Communicator, Options, measure_all_reduce, run_ranks};
use fusestep_collective_processes::{ProcessCommunicator, ProcessOptions, launched_processes};
use fusestep_simd::Level;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let sizes: Result<Vec<u64>, _> = std::env::args().skip(1).map(|size| size.parse()).collect();
    let sizes = sizes?;
    let (rows, rank) = if launched_processes()?.is_some() {
        let mut comm = ProcessCommunicator::world(&ProcessOptions::default())?;
        let rows = measure_all_reduce(&mut comm, &sizes, Level::detect())?;
        (rows, comm.rank())
    } else {
        let mut both = run_ranks(2, &Options::default(), |mut comm| {
            measure_all_reduce(&mut comm, &sizes, Level::detect())
        })?;
        (both.remove(0).expect("no rank panics")?, 0)
    };
    for row in rows.iter().filter(|_| rank == 0) {
        println!(
            "{:>10} B  best {:>12.2} us  median {:>12.2} us  share of memory's speed {:.3}",
            row.len_bytes,
            row.best_seconds * 1e6,
            row.seconds * 1e6,
            row.share_of_ceiling
        );
    }
    Ok(())
}
