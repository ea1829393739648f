//! Layers split over ranks, trained by an optimizer on the ranks, against one rank that has all.

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Module, Optimizer, VarBuilder, VarMap};
use fusestep_candle::parallel::{
    ColumnParallel, ColumnParallelLinear, GatherOutput, Group, LinearShape, RowParallel,
    RowParallelLinear, sharded_cross_entropy,
};
use fusestep_candle::{AnyRule, LossScale, Options, Params, ParamsLamb, ParamsLars, ParamsSgd};
use fusestep_collective::{Communicator, Membership, run_ranks};
use fusestep_planner::Optimizer as Rule;

use super::{distance, f64s, noise};

const INPUTS: usize = 6;
const HIDDEN: usize = 7;
const CLASSES: usize = 11;
const BATCH: usize = 5;
const STEPS: u64 = 5;

/// Names of the variables, and the dimension that is split over ranks.
const VARS: [(&str, Option<usize>); 5] = [
    ("column.bias", Some(0)),
    ("column.weight", Some(0)),
    ("head.weight", Some(0)),
    ("row.bias", None),
    ("row.weight", Some(1)),
];

/// The model of a rank: inputs, outputs in columns, back in rows, and classes that are split.
struct Model {
    vars: VarMap,
    column: ColumnParallelLinear,
    row: RowParallelLinear,
    head: ColumnParallelLinear,
    group: Group,
}

fn whole_value(index: usize) -> Tensor {
    let dims: &[usize] = match VARS[index].0 {
        "column.bias" => &[HIDDEN],
        "column.weight" => &[HIDDEN, INPUTS],
        "head.weight" => &[CLASSES, INPUTS],
        "row.bias" => &[INPUTS],
        _ => &[INPUTS, HIDDEN],
    };
    noise(dims, 50 + index as u64, 0.5)
}

impl Model {
    fn new(group: &Group) -> candle_core::Result<Self> {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F64, &Device::Cpu);
        let shape = |inputs, outputs| LinearShape { inputs, outputs };
        let column = ColumnParallelLinear::new(
            shape(INPUTS, HIDDEN),
            &ColumnParallel::default(),
            &vb.pp("column"),
            group,
        )?;
        let row = RowParallelLinear::new(
            shape(HIDDEN, INPUTS),
            &RowParallel::default(),
            &vb.pp("row"),
            group,
        )?;
        let options = ColumnParallel {
            gather_output: GatherOutput::No,
            bias: fusestep_candle::parallel::Bias::No,
            ..ColumnParallel::default()
        };
        let head =
            ColumnParallelLinear::new(shape(INPUTS, CLASSES), &options, &vb.pp("head"), group)?;
        let model = Self { vars, column, row, head, group: group.clone() };
        for index in 0..VARS.len() {
            let whole = whole_value(index);
            model.var(index).set(&model.own(index, &whole)?)?;
        }
        Ok(model)
    }

    fn var(&self, index: usize) -> Var {
        self.vars.data().lock().unwrap()[VARS[index].0].clone()
    }

    /// This rank's part of a whole tensor.
    fn own(&self, index: usize, whole: &Tensor) -> candle_core::Result<Tensor> {
        let (name, dim) = VARS[index];
        let split = match name {
            "head.weight" => self.head.split(),
            "row.weight" => self.row.split(),
            _ => self.column.split(),
        };
        let range = split.range(self.group.rank());
        match dim {
            Some(dim) => whole.narrow(dim, range.start, range.len())?.force_contiguous(),
            None => Ok(whole.clone()),
        }
    }

    fn loss(&self, step: u64) -> candle_core::Result<Tensor> {
        let x = noise(&[BATCH, INPUTS], 900 + step, 1.0);
        let labels: Vec<u32> = (0..BATCH).map(|at| ((at as u64 * 3 + step) % 11) as u32).collect();
        let labels = Tensor::new(labels, &Device::Cpu)?;
        let hidden = self.column.forward(&x)?.tanh()?;
        let logits = self.head.forward(&self.row.forward(&hidden)?)?;
        sharded_cross_entropy(&logits, &labels, self.head.split(), &self.group)?.mean_all()
    }
}

fn rules() -> [Rule; 4] {
    [
        Rule::Sgd(ParamsSgd { lr: 0.3, momentum: 0.9, ..ParamsSgd::default() }),
        Rule::Adam(Default::default()),
        Rule::Lars(ParamsLars { lr: 5.0, ..ParamsLars::default() }),
        ParamsLamb { lr: 0.05, ..ParamsLamb::default() }.rule(),
    ]
}

/// The parameters of one rank that has everything.
fn whole(rule: Rule, options: &Options) -> Vec<Vec<f64>> {
    let model = Model::new(&Group::solo()).unwrap();
    let mut fused = AnyRule::with_options(model.vars.data(), rule, options).unwrap();
    for step in 0..STEPS {
        let grads = model.loss(step).unwrap().backward().unwrap();
        fused.step(&grads).unwrap();
    }
    (0..VARS.len()).map(|index| f64s(model.var(index).as_tensor())).collect()
}

fn assert_parts(model: &Model, whole: &[Vec<f64>], what: &str) {
    for (index, whole) in whole.iter().enumerate() {
        let whole = Tensor::from_slice(whole, whole_value(index).shape(), &Device::Cpu).unwrap();
        let expected = f64s(&model.own(index, &whole).unwrap());
        let found = f64s(model.var(index).as_tensor());
        // Products of matrices and norms add in another order.
        assert!(
            expected.is_empty() || distance(&found, &expected) < 1e-9,
            "{what}: {}",
            VARS[index].0
        );
    }
}

#[test]
fn split_layers_train_save_and_resume_as_whole_ones_without_any_setting() {
    for rule in rules() {
        for (clip_norm, zeros) in [(None, [0, 1, 2, 3]), (Some(0.1), [0, 1, 2, 3])] {
            let options = Options { clip_norm, ..Options::default() };
            let whole = whole(rule, &options);
            for (world, zero) in [2, 3, 4].into_iter().flat_map(|world| zeros.map(|z| (world, z))) {
                let options = Options { zero, ..options.clone() };
                let folder = tempfile::tempdir().unwrap();
                let what = format!("{rule:?} {clip_norm:?} zero {zero} on {world}");
                let outcomes = run_ranks(world, &Default::default(), |mut comm| {
                    let group = Group::new(
                        comm.split(Some(Membership { colour: 0, key: 0 })).unwrap().unwrap(),
                    );
                    let model = Model::new(&group).unwrap();
                    let fused = AnyRule::with_options(model.vars.data(), rule, &options).unwrap();
                    let mut ranked = fused.on(&mut comm).unwrap();
                    for step in 0..STEPS / 2 {
                        ranked.backward_step(&model.loss(step).unwrap()).unwrap();
                    }
                    ranked.save_checkpoint(folder.path(), 2).unwrap();
                    drop(ranked);
                    // Another run goes on from the checkpoint, with variables of its own.
                    let model = Model::new(&group).unwrap();
                    let fused = AnyRule::with_options(model.vars.data(), rule, &options).unwrap();
                    let mut ranked = fused.on(&mut comm).unwrap();
                    assert_eq!(ranked.resume(folder.path()).unwrap(), 2);
                    for step in STEPS / 2..STEPS {
                        ranked.backward_step(&model.loss(step).unwrap()).unwrap();
                    }
                    assert_parts(&model, &whole, &what);
                });
                for outcome in outcomes.unwrap() {
                    outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                }
            }
        }
    }
}

#[test]
fn variables_of_ones_own_are_slices_where_options_name_them() {
    let outcomes = run_ranks(2, &Default::default(), |mut comm| {
        let rank = comm.rank();
        let vars = |numel: usize| {
            let first = Tensor::full(1.0 + rank as f64, numel, &Device::Cpu).unwrap();
            vec![("w".to_owned(), Var::from_tensor(&first).unwrap())]
        };
        let options = Options { distributed: ["w".to_owned()].into(), ..Options::default() };
        let params = ParamsSgd { lr: 1.0, ..ParamsSgd::default() };
        let own = vars(3 - rank);
        let fused = fusestep_candle::Sgd::with_options(own.clone(), params, &options).unwrap();
        let mut ranked = fused.on(&mut comm).unwrap();
        let loss = (own[0].1.as_tensor() * (rank + 1) as f64).unwrap().sum_all().unwrap();
        ranked.backward_step(&loss).unwrap();
        assert_eq!(f64s(own[0].1.as_tensor()), vec![0.0; 3 - rank]);
        drop(ranked);
        // Ranks that do not mean the same are told so, and a name of nobody.
        let distributed = if rank == 0 { ["w".to_owned()].into() } else { Default::default() };
        let options = Options { distributed, ..Options::default() };
        let fused = fusestep_candle::Sgd::with_options(vars(3), params, &options).unwrap();
        let differ = fused.on(&mut comm).unwrap_err().to_string();
        let options = Options { distributed: ["v".to_owned()].into(), ..Options::default() };
        let fused = fusestep_candle::Sgd::with_options(vars(3), params, &options).unwrap();
        [differ, fused.on(&mut comm).unwrap_err().to_string()]
    });
    for told in outcomes.unwrap() {
        let [differ, unknown] = told.unwrap();
        assert!(
            differ.contains("distributed parameters: expected w as on rank 0, found none"),
            "{differ}"
        );
        assert!(unknown.contains("`v`"), "{unknown}");
    }
}

#[test]
fn slices_of_other_ranks_and_of_one_alone_are_refused_by_name() {
    let outcomes = run_ranks(4, &Default::default(), |mut comm| {
        let pair = comm
            .split(Some(Membership { colour: comm.rank() as u32 / 2, key: 0 }))
            .unwrap()
            .unwrap();
        let group = Group::new(pair);
        let model = Model::new(&group).unwrap();
        let fused = AnyRule::new(model.vars.data(), rules()[0]).unwrap();
        let split = fused.on(&mut comm).unwrap_err().to_string();
        let clip = Options { clip_norm: Some(1.0), ..Options::default() };
        let scale = Options { loss_scale: Some(LossScale::dynamic()), ..Options::default() };
        let none = Options::default();
        let alone = [(0, &clip), (0, &scale), (2, &none), (3, &none)].map(|(rule, options)| {
            let vars = model.vars.data();
            let mut fused = AnyRule::with_options(vars, rules()[rule], options).unwrap();
            let grads = model.loss(0).unwrap().backward().unwrap();
            fused.step(&grads).unwrap_err().to_string()
        });
        // What takes no norms steps on slices alone.
        let mut fused = AnyRule::new(model.vars.data(), rules()[1]).unwrap();
        fused.step(&model.loss(0).unwrap().backward().unwrap()).unwrap();
        // A layer that is built of a variable once the optimizer has it.
        let late = Var::from_tensor(&noise(&[3, 2], 1, 1.0)).unwrap();
        let vars = vec![("late".to_owned(), late.clone())];
        let pairs = comm.split(Some(Membership { colour: comm.rank() as u32 / 2, key: 0 }));
        let mut pair = pairs.unwrap().unwrap();
        let mut ranked = AnyRule::new(vars, rules()[0]).unwrap().on(pair.as_mut()).unwrap();
        let weight = late.as_tensor().clone();
        ColumnParallelLinear::from_slice(weight, None, &Default::default(), &group).unwrap();
        let error = ranked.backward_step(&late.sum_all().unwrap()).unwrap_err().to_string();
        assert!(error.contains("`late`") && error.contains("build layers first"), "{error}");
        (split, alone)
    });
    for told in outcomes.unwrap() {
        let (split, alone) = told.unwrap();
        assert!(
            split.contains("on the 2 ranks that its layer is split over, found one on 4"),
            "{split}"
        );
        for (told, named) in alone.iter().zip(["clip_norm", "loss_scale", "lars", "lamb"]) {
            assert!(told.contains(named) && told.contains("`.on(comm)`"), "{told}");
        }
    }
}
