//! The kernel on the host.

use std::marker::PhantomData;

use fusestep_elementwise::{Compute, Update, padded_bytes, read_values, run_format, write_padded};
use fusestep_launch::{
    ArgumentLayout, Format, HostRun, MultiTensorKernel, ResidentSets, SetValues, TensorList, entry,
    sets_entry,
};

use crate::device::{FLAG_AMSGRAD, FLAG_MAXIMIZE, STATE, Scalars, Set};
use crate::{Adam, Objective, SecondMoment, WeightDecay};

/// Adam with all arithmetic in `T`, for tensors kept in any format that is computed in `T`.
///
/// # Cost
/// 28 bytes of memory traffic per f32 element (read p, g, m, v; write p, m, v), 36 with AMSGrad;
/// twice that for f64; from 14 on for 16-bit formats.
#[derive(Debug, Clone)]
pub struct AdamKernel<T> {
    config: Adam,
    format: Format,
    lists: Vec<TensorList>,
    compute: PhantomData<T>,
}

impl<T: Compute> AdamKernel<T> {
    /// The kernel of a validated configuration.
    pub(crate) fn new(config: Adam, format: Format) -> Self {
        let state = match config.second_moment {
            SecondMoment::Running => &STATE[..2],
            SecondMoment::Largest => &STATE,
        };
        Self {
            config,
            format,
            lists: format.lists(state),
            compute: PhantomData,
        }
    }
}

impl<T: Compute> MultiTensorKernel for AdamKernel<T> {
    fn stem(&self) -> &'static str {
        "fused_adam"
    }

    fn entry(&self) -> &'static str {
        entry!("fused_adam", self.format)
    }

    fn lists(&self) -> &[TensorList] {
        &self.lists
    }

    fn argument_layout(&self) -> ArgumentLayout {
        self.format.argument_layout(ArgumentLayout {
            lists: self.lists.len(),
            scalar_bytes: padded_bytes::<T>(4),
            set_bytes: padded_bytes::<T>(4),
        })
    }

    fn flags(&self) -> u32 {
        let amsgrad = match self.config.second_moment {
            SecondMoment::Running => 0,
            SecondMoment::Largest => FLAG_AMSGRAD,
        };
        let maximize = match self.config.objective {
            Objective::Minimize => 0,
            Objective::Maximize => FLAG_MAXIMIZE,
        };
        amsgrad | maximize | self.format.flags()
    }

    fn write_scalars(&self, out: &mut [u8]) {
        let Adam { beta1, beta2, .. } = self.config;
        let scalars = [beta1, 1.0 - beta1, beta2, 1.0 - beta2];
        write_padded(&scalars.map(T::round), out);
    }

    fn write_set(&self, values: SetValues, out: &mut [u8]) {
        let set = self.config.set(values);
        let scalars = [set.step_size, set.eps, set.decay, set.l2];
        write_padded(
            &scalars.map(T::round),
            self.format.write_key(values.step, out),
        );
    }

    fn resident(&self) -> Option<ResidentSets> {
        let c = &self.config;
        let (decoupled, lambda) = (c.weight_decay.decoupled_scalar(), c.weight_decay.lambda());
        let hyper = [c.beta1, c.beta2, lambda, decoupled, c.eps];
        let entry = sets_entry!("fused_adam", self.format);
        Some(ResidentSets::new(entry, &hyper, self.format.seed()))
    }

    fn run_host(&self, run: HostRun<'_, '_>) {
        let Adam {
            objective,
            second_moment,
            ..
        } = self.config;
        let scalars = Scalars::read(run.call.scalars);
        // What the compiler knows to be so it does not test for in the loop: 5 % of the arithmetic
        // of Adam all in bf16.
        let as_it_is = objective == Objective::Minimize
            && matches!(self.config.weight_decay, WeightDecay::Decoupled(_));
        match (second_moment, as_it_is) {
            (SecondMoment::Running, true) => {
                let update = AdamUpdate::<T, true> { scalars, objective };
                run_format::<T, _, 2>(&update, self.format, run);
            }
            (SecondMoment::Running, false) => {
                let update = AdamUpdate::<T, false> { scalars, objective };
                run_format::<T, _, 2>(&update, self.format, run);
            }
            (SecondMoment::Largest, _) => {
                let update = AdamUpdate::<T, false> { scalars, objective };
                run_format::<T, _, 3>(&update, self.format, run);
            }
        }
    }
}

impl<T: Compute> Scalars<T> {
    fn read(bytes: &[u8]) -> Self {
        let [beta1, one_minus_beta1, beta2, one_minus_beta2] = read_values(bytes);
        Self {
            beta1,
            one_minus_beta1,
            beta2,
            one_minus_beta2,
        }
    }
}

/// The update of `kernels/fused_adam.cu`, operation for operation. With `AS_IT_IS` gradients are
/// minimized along and weight decay is no part of them.
#[derive(Clone, Copy)]
struct AdamUpdate<T, const AS_IT_IS: bool> {
    scalars: Scalars<T>,
    objective: Objective,
}

/// With 2 state tensors Adam, with 3 AMSGrad, whose last is the largest second moment so far.
impl<T: Compute, const N: usize, const AS_IT_IS: bool> Update<T, N> for AdamUpdate<T, AS_IT_IS> {
    type Set = Set<T>;
    const SET_BYTES: usize = padded_bytes::<T>(4);

    #[inline(always)]
    fn set(&self, bytes: &[u8]) -> Set<T> {
        let [step_size, eps, decay, l2] = read_values(bytes);
        Set {
            step_size,
            eps,
            decay,
            l2,
        }
    }

    #[inline(always)]
    fn element(&self, set: &Set<T>, p: T, g: T, state: [T; N]) -> (T, [T; N]) {
        let k = &self.scalars;
        let mut g = match self.objective {
            Objective::Maximize if !AS_IT_IS => -g,
            _ => g,
        };
        if !AS_IT_IS && set.l2 != T::ZERO {
            g = g + set.l2 * p;
        }
        let mut new = state;
        let m = k.beta1 * state[0] + k.one_minus_beta1 * g;
        let v = k.beta2 * state[1] + k.one_minus_beta2 * (g * g);
        (new[0], new[1]) = (m, v);
        let mut w = v;
        if N > 2 {
            w = if state[N - 1] > v { state[N - 1] } else { v };
            new[N - 1] = w;
        }
        let d = w.sqrt() + set.eps;
        let p = p * set.decay - set.step_size * (m / d);
        (p, new)
    }
}
