//! The way from dtypes known at run time to code compiled for them.

use fusestep_launch::{Format, HostRun, Layout};
use half::{bf16, f16};

use crate::compute::{Compute, Converted, FormatVisitor, ParamStorage, Storage};
use crate::param_storage::{Plain, WithMaster, WithRemainder, WithRemainder8};
use crate::rounding::{Nearest, Rounding, Stochastic};
use crate::run::{Update, run_stored};

pub(crate) fn visit_f64<V: FormatVisitor<f64>>(format: Format, visitor: V) -> V::Output {
    assert_eq!(format.layout(), Layout::F64, "the rule computes in f64");
    visitor.visit::<Plain<f64>, f64, Nearest>()
}

pub(crate) fn visit_f32<V: FormatVisitor<f32>>(format: Format, visitor: V) -> V::Output {
    match format.layout() {
        Layout::F64 => panic!("the rule computes in f32, its parameters are f64"),
        Layout::F32 => visitor.visit::<Plain<f32>, f32, Nearest>(),
        Layout::F32State16 => rounded::<Plain<f32>, bf16, V>(format, visitor),
        Layout::F16 => visitor.visit::<Plain<f16>, f32, Nearest>(),
        Layout::F16Master => visitor.visit::<WithMaster<f16>, f32, Nearest>(),
        Layout::Bf16 => rounded::<Plain<bf16>, f32, V>(format, visitor),
        Layout::Bf16Master => visitor.visit::<WithMaster<bf16>, f32, Nearest>(),
        Layout::Bf16Remainder => visitor.visit::<WithRemainder, f32, Nearest>(),
        Layout::Bf16State16 => rounded::<Plain<bf16>, bf16, V>(format, visitor),
        Layout::Bf16MasterState16 => rounded::<WithMaster<bf16>, bf16, V>(format, visitor),
        Layout::Bf16RemainderState16 => rounded::<WithRemainder, bf16, V>(format, visitor),
        // Loops over state in codes are `coded/host.rs`; who visits here reads parameters alone.
        Layout::F32State8 => visitor.visit::<Plain<f32>, f32, Nearest>(),
        Layout::Bf16State8 => visitor.visit::<Plain<bf16>, f32, Nearest>(),
        Layout::Bf16MasterState8 => visitor.visit::<WithMaster<bf16>, f32, Nearest>(),
        Layout::Bf16RemainderState8 => visitor.visit::<WithRemainder, f32, Nearest>(),
        Layout::Bf16Remainder8State8 => visitor.visit::<WithRemainder8, f32, Nearest>(),
    }
}

/// Runs for formats in which something may be rounded at random.
fn rounded<K, S, V>(format: Format, visitor: V) -> V::Output
where
    K: ParamStorage<f32>,
    S: Storage<f32>,
    V: FormatVisitor<f32>,
{
    if format.is_stochastic() {
        visitor.visit::<K, S, Stochastic>()
    } else {
        visitor.visit::<K, S, Nearest>()
    }
}

/// An update, and the lists that its loop runs over.
struct Call<'a, 'b, U, const N: usize> {
    update: &'b U,
    run: HostRun<'a, 'b>,
}

impl<C: Compute, U: Update<C, N>, const N: usize> FormatVisitor<C> for Call<'_, '_, U, N> {
    type Output = ();

    fn visit<K: ParamStorage<C>, S: Storage<C>, R: Rounding>(self) {
        run_stored::<C, K, S, R, U, N>(self.update, self.run);
    }
}

/// Runs an update over all tensors of a call. Their lists are those of [`Format::lists`] with `N`
/// roles of state: parameter, gradient, state, and master or remainder. Whatever the format, an
/// update is written for values of `C` alone.
///
/// Above [`Level::PORTABLE`](fusestep_simd::Level::PORTABLE) the loop is compiled for each format;
/// there it is compiled for values alone, which `converted.rs` forms from any format and keeps.
///
/// # Panics
/// If `C` is not the type that `format` is computed in, or a list is missing or of another type:
/// backends bring the lists that the kernel declared.
pub fn run_format<C: Compute, U: Update<C, N>, const N: usize>(
    update: &U,
    format: Format,
    run: HostRun<'_, '_>,
) {
    let is_converted = !matches!(format.layout(), Layout::F32 | Layout::F64);
    if format.has_wide_gradients() || is_converted && run.call.level.is_portable() {
        let of_values = |run: HostRun<'_, '_>| {
            run_stored::<C, Plain<C>, C, Nearest, U, N>(update, run);
        };
        let converted = Converted {
            roles: N,
            step_scalar_bytes: U::STEP_SCALAR_BYTES,
            update: &of_values,
            run,
            has_wide_gradients: format.has_wide_gradients(),
        };
        return C::convert(format, converted);
    }
    C::visit(format, Call::<U, N> { update, run });
}
