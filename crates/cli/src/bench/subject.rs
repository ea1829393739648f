//! Plans with their state, run and timed.

use fusestep_coalesce::{CoalesceError, zeroed_bytes};
use fusestep_cpu::CpuBackend;
use fusestep_planner::{Plan, RunAlone, State};
use fusestep_tensor::{DType, ParamDesc, Role};
use half::{bf16, f16};

use crate::timer::Timer;

/// A plan with its state.
pub(crate) struct Subject<'a> {
    plan: &'a Plan,
    backend: &'a CpuBackend,
    state: State,
    pub(crate) timer: Timer,
}

impl<'a> Subject<'a> {
    pub(crate) fn new(plan: &'a Plan, backend: &'a CpuBackend) -> anyhow::Result<Self> {
        let mut state = plan.allocate(backend)?;
        for param in plan.params() {
            for (role, value) in [(Role::Param, 0.1), (Role::Grad, 0.01)] {
                let bytes = filled(param, value)?;
                state.write(backend, role, &param.name, &bytes)?;
            }
        }
        Ok(Self { plan, backend, state, timer: Timer::new() })
    }

    pub(crate) fn run(&mut self) -> anyhow::Result<()> {
        RunAlone::of(self.plan, &mut self.state, self.backend).step_all()?;
        Ok(())
    }

    pub(crate) fn sample(&mut self) -> anyhow::Result<()> {
        let (plan, state, backend) = (self.plan, &mut self.state, self.backend);
        self.timer
            .sample(|| RunAlone::of(plan, state, backend).step_all().map(drop))
            .map_err(Into::into)
    }
}

/// A parameter's bytes, every element `value`.
pub(crate) fn filled(param: &ParamDesc, value: f64) -> Result<Vec<u8>, CoalesceError> {
    let mut bytes = zeroed_bytes(param.numel() as usize * param.dtype.len_bytes())?;
    let element: &[u8] = match param.dtype {
        DType::F64 => &value.to_le_bytes(),
        DType::F16 => &f16::from_f64(value).to_le_bytes(),
        DType::BF16 => &bf16::from_f64(value).to_le_bytes(),
        _ => &(value as f32).to_le_bytes(),
    };
    for place in bytes.chunks_exact_mut(element.len()) {
        place.copy_from_slice(element);
    }
    Ok(bytes)
}
