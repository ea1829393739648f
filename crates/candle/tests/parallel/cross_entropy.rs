//! Softmax cross-entropy over split classes.

use candle_core::{DType, Device, Tensor};
use fusestep_candle::parallel::{Group, Split, sharded_cross_entropy};

use super::{bits, distance, f64s, noise, on_ranks, var};

const LEAF: usize = 1024;

/// Losses and gradients of logits that `split` cuts, put together again.
fn split_run(
    group: &Group,
    logits: &Tensor,
    labels: &Tensor,
    split: &Split,
) -> candle_core::Result<(Tensor, Tensor)> {
    let own = split.range(group.rank());
    let last = logits.dims().len() - 1;
    let x = var(&logits.narrow(last, own.start, own.len())?);
    let losses = sharded_cross_entropy(&x, labels, split, group)?;
    // Another factor for each sample.
    let factors = Tensor::arange(1f64, 1.0 + labels.elem_count() as f64, &Device::Cpu)?;
    let factors = factors.reshape(losses.shape())?.to_dtype(losses.dtype())?;
    let grads = losses.mul(&factors)?.sum_all()?.backward()?;
    Ok((losses, group.all_gather(grads.get(&x).unwrap(), last)?))
}

fn labels_of(samples: usize, classes: usize) -> Tensor {
    let labels: Vec<u32> =
        (0..samples).map(|sample| (sample * 2_654_435_761 % classes) as u32).collect();
    Tensor::new(labels, &Device::Cpu).unwrap()
}

/// Losses and gradients as the definition has them, in f64.
fn reference(logits: &Tensor, labels: &Tensor) -> (Vec<f64>, Vec<f64>) {
    let classes = *logits.dims().last().unwrap();
    let labels: Vec<u32> = labels.flatten_all().unwrap().to_vec1().unwrap();
    let (mut losses, mut gradients) = (Vec::new(), Vec::new());
    for (sample, row) in f64s(logits).chunks(classes).enumerate() {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|x| (x - max).exp()).sum();
        let label = labels[sample] as usize;
        losses.push(-((row[label] - max) - sum.ln()));
        gradients.extend(row.iter().enumerate().map(|(class, x)| {
            let hit = if class == label { 1.0 } else { 0.0 };
            ((x - max).exp() / sum - hit) * (sample + 1) as f64
        }));
    }
    (losses, gradients)
}

#[test]
fn blocks_of_whole_leaves_have_the_bits_of_one_rank() {
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        let classes = 5 * LEAF + 77;
        let logits = noise(&[7, classes], 1, 8.0).to_dtype(dtype).unwrap();
        let labels = labels_of(7, classes);
        let whole = Split::from_counts([classes]);
        let (losses, grads) = split_run(&Group::solo(), &logits, &labels, &whole).unwrap();
        let (expected, expected_grads) = reference(&logits, &labels);
        let bound: f64 = match dtype {
            DType::F64 => 1e-14,
            DType::F32 => 1e-7,
            DType::F16 => 5e-4,
            _ => 4e-3,
        };
        assert!(distance(&f64s(&losses), &expected) < bound.min(1e-7));
        assert!(distance(&f64s(&grads), &expected_grads) < bound);
        for counts in [
            vec![2 * LEAF, 3 * LEAF + 77],
            vec![LEAF, 0, 4 * LEAF + 77],
            vec![0, LEAF, 4 * LEAF, 77],
        ] {
            let split = Split::from_counts(counts.clone());
            let ranks = on_ranks(counts.len(), |group| {
                let (losses, grads) = split_run(group, &logits, &labels, &split)?;
                Ok((bits(&losses), bits(&grads)))
            });
            for rank in ranks {
                assert!(rank == (bits(&losses), bits(&grads)), "{dtype:?} {counts:?}");
            }
        }
    }
}

#[test]
fn blocks_of_any_lengths_differ_by_the_rounding_of_one_sum() {
    let classes = 2 * LEAF + 5;
    let logits = noise(&[4, classes], 2, 20.0);
    let labels = labels_of(4, classes);
    let (expected, expected_grads) = reference(&logits, &labels);
    for world in 1..=4 {
        let ranks = on_ranks(world, |group| {
            let split = Split::even(classes, group);
            let (losses, grads) = split_run(group, &logits, &labels, &split)?;
            Ok((f64s(&losses), f64s(&grads)))
        });
        for (losses, grads) in &ranks {
            assert!(distance(losses, &expected) < 1e-15 * 4.0);
            assert!(distance(grads, &expected_grads) < 1e-14);
            assert!(*losses == ranks[0].0 && *grads == ranks[0].1);
        }
    }
}

#[test]
fn gradients_are_the_slopes_of_losses() {
    const STEP: f64 = 1e-5;
    let (samples, classes) = (3, 9);
    let logits = noise(&[samples, classes], 3, 2.0);
    let labels = labels_of(samples, classes);
    let values = f64s(&logits);
    on_ranks(3, |group| {
        let split = Split::from_counts([4, 0, 5]);
        let (_, grads) = split_run(group, &logits, &labels, &split)?;
        for (at, grad) in f64s(&grads).into_iter().enumerate() {
            let at_distance = |distance: f64| -> candle_core::Result<f64> {
                let mut moved = values.clone();
                moved[at] += distance;
                let moved = Tensor::from_vec(moved, (samples, classes), &Device::Cpu)?;
                let (losses, _) = split_run(group, &moved, &labels, &split)?;
                let weighted = f64s(&losses).into_iter().enumerate();
                Ok(weighted.map(|(sample, loss)| loss * (sample + 1) as f64).sum())
            };
            let slope = (at_distance(STEP)? - at_distance(-STEP)?) / (2.0 * STEP);
            assert!((slope - grad).abs() < 1e-8, "{at}: {slope} {grad}");
        }
        Ok(())
    });
}

#[test]
fn large_and_masked_logits_neither_overflow_nor_spread() {
    let inf = f32::INFINITY;
    let logits = Tensor::new(
        &[
            [1e30f32, -1e30, 0.0, 1e30],
            [-inf, 700.0, -inf, 700.0],
            [f32::NAN, 0.0, 0.0, 0.0],
            [0.0, 0.0, 0.0, 0.0],
        ],
        &Device::Cpu,
    )
    .unwrap();
    let labels = Tensor::new(&[0u32, 1, 1, 3], &Device::Cpu).unwrap();
    for counts in [vec![4], vec![1, 3], vec![2, 0, 2]] {
        let ranks = on_ranks(counts.len(), |group| {
            let split = Split::from_counts(counts.clone());
            let (losses, grads) = split_run(group, &logits, &labels, &split)?;
            Ok((f64s(&losses), f64s(&grads)))
        });
        for (losses, grads) in ranks {
            let two = f64::from(2f64.ln() as f32);
            assert_eq!(losses[..2], [two, two]);
            assert!(losses[2].is_nan());
            assert_eq!(losses[3], f64::from(4f64.ln() as f32));
            assert_eq!(grads[..4], [-0.5, 0.0, 0.0, 0.5]);
            assert_eq!(grads[4..8], [0.0, -1.0, 0.0, 1.0]);
            assert!(grads[8..12].iter().all(|grad| grad.is_nan()));
            assert_eq!(grads[12..], [1.0, 1.0, 1.0, -3.0]);
        }
    }
}

#[test]
fn samples_may_have_several_dimensions_and_labels_any_integers() {
    let logits = noise(&[2, 3, 8], 4, 3.0);
    let flat = labels_of(6, 8);
    let (expected, _) = reference(&logits, &flat);
    on_ranks(2, |group| {
        let split = Split::from_counts([3, 5]);
        for dtype in [DType::U8, DType::U32, DType::I64] {
            let labels = flat.reshape((2, 3))?.to_dtype(dtype)?;
            let (losses, grads) = split_run(group, &logits, &labels, &split)?;
            assert_eq!((losses.dims(), grads.dims()), (&[2, 3][..], &[2, 3, 8][..]));
            assert!(distance(&f64s(&losses), &expected) < 1e-15);
        }
        let none = noise(&[0, 8], 5, 1.0);
        let labels = Tensor::zeros(0, DType::U32, &Device::Cpu)?;
        let own = split.range(group.rank());
        let x = none.narrow(1, own.start, own.len())?;
        assert_eq!(sharded_cross_entropy(&x, &labels, &split, group)?.dims(), [0]);
        Ok(())
    });
}
