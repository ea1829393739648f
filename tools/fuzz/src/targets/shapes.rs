//! Any bytes as a file of shapes.

use std::path::Path;

use fusestep_fused_adam::Adam;
use fusestep_planner::Planner;
use fusestep_tensor::DType;

use crate::{Outcome, inputs};

pub(crate) fn run(input: &[u8]) -> Outcome {
    let params = match inputs::parse_shapes(Path::new("input"), input, DType::F32)
        .map(|shapes| shapes.params)
    {
        Ok(params) => params,
        Err(error) => return Ok(format!("{error:#}")),
    };
    match Planner::new(Adam::default().into()).plan(&params) {
        Ok(plan) => Ok(plan.to_string().lines().next().unwrap_or_default().to_owned()),
        Err(error) => Ok(error.to_string()),
    }
}
