//! From dtypes known at run time to the loop compiled for them.

use fusestep_launch::{Format, HostCall, HostList, HostSpans, Layout, MAX_LISTS};
use half::{bf16, f16};

use crate::rounding::{Nearest, Rounding, Stochastic};
use crate::run::run_slot;
use crate::slot::{Plain, Slot, WithMaster, WithRemainder};
use crate::{Compute, Storage, Update};

/// What a loop runs over.
pub struct Call<'a, U> {
    pub(crate) update: &'a U,
    pub(crate) call: HostCall<'a>,
    pub(crate) lists: [HostList<'a>; MAX_LISTS],
    pub(crate) spans: HostSpans<'a>,
}

impl<U> Call<'_, U> {
    fn slot<C, K, S, R, const N: usize>(self)
    where
        C: Compute,
        K: Slot<C>,
        S: Storage<C>,
        R: Rounding,
        U: Update<C, N>,
    {
        run_slot::<C, K, S, R, U, N>(self.update, self.call, self.lists, self.spans);
    }

    /// For formats in which something may be rounded at random.
    fn rounded<C, K, S, const N: usize>(self, format: Format)
    where
        C: Compute,
        K: Slot<C>,
        S: Storage<C>,
        U: Update<C, N>,
    {
        if format.is_stochastic() {
            self.slot::<C, K, S, Stochastic, N>();
        } else {
            self.slot::<C, K, S, Nearest, N>();
        }
    }

    pub(crate) fn run_f64<const N: usize>(self, format: Format)
    where
        U: Update<f64, N>,
    {
        assert_eq!(format.layout(), Layout::F64, "the rule computes in f64");
        self.slot::<f64, Plain<f64>, f64, Nearest, N>();
    }

    pub(crate) fn run_f32<const N: usize>(self, format: Format)
    where
        U: Update<f32, N>,
    {
        match format.layout() {
            Layout::F64 => panic!("the rule computes in f32, its parameters are f64"),
            Layout::F32 => self.slot::<f32, Plain<f32>, f32, Nearest, N>(),
            Layout::F32State16 => self.rounded::<f32, Plain<f32>, bf16, N>(format),
            Layout::F16 => self.slot::<f32, Plain<f16>, f32, Nearest, N>(),
            Layout::F16Master => self.slot::<f32, WithMaster<f16>, f32, Nearest, N>(),
            Layout::Bf16 => self.rounded::<f32, Plain<bf16>, f32, N>(format),
            Layout::Bf16Master => self.slot::<f32, WithMaster<bf16>, f32, Nearest, N>(),
            Layout::Bf16Remainder => self.slot::<f32, WithRemainder, f32, Nearest, N>(),
            Layout::Bf16State16 => self.rounded::<f32, Plain<bf16>, bf16, N>(format),
            Layout::Bf16MasterState16 => self.rounded::<f32, WithMaster<bf16>, bf16, N>(format),
            Layout::Bf16RemainderState16 => self.rounded::<f32, WithRemainder, bf16, N>(format),
        }
    }
}

/// Runs an update over all tensors of a call, whose lists are those of [`Format::lists`] with `N` roles of state: parameter,
/// gradient, state, and what is beside the parameter. Whatever the format, an update is written for values of `C` alone.
///
/// # Panics
/// If `C` is not the type that `format` is computed in, or a list is missing or of another type: backends bring the lists that the
/// kernel declared.
pub fn run_format<C: Compute, U: Update<C, N>, const N: usize>(
    update: &U,
    format: Format,
    call: HostCall<'_>,
    lists: [HostList<'_>; MAX_LISTS],
    spans: HostSpans<'_>,
) {
    let call = Call {
        update,
        call,
        lists,
        spans,
    };
    C::dispatch(call, format);
}
