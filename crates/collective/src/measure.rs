//! Measured times of all-reduces, beside what memory allows.

use std::hint::black_box;
use std::time::Instant;

use fusestep_simd::{Level, prefetch_ahead};
use fusestep_tensor::DType;
use serde::{Deserialize, Serialize};

use crate::{
    Buffers, Call, CollectiveError, Collectives, Communicator, Operation, ReduceOp, even_counts,
};

/// Smallest number of rounds that each length is measured in.
const MIN_ROUNDS: usize = 7;

/// Smallest number of bytes reduced in all for one length; small lengths get many rounds.
const MIN_TOTAL_BYTES: usize = 16 << 20;

/// Most calls of one length that are timed.
const MAX_ROUNDS: usize = 10_000;

/// Bytes reduced between two looks at the clock, if [`MAX_CALLS`] suffice. Several short calls are
/// timed one behind the other, since ranks leave the barrier at different times: the difference is
/// as long as one short call.
const MIN_TIMED_BYTES: usize = 512 << 10;

/// Most calls between two looks at the clock.
const MAX_CALLS: usize = 128;

/// Measurements of one length of buffer, f32 and in place.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AllReduceRow {
    /// Number of ranks.
    pub ranks: usize,
    /// Bytes of each rank's buffer.
    pub len_bytes: u64,
    /// Median time of one all-reduce, in seconds.
    pub seconds: f64,
    /// The shortest time of one all-reduce, which it takes when nothing else wants the cores.
    pub best_seconds: f64,
    /// Bytes read and written per second of the median: every buffer once each way.
    pub bytes_per_second: f64,
    /// Median time in which the same threads read and write their own buffers once, without a word
    /// to each other, in seconds.
    pub ceiling_seconds: f64,
    /// `ceiling_seconds / seconds`; 1 is the bound for lengths that leave the caches.
    pub share_of_ceiling: f64,
}

/// Measures an all-reduce (sum, f32, in place) for each length, in turn with the ceiling of the
/// same bytes. All ranks of `comm` call it; the numbers are those that each rank has seen.
///
/// The first result of each length is compared with the expected sums before anything is timed.
/// Buffers lie as the buckets of a step do, where [`Communicator::allocate`] puts them: for threads
/// in huge pages from 2 MiB on.
///
/// # Units
/// `sizes` are bytes of each rank's buffer, rounded down to whole f32.
/// # Errors
/// [`CollectiveError`] of the communicator; [`CollectiveError::Refused`] if memory does not suffice
/// or a sum is wrong.
pub fn measure_all_reduce(
    comm: &mut dyn Communicator,
    sizes: &[u64],
    level: Level,
) -> Result<Vec<AllReduceRow>, CollectiveError> {
    let rows = sizes.iter().map(|&len_bytes| row(comm, len_bytes, level));
    rows.collect()
}

/// The cost of calls: an all-reduce of `B` bytes takes `alpha_seconds + B / beta_bytes_per_second`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// The time of a call that moves next to nothing, in seconds.
    pub alpha_seconds: f64,
    /// Bytes of each rank's buffer per second, for long buffers.
    pub beta_bytes_per_second: f64,
}

/// Costs of calls, and of a rank's passes over its own memory, where no cache has that memory. A
/// training step finds memory that way: since it last used a bucket, it has gone through all its
/// other tensors.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Costs {
    /// An all-reduce of a buffer.
    pub all_reduce: Link,
    /// A reduce-scatter of a buffer of which each rank gets its part.
    pub reduce_scatter: Link,
    /// An all-gather into a buffer to which each rank gives its part.
    pub all_gather: Link,
    /// Bytes that a rank reads and writes per second when it copies, each counted, while the other
    /// ranks copy too.
    pub memory_bytes_per_second: f64,
    /// Bytes of newly allocated memory that a rank writes for the first time per second, while the
    /// other ranks do so too. Most of that time the operating system finds the pages and takes them
    /// back.
    pub fresh_bytes_per_second: f64,
}

/// Bytes of all ranks' buffers that are gone through in turn, more than caches hold.
const COLD_BYTES: usize = 256 << 20;

/// Lengths of calls that [`measure`] times.
const MEASURED_BYTES: [usize; 4] = [4 << 10, 64 << 10, 1 << 20, 8 << 20];

/// Bytes that are allocated, written and given back at a time: a bucket's.
const FRESH_BYTES: usize = 25 << 20;

/// Times that a copy and new memory are measured.
const COPIES: usize = 5;

/// Measures the costs of calls between the ranks of `comm`. All ranks call it, and get nearly the
/// same.
///
/// # Errors
/// [`CollectiveError`] of the communicator.
/// # Cost
/// About two seconds, and a quarter of a GiB in all.
pub fn measure(comm: &mut dyn Communicator) -> Result<Costs, CollectiveError> {
    let largest = MEASURED_BYTES[MEASURED_BYTES.len() - 1];
    let calls = (COLD_BYTES / comm.world_size() / largest).max(2);
    let mut memory = vec![1.0f32; calls * largest / 4];
    let mut link = |operation| {
        let mut points = Vec::with_capacity(MEASURED_BYTES.len());
        for len_bytes in MEASURED_BYTES {
            let seconds = median_of_calls(comm, operation, &mut memory, len_bytes / 4)?;
            points.push((len_bytes as f64, seconds));
        }
        Ok::<_, CollectiveError>(fit(&points))
    };
    let all_reduce = link(Operation::AllReduce(ReduceOp::Average))?;
    let reduce_scatter = link(Operation::ReduceScatter(ReduceOp::Average))?;
    let all_gather = link(Operation::AllGather)?;
    let (from, to) = memory.split_at_mut(calls / 2 * largest / 4);
    let len = from.len().min(to.len());
    let copies = timed(comm, COPIES, |_| {
        to[..len].copy_from_slice(&from[..len]);
        Ok(())
    })?;
    let fresh = timed(comm, COPIES, |_| {
        let mut words = vec![0u64; FRESH_BYTES / 8];
        words.iter_mut().for_each(|word| *word = 1);
        drop(black_box(words));
        Ok(())
    })?;
    Ok(Costs {
        all_reduce,
        reduce_scatter,
        all_gather,
        memory_bytes_per_second: 8.0 * len as f64 / copies[COPIES / 2],
        fresh_bytes_per_second: FRESH_BYTES as f64 / fresh[COPIES / 2],
    })
}

/// The times of `work`, each behind a barrier, in seconds and ascending.
fn timed(
    comm: &mut dyn Communicator,
    times: usize,
    mut work: impl FnMut(&mut dyn Communicator) -> Result<(), CollectiveError>,
) -> Result<Vec<f64>, CollectiveError> {
    let mut seconds = Vec::with_capacity(times);
    for _ in 0..times {
        comm.barrier()?;
        let start = Instant::now();
        work(comm)?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds)
}

/// The median time of a call in place, on one buffer after the other.
fn median_of_calls(
    comm: &mut dyn Communicator,
    operation: Operation,
    memory: &mut [f32],
    numel: usize,
) -> Result<f64, CollectiveError> {
    let counts = even_counts(numel, comm.world_size());
    let parts = !matches!(operation, Operation::AllReduce(_));
    let times = (memory.len() / numel).min(MAX_ROUNDS);
    let mut buffers = memory.chunks_exact_mut(numel);
    let seconds = timed(comm, times, |comm| {
        comm.execute(Call {
            operation,
            dtype: DType::F32,
            counts: parts.then_some(&counts),
            buffers: Buffers::InPlace(bytemuck::cast_slice_mut(buffers.next().unwrap_or_default())),
        })
    })?;
    Ok(seconds[times / 2])
}

/// The line `seconds = alpha + bytes / beta` through points of (bytes, seconds), by least squares
/// of relative errors. Short calls count as much as long ones. Neither alpha nor the slope is below
/// zero; without two lengths the slope is zero and beta infinite.
pub fn fit(points: &[(f64, f64)]) -> Link {
    let (mut w, mut wx, mut wxx, mut wy, mut wxy) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for &(x, y) in points {
        let weight = 1.0 / (y * y).max(1e-24);
        w += weight;
        wx += weight * x;
        wxx += weight * x * x;
        wy += weight * y;
        wxy += weight * x * y;
    }
    let determinant = w * wxx - wx * wx;
    let slope = if determinant > 1e-12 * w * wxx {
        ((w * wxy - wx * wy) / determinant).max(0.0)
    } else {
        0.0
    };
    let alpha = if w > 0.0 { ((wy - slope * wx) / w).max(0.0) } else { 0.0 };
    Link { alpha_seconds: alpha, beta_bytes_per_second: 1.0 / slope }
}

fn row(
    comm: &mut dyn Communicator,
    len_bytes: u64,
    level: Level,
) -> Result<AllReduceRow, CollectiveError> {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let refused = |reason: String| CollectiveError::refused(rank, "all-reduce benchmark", reason);
    let numel = usize::try_from(len_bytes).map_err(|_| {
        refused(format!("expected a length that fits memory, found {len_bytes} bytes"))
    })? / 4;
    let mut memory = comm.allocate(4 * numel)?;
    let buffer: &mut [f32] = memory.elements_mut();
    for (i, x) in buffer.iter_mut().enumerate() {
        *x = (i % 64 + rank) as f32;
    }
    comm.all_reduce(buffer, ReduceOp::Sum)?;
    let expected = |i: usize| (ranks * (i % 64) + ranks * (ranks - 1) / 2) as f32;
    if let Some((i, &found)) = buffer.iter().enumerate().find(|&(i, &x)| x != expected(i)) {
        return Err(refused(format!("element {i}: expected {}, found {found}", expected(i))));
    }
    // The sums grow to infinity, which takes no longer than other values.
    let calls = (MIN_TIMED_BYTES / (4 * numel).max(1)).clamp(1, MAX_CALLS);
    let rounds = (MIN_TOTAL_BYTES / (4 * numel).max(1)).clamp(MIN_ROUNDS, MAX_ROUNDS) / calls;
    let ours = timed(comm, rounds, |comm| {
        (0..calls).try_for_each(|_| comm.all_reduce(buffer, ReduceOp::Sum))
    })?;
    let ceiling = timed(comm, rounds, |_| {
        (0..calls).for_each(|_| read_and_write(level, black_box(&mut *buffer)));
        Ok(())
    })?;
    let [best_seconds, seconds, ceiling_seconds] =
        [ours[0], ours[rounds / 2], ceiling[rounds / 2]].map(|seconds| seconds / calls as f64);
    let traffic_bytes = 2.0 * 4.0 * (numel * ranks) as f64;
    Ok(AllReduceRow {
        ranks,
        len_bytes: 4 * numel as u64,
        seconds,
        best_seconds,
        bytes_per_second: traffic_bytes / seconds,
        ceiling_seconds,
        share_of_ceiling: ceiling_seconds / seconds,
    })
}

/// Goes through memory once as fast as this machine can; like reductions, it asks for lines ahead.
fn read_and_write(level: Level, buffer: &mut [f32]) {
    level.run(
        #[inline(always)]
        || {
            let mut lines = buffer.chunks_exact_mut(16);
            for line in &mut lines {
                prefetch_ahead(line, 256);
                line.iter_mut().for_each(|x| *x = -*x);
            }
            lines.into_remainder().iter_mut().for_each(|x| *x = -*x);
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Options, Solo};

    #[test]
    fn a_line_is_found_again_and_bad_points_give_no_nonsense() {
        let cost = |bytes: f64| 2e-6 + bytes / 5e9;
        let points: Vec<_> = [4e3, 6.4e4, 1e6, 1.6e7].map(|bytes| (bytes, cost(bytes))).into();
        let link = fit(&points);
        assert!((link.alpha_seconds / 2e-6 - 1.0).abs() < 1e-6, "{link:?}");
        assert!((link.beta_bytes_per_second / 5e9 - 1.0).abs() < 1e-6, "{link:?}");
        assert_eq!(fit(&[]).alpha_seconds, 0.0);
        assert_eq!(
            fit(&[(8.0, 1.0)]),
            Link { alpha_seconds: 1.0, beta_bytes_per_second: f64::INFINITY }
        );
        let falling = fit(&[(1.0, 2.0), (100.0, 1.0)]);
        assert!(falling.alpha_seconds >= 0.0 && falling.beta_bytes_per_second > 0.0);
    }

    #[test]
    fn calls_and_copies_have_a_price() {
        let ranks = crate::run_ranks(2, &Options::default(), |mut comm| measure(&mut comm));
        for costs in ranks.unwrap() {
            let costs = costs.unwrap().unwrap();
            for link in [costs.all_reduce, costs.reduce_scatter, costs.all_gather] {
                assert!(link.beta_bytes_per_second > 0.0 && link.alpha_seconds >= 0.0);
                assert!(link.beta_bytes_per_second.is_finite(), "{costs:?}");
            }
            assert!(
                costs.memory_bytes_per_second > 0.0 && costs.memory_bytes_per_second.is_finite()
            );
        }
        assert!(measure(&mut Solo::new()).is_ok());
    }

    #[test]
    fn any_engine_can_be_measured() {
        let rows = measure_all_reduce(&mut Solo::new(), &[0, 1024], Level::detect()).unwrap();
        assert_eq!(rows.iter().map(|row| row.len_bytes).collect::<Vec<_>>(), [0, 1024]);
        assert!(rows.iter().all(|row| row.seconds > 0.0 && row.ranks == 1));
    }
}
