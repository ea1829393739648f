//! The kernel on the host.

use std::marker::PhantomData;

use fusestep_elementwise::{Compute, Update, padded_bytes, read_values, run_format, write_padded};
use fusestep_launch::{
    ArgumentLayout, Format, HostRun, MultiTensorKernel, Objective, ResidentSets, SetValues,
    TensorList, entry, sets_entry,
};

use crate::device::{FLAG_MAXIMIZE, FLAG_NESTEROV, FLAG_VELOCITY, STATE, Scalars, Set};
use crate::{Nesterov, Sgd};

/// SGD with all arithmetic in `T`, for tensors kept in any format that is computed in `T`.
///
/// # Cost
/// 12 bytes of memory traffic per f32 element (read p, g; write p), 20 with a velocity; twice that
/// for f64.
#[derive(Debug, Clone)]
pub struct SgdKernel<T> {
    config: Sgd,
    format: Format,
    lists: Vec<TensorList>,
    compute: PhantomData<T>,
}

impl<T: Compute> SgdKernel<T> {
    /// The kernel of a validated configuration.
    pub(crate) fn new(config: Sgd, format: Format) -> Self {
        let state = if config.has_velocity() {
            &STATE[..]
        } else {
            &[]
        };
        Self {
            config,
            format,
            lists: format.lists(state),
            compute: PhantomData,
        }
    }
}

impl<T: Compute> MultiTensorKernel for SgdKernel<T> {
    fn stem(&self) -> &'static str {
        "fused_sgd"
    }

    fn entry(&self) -> &'static str {
        entry!("fused_sgd", self.format)
    }

    fn lists(&self) -> &[TensorList] {
        &self.lists
    }

    fn argument_layout(&self) -> ArgumentLayout {
        self.format.argument_layout(ArgumentLayout {
            lists: self.lists.len(),
            scalar_bytes: padded_bytes::<T>(2),
            set_bytes: padded_bytes::<T>(4),
        })
    }

    fn flags(&self) -> u32 {
        let velocity = if self.config.has_velocity() {
            FLAG_VELOCITY
        } else {
            0
        };
        let nesterov = match self.config.nesterov {
            Nesterov::Plain => 0,
            Nesterov::Nesterov => FLAG_NESTEROV,
        };
        let maximize = match self.config.objective {
            Objective::Minimize => 0,
            Objective::Maximize => FLAG_MAXIMIZE,
        };
        velocity | nesterov | maximize | self.format.flags()
    }

    fn write_scalars(&self, out: &mut [u8]) {
        let scalars = [self.config.rescale, self.config.momentum];
        write_padded(&scalars.map(T::round), out);
    }

    fn write_set(&self, values: SetValues, out: &mut [u8]) {
        let set = self.config.set(values);
        let scalars = [set.lr, set.decay, set.l2, set.one_minus_dampening];
        write_padded(
            &scalars.map(T::round),
            self.format.write_key(values.step, out),
        );
    }

    fn resident(&self) -> Option<ResidentSets> {
        let c = &self.config;
        let hyper = [
            c.dampening,
            c.weight_decay.lambda(),
            c.weight_decay.decoupled_scalar(),
        ];
        let entry = sets_entry!("fused_sgd", self.format);
        Some(ResidentSets::new(entry, &hyper, self.format.seed()))
    }

    fn run_host(&self, run: HostRun<'_, '_>) {
        let [rescale, momentum] = read_values(run.call.scalars);
        let update = SgdUpdate::<T> {
            scalars: Scalars { rescale, momentum },
            nesterov: self.config.nesterov,
            objective: self.config.objective,
        };
        if self.config.has_velocity() {
            run_format::<T, _, 1>(&update, self.format, run)
        } else {
            run_format::<T, _, 0>(&update, self.format, run)
        }
    }
}

/// The update of `kernels/fused_sgd.cu`, operation for operation.
#[derive(Clone, Copy)]
struct SgdUpdate<T> {
    scalars: Scalars<T>,
    nesterov: Nesterov,
    objective: Objective,
}

/// With a state tensor momentum, without one plain SGD.
impl<T: Compute, const N: usize> Update<T, N> for SgdUpdate<T> {
    type Set = Set<T>;
    const SET_BYTES: usize = padded_bytes::<T>(4);

    #[inline(always)]
    fn set(&self, bytes: &[u8]) -> Set<T> {
        let [lr, decay, l2, one_minus_dampening] = read_values(bytes);
        Set {
            lr,
            decay,
            l2,
            one_minus_dampening,
        }
    }

    #[inline(always)]
    fn element(&self, set: &Set<T>, p: T, g: T, state: [T; N]) -> (T, [T; N]) {
        let k = &self.scalars;
        let mut g = match self.objective {
            Objective::Minimize => g,
            Objective::Maximize => -g,
        };
        g = k.rescale * g;
        if set.l2 != T::ZERO {
            g = g + set.l2 * p;
        }
        let (mut new, mut step) = (state, g);
        if let Some(u) = new.first_mut() {
            *u = k.momentum * *u + set.one_minus_dampening * g;
            step = match self.nesterov {
                Nesterov::Plain => *u,
                Nesterov::Nesterov => g + k.momentum * *u,
            };
        }
        (p * set.decay - set.lr * step, new)
    }
}
