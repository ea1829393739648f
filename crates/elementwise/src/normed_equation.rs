//! A rule that is its equation, and whose rate follows from norms of whole tensors: state, scalars,
//! norms, the rate, and the update of one element.

use std::marker::PhantomData;

use fusestep_launch::{Excluded, Format, GroupValues, HostCall, MAX_LISTS, MAX_SUMS, Settings};
use fusestep_tensor::Role;

use crate::coded::{Coding, coded_chunk_sums, coded_param_sum};
use crate::{
    Compute, Terms, Update, chunk_sums, grad_chunk_sum, padded_bytes, param_chunk_sum, read_values,
};

/// Position of the sum over the parameter.
const PARAM_SUM: usize = 0;

/// Position of the sum over the gradient or the direction.
const SECOND_SUM: usize = 1;

/// Scalars as the bytes that device and host read: an array.
pub trait Scalars<T>: Copy + Send + Sync + 'static {
    /// Bytes of all of them, rounded up to a multiple of 8.
    const LEN_BYTES: usize;

    /// Reads them from the start of `bytes`.
    fn read(bytes: &[u8]) -> Self;

    /// All of them in order.
    fn values(&self) -> &[T];
}

impl<T: Compute, const N: usize> Scalars<T> for [T; N] {
    const LEN_BYTES: usize = padded_bytes::<T>(N);

    #[inline(always)]
    fn read(bytes: &[u8]) -> Self {
        read_values(bytes)
    }

    fn values(&self) -> &[T] {
        self
    }
}

/// A rule with norms that is its equation; [`crate::normed_rule!`] makes the rest of it.
///
/// It has `STATES` tensors of state. Scalars of the rate stay in f64; scalars of elements are
/// formed in f64 and rounded once. The rule's `.cu` file reads both in this order.
///
/// A tensor's rate is [`NormedEquation::rate`] if it is trusted and neither norm is 0, else lr. A
/// tensor whose rate or norms are not finite is skipped.
pub trait NormedEquation<const STATES: usize>: Settings + Send + Sync + 'static {
    /// The norms that are taken of a tensor: [`ParamAndGradient`] or [`ParamAndDirection`].
    type Norms: Norms<Self, STATES>;
    /// Scalars of the rate that all tensors share.
    type RateScalars: Scalars<f64>;
    /// Scalars of elements that all tensors share.
    type Scalars<T: Compute>: Scalars<T>;
    /// Scalars of the rate that tensors of one group share at one step. The learning rate stands
    /// before them, and trust behind them, 1 or 0.
    type RateStepScalars: Scalars<f64>;
    /// Scalars of elements that tensors of one group share at one step.
    type StepScalars<T: Compute>: Scalars<T>;
    /// Scalars of one tensor's update, once its norms are known.
    type TensorScalars<T: Compute>: Scalars<T>;
    /// Codings of the state where it is kept in 8 bits.
    const CODINGS: [Coding; STATES];

    /// The scalars of the rate that all tensors share.
    fn rate_scalars(&self) -> Self::RateScalars;

    /// The scalars of elements that all tensors share.
    fn scalars(&self) -> Self::Scalars<f64>;

    /// The scalars of the rate that tensors of one group share at one step.
    fn rate_step_scalars(&self, values: GroupValues) -> Self::RateStepScalars;

    /// The scalars of elements that tensors of one group share at one step.
    fn step_scalars(&self, values: GroupValues) -> Self::StepScalars<f64>;

    /// The hyper-parameters that a device derives step scalars from; the learning rate comes before
    /// them.
    fn derived_from(&self) -> Vec<f64>;

    /// The second norm from the one that was taken. `grad_factor` multiplies every gradient; in the
    /// norm of a direction it is there already.
    fn second_norm(_scalars: &Self::RateScalars, _grad_factor: f64, norm: f64) -> f64 {
        norm
    }

    /// The rate of a trusted tensor, from its group's lr and from its two norms, neither of them 0.
    fn rate(
        scalars: &Self::RateScalars,
        step_scalars: &Self::RateStepScalars,
        lr: f64,
        norms: [f64; MAX_SUMS],
    ) -> f64;

    /// The scalars of a tensor's update; `rate` is rounded already.
    fn tensor_scalars<T: Compute>(
        rate: T,
        rate_step_scalars: &Self::RateStepScalars,
        step_scalars: &Self::StepScalars<T>,
    ) -> Self::TensorScalars<T>;

    /// The new parameter and state of one element.
    fn element<T: Compute>(
        scalars: &Self::Scalars<T>,
        tensor_scalars: &Self::TensorScalars<T>,
        p: T,
        g: T,
        state: [T; STATES],
    ) -> (T, [T; STATES]);
}

/// A rule whose second norm is that of its direction: a value of each element that the rate is a
/// factor on.
pub trait Directed<const STATES: usize>: NormedEquation<STATES> {
    /// The direction of one element.
    fn direction<T: Compute>(
        scalars: &Self::Scalars<T>,
        step_scalars: &Self::StepScalars<T>,
        p: T,
        g: T,
        state: [T; STATES],
    ) -> T;
}

/// Names of a normed rule's device entries for one format.
#[derive(Clone, Copy, Debug)]
pub struct NormedEntries {
    /// The name of sums and update together, by [`fusestep_launch::entry`].
    pub both: &'static str,
    /// The entry that takes sums.
    pub sums: &'static str,
    /// The entry that updates.
    pub update: &'static str,
    /// The entry that derives the step scalars of a resident table, by
    /// [`fusestep_launch::step_scalars_entry`].
    pub step_scalars: &'static str,
}

/// Names and lists of a rule with norms; [`crate::normed_rule!`] implements it.
pub trait NormedRule<const STATES: usize>: NormedEquation<STATES> {
    /// Names the rule's `.cu` file and PTX module: `lars_momentum`.
    const STEM: &'static str;

    /// The state in the order of a record's addresses.
    const STATE: [Role; STATES];

    /// The device entries for a format.
    fn entries(format: Format) -> NormedEntries;

    /// The rate of tensors that are excluded from weight decay.
    fn excluded(&self) -> Excluded;
}

/// A chunk whose sums are taken, and the scalars of its tensor's group.
pub struct SummedChunk<'a> {
    /// The settings of the call.
    pub call: HostCall<'a>,
    /// The format of the lists.
    pub format: Format,
    /// Scalars of elements that all tensors share.
    pub scalars: &'a [u8],
    /// Scalars of elements of the tensor's group.
    pub step_scalars: &'a [u8],
    /// The elements, as [`crate::chunk_sums`] takes them.
    pub lists: [&'a [u8]; MAX_LISTS],
    /// The sums that are wanted.
    pub wanted: [bool; MAX_SUMS],
}

/// The norms that a rule takes of a tensor: of its parameter, and a second one.
pub trait Norms<E: ?Sized, const STATES: usize>: 'static {
    /// The position of the sum that is Σ p² alone, if there is one.
    const PARAM_SUM: Option<usize>;

    /// The position of the sum that is Σ g² alone, if there is one.
    const GRAD_SUM: Option<usize>;

    /// The sums of squares over one chunk.
    fn chunk_sums<T: Compute>(chunk: SummedChunk<'_>) -> [f64; MAX_SUMS];

    /// The sums of squares over one chunk whose state is in codes.
    fn coded_chunk_sums(chunk: SummedChunk<'_>) -> [f64; MAX_SUMS];
}

/// The norms of the parameter and of the gradient as it is stored, each list read by itself.
pub struct ParamAndGradient;

impl<E: NormedEquation<STATES>, const STATES: usize> Norms<E, STATES> for ParamAndGradient {
    const PARAM_SUM: Option<usize> = Some(PARAM_SUM);
    const GRAD_SUM: Option<usize> = Some(SECOND_SUM);

    fn chunk_sums<T: Compute>(chunk: SummedChunk<'_>) -> [f64; MAX_SUMS] {
        let SummedChunk { call, format, lists, wanted, .. } = chunk;
        let mut sums = [0.0; MAX_SUMS];
        if wanted[PARAM_SUM] {
            sums[PARAM_SUM] = param_chunk_sum::<T, STATES>(call.level, format, lists);
        }
        if wanted[SECOND_SUM] {
            sums[SECOND_SUM] = grad_chunk_sum::<T>(call.level, format, lists[1]);
        }
        sums
    }

    fn coded_chunk_sums(chunk: SummedChunk<'_>) -> [f64; MAX_SUMS] {
        let SummedChunk { call, format, lists, wanted, .. } = chunk;
        let mut sums = [0.0; MAX_SUMS];
        if wanted[PARAM_SUM] {
            sums[PARAM_SUM] = coded_param_sum::<STATES>(call.level, format, lists);
        }
        if wanted[SECOND_SUM] {
            sums[SECOND_SUM] = grad_chunk_sum::<f32>(call.level, format, lists[1]);
        }
        sums
    }
}

/// The norms of the parameter and of the rule's direction, taken together.
pub struct ParamAndDirection;

impl<E: Directed<STATES>, const STATES: usize> Norms<E, STATES> for ParamAndDirection {
    const PARAM_SUM: Option<usize> = None;
    const GRAD_SUM: Option<usize> = None;

    fn chunk_sums<T: Compute>(chunk: SummedChunk<'_>) -> [f64; MAX_SUMS] {
        let terms = DirectionTerms::<E, T, STATES>::of(&chunk);
        chunk_sums::<T, _, STATES, MAX_SUMS>(chunk.call.level, &terms, chunk.format, chunk.lists)
    }

    fn coded_chunk_sums(chunk: SummedChunk<'_>) -> [f64; MAX_SUMS] {
        let terms = DirectionTerms::<E, f32, STATES>::of(&chunk);
        coded_chunk_sums(chunk.call.level, &terms, E::CODINGS, chunk.format, chunk.lists)
    }
}

/// Terms of an element whose squares are summed: parameter and direction.
struct DirectionTerms<E: NormedEquation<STATES>, T: Compute, const STATES: usize> {
    scalars: E::Scalars<T>,
    step_scalars: E::StepScalars<T>,
    grad_factor: T,
}

impl<E: NormedEquation<STATES>, T: Compute, const STATES: usize> DirectionTerms<E, T, STATES> {
    fn of(chunk: &SummedChunk<'_>) -> Self {
        Self {
            scalars: E::Scalars::read(chunk.scalars),
            step_scalars: E::StepScalars::read(chunk.step_scalars),
            grad_factor: T::round(chunk.call.grad_factor),
        }
    }
}

impl<E, T, const STATES: usize> Terms<T, STATES, MAX_SUMS> for DirectionTerms<E, T, STATES>
where
    E: Directed<STATES>,
    T: Compute,
{
    const READ: usize = STATES;

    #[inline(always)]
    fn terms(&self, p: T, g: T, state: [T; STATES]) -> [T; MAX_SUMS] {
        let g = g * self.grad_factor;
        [p, E::direction(&self.scalars, &self.step_scalars, p, g, state)]
    }
}

/// The update of one element by a [`NormedEquation`].
pub(crate) struct ByNormedEquation<E: NormedEquation<STATES>, T: Compute, const STATES: usize> {
    pub(crate) scalars: E::Scalars<T>,
    pub(crate) rule: PhantomData<E>,
}

impl<E: NormedEquation<STATES>, T: Compute, const STATES: usize> Clone
    for ByNormedEquation<E, T, STATES>
{
    fn clone(&self) -> Self {
        *self
    }
}

impl<E: NormedEquation<STATES>, T: Compute, const STATES: usize> Copy
    for ByNormedEquation<E, T, STATES>
{
}

impl<E, T, const STATES: usize> Update<T, STATES> for ByNormedEquation<E, T, STATES>
where
    E: NormedEquation<STATES>,
    T: Compute,
{
    type StepScalars = E::TensorScalars<T>;
    const STEP_SCALAR_BYTES: usize = E::TensorScalars::<T>::LEN_BYTES;
    const CODINGS: Option<[Coding; STATES]> = Some(E::CODINGS);

    #[inline(always)]
    fn step_scalars(&self, bytes: &[u8]) -> E::TensorScalars<T> {
        E::TensorScalars::read(bytes)
    }

    #[inline(always)]
    fn element(
        &self,
        step_scalars: &E::TensorScalars<T>,
        p: T,
        g: T,
        state: [T; STATES],
    ) -> (T, [T; STATES]) {
        E::element(&self.scalars, step_scalars, p, g, state)
    }
}

/// Makes a rule of a [`NormedEquation`] whose settings are `lr`, `excluded` and others: its name,
/// the stem of its `.cu` file, and its lists of state in the order of a record's addresses.
#[macro_export]
macro_rules! normed_rule {
    ($rule:ident is $name:literal of $stem:literal, with [$($role:ident),+]) => {
        impl $crate::launch::UpdateRule for $rule {
            fn name(&self) -> &'static str {
                $name
            }

            fn lr(&self) -> f64 {
                self.lr
            }

            fn hyper_parameters(&self) -> Vec<(&'static str, f64)> {
                $crate::launch::Settings::numbers(self)
            }

            fn settings(&self) -> Vec<(&'static str, String)> {
                let hyper = $crate::launch::Settings::numbers(self);
                let mut all = $crate::launch::tuned(hyper);
                all.push(("excluded", self.excluded.name().to_owned()));
                all
            }

            fn validate(&self) -> Result<(), $crate::launch::RuleError> {
                $crate::launch::Settings::check(self)
            }

            fn kernel(
                &self,
                dtype: $crate::tensor::DType,
                precision: $crate::launch::Precision,
            ) -> Result<Box<dyn $crate::launch::MultiTensorKernel>, $crate::launch::RuleError> {
                $crate::normed_kernel(self, dtype, precision)
            }
        }

        impl $crate::NormedRule<{ [$($crate::tensor::Role::$role),+].len() }> for $rule {
            const STEM: &'static str = $stem;
            const STATE: [$crate::tensor::Role; { [$($crate::tensor::Role::$role),+].len() }] =
                [$($crate::tensor::Role::$role),+];

            fn entries(format: $crate::launch::Format) -> $crate::NormedEntries {
                $crate::NormedEntries {
                    both: $crate::launch::entry!($stem, format),
                    sums: $crate::launch::entry!($stem, format, "_sums"),
                    update: $crate::launch::entry!($stem, format, "_update"),
                    step_scalars: $crate::launch::step_scalars_entry!($stem, format),
                }
            }

            fn excluded(&self) -> $crate::launch::Excluded {
                self.excluded
            }
        }
    };
}
