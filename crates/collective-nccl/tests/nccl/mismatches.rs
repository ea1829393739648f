//! Ranks that do not do the same thing all say so before data moves.

use fusestep_collective::{CollectiveError, Collectives, Communicator, Field, ReduceOp};

use super::perturbed::call;
use super::worlds::{group, options, sizes, turn};

#[test]
fn each_field_on_each_rank_gives_the_same_error_everywhere_and_moves_nothing() {
    use Field::{Bucket, Counts, DType, Numel, Operation, PlanHash, ReduceOp, Root};
    let _turn = turn();
    for ranks in sizes().into_iter().filter(|&ranks| ranks > 1) {
        for odd in 0..ranks {
            for field in [Operation, ReduceOp, DType, Numel, Root, Counts, Bucket, PlanHash] {
                let errors = group(ranks, &options(), |mut comm| {
                    comm.barrier().unwrap();
                    let own = comm.rank();
                    let mut buffer = vec![own as f32; 7];
                    let error = call(&mut comm, field, own == odd, &mut buffer).unwrap_err();
                    assert_eq!(buffer, vec![own as f32; 7], "data moved");
                    assert_eq!(comm.barrier().unwrap_err(), error, "the group stays closed");
                    error
                });
                assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
                let CollectiveError::Mismatch { field: named, expected_rank, found_rank, .. } =
                    errors[0]
                else {
                    panic!("{field} on rank {odd} of {ranks}: {}", errors[0]);
                };
                let sides = if ranks == 2 { (0, 1) } else { (usize::from(odd == 0), odd) };
                assert_eq!((named, expected_rank, found_rank), (field, sides.0, sides.1));
            }
        }
    }
}

#[test]
fn transfers_are_compared_too() {
    let _turn = turn();
    if sizes().len() < 3 {
        return;
    }
    let errors = group(3, &options(), |mut comm| match comm.rank() {
        0 => comm.barrier(),
        1 => comm.send(&[1.0f32; 3], 2),
        _ => comm.receive(&mut [0.0f32; 4], 1),
    });
    for error in &errors {
        let text = error.as_ref().unwrap_err().to_string();
        assert!(text.contains("expected `3` as on rank 1, found `4` on rank 2"), "{text}");
    }
}

#[test]
fn a_call_that_one_rank_cannot_make_is_refused_on_all() {
    let _turn = turn();
    if sizes().len() < 2 {
        return;
    }
    for kind in 0..3 {
        let errors = group(2, &options(), |mut comm| match (comm.rank(), kind) {
            (1, 0) => comm.broadcast(&mut [0.0f32], 99),
            (1, 1) => comm.all_reduce(&mut [0i32; 4], ReduceOp::Average),
            (1, _) => comm.send(&[0u8], 1),
            _ => comm.barrier(),
        });
        assert_eq!(errors[0], errors[1]);
        let text = errors[0].as_ref().unwrap_err().to_string();
        assert!(text.contains("rank 1"), "{text}");
    }
}
