//! The kernel on the host.

use std::marker::PhantomData;

use fusestep_elementwise::{Compute, Update, padded_bytes, read_values, run_format, write_padded};
use fusestep_launch::{
    ArgumentLayout, Format, HostRun, MultiTensorKernel, Objective, ResidentSets, SetValues,
    TensorList, entry, sets_entry,
};

use crate::Adagrad;
use crate::device::{FLAG_MAXIMIZE, STATE, Scalars, Set};

/// Adagrad with all arithmetic in `T`, for tensors kept in any format that is computed in `T`.
///
/// # Cost
/// 20 bytes of memory traffic per f32 element (read p, g, s; write p, s); twice that for f64.
#[derive(Debug, Clone)]
pub struct AdagradKernel<T> {
    config: Adagrad,
    format: Format,
    lists: Vec<TensorList>,
    compute: PhantomData<T>,
}

impl<T: Compute> AdagradKernel<T> {
    /// The kernel of a validated configuration.
    pub(crate) fn new(config: Adagrad, format: Format) -> Self {
        Self {
            config,
            format,
            lists: format.lists(&STATE),
            compute: PhantomData,
        }
    }
}

impl<T: Compute> MultiTensorKernel for AdagradKernel<T> {
    fn stem(&self) -> &'static str {
        "adagrad"
    }

    fn entry(&self) -> &'static str {
        entry!("adagrad", self.format)
    }

    fn lists(&self) -> &[TensorList] {
        &self.lists
    }

    fn argument_layout(&self) -> ArgumentLayout {
        self.format.argument_layout(ArgumentLayout {
            lists: self.lists.len(),
            scalar_bytes: padded_bytes::<T>(1),
            set_bytes: padded_bytes::<T>(3),
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
        write_padded(&[T::round(self.config.eps)], out);
    }

    fn write_set(&self, values: SetValues, out: &mut [u8]) {
        let set = self.config.set(values);
        write_padded(
            &[set.step_size, set.l2, set.initial].map(T::round),
            self.format.write_key(values.step, out),
        );
    }

    fn resident(&self) -> Option<ResidentSets> {
        let c = &self.config;
        let hyper = [c.lr_decay, c.weight_decay, c.initial_sum];
        let entry = sets_entry!("adagrad", self.format);
        Some(ResidentSets::new(entry, &hyper, self.format.seed()))
    }

    fn run_host(&self, run: HostRun<'_, '_>) {
        let [eps] = read_values(run.call.scalars);
        let update = AdagradUpdate::<T> {
            scalars: Scalars { eps },
            objective: self.config.objective,
        };
        run_format::<T, _, 1>(&update, self.format, run);
    }
}

/// The update of `kernels/adagrad.cu`, operation for operation.
#[derive(Clone, Copy)]
struct AdagradUpdate<T> {
    scalars: Scalars<T>,
    objective: Objective,
}

impl<T: Compute> Update<T, 1> for AdagradUpdate<T> {
    type Set = Set<T>;
    const SET_BYTES: usize = padded_bytes::<T>(3);

    #[inline(always)]
    fn set(&self, bytes: &[u8]) -> Set<T> {
        let [step_size, l2, initial] = read_values(bytes);
        Set {
            step_size,
            l2,
            initial,
        }
    }

    #[inline(always)]
    fn element(&self, set: &Set<T>, p: T, g: T, [s]: [T; 1]) -> (T, [T; 1]) {
        let mut g = match self.objective {
            Objective::Minimize => g,
            Objective::Maximize => -g,
        };
        if set.l2 != T::ZERO {
            g = g + set.l2 * p;
        }
        let s = (s + set.initial) + g * g;
        let d = s.sqrt() + self.scalars.eps;
        (p - set.step_size * (g / d), [s])
    }
}
