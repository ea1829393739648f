//! Linear layers and whole models.

use candle_core::{DType, Tensor, Var};
use candle_nn::{Linear, Module, VarBuilder, VarMap};
use fusestep_candle::parallel::{
    Bias, ColumnInput, ColumnParallel, ColumnParallelLinear, GatherOutput, Group, InputIsParallel,
    LinearShape, RowParallel, RowParallelLinear, Split, sharded_cross_entropy,
};

use super::{bits, distance, dot, f64s, integers, noise, on_ranks, var};

/// Uneven blocks, one of them empty where there are three ranks or more.
fn blocks(total: usize, group: &Group) -> Split {
    let world = group.world_size();
    let mut counts = vec![1; world];
    if world >= 3 {
        counts[1] = 0;
    }
    counts[0] += total - counts.iter().sum::<usize>();
    Split::from_counts(counts)
}

/// This rank's variables of a layer that a whole weight and bias make.
struct Slices {
    weight: Var,
    bias: Var,
}

impl Slices {
    fn of(weight: &Tensor, bias: &Tensor) -> Self {
        Self { weight: var(weight), bias: var(bias) }
    }
}

#[test]
fn column_parallel_layers_are_the_whole_layer() {
    for world in 1..=4 {
        for gather_output in [GatherOutput::Yes, GatherOutput::No] {
            on_ranks(world, |group| {
                let (w, b) = (integers(&[7, 5], 1, DType::F32), integers(&[7], 2, DType::F32));
                let split = blocks(7, group);
                let range = split.range(group.rank());
                let cut = |whole: &Tensor| whole.narrow(0, range.start, range.len());
                let own = Slices::of(&cut(&w)?, &cut(&b)?);
                let options = ColumnParallel { gather_output, ..ColumnParallel::default() };
                let layer = ColumnParallelLinear::from_slice(
                    own.weight.as_tensor().clone(),
                    Some(own.bias.as_tensor().clone()),
                    &options,
                    group,
                )?;
                assert_eq!(*layer.split(), split);
                for dims in [vec![3, 5], vec![2, 3, 5]] {
                    let x = var(&integers(&dims, 3, DType::F32));
                    let whole = Slices::of(&w, &b);
                    let one = Linear::new(
                        whole.weight.as_tensor().clone(),
                        Some(whole.bias.as_tensor().clone()),
                    );
                    let expected = one.forward(&x)?;
                    let upstream = integers(expected.dims(), 4, DType::F32);
                    let of_one = dot(&expected, &upstream).backward()?;
                    let found = layer.forward(&x)?;
                    let last = dims.len() - 1;
                    let slice = |whole: &Tensor| whole.narrow(last, range.start, range.len());
                    let grads = match gather_output {
                        GatherOutput::Yes => {
                            assert_eq!(bits(&found), bits(&expected));
                            dot(&found, &upstream).backward()?
                        }
                        GatherOutput::No => {
                            assert_eq!(bits(&found), bits(&slice(&expected)?));
                            let part = dot(&found, &slice(&upstream)?.contiguous()?);
                            group.all_reduce(&part)?.backward()?
                        }
                    };
                    // candle adds no bias of no elements, so that it has no gradient either.
                    let grad = |of: &Var| match grads.get(of) {
                        None if of.elem_count() == 0 => of.as_tensor().clone(),
                        grad => grad.unwrap().clone(),
                    };
                    let grad_of_one = |of: &Var| of_one.get(of).unwrap().clone();
                    assert_eq!(f64s(&grad(&x)), f64s(&grad_of_one(&x)));
                    for (own, whole) in [(&own.weight, &whole.weight), (&own.bias, &whole.bias)] {
                        assert_eq!(f64s(&grad(own)), f64s(&cut(&grad_of_one(whole))?));
                    }
                }
                Ok(())
            });
        }
    }
}

#[test]
fn rows_of_a_shared_out_batch_get_the_gradients_of_the_whole_batch() {
    for world in 1..=4 {
        on_ranks(world, |group| {
            let (w, x) = (integers(&[7, 5], 1, DType::F32), integers(&[9, 5], 3, DType::F32));
            let options = ColumnParallel {
                input: ColumnInput::Rows,
                split: Some(blocks(7, group)),
                ..ColumnParallel::default()
            };
            let layer = ColumnParallelLinear::from_whole(&w, None, &options, group)?;
            let rows = blocks(9, group).range(group.rank());
            let own = var(&x.narrow(0, rows.start, rows.len())?);
            let found = layer.forward(&own)?;
            let whole = var(&x);
            let expected = whole.matmul(&w.t()?)?;
            let columns = layer.split().range(group.rank());
            let cut = |whole: &Tensor| whole.narrow(1, columns.start, columns.len());
            assert_eq!(bits(&found), bits(&cut(&expected)?));
            let upstream = integers(&[9, 7], 4, DType::F32);
            let of_one = dot(&expected, &upstream).backward()?;
            let part = dot(&found, &cut(&upstream)?.contiguous()?);
            let grads = group.all_reduce(&part)?.backward()?;
            let expected = of_one.get(&whole).unwrap().narrow(0, rows.start, rows.len())?;
            assert_eq!(f64s(grads.get(&own).unwrap()), f64s(&expected));
            Ok(())
        });
    }
}

#[test]
fn row_parallel_layers_are_the_whole_layer() {
    for world in 1..=4 {
        for input_is_parallel in [InputIsParallel::Yes, InputIsParallel::No] {
            on_ranks(world, |group| {
                let (w, b) = (integers(&[4, 9], 1, DType::F32), integers(&[4], 2, DType::F32));
                let split = blocks(9, group);
                let range = split.range(group.rank());
                let cut = |whole: &Tensor| whole.narrow(1, range.start, range.len());
                let own = Slices::of(&cut(&w)?, &b);
                let options = RowParallel { input_is_parallel, ..RowParallel::default() };
                let layer = RowParallelLinear::from_slice(
                    own.weight.as_tensor().clone(),
                    Some(own.bias.as_tensor().clone()),
                    &options,
                    group,
                )?;
                assert_eq!(*layer.split(), split);
                let (whole_x, whole) = (var(&integers(&[3, 9], 3, DType::F32)), Slices::of(&w, &b));
                let one = Linear::new(
                    whole.weight.as_tensor().clone(),
                    Some(whole.bias.as_tensor().clone()),
                );
                let expected = one.forward(&whole_x)?;
                let upstream = integers(&[3, 4], 4, DType::F32);
                let of_one = dot(&expected, &upstream).backward()?;
                let x = match input_is_parallel {
                    InputIsParallel::Yes => var(&cut(&whole_x)?),
                    InputIsParallel::No => var(&whole_x),
                };
                let found = layer.forward(&x)?;
                assert_eq!(bits(&found), bits(&expected));
                let grads = dot(&found, &upstream).backward()?;
                let grad = |of: &Var| f64s(grads.get(of).unwrap());
                let grad_of_x = match input_is_parallel {
                    InputIsParallel::Yes => cut(of_one.get(&whole_x).unwrap())?,
                    InputIsParallel::No => of_one.get(&whole_x).unwrap().clone(),
                };
                assert_eq!(grad(&x), f64s(&grad_of_x));
                let expected = cut(of_one.get(&whole.weight).unwrap())?;
                assert_eq!(grad(&own.weight), f64s(&expected));
                assert_eq!(grad(&own.bias), f64s(of_one.get(&whole.bias).unwrap()));
                Ok(())
            });
        }
    }
}

#[test]
fn layers_cut_out_of_a_whole_one_have_its_slices() {
    on_ranks(3, |group| {
        let (w, b) = (integers(&[7, 5], 1, DType::BF16), integers(&[7], 2, DType::BF16));
        let column = ColumnParallelLinear::from_whole(&w, Some(&b), &Default::default(), group)?;
        let own = column.split().range(group.rank());
        assert_eq!(column.split().counts(), [3, 2, 2]);
        assert_eq!(bits(column.weight()), bits(&w.narrow(0, own.start, own.len())?));
        assert_eq!(bits(column.bias().unwrap()), bits(&b.narrow(0, own.start, own.len())?));
        let row = RowParallelLinear::from_whole(&w, Some(&b), &Default::default(), group)?;
        let own = row.split().range(group.rank());
        assert_eq!(bits(row.weight()), bits(&w.narrow(1, own.start, own.len())?));
        assert_eq!(bits(row.bias().unwrap()), bits(&b));
        Ok(())
    });
}

#[test]
fn new_layers_have_variables_of_this_rank_and_the_variance_of_whole_ones() {
    on_ranks(2, |group| {
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, &candle_core::Device::Cpu);
        let shape = LinearShape { inputs: 400, outputs: 301 };
        let column = ColumnParallelLinear::new(shape, &Default::default(), &vb.pp("c"), group)?;
        let options = RowParallel { bias: Bias::No, ..RowParallel::default() };
        let row = RowParallelLinear::new(shape, &options, &vb.pp("r"), group)?;
        assert_eq!(column.weight().dims(), [[151, 400], [150, 400]][group.rank()]);
        assert_eq!(row.weight().dims(), [301, 200]);
        let mut names: Vec<String> = varmap.data().lock().unwrap().keys().cloned().collect();
        names.sort();
        assert_eq!(names, ["c.bias", "c.weight", "r.weight"]);
        for weight in [column.weight(), row.weight()] {
            let values = f64s(weight);
            let squares: f64 = values.iter().map(|value| value * value).sum();
            let variance = squares / values.len() as f64;
            assert!((variance * 400.0 / 2.0 - 1.0).abs() < 0.05, "{variance}");
        }
        Ok(())
    });
}

/// A two-layer network whose hidden features and classes are split, and its gradients by name.
fn model(group: &Group, classes: usize) -> candle_core::Result<(f64, Vec<Vec<f64>>)> {
    let first = noise(&[24, 10], 1, 0.5);
    let second = noise(&[12, 24], 2, 0.5);
    let head = noise(&[classes, 12], 3, 0.5);
    let own = blocks(24, group).range(group.rank());
    let first = var(&first.narrow(0, own.start, own.len())?);
    let second = var(&second.narrow(1, own.start, own.len())?);
    let classes = blocks(classes, group);
    let own = classes.range(group.rank());
    let head = var(&head.narrow(0, own.start, own.len())?);
    let (x, bias) = (var(&noise(&[6, 10], 4, 1.0)), var(&noise(&[12], 5, 0.1)));
    let tensor = |var: &Var| var.as_tensor().clone();
    let column = ColumnParallel::default();
    let up = ColumnParallelLinear::from_slice(tensor(&first), None, &column, group)?;
    let bias_of_down = Some(tensor(&bias));
    let row = RowParallel::default();
    let down = RowParallelLinear::from_slice(tensor(&second), bias_of_down, &row, group)?;
    let classifier = ColumnParallelLinear::from_slice(tensor(&head), None, &column, group)?;
    let labels: Vec<u32> = (0..6).map(|sample| sample * 7 % classes.total() as u32).collect();
    let labels = Tensor::new(labels, x.device())?;
    let hidden = up.forward(&x)?.tanh()?;
    let logits = classifier.forward(&down.forward(&hidden)?)?;
    let loss = sharded_cross_entropy(&logits, &labels, &classes, group)?.mean_all()?;
    let grads = loss.backward()?;
    let grad = |of: &Var| grads.get(of).unwrap().clone();
    // Slices put together again, so that every rank has the whole model's gradients.
    let whole = |of: &Var, dim: usize| group.all_gather(&grad(of), dim);
    let gradients =
        [grad(&x), whole(&first, 0)?, whole(&second, 1)?, grad(&bias), whole(&head, 0)?];
    Ok((loss.to_scalar()?, gradients.iter().map(f64s).collect()))
}

#[test]
fn a_split_model_has_the_loss_and_gradients_of_one_rank() {
    for classes in [5, 40] {
        let (loss, gradients) = model(&Group::solo(), classes).unwrap();
        for world in 2..=4 {
            let ranks = on_ranks(world, |group| model(group, classes));
            for (own_loss, own) in &ranks {
                // Sums over hidden features and ranks are in another order: f64's rounding.
                assert!((own_loss / loss - 1.0).abs() < 1e-14);
                for (found, expected) in own.iter().zip(&gradients) {
                    assert!(distance(found, expected) < 1e-13);
                }
            }
            let first = format!("{:?}", ranks[0]);
            assert!(ranks.iter().all(|rank| format!("{rank:?}") == first));
        }
    }
}
