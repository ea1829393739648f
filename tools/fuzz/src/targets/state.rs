//! A rule and an element type, then any bytes as a state file of a small model.

use std::fs;
use std::num::NonZeroUsize;

use fusestep_checkpoint::{StateTensors, load_state};
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_fused_sgd::Sgd;
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::Lars;
use fusestep_launch::{Master, Precision};
use fusestep_planner::{Optimizer, Plan, PlanError, Planner, State};
use fusestep_tensor::{DType, ParamDesc, Shape};
use fusestep_tensor_file::serialize;

use crate::Outcome;

/// Element types that are drawn, by the first byte divided by the rules.
const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Rules that are drawn, by the first byte.
const RULES: u8 = 4;

/// The model that the corpus is of.
pub(crate) fn params(dtype: DType) -> Result<Vec<ParamDesc>, PlanError> {
    let desc = |name, numel| Ok::<_, PlanError>(ParamDesc::new(name, Shape::new([numel])?, dtype));
    Ok(vec![desc("a", 5)?, desc("b", 3)?])
}

/// The plan that a first byte stands for; parameters in 16 bits have masters.
pub(crate) fn plan(first: u8) -> Result<Plan, PlanError> {
    let rules: [Optimizer; RULES as usize] = [
        Adam::default().into(),
        Sgd { momentum: 0.5, ..Sgd::default() }.into(),
        Lamb::default().into(),
        Lars::default().into(),
    ];
    let dtype = DTYPES[usize::from(first / RULES) % DTYPES.len()];
    let mut planner = Planner::new(rules[usize::from(first % RULES)]);
    if dtype != DType::F32 {
        planner = planner.precision(Precision { master: Master::F32, ..Precision::default() });
    }
    planner.plan(&params(dtype)?)
}

pub(crate) fn run(input: &[u8]) -> Outcome {
    let (first, file) = input.split_first().unwrap_or((&0, &[]));
    tried(*first, file).map_err(|error| error.to_string())?
}

fn tried(first: u8, file: &[u8]) -> Result<Outcome, anyhow::Error> {
    let plan = plan(first)?;
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let mut state = plan.allocate(&backend)?;
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("state");
    fs::write(&path, file)?;
    let written = |state: &State| -> Result<Vec<u8>, PlanError> {
        let saved = StateTensors::of(state, &backend)?;
        Ok(serialize(&path, &saved.tensors, saved.metadata)?)
    };
    let before = written(&state)?;
    let outcome = load_state(&mut state, &backend, &path);
    let after = written(&state)?;
    if let Err(error) = outcome {
        let text = error.to_string().replace(&path.display().to_string(), "");
        return Ok(if before == after {
            Ok(text)
        } else {
            Err(format!("refused, and changed all the same: {text}"))
        });
    }
    fs::write(&path, &after)?;
    load_state(&mut state, &backend, &path)?;
    Ok(if written(&state)? == after {
        Ok("loaded".to_owned())
    } else {
        Err("what was loaded does not save as itself".to_owned())
    })
}
