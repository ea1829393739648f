//! Any bytes as a state file of a small model.

use std::fs;
use std::num::NonZeroUsize;

use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_planner::{PlanError, Planner, State};
use fusestep_tensor::{DType, ParamDesc, Shape};
use fusestep_tensor_file::serialize;

use crate::Outcome;

/// The model that the corpus is of.
pub(crate) fn params() -> Result<Vec<ParamDesc>, PlanError> {
    let desc =
        |name, numel| Ok::<_, PlanError>(ParamDesc::new(name, Shape::new([numel])?, DType::F32));
    Ok(vec![desc("a", 5)?, desc("b", 3)?])
}

pub(crate) fn run(input: &[u8]) -> Outcome {
    tried(input).map_err(|error| error.to_string())?
}

fn tried(input: &[u8]) -> Result<Outcome, anyhow::Error> {
    let plan = Planner::new(Adam::default().into()).plan(&params()?)?;
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let mut state = plan.allocate(&backend)?;
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("state");
    fs::write(&path, input)?;
    let written = |state: &State| -> Result<Vec<u8>, PlanError> {
        let saved = state.to_tensors(&backend)?;
        Ok(serialize(&path, &saved.tensors, saved.metadata)?)
    };
    let before = written(&state)?;
    let outcome = state.load(&backend, &path);
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
    state.load(&backend, &path)?;
    Ok(if written(&state)? == after {
        Ok("loaded".to_owned())
    } else {
        Err("what was loaded does not save as itself".to_owned())
    })
}
