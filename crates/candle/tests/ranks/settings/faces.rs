//! One run of a planner by hand, of the facade and through candle, on the same gradients.

use fusestep_planner::Run;
use std::num::NonZeroUsize;

use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, Var};
use candle_nn::Optimizer as _;
use fusestep::planner::{Comms, Optimizer, Plan};
use fusestep::{
    Builder, Cpu, CpuBackend, DType, Error, Kind, ParamDesc, Role, Session, Shape, StepOptions,
};
use fusestep_candle::{AnyRule, Communicator};
use half::bf16;

use super::cases::ByHand;
use crate::exact;

/// Name and length of each parameter.
const PARAMS: [(&str, u64); 4] =
    [("body.bias", 17), ("body.weight", 3_000), ("head.bias", 1), ("head.weight", 70_000)];

/// Calls of `step`, so that two micro-steps make two updates.
const STEPS: u64 = 4;

pub(super) fn params(dtype: DType) -> Vec<ParamDesc> {
    PARAMS
        .map(|(name, numel)| ParamDesc::new(name, Shape::new([numel]).expect("a shape"), dtype))
        .to_vec()
}

/// First values, the same on all ranks.
pub(super) fn first(index: usize) -> Vec<f32> {
    (0..PARAMS[index].1).map(|at| exact([7, index as u64, at])).collect()
}

pub(super) fn gradient(rank: usize, step: u64, index: usize) -> Vec<f32> {
    let key = 100 + 10 * step + rank as u64;
    (0..PARAMS[index].1).map(|at| exact([key, index as u64, at])).collect()
}

pub(super) fn loss(rank: usize, step: u64) -> f64 {
    1.0 / (1 + step + rank as u64) as f64
}

fn bytes_of(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::BF16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    }
}

/// Lines of the plan, and bytes of the parameters at the end.
#[derive(Debug, PartialEq)]
pub(super) struct Trained {
    pub(super) plan: Vec<String>,
    pub(super) bytes: Vec<Vec<u8>>,
}

/// The lines of a plan; passes note what they did in the order in which they were given.
fn lines(plan: &Plan) -> Vec<String> {
    let mut lines: Vec<String> = plan.to_string().lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

pub(super) fn by_hand(
    by: ByHand,
    dtype: DType,
    comm: &mut dyn Communicator,
) -> Result<Trained, Error> {
    let rank = comm.rank();
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let group = by.group;
    let plan = by.plan(comm);
    let mut state = plan.allocate_on(&backend, comm)?;
    for (index, (name, _)) in PARAMS.iter().enumerate() {
        state.write(&backend, Role::Param, name, &bytes_of(&first(index), dtype))?;
    }
    let mut comms = match group {
        Some(group) => Comms::in_groups(comm, group, 0)?,
        None => Comms::with_streams(comm, 0)?.reducing_when_full(),
    };
    for step in 0..STEPS {
        for (index, (name, _)) in PARAMS.iter().enumerate().rev() {
            let bytes = bytes_of(&gradient(rank, step, index), dtype);
            Run::of(&plan, &mut state, &backend, &mut comms).push_grad(name, &bytes)?;
        }
        state.set_loss(loss(rank, step));
        Run::of(&plan, &mut state, &backend, &mut comms).step()?;
    }
    let names = PARAMS.map(|(name, _)| name);
    let gathered = Run::of(&plan, &mut state, &backend, &mut comms).gather(&names)?;
    let bytes = (0..names.len()).map(|at| gathered.bytes(at).to_vec()).collect();
    Ok(Trained { plan: lines(&plan), bytes })
}

pub(super) fn in_facade<K: Kind>(
    builder: Builder<K>,
    options: &StepOptions,
    dtype: DType,
    comm: Option<&mut dyn Communicator>,
) -> Result<Trained, Error> {
    let rank = comm.as_ref().map_or(0, |comm| comm.rank());
    let builder =
        builder.options(|step| *step = StepOptions { rule: step.rule, ..options.clone() });
    let (params, cpu) = (params(dtype), Cpu::with_threads(NonZeroUsize::MIN));
    match comm {
        Some(comm) => stepped(&mut builder.on(comm).build(&params, cpu)?, rank, dtype),
        None => stepped(&mut builder.build(&params, cpu)?, rank, dtype),
    }
}

fn stepped(optimizer: &mut Session<'_>, rank: usize, dtype: DType) -> Result<Trained, Error> {
    for (index, (name, _)) in PARAMS.iter().enumerate() {
        let values = first(index);
        match dtype {
            DType::BF16 => {
                let values: Vec<bf16> = values.into_iter().map(bf16::from_f32).collect();
                optimizer.set_param(name, &values)?;
            }
            _ => optimizer.set_param(name, &values)?,
        }
    }
    for step in 0..STEPS {
        for (index, (name, _)) in PARAMS.iter().enumerate().rev() {
            let values = gradient(rank, step, index);
            match dtype {
                DType::BF16 => {
                    let values: Vec<bf16> = values.into_iter().map(bf16::from_f32).collect();
                    optimizer.push_grad(name, &values)?;
                }
                _ => optimizer.push_grad(name, &values)?,
            }
        }
        optimizer.set_loss(loss(rank, step));
        optimizer.step()?;
    }
    let plan = lines(optimizer.plan());
    let names = PARAMS.map(|(name, _)| name);
    let gathered = optimizer.gather(&names)?;
    let bytes = (0..names.len()).map(|at| gathered.bytes(at).to_vec()).collect();
    Ok(Trained { plan, bytes })
}

pub(super) fn through_candle(
    rule: Optimizer,
    options: &StepOptions,
    dtype: DType,
    comm: Option<&mut dyn Communicator>,
) -> candle_core::Result<Trained> {
    let rank = comm.as_ref().map_or(0, |comm| comm.rank());
    let candle_dtype = match dtype {
        DType::BF16 => candle_core::DType::BF16,
        _ => candle_core::DType::F32,
    };
    let tensor = |values: Vec<f32>| {
        Tensor::from_vec(values.clone(), values.len(), &Device::Cpu)?.to_dtype(candle_dtype)
    };
    let mut vars = Vec::new();
    for (index, (name, _)) in PARAMS.iter().enumerate() {
        vars.push(((*name).to_owned(), Var::from_tensor(&tensor(first(index))?)?));
    }
    let built = AnyRule::with_options(vars.clone(), rule, options)?;
    let grads_of = |step| -> candle_core::Result<GradStore> {
        let mut grads = GradStore::default();
        for (index, (_, var)) in vars.iter().enumerate() {
            grads.insert(var, tensor(gradient(rank, step, index))?);
        }
        Ok(grads)
    };
    let plan = match comm {
        Some(comm) => {
            let mut optimizer = built.on(comm)?;
            for step in 0..STEPS {
                optimizer.set_loss(loss(rank, step));
                optimizer.step(&grads_of(step)?)?;
            }
            lines(optimizer.plan())
        }
        None => {
            let mut optimizer = built;
            for step in 0..STEPS {
                optimizer.step(&grads_of(step)?)?;
            }
            lines(optimizer.plan())
        }
    };
    let values = |(_, var): &(String, Var)| -> candle_core::Result<Vec<u8>> {
        let wide = var.to_dtype(candle_core::DType::F32)?.to_vec1::<f32>()?;
        Ok(bytes_of(&wide, dtype))
    };
    let bytes = vars.iter().map(values).collect::<candle_core::Result<_>>()?;
    Ok(Trained { plan, bytes })
}
