//! One plan on one set, timed in turn with copies.

use std::error::Error;
use std::num::NonZeroU32;
use std::time::Instant;

use fusestep_cuda::{CudaBackend, DeviceTime};
use fusestep_launch::{BackendError, Memory};
use fusestep_planner::{Plan, PlanError, Planner, RunAlone, State, StepGraph};
use fusestep_tensor::{DType, ParamDesc, Role, Shape};

use crate::arguments::Arguments;
use crate::copies::{Copies, rotated, values};
use crate::report::{Line, Subject};
use crate::rules::{Entrant, Way};
use crate::sets::Set;

/// Nanoseconds that a round's steps fill, where nobody asks for a number of steps.
const ROUND_NS: f64 = 4e6;

/// Fewest and most steps of such a round.
const STEPS: (f64, f64) = (10.0, 200.0);

/// What all lines are timed with.
pub(crate) struct Bench<'a> {
    /// The device.
    pub(crate) backend: &'a CudaBackend,
    /// What was asked for.
    pub(crate) arguments: &'a Arguments,
    begun: Instant,
}

impl<'a> Bench<'a> {
    /// A bench that counts its time from `begun`.
    pub(crate) fn new(backend: &'a CudaBackend, arguments: &'a Arguments, begun: Instant) -> Self {
        Self { backend, arguments, begun }
    }

    /// Whether no further line is to be begun.
    pub(crate) fn is_over(&self) -> bool {
        self.begun.elapsed() >= self.arguments.budget
    }

    /// Times every way of an entrant.
    pub(crate) fn enter(
        &self,
        set: &Set,
        entrant: &Entrant,
        copies: &mut Copies<'_>,
    ) -> Result<Vec<Line>, Box<dyn Error>> {
        let mut ready = Ready::new(self, set, entrant)?;
        let mut lines = Vec::new();
        for &way in entrant.ways {
            let subject = Subject {
                set: set.name.clone(),
                rule: entrant.name(),
                dtype: entrant.kept.name(),
                way: way.name(),
                tensors: ready.plan.params().len(),
                elements: ready.plan.elements(),
                launches: ready.plan.launches(),
                rotated: ready.states.len(),
                bytes: ready.plan.traffic_bytes(),
            };
            let mut step = |_| ready.step(self.backend, way);
            lines.push(self.line(subject, copies, &mut step)?);
        }
        ready.check(self.backend)?;
        Ok(lines)
    }

    /// Times one subject and copies of its bytes in turn.
    pub(crate) fn line<E>(
        &self,
        subject: Subject,
        copies: &mut Copies<'_>,
        step: &mut dyn FnMut(u32) -> Result<(), E>,
    ) -> Result<Line, Box<dyn Error>>
    where
        E: From<BackendError> + Error + 'static,
    {
        // One step loads modules and builds tables; the second round of warming up tells how long a
        // step is.
        self.backend.timed(NonZeroU32::MIN, step)?;
        let rotation = NonZeroU32::new(subject.rotated as u32).unwrap_or(NonZeroU32::MIN);
        self.backend.timed(rotation, step)?;
        let warm = self.backend.timed(rotation, step)?;
        copies.timed(NonZeroU32::MIN, subject.bytes)?;
        let steps = self.arguments.steps.unwrap_or_else(|| {
            let fitting = ROUND_NS / warm.wall_ns().max(warm.device_ns()).max(1.0);
            NonZeroU32::new(fitting.clamp(STEPS.0, STEPS.1) as u32).unwrap_or(NonZeroU32::MIN)
        });
        let mut times: Vec<DeviceTime> = Vec::new();
        let mut copied: Vec<DeviceTime> = Vec::new();
        for _ in 0..self.arguments.rounds {
            times.push(self.backend.timed(steps, step)?);
            copied.push(copies.timed(steps, subject.bytes)?);
        }
        Ok(Line::new(subject, steps, &times, &copied))
    }
}

/// A plan, and states that take turns.
struct Ready {
    plan: Plan,
    states: Vec<State>,
    graphs: Vec<StepGraph>,
    /// What the first tensor of each state was.
    before: Vec<u8>,
    /// Steps of each state.
    done: Vec<u64>,
    next: usize,
}

impl Ready {
    fn new(bench: &Bench<'_>, set: &Set, entrant: &Entrant) -> Result<Self, Box<dyn Error>> {
        let backend = bench.backend;
        let params = set.params(entrant.kept.dtype())?;
        let plan = entrant.planner().limits(backend.limits()).plan(&params)?;
        let bytes = bytes_of(entrant.kept.dtype(), set.most_elements());
        let mut states = Vec::new();
        let mut graphs = Vec::new();
        for _ in 0..rotated(backend, plan.traffic_bytes(), bench.arguments.scale) {
            let mut state = plan.allocate(backend)?;
            for param in &params {
                let bytes = &bytes[..param.numel() as usize * param.dtype.len_bytes()];
                state.write(backend, Role::Param, &param.name, bytes)?;
                state.write(backend, Role::Grad, &param.name, bytes)?;
            }
            if entrant.ways.contains(&Way::Graph) {
                graphs.push(RunAlone::of(&plan, &mut state, backend).capture()?);
            }
            states.push(state);
        }
        let first = params.first().ok_or("the set has no tensor")?;
        let before = bytes[..first.numel() as usize * first.dtype.len_bytes()].to_vec();
        Ok(Self { plan, done: vec![0; states.len()], states, graphs, before, next: 0 })
    }

    fn step(&mut self, backend: &CudaBackend, way: Way) -> Result<(), PlanError> {
        let index = self.next;
        self.next = (index + 1) % self.states.len();
        self.done[index] += 1;
        let state = &mut self.states[index];
        match way {
            Way::Arguments | Way::Resident => RunAlone::of(&self.plan, state, backend).enqueue(),
            Way::Graph => RunAlone::of(&self.plan, state, backend).replay(&self.graphs[index]),
        }
    }

    /// Requires that every state has taken its steps, none skipped, and has other, finite values
    /// now.
    fn check(&mut self, backend: &CudaBackend) -> Result<(), Box<dyn Error>> {
        let first = &self.plan.params()[0];
        let mut now = vec![0; self.before.len()];
        for (state, &done) in self.states.iter_mut().zip(&self.done) {
            state.settle(backend)?;
            let found = state.step();
            if found != done {
                return Err(format!("expected {done} steps applied, found {found}").into());
            }
            state.read(backend, Role::Param, &first.name, &mut now)?;
            if done > 0 && now == self.before {
                return Err(format!("`{}` is as it was after {done} steps", first.name).into());
            }
            if !is_finite(first.dtype, &now) {
                return Err(format!("`{}` is not finite after {done} steps", first.name).into());
            }
        }
        Ok(())
    }
}

/// The first values in this dtype; bf16 takes the upper half of an f32.
fn bytes_of(dtype: DType, numel: u64) -> Vec<u8> {
    let values = values().take(numel as usize);
    match dtype {
        DType::BF16 => {
            values.flat_map(|value| ((value.to_bits() >> 16) as u16).to_le_bytes()).collect()
        }
        _ => values.flat_map(f32::to_le_bytes).collect(),
    }
}

fn is_finite(dtype: DType, bytes: &[u8]) -> bool {
    match dtype {
        DType::BF16 => bytes
            .chunks_exact(2)
            .all(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16).is_finite()),
        _ => {
            bytes.chunks_exact(4).all(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]).is_finite())
        }
    }
}

/// One step of a plan over one tensor, on a backend of its own; returns what was loaded, and from
/// what.
pub(crate) fn one_step(planner: Planner) -> Result<String, Box<dyn Error>> {
    let backend = CudaBackend::open(0)?;
    let params = [ParamDesc::new("tensor", Shape::new([64])?, DType::F32)];
    let plan = planner.limits(backend.limits()).plan(&params)?;
    let mut state = plan.allocate(&backend)?;
    RunAlone::of(&plan, &mut state, &backend).step_all()?;
    backend.synchronize()?;
    let loaded = backend.loaded_entries().into_iter();
    let loaded: Vec<_> = loaded.map(|(entry, code)| format!("{entry} from {code}")).collect();
    Ok(loaded.join(", "))
}
