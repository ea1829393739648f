//! What goes wrong between ranks, and what each of them is told.

use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use fusestep_candle::parallel::{
    ColumnParallel, ColumnParallelLinear, Group, Split, sharded_cross_entropy,
};
use fusestep_collective::{Options, run_ranks};

use super::{integers, on_ranks, var};

fn message<T>(result: candle_core::Result<T>) -> String {
    match result {
        Ok(_) => panic!("expected an error, found none"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn another_shape_or_dtype_is_named_on_all_ranks_and_calls_go_on() {
    on_ranks(3, |group| {
        let odd = group.rank() == 2;
        let x = integers(if odd { &[3, 2] } else { &[2, 3] }, 1, DType::F32);
        let error = message(group.all_reduce(&x));
        let expected = "all_reduce: expected f32 [2, 3] as on rank 0, found f32 [3, 2] on rank 2";
        assert!(error.starts_with(expected), "{error}");
        let dtype = if group.rank() == 1 { DType::BF16 } else { DType::F16 };
        let error = message(group.all_gather(&integers(&[2], 1, dtype), 0));
        assert!(
            error.contains("expected f16 [2] as on rank 0, found bf16 [2] on rank 1"),
            "{error}"
        );
        let rows = if odd { 5 } else { 4 };
        let error = message(group.all_gather(&integers(&[rows, 2], 1, DType::F32), 1));
        assert!(error.contains("[5, 2] on rank 2"), "{error}");
        assert_eq!(group.all_reduce(&integers(&[4], 1, DType::F32))?.dims(), [4]);
        Ok(())
    });
}

#[test]
fn a_rank_that_is_gone_is_an_error_of_the_others() {
    let outcomes = run_ranks(3, &Options::default(), |comm| {
        let group = Group::new(comm);
        if group.rank() == 1 {
            return None;
        }
        let x = var(&integers(&[2], 1, DType::F32));
        Some(message(group.all_reduce(&x)))
    });
    for (rank, outcome) in outcomes.unwrap().into_iter().enumerate() {
        let error = outcome.unwrap();
        assert_eq!(error.is_none(), rank == 1);
        assert!(error.is_none_or(|error| error.contains("rank 1 left the group after 0 calls")));
    }
}

#[test]
fn a_rank_that_is_late_backward_is_an_error_at_the_deadline() {
    let options = Options { timeout: Duration::from_millis(200), ..Options::default() };
    let (say, hear) = std::sync::mpsc::channel::<()>();
    let hear = std::sync::Mutex::new(hear);
    let outcomes = run_ranks(2, &options, |comm| {
        let group = Group::new(comm);
        let x = var(&integers(&[2], 1, DType::F32));
        let loss = group.copy_to_ranks(&x).unwrap().sum_all().unwrap();
        if group.rank() == 1 {
            // It keeps its place and never goes backward.
            let _ = hear.lock().unwrap().recv_timeout(Duration::from_secs(30));
            return String::new();
        }
        let error = message(loss.backward());
        say.send(()).unwrap();
        error
    });
    let errors: Vec<String> = outcomes.unwrap().into_iter().map(Result::unwrap).collect();
    assert!(errors[0].contains("all-reduce"), "{}", errors[0]);
    assert!(errors[0].contains("found none of [1]"), "{}", errors[0]);
}

#[test]
fn labels_that_are_no_classes_or_differ_are_refused_together() {
    on_ranks(2, |group| {
        let split = Split::from_counts([3, 2]);
        let own = split.counts()[group.rank()];
        let x = var(&integers(&[4, own], 1, DType::F32));
        let labels = |labels: [i64; 4]| Tensor::new(&labels, &Device::Cpu);
        for unknown in [5, -1] {
            // Only rank 1 has it.
            let second = if group.rank() == 1 { unknown } else { 4 };
            let result = sharded_cross_entropy(&x, &labels([0, 1, second, 3])?, &split, group);
            let error = message(result);
            let expected = "label of sample 2: expected a class below 5 on every rank";
            assert!(error.starts_with(expected), "{error}");
        }
        let second = if group.rank() == 1 { 1 } else { 4 };
        let result = sharded_cross_entropy(&x, &labels([0, second, 1, 3])?, &split, group);
        let error = message(result);
        assert!(error.contains("label of sample 1: expected the same on every rank"), "{error}");
        let result = sharded_cross_entropy(&x, &labels([0, 1, 2, 3])?, &split, group);
        assert_eq!(result?.dims(), [4]);
        Ok(())
    });
}

#[test]
fn a_tensor_that_one_rank_alone_cannot_move_is_told_to_all() {
    let ints = Tensor::new(&[1u32, 2], &Device::Cpu).unwrap();
    let deep = integers(&[1; 9], 1, DType::F32);
    on_ranks(2, |group| {
        let fine = integers(&[2], 1, DType::F32);
        for (wrong, own, told) in [
            (&ints, "found U32", "a tensor that its rank refuses"),
            (&deep, "at most 8 dimensions", "a tensor of 9 dimensions"),
        ] {
            let is_wrong = group.rank() == 1;
            let error = message(group.all_reduce(if is_wrong { wrong } else { &fine }));
            assert!(error.contains(if is_wrong { own } else { told }), "{error}");
        }
        let (even, other) = (Split::from_counts([1, 1]), Split::from_counts([2, 1]));
        let split = if group.rank() == 1 { &other } else { &even };
        let error = message(group.reduce_scatter(&fine, 0, split));
        let [own, told] = ["expected 3 elements along", "a tensor that its rank refuses"];
        assert!(error.contains(if group.rank() == 1 { own } else { told }), "{error}");
        // Later calls work.
        group.all_reduce(&fine).map(|_| ())
    });
}

#[test]
fn what_cannot_be_moved_is_refused_before_any_call() {
    let group = Group::solo();
    let ints = Tensor::new(&[1u32, 2], &Device::Cpu).unwrap();
    let error = message(group.all_reduce(&ints));
    assert!(error.contains("expected f32, f64, f16 or bf16, found U32"), "{error}");
    let deep = integers(&[1; 9], 1, DType::F32);
    let error = message(group.all_reduce(&deep));
    assert!(error.contains("at most 8 dimensions"), "{error}");
    let x = integers(&[4, 3], 1, DType::F32);
    let error = message(group.reduce_scatter(&x, 0, &Split::from_counts([3])));
    assert!(error.contains("expected 3 elements along dimension 0"), "{error}");
    let error = message(group.scatter_replicated(&x, 0, &Split::from_counts([2, 2])));
    assert!(error.contains("a block for each of 1 ranks, found 2"), "{error}");
    assert!(group.all_gather(&x, 2).is_err());
    let error = message(group.broadcast(&x, 1));
    assert!(error.contains("a root below 1, found 1"), "{error}");
    let split = Split::from_counts([3]);
    let options = ColumnParallel { split: Some(split.clone()), ..ColumnParallel::default() };
    let error = message(ColumnParallelLinear::from_slice(x.clone(), None, &options, &group));
    assert!(error.contains("expected 3 elements along dimension 0"), "{error}");
    let error = message(group.all_gather_labels(&x));
    assert!(error.contains("expected integers of at least one dimension"), "{error}");
    let labels = Tensor::new(&[1f32, 2., 0., 0.], &Device::Cpu).unwrap();
    let error = message(sharded_cross_entropy(&x, &labels, &split, &group));
    assert!(error.contains("expected integers of shape [4]"), "{error}");
    let error = message(sharded_cross_entropy(&x, &ints, &split, &group));
    assert!(error.contains("found U32 [2]"), "{error}");
}
