//! The kernel of LAMB on the host.

use std::marker::PhantomData;

use fusestep_elementwise::{
    Compute, Terms, Update, chunk_sums, padded_bytes, read_values, run_format, write_padded,
};
use fusestep_launch::{
    ArgumentLayout, FINISHED_BYTES, Format, GroupValues, HostCall, HostRun, MAX_LISTS, MAX_SUMS,
    MultiTensorKernel, NormedKernel, Outcome, ResidentStepScalars, SumsAndUpdate, TensorList,
    WORKSPACE_BYTES, entry, step_scalars_entry,
};

use crate::Lamb;
use crate::device::{Direction, Finished, STATE, Scalars, StepScalars};

/// Bytes of a group's step scalars before those of the direction: lr and trust.
const DIRECTION_AT: usize = 2 * size_of::<f64>();

/// Kernel of LAMB with all arithmetic of an element in `T`, and norms and rates in f64. It serves
/// tensors in every format that is computed in `T`. The norm of a parameter with a master is the
/// master's.
///
/// # Cost
/// 28 bytes of memory traffic per f32 element (read p, g, m, v; write p, m, v). 44 if a tensor does
/// not fit into the cache and all four lists are read again. Twice that for f64. The moments are
/// computed twice and not written in between. Thus a skipped tensor keeps every bit, and only final
/// values are written.
#[derive(Debug, Clone)]
pub struct LambKernel<T> {
    config: Lamb,
    format: Format,
    lists: Vec<TensorList>,
    compute: PhantomData<T>,
}

impl<T: Compute> LambKernel<T> {
    /// The kernel of a validated configuration.
    pub(crate) fn new(config: Lamb, format: Format) -> Self {
        Self { config, format, lists: format.lists(&STATE), compute: PhantomData }
    }

    /// The bytes of a group's step scalars, as this kernel wrote them, and of the key behind them.
    fn step_scalars_of<'a>(&self, call: HostCall<'a>, group: u32) -> &'a [u8] {
        call.step_scalars_of(group, step_scalar_bytes::<T>() + self.format.key_bytes())
    }
}

impl<T: Compute> MultiTensorKernel for LambKernel<T> {
    fn stem(&self) -> &'static str {
        "lamb"
    }

    fn entry(&self) -> &'static str {
        entry!("lamb", self.format)
    }

    fn lists(&self) -> &[TensorList] {
        &self.lists
    }

    fn argument_layout(&self) -> ArgumentLayout {
        self.format.argument_layout(ArgumentLayout {
            lists: self.lists.len(),
            scalar_bytes: WORKSPACE_BYTES + padded_bytes::<T>(4),
            step_scalar_bytes: step_scalar_bytes::<T>(),
        })
    }

    fn flags(&self) -> u32 {
        self.format.flags()
    }

    fn write_scalars(&self, out: &mut [u8]) {
        let Lamb { beta1, beta2, .. } = self.config;
        let scalars = [beta1, 1.0 - beta1, beta2, 1.0 - beta2];
        out[..WORKSPACE_BYTES].fill(0);
        write_padded(&scalars.map(T::round), &mut out[WORKSPACE_BYTES..]);
    }

    fn write_step_scalars(&self, values: GroupValues, out: &mut [u8]) {
        let step_scalars = self.config.step_scalars(values);
        let out = self.format.write_key(values.step, out);
        let Direction { scale, eps, lambda } = step_scalars.direction;
        write_padded(&[step_scalars.lr, step_scalars.trust], &mut out[..DIRECTION_AT]);
        write_padded(&[scale, eps, lambda].map(T::round), &mut out[DIRECTION_AT..]);
    }

    fn resident(&self) -> Option<ResidentStepScalars> {
        let c = &self.config;
        let hyper = [c.beta1, c.beta2, c.weight_decay, c.excluded.plain_scalar(), c.eps];
        let entry = step_scalars_entry!("lamb", self.format);
        Some(ResidentStepScalars::new(entry, &hyper, self.format.seed()))
    }

    fn run_host(&self, run: HostRun<'_, '_>) {
        let update = LambUpdate { scalars: Scalars::<T>::read(run.call.scalars) };
        run_format::<T, _, 2>(&update, self.format, run);
    }

    fn normed(&self) -> Option<&dyn NormedKernel> {
        Some(self)
    }
}

impl<T: Compute> NormedKernel for LambKernel<T> {
    fn sums_and_update(&self) -> SumsAndUpdate {
        SumsAndUpdate {
            sums: entry!("lamb_sums", self.format),
            update: entry!("lamb_update", self.format),
        }
    }

    fn chunk_sums(
        &self,
        call: HostCall<'_>,
        group: u32,
        lists: [&[u8]; MAX_LISTS],
        _wanted: [bool; MAX_SUMS],
    ) -> [f64; MAX_SUMS] {
        let terms = ParamAndDirection {
            scalars: Scalars::<T>::read(call.scalars),
            direction: StepScalars::<T>::read(self.step_scalars_of(call, group)).direction,
            grad_factor: T::round(call.grad_factor),
        };
        chunk_sums::<T, _, 2, 2>(call.level, &terms, self.format, lists)
    }

    fn finish(
        &self,
        call: HostCall<'_>,
        group: u32,
        sums: [f64; MAX_SUMS],
        step_scalars: &mut [u8; FINISHED_BYTES],
    ) -> Outcome {
        let bytes = self.step_scalars_of(call, group);
        let of_group = StepScalars::<T>::read(bytes);
        let Some(step_size) = step_size::<T>(of_group.lr, of_group.trust, sums) else {
            return Outcome::Skip;
        };
        let Direction { scale, eps, lambda } = of_group.direction;
        write_padded(&[step_size, scale, eps, lambda], step_scalars);
        let own = padded_bytes::<T>(4);
        self.format.copy_key(&bytes[step_scalar_bytes::<T>()..], &mut step_scalars[own..]);
        Outcome::Update
    }
}

/// Bytes of a group's step scalars.
const fn step_scalar_bytes<T>() -> usize {
    DIRECTION_AT + padded_bytes::<T>(3)
}

impl<T: Compute> StepScalars<T> {
    fn read(bytes: &[u8]) -> Self {
        let [lr, trust] = read_values(bytes);
        let [scale, eps, lambda] = read_values(&bytes[DIRECTION_AT..]);
        Self { lr, trust, direction: Direction { scale, eps, lambda } }
    }
}

impl<T: Compute> Scalars<T> {
    fn read(bytes: &[u8]) -> Self {
        let [beta1, one_minus_beta1, beta2, one_minus_beta2] =
            read_values(&bytes[WORKSPACE_BYTES..]);
        Self { beta1, one_minus_beta1, beta2, one_minus_beta2 }
    }

    /// The new moments and the direction of the step. The operations are those of
    /// `kernels/lamb.cu`, in the same order.
    #[inline(always)]
    fn direction(&self, step_scalars: &Direction<T>, p: T, g: T, [m, v]: [T; 2]) -> ([T; 2], T) {
        let m = self.beta1 * m + self.one_minus_beta1 * g;
        let v = self.beta2 * v + self.one_minus_beta2 * (g * g);
        let d = v.sqrt() + step_scalars.eps;
        let r = step_scalars.scale * (m / d) + step_scalars.lambda * p;
        ([m, v], r)
    }
}

/// lr·φ, in f64 and rounded once; `None` if lr·φ or a norm is not finite.
fn step_size<T: Compute>(lr: f64, trust: f64, sums: [f64; MAX_SUMS]) -> Option<T> {
    let p = sums[0].sqrt();
    let r = sums[1].sqrt();
    let mut ratio = 1.0;
    if trust != 0.0 && p > 0.0 && r > 0.0 {
        ratio = p / r;
    }
    let step_size = T::round(lr * ratio);
    let finite = p.is_finite() && r.is_finite() && step_size.exact().is_finite();
    finite.then_some(step_size)
}

/// Terms of an element whose squares are summed: parameter and direction.
struct ParamAndDirection<T> {
    scalars: Scalars<T>,
    direction: Direction<T>,
    grad_factor: T,
}

impl<T: Compute> Terms<T, 2, 2> for ParamAndDirection<T> {
    const READ: usize = 2;

    #[inline(always)]
    fn terms(&self, p: T, g: T, state: [T; 2]) -> [T; 2] {
        let g = g * self.grad_factor;
        let (_, r) = self.scalars.direction(&self.direction, p, g, state);
        [p, r]
    }
}

/// Update of one element. The operations are those of `kernels/lamb.cu`, in the same order.
#[derive(Clone, Copy)]
struct LambUpdate<T> {
    scalars: Scalars<T>,
}

impl<T: Compute> Update<T, 2> for LambUpdate<T> {
    type StepScalars = Finished<T>;
    const STEP_SCALAR_BYTES: usize = padded_bytes::<T>(4);

    #[inline(always)]
    fn step_scalars(&self, bytes: &[u8]) -> Finished<T> {
        let [step_size, scale, eps, lambda] = read_values(bytes);
        Finished { step_size, direction: Direction { scale, eps, lambda } }
    }

    #[inline(always)]
    fn element(&self, step_scalars: &Finished<T>, p: T, g: T, state: [T; 2]) -> (T, [T; 2]) {
        let (state, r) = self.scalars.direction(&step_scalars.direction, p, g, state);
        (p - step_scalars.step_size * r, state)
    }
}
