//! What passes make of the naive plan: the printed plans before and after, and the same bits.
//!
//! `cargo run --release -p fusestep-planner --example passes`

use std::error::Error;
use std::num::NonZeroUsize;

use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_planner::{ClipByGlobalNorm, Plan, Planner, RunAlone};
use fusestep_tensor::{DType, ParamDesc, Shape};

/// The parameters of three steps, with gradients that differ from element to element.
fn train(plan: &Plan, params: &[ParamDesc]) -> Result<Vec<f32>, Box<dyn Error>> {
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let mut state = plan.allocate(&backend)?;
    for step in 1..=3 {
        for param in params {
            for (at, grad) in
                state.grad_mut::<f32>(&param.name)?.as_mut_slice().iter_mut().enumerate()
            {
                *grad = ((at * step) % 13) as f32 - 6.0;
            }
        }
        let report = RunAlone::of(plan, &mut state, &backend).step_all()?;
        println!("step {}: norm of all gradients {:?}", report.step, report.grad_norm);
    }
    let mut all = Vec::new();
    for param in params {
        all.extend_from_slice(state.param::<f32>(&param.name)?);
    }
    Ok(all)
}

fn main() -> Result<(), Box<dyn Error>> {
    let layer = |index: u64| {
        let name = format!("layer{index}.weight");
        Ok::<_, Box<dyn Error>>(ParamDesc::new(name, Shape::new([32, 8 * index])?, DType::F32))
    };
    let params = (1..=5).map(layer).collect::<Result<Vec<_>, _>>()?;
    let planner = || Planner::new(Adam::default().into());
    let clip = ClipByGlobalNorm::new(1.0);
    // `naive` takes all passes out; what comes after it stays.
    let naive = planner().naive().with(clip).plan(&params)?;
    let fused = planner().with(clip).plan(&params)?;
    println!("{naive}\n{fused}");
    assert!(fused.launches() < naive.launches());
    assert!(train(&fused, &params)? == train(&naive, &params)?);
    Ok(())
}
