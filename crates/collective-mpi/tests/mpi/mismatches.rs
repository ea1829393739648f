//! Ranks that do not do the same thing all say so before data moves.

use std::time::{Duration, Instant};

use fusestep_collective::{CollectiveError, Collectives, Communicator, Field, ReduceOp};

use super::perturbed::call;
use super::worlds::{group, with_world};

const TIMEOUT_MS: u64 = 20_000;

/// Requires that all ranks have found the same text, by telling it to each other.
fn agreed(text: &str) {
    with_world(|world| {
        let mut bytes = text.as_bytes().to_vec();
        bytes.resize(600, 0);
        let own = bytes.clone();
        world.broadcast(&mut bytes, 0).unwrap();
        let theirs = String::from_utf8_lossy(&bytes).into_owned();
        assert!(own == bytes, "rank 0 found `{theirs}`, this one `{text}`");
    });
}

#[test]
fn each_field_on_each_rank_gives_the_same_error_everywhere_and_moves_nothing() {
    use Field::{Bucket, Counts, DType, Numel, Operation, PlanHash, ReduceOp, Root};
    let ranks = with_world(|world| world.world_size());
    for odd in 0..if ranks == 1 { 0 } else { ranks } {
        for field in [Operation, ReduceOp, DType, Numel, Root, Counts, Bucket, PlanHash] {
            let error = group(TIMEOUT_MS, |mut comm| {
                comm.barrier().unwrap();
                let own = comm.rank();
                let mut buffer = vec![own as f32; 7];
                // Counts are for worlds of up to four.
                if field == Counts && ranks > 4 {
                    return None;
                }
                let error = call(&mut *comm, field, own == odd, &mut buffer).unwrap_err();
                assert_eq!(buffer, vec![own as f32; 7], "data moved");
                assert_eq!(comm.barrier().unwrap_err(), error, "the group stays closed");
                Some(error)
            });
            let Some(error) = error else { continue };
            agreed(&error.to_string());
            let CollectiveError::Mismatch { field: named, expected_rank, found_rank, .. } = error
            else {
                panic!("{field} on rank {odd} of {ranks}: {error}");
            };
            let sides = if ranks == 2 { (0, 1) } else { (usize::from(odd == 0), odd) };
            assert_eq!((named, expected_rank, found_rank), (field, sides.0, sides.1));
        }
    }
}

#[test]
fn transfers_are_compared_too() {
    if with_world(|world| world.world_size()) != 3 {
        return;
    }
    let error = group(TIMEOUT_MS, |mut comm| match comm.rank() {
        0 => comm.barrier(),
        1 => comm.send(&[1.0f32; 3], 2),
        _ => comm.receive(&mut [0.0f32; 4], 1),
    });
    let text = error.unwrap_err().to_string();
    assert!(text.contains("expected `3` as on rank 1, found `4` on rank 2"), "{text}");
    agreed(&text);
}

#[test]
fn a_call_that_one_rank_cannot_make_is_refused_on_all_before_the_deadline() {
    if with_world(|world| world.world_size()) == 1 {
        return;
    }
    for kind in 0..3 {
        let start = Instant::now();
        let error = group(TIMEOUT_MS, |mut comm| match (comm.rank(), kind) {
            (1, 0) => comm.broadcast(&mut [0.0f32], 99),
            (1, 1) => comm.all_reduce(&mut [0i32; 4], ReduceOp::Average),
            (1, _) => comm.send(&[0u8], 1),
            _ => comm.barrier(),
        });
        assert!(start.elapsed() < Duration::from_millis(TIMEOUT_MS));
        let text = error.unwrap_err().to_string();
        assert!(text.contains("rank 1"), "{text}");
        agreed(&text);
    }
}
