//! The kernel of LARS on the host.

use std::marker::PhantomData;

use fusestep_elementwise::{
    Compute, Update, grad_chunk_sum, padded_bytes, param_chunk_sum, read_values, run_format,
    write_padded,
};
use fusestep_launch::{
    ArgumentLayout, FINISHED_BYTES, Format, GroupValues, HostCall, HostRun, MAX_LISTS, MAX_SUMS,
    MultiTensorKernel, NormedKernel, Outcome, ResidentStepScalars, SumsAndUpdate, TensorList,
    WORKSPACE_BYTES, entry, step_scalars_entry,
};

use crate::Lars;
use crate::device::{Finished, RateScalars, STATE, Scalars, StepScalars};

/// Bytes of a group's step scalars.
const STEP_SCALAR_BYTES: usize = size_of::<StepScalars>();

/// Offset of the update's scalars among the scalars of a launch.
const UPDATE_AT: usize = WORKSPACE_BYTES + size_of::<RateScalars>();

/// Positions of the two sums.
const PARAM_SUM: usize = 0;
const GRAD_SUM: usize = 1;

/// Kernel of LARS with all arithmetic of an element in `T`, and norms and rates in f64. It serves
/// tensors in every format that is computed in `T`. The norm of a parameter with a master is the
/// master's.
///
/// # Cost
/// 20 bytes of memory traffic per f32 element (read p, g, u; write p, u). If a tensor does not fit
/// into the cache, g and p are read again: 28. The second read of p is saved if the backend has a
/// cached norm from the last update. The second read of g is saved if the step has summed g for the
/// global norm. Twice all that for f64.
#[derive(Debug, Clone)]
pub struct LarsKernel<T> {
    config: Lars,
    format: Format,
    lists: Vec<TensorList>,
    compute: PhantomData<T>,
}

impl<T: Compute> LarsKernel<T> {
    /// The kernel of a validated configuration.
    pub(crate) fn new(config: Lars, format: Format) -> Self {
        Self { config, format, lists: format.lists(&STATE), compute: PhantomData }
    }
}

impl<T: Compute> MultiTensorKernel for LarsKernel<T> {
    fn stem(&self) -> &'static str {
        "lars_momentum"
    }

    fn entry(&self) -> &'static str {
        entry!("lars_momentum", self.format)
    }

    fn lists(&self) -> &[TensorList] {
        &self.lists
    }

    fn argument_layout(&self) -> ArgumentLayout {
        self.format.argument_layout(ArgumentLayout {
            lists: self.lists.len(),
            scalar_bytes: UPDATE_AT + padded_bytes::<T>(2),
            step_scalar_bytes: STEP_SCALAR_BYTES,
        })
    }

    fn flags(&self) -> u32 {
        self.format.flags()
    }

    fn write_scalars(&self, out: &mut [u8]) {
        let Lars { trust_coefficient, eps, rescale, momentum, .. } = self.config;
        out[..WORKSPACE_BYTES].fill(0);
        write_padded(&[trust_coefficient, eps, rescale], &mut out[WORKSPACE_BYTES..UPDATE_AT]);
        write_padded(&[momentum, rescale].map(T::round), &mut out[UPDATE_AT..]);
    }

    fn write_step_scalars(&self, values: GroupValues, out: &mut [u8]) {
        let step_scalars = self.config.step_scalars(values);
        write_padded(
            &[step_scalars.lr, step_scalars.lambda, step_scalars.trust],
            self.format.write_key(values.step, out),
        );
    }

    fn resident(&self) -> Option<ResidentStepScalars> {
        let hyper = [self.config.weight_decay, self.config.excluded.plain_scalar()];
        let entry = step_scalars_entry!("lars_momentum", self.format);
        Some(ResidentStepScalars::new(entry, &hyper, self.format.seed()))
    }

    fn run_host(&self, run: HostRun<'_, '_>) {
        run_format::<T, _, 1>(&LarsUpdate::<T>::of(run.call), self.format, run);
    }

    fn normed(&self) -> Option<&dyn NormedKernel> {
        Some(self)
    }
}

impl<T: Compute> NormedKernel for LarsKernel<T> {
    fn sums_and_update(&self) -> SumsAndUpdate {
        SumsAndUpdate {
            sums: entry!("lars_momentum_sums", self.format),
            update: entry!("lars_momentum_update", self.format),
        }
    }

    fn chunk_sums(
        &self,
        call: HostCall<'_>,
        _group: u32,
        lists: [&[u8]; MAX_LISTS],
        [param, grad]: [bool; MAX_SUMS],
    ) -> [f64; MAX_SUMS] {
        let mut sums = [0.0; MAX_SUMS];
        if param {
            sums[PARAM_SUM] = param_chunk_sum::<T, 1>(call.level, self.format, lists);
        }
        if grad {
            sums[GRAD_SUM] = grad_chunk_sum::<T>(call.level, self.format, lists[1]);
        }
        sums
    }

    fn finish(
        &self,
        call: HostCall<'_>,
        group: u32,
        sums: [f64; MAX_SUMS],
        step_scalars: &mut [u8; FINISHED_BYTES],
    ) -> Outcome {
        let of_group = call.step_scalars_of(group, STEP_SCALAR_BYTES + self.format.key_bytes());
        let [lr, lambda, trust] = read_values(of_group);
        let [trust_coefficient, eps, rescale] = read_values(&call.scalars[WORKSPACE_BYTES..]);
        let scalars = RateScalars { trust_coefficient, eps, rescale: rescale * call.grad_factor };
        match finished::<T>(&scalars, &StepScalars { lr, lambda, trust }, sums) {
            Some(finished) => {
                write_padded(&[finished.local, finished.lambda], step_scalars);
                let own = padded_bytes::<T>(2);
                self.format.copy_key(&of_group[STEP_SCALAR_BYTES..], &mut step_scalars[own..]);
                Outcome::Update
            }
            None => Outcome::Skip,
        }
    }

    fn grad_sum(&self) -> Option<usize> {
        Some(GRAD_SUM)
    }

    fn param_sum(&self) -> Option<usize> {
        Some(PARAM_SUM)
    }
}

/// The tensor's rate, in f64 and rounded once; `None` if the rate or a norm is not finite. The
/// operations are those of `kernels/lars_momentum.cu`, in the same order.
fn finished<T: Compute>(
    scalars: &RateScalars,
    step_scalars: &StepScalars,
    sums: [f64; MAX_SUMS],
) -> Option<Finished<T>> {
    let p = sums[PARAM_SUM].sqrt();
    let g = scalars.rescale * sums[GRAD_SUM].sqrt();
    let mut local = step_scalars.lr;
    if step_scalars.trust != 0.0 && p > 0.0 && g > 0.0 {
        local = step_scalars.lr * scalars.trust_coefficient * p
            / (g + step_scalars.lambda * p + scalars.eps);
    }
    let local = T::round(local);
    let finite = p.is_finite() && g.is_finite() && local.exact().is_finite();
    finite.then(|| Finished { local, lambda: T::round(step_scalars.lambda) })
}

/// Update of one element. The operations are those of `kernels/lars_momentum.cu`, in the same
/// order.
#[derive(Clone, Copy)]
struct LarsUpdate<T> {
    scalars: Scalars<T>,
}

impl<T: Compute> LarsUpdate<T> {
    fn of(call: HostCall<'_>) -> Self {
        let [momentum, rescale] = read_values(&call.scalars[UPDATE_AT..]);
        Self { scalars: Scalars { momentum, rescale } }
    }
}

impl<T: Compute> Update<T, 1> for LarsUpdate<T> {
    type StepScalars = Finished<T>;
    const STEP_SCALAR_BYTES: usize = padded_bytes::<T>(2);

    #[inline(always)]
    fn step_scalars(&self, bytes: &[u8]) -> Finished<T> {
        let [local, lambda] = read_values(bytes);
        Finished { local, lambda }
    }

    #[inline(always)]
    fn element(&self, step_scalars: &Finished<T>, p: T, g: T, [u]: [T; 1]) -> (T, [T; 1]) {
        let d = self.scalars.rescale * g + step_scalars.lambda * p;
        let u = self.scalars.momentum * u + step_scalars.local * d;
        (p - u, [u])
    }
}
