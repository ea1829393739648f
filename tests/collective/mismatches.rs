//! Ranks that do not do the same thing all say so, with both sides, before data moves; calls that
//! cannot be made are refused.

use fusestep_collective::{
    Buffers, Call, CollectiveError, Collectives, Communicator, Field, Operation, ReduceOp, Solo,
};
use fusestep_tensor::DType;

use super::perturbed::call;
use super::worlds::{all, threads, within};

#[test]
fn each_field_on_each_rank_gives_the_same_error_everywhere_and_moves_nothing() {
    use Field::{Bucket, Counts, DType, Numel, Operation, PlanHash, ReduceOp, Root};
    for ranks in [2, 3, 4] {
        for odd in 0..ranks {
            for field in [Operation, ReduceOp, DType, Numel, Root, Counts, Bucket, PlanHash] {
                let errors = all(threads(ranks, 20_000, |mut comm| {
                    comm.barrier().unwrap();
                    let own = comm.rank();
                    let mut buffer = vec![own as f32; 7];
                    let error = call(&mut comm, field, own == odd, &mut buffer).unwrap_err();
                    assert_eq!(buffer, vec![own as f32; 7], "data moved");
                    assert_eq!(comm.barrier().unwrap_err(), error, "the group stays closed");
                    error
                }));
                assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
                let CollectiveError::Mismatch {
                    field: named,
                    expected_rank,
                    found_rank,
                    expected,
                    found,
                    sequence,
                    ..
                } = &errors[0]
                else {
                    panic!("{field} on rank {odd} of {ranks}: {}", errors[0]);
                };
                assert_eq!((*named, *sequence), (field, 2), "{}", errors[0]);
                assert_ne!(expected, found);
                let sides = if ranks == 2 { (0, 1) } else { (usize::from(odd == 0), odd) };
                assert_eq!((*expected_rank, *found_rank), sides, "{}", errors[0]);
            }
        }
    }
}

#[test]
fn transfers_are_compared_too() {
    within(30, || {
        let errors = all(threads(3, 20_000, |mut comm| match comm.rank() {
            0 => comm.barrier(),
            1 => comm.send(&[1.0f32; 3], 2),
            _ => comm.receive(&mut [0.0f32; 4], 1),
        }));
        for error in errors {
            let text = error.unwrap_err().to_string();
            assert!(text.contains("expected `3` as on rank 1, found `4` on rank 2"), "{text}");
        }
    });
}

#[test]
fn calls_that_cannot_be_made_are_refused_on_all_ranks() {
    type Bad = fn(&mut dyn Communicator) -> Result<(), CollectiveError>;
    let cases: [(Bad, &str); 8] = [
        (|comm| comm.broadcast(&mut [0.0f32], 2), "all-rank"),
        (
            |comm| comm.all_reduce(&mut [0i32; 4], ReduceOp::Average),
            "average is not defined for i32",
        ),
        (
            |comm| comm.all_reduce_into(&[0.0f32; 3], &mut [0.0; 4], ReduceOp::Sum),
            "receive: expected 3 elements, found 4",
        ),
        (
            |comm| comm.all_to_all(&[0u8; 3], &mut [0; 3]),
            "expected a multiple of 2, the world size, found 3",
        ),
        (
            |comm| comm.all_gather_counts(&[1], &[0u8], &mut [0]),
            "counts: expected 2, one for each rank, found 1",
        ),
        (|comm| comm.all_gather_counts(&[usize::MAX, 2], &[0u8], &mut [0]), "found an overflow"),
        (|comm| comm.send(&[0u8], comm.rank()), "expected another rank as the peer"),
        (
            |comm| {
                let buffers = Buffers::InPlace(&mut [0; 7]);
                comm.execute(Call {
                    operation: Operation::AllReduce(ReduceOp::Sum),
                    dtype: DType::F32,
                    counts: None,
                    buffers,
                })
            },
            "expected a multiple of 4 bytes (f32), found 7 bytes",
        ),
    ];
    for (bad, expected) in cases {
        // Only rank 1 makes the bad call; rank 0 gets its error and need not wait for the deadline.
        let errors = within(30, move || {
            all(threads(2, 20_000, move |mut comm| match comm.rank() {
                0 => comm.barrier(),
                _ => bad(&mut comm),
            }))
        });
        assert_eq!(errors[0], errors[1]);
        let text = errors[0].clone().unwrap_err().to_string();
        let expected =
            if expected == "all-rank" { "expected a rank below 2, found 2" } else { expected };
        assert!(text.contains(expected) && text.contains("rank 1"), "{text}");
    }
    let mut solo = Solo::new();
    assert!(solo.broadcast(&mut [1u8], 1).is_err());
    assert!(solo.barrier().is_err(), "an error is the last word in a world of one, too");
}

#[test]
fn lengths_beyond_32_bits_are_counted_not_cut() {
    let call = Call {
        operation: Operation::AllGather,
        dtype: DType::F32,
        counts: Some(&[3 << 32, 0]),
        buffers: Buffers::OutOfPlace { send: &[], receive: &mut [] },
    };
    let text = call.blocks(1, 2).unwrap_err().to_string();
    assert!(text.contains("receive: expected 12884901888 elements, found 0"), "{text}");
}
