//! The kernel on the host.

use std::marker::PhantomData;

use fusestep_elementwise::{Compute, Update, padded_bytes, read_values, run_format, write_padded};
use fusestep_launch::{
    ArgumentLayout, Format, HostRun, MultiTensorKernel, Objective, ResidentSets, SetValues,
    TensorList, entry, sets_entry,
};

use crate::Lion;
use crate::device::{FLAG_MAXIMIZE, STATE, Scalars, Set};

/// Lion with all arithmetic in `T`, for tensors kept in any format that is computed in `T`.
///
/// # Cost
/// 20 bytes of memory traffic per f32 element (read p, g, m; write p, m); twice that for f64.
#[derive(Debug, Clone)]
pub struct LionKernel<T> {
    config: Lion,
    format: Format,
    lists: Vec<TensorList>,
    compute: PhantomData<T>,
}

impl<T: Compute> LionKernel<T> {
    /// The kernel of a validated configuration.
    pub(crate) fn new(config: Lion, format: Format) -> Self {
        Self {
            config,
            format,
            lists: format.lists(&STATE),
            compute: PhantomData,
        }
    }
}

impl<T: Compute> MultiTensorKernel for LionKernel<T> {
    fn stem(&self) -> &'static str {
        "lion"
    }

    fn entry(&self) -> &'static str {
        entry!("lion", self.format)
    }

    fn lists(&self) -> &[TensorList] {
        &self.lists
    }

    fn argument_layout(&self) -> ArgumentLayout {
        self.format.argument_layout(ArgumentLayout {
            lists: self.lists.len(),
            scalar_bytes: padded_bytes::<T>(4),
            set_bytes: padded_bytes::<T>(2),
        })
    }

    fn flags(&self) -> u32 {
        let maximize = match self.config.objective {
            Objective::Minimize => 0,
            Objective::Maximize => FLAG_MAXIMIZE,
        };
        maximize | self.format.flags()
    }

    fn write_scalars(&self, out: &mut [u8]) {
        let Lion { beta1, beta2, .. } = self.config;
        write_padded(&[beta1, 1.0 - beta1, beta2, 1.0 - beta2].map(T::round), out);
    }

    fn write_set(&self, values: SetValues, out: &mut [u8]) {
        let set = self.config.set(values);
        write_padded(
            &[set.lr, set.decay].map(T::round),
            self.format.write_key(values.step, out),
        );
    }

    fn resident(&self) -> Option<ResidentSets> {
        let hyper = [self.config.weight_decay];
        let entry = sets_entry!("lion", self.format);
        Some(ResidentSets::new(entry, &hyper, self.format.seed()))
    }

    fn run_host(&self, run: HostRun<'_, '_>) {
        let [beta1, one_minus_beta1, beta2, one_minus_beta2] = read_values(run.call.scalars);
        let update = LionUpdate::<T> {
            scalars: Scalars {
                beta1,
                one_minus_beta1,
                beta2,
                one_minus_beta2,
            },
            objective: self.config.objective,
        };
        run_format::<T, _, 1>(&update, self.format, run);
    }
}

/// The update of `kernels/lion.cu`, operation for operation.
#[derive(Clone, Copy)]
struct LionUpdate<T> {
    scalars: Scalars<T>,
    objective: Objective,
}

impl<T: Compute> Update<T, 1> for LionUpdate<T> {
    type Set = Set<T>;
    const SET_BYTES: usize = padded_bytes::<T>(2);

    #[inline(always)]
    fn set(&self, bytes: &[u8]) -> Set<T> {
        let [lr, decay] = read_values(bytes);
        Set { lr, decay }
    }

    #[inline(always)]
    fn element(&self, set: &Set<T>, p: T, g: T, [m]: [T; 1]) -> (T, [T; 1]) {
        let k = &self.scalars;
        let g = match self.objective {
            Objective::Minimize => g,
            Objective::Maximize => -g,
        };
        let c = k.beta1 * m + k.one_minus_beta1 * g;
        let m = k.beta2 * m + k.one_minus_beta2 * g;
        (p * set.decay - set.lr * sign(c), [m])
    }
}

/// 1, −1, or the value itself if it is zero or NaN.
#[inline(always)]
fn sign<T: Compute>(x: T) -> T {
    let negative = if x < T::ZERO { -T::ONE } else { x };
    if x > T::ZERO { T::ONE } else { negative }
}
