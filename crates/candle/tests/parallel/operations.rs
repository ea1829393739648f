//! Collectives on tensors: what they give, and that backward is the transpose of forward.

use candle_core::{DType, Tensor};
use fusestep_candle::parallel::{Group, Split};

use super::{bits, dot, f64s, integers, on_ranks, var};

const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

/// Rows of each rank's block; one may have none.
const UNEVEN: [usize; 4] = [2, 0, 3, 1];

fn uneven(group: &Group) -> Split {
    Split::from_counts(&UNEVEN[..group.world_size()])
}

/// Dimensions of a tensor whose `dim` is `length`.
fn dims(dim: usize, length: usize) -> Vec<usize> {
    let mut dims = vec![2, 3, 2];
    dims[dim] = length;
    dims
}

/// This rank's input of some operation.
fn own(dims: &[usize], group: &Group, dtype: DType) -> Tensor {
    integers(dims, 10 + group.rank() as u64, dtype)
}

/// All ranks' inputs.
fn of_all(dims: impl Fn(usize) -> Vec<usize>, group: &Group, dtype: DType) -> Vec<Tensor> {
    (0..group.world_size()).map(|rank| integers(&dims(rank), 10 + rank as u64, dtype)).collect()
}

fn sum(tensors: &[Tensor]) -> Tensor {
    let rest = tensors[1..].iter();
    rest.fold(tensors[0].clone(), |sum, tensor| (sum + tensor).unwrap())
}

/// Runs on every world, dtype and, for operations that have one, dimension.
fn everywhere(body: impl Fn(&Group, DType, usize) + Sync) {
    for world in 1..=4 {
        for dtype in DTYPES {
            for dim in 0..3 {
                on_ranks(world, |group| {
                    body(group, dtype, dim);
                    Ok(())
                });
            }
        }
    }
}

#[test]
fn sums_are_of_all_ranks_and_pass_gradients_on() {
    everywhere(|group, dtype, _| {
        let x = var(&own(&[2, 3], group, dtype));
        let y = group.all_reduce(&x).unwrap();
        let expected = sum(&of_all(|_| vec![2, 3], group, dtype));
        assert_eq!(bits(&y), bits(&expected));
        // Downstream of a replicated tensor everything is replicated.
        let weights = integers(&[2, 3], 99, dtype);
        let grads = dot(&y, &weights).backward().unwrap();
        assert_eq!(bits(grads.get(&x).unwrap()), bits(&weights));
    });
}

#[test]
fn copies_take_the_sum_of_what_ranks_make_of_them() {
    everywhere(|group, dtype, _| {
        let x = var(&integers(&[4], 7, dtype));
        let y = group.copy_to_ranks(&x).unwrap();
        assert_eq!(bits(&y), bits(&x));
        let weights = own(&[4], group, dtype);
        let part = dot(&y, &weights);
        let grads = group.all_reduce(&part).unwrap().backward().unwrap();
        let expected = sum(&of_all(|_| vec![4], group, dtype));
        assert_eq!(bits(grads.get(&x).unwrap()), bits(&expected));
    });
}

#[test]
fn gathers_have_all_blocks_in_rank_order_and_scatter_the_sum_of_gradients() {
    everywhere(|group, dtype, dim| {
        let split = uneven(group);
        let mine = dims(dim, UNEVEN[group.rank()]);
        let x = var(&own(&mine, group, dtype));
        let y = group.all_gather(&x, dim).unwrap();
        let all = of_all(|rank| dims(dim, UNEVEN[rank]), group, dtype);
        assert_eq!(bits(&y), bits(&Tensor::cat(&all, dim).unwrap()));
        let whole = dims(dim, split.total());
        let weights = |rank: usize| integers(&whole, 50 + rank as u64, dtype);
        let part = dot(&y, &weights(group.rank()));
        let grads = group.all_reduce(&part).unwrap().backward().unwrap();
        let range = split.range(group.rank());
        let all: Vec<Tensor> = (0..group.world_size()).map(weights).collect();
        let expected = sum(&all).narrow(dim, range.start, range.len()).unwrap();
        assert_eq!(bits(grads.get(&x).unwrap()), bits(&expected));
    });
}

#[test]
fn gathers_for_one_use_take_their_block_of_the_gradient() {
    everywhere(|group, dtype, dim| {
        let split = uneven(group);
        let x = var(&own(&dims(dim, UNEVEN[group.rank()]), group, dtype));
        let y = group.all_gather_replicated(&x, dim).unwrap();
        let all = of_all(|rank| dims(dim, UNEVEN[rank]), group, dtype);
        assert_eq!(bits(&y), bits(&Tensor::cat(&all, dim).unwrap()));
        let weights = integers(&dims(dim, split.total()), 50, dtype);
        let grads = dot(&y, &weights).backward().unwrap();
        let range = split.range(group.rank());
        let expected = weights.narrow(dim, range.start, range.len()).unwrap();
        assert_eq!(bits(grads.get(&x).unwrap()), bits(&expected));
    });
}

#[test]
fn blocks_of_sums_gather_their_gradients() {
    everywhere(|group, dtype, dim| {
        let split = uneven(group);
        let whole = dims(dim, split.total());
        let range = split.range(group.rank());
        let block = |whole: &Tensor| whole.narrow(dim, range.start, range.len()).unwrap();
        let partial = var(&own(&whole, group, dtype));
        let sums = group.reduce_scatter(&partial, dim, &split).unwrap();
        let expected = sum(&of_all(|_| whole.clone(), group, dtype));
        assert_eq!(bits(&sums), bits(&block(&expected)));
        let replicated = var(&integers(&whole, 3, dtype));
        let blocks = group.scatter_replicated(&replicated, dim, &split).unwrap();
        assert_eq!(bits(&blocks), bits(&block(&replicated)));
        for (x, y) in [(&partial, &sums), (&replicated, &blocks)] {
            let weights = own(&dims(dim, range.len()), group, dtype);
            let part = dot(y, &weights);
            let grads = group.all_reduce(&part).unwrap().backward().unwrap();
            let all = of_all(|rank| dims(dim, UNEVEN[rank]), group, dtype);
            let expected = Tensor::cat(&all, dim).unwrap();
            assert_eq!(bits(grads.get(x).unwrap()), bits(&expected));
        }
    });
}

#[test]
fn a_root_tells_all_and_hears_all() {
    everywhere(|group, dtype, dim| {
        let root = dim % group.world_size();
        let all = of_all(|_| vec![5], group, dtype);
        let x = var(&own(&[5], group, dtype));
        let y = group.broadcast(&x, root).unwrap();
        assert_eq!(bits(&y), bits(&all[root]));
        let part = dot(&y, &all[group.rank()]);
        let grads = group.all_reduce(&part).unwrap().backward().unwrap();
        let zeros = all[0].zeros_like().unwrap();
        let expected = if group.rank() == root { sum(&all) } else { zeros.clone() };
        assert_eq!(f64s(grads.get(&x).unwrap()), f64s(&expected));

        let y = group.reduce(&x, root).unwrap();
        let expected = if group.rank() == root { sum(&all) } else { zeros };
        assert_eq!(f64s(&y), f64s(&expected));
        // What others make of their zeros counts for nothing.
        let grads = dot(&y, &all[group.rank()]).backward().unwrap();
        assert_eq!(bits(grads.get(&x).unwrap()), bits(&all[root]));
    });
}

#[test]
fn sums_of_16_bits_are_rounded_once() {
    // 256 + 1 + 1 + 1: rounded to bf16 (8 bits) after each addition it would stay 256.
    let sums = on_ranks(4, |group| {
        let value = if group.rank() == 0 { 256f32 } else { 1.0 };
        let x = Tensor::new(&[value], &candle_core::Device::Cpu)?.to_dtype(DType::BF16)?;
        Ok(f64s(&group.all_reduce(&x)?))
    });
    assert!(sums.iter().all(|sum| *sum == [260.0]), "{sums:?}");
}

#[test]
fn scaled_gradients_are_rounded_once_and_values_stay() {
    let group = Group::solo();
    for dtype in DTYPES {
        let x = var(&integers(&[6], 1, dtype));
        let y = group.scale_gradient(&x, 3.0).unwrap();
        assert_eq!(bits(&y), bits(&x));
        let weights = integers(&[6], 2, dtype);
        let grads = dot(&y, &weights).backward().unwrap();
        let expected = (weights * 3.0).unwrap();
        assert_eq!(f64s(grads.get(&x).unwrap()), f64s(&expected));
    }
}

#[test]
fn strides_and_scalars_are_taken_as_they_are() {
    on_ranks(2, |group| {
        let x = var(&integers(&[3, 4], 5 + group.rank() as u64, DType::F32));
        let of = |x: &Tensor| x.t()?.narrow(0, 1, 2);
        let y = group.all_reduce(&of(&x)?)?;
        let all: Vec<Tensor> =
            (0..2).map(|rank| of(&integers(&[3, 4], 5 + rank, DType::F32)).unwrap()).collect();
        assert_eq!(bits(&y), bits(&sum(&all)));
        let scalar = group.all_reduce(&x.sum_all()?)?;
        assert!(scalar.dims().is_empty());
        Ok(())
    });
}

#[test]
fn labels_come_together_in_rank_order() {
    on_ranks(3, |group| {
        let rank = group.rank() as u32;
        let own = Tensor::new(vec![10 * rank; UNEVEN[group.rank()]], &candle_core::Device::Cpu)?;
        let all = group.all_gather_labels(&own)?;
        assert_eq!(all.to_vec1::<i64>()?, [0, 0, 20, 20, 20]);
        Ok(())
    });
}
