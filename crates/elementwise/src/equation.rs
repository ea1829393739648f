//! A rule that is its equation: state, scalars, and the update of one element.

use std::marker::PhantomData;

use fusestep_launch::{GroupValues, Objective, Settings};

use crate::coded::Coding;
use crate::{Compute, Update, padded_bytes, read_values};

/// Flag that turns the gradient's sign (maximize), of every rule that is an [`Equation`].
pub const FLAG_MAXIMIZE: u32 = 1;

/// A rule that is its equation; [`crate::equation_rule!`] makes the rest of it.
///
/// It has `STATES` tensors of state, `SCALARS` scalars that all tensors share, and `STEP_SCALARS`
/// that tensors of one group share at one step. Scalars are formed in f64 and rounded once, and
/// the rule's `.cu` file reads them in this order.
pub trait Equation<const STATES: usize, const SCALARS: usize, const STEP_SCALARS: usize>:
    Settings + Send + Sync + 'static
{
    /// The scalars that all tensors share.
    fn scalars(&self) -> [f64; SCALARS];

    /// The scalars that tensors of one group share at one step.
    fn step_scalars(&self, values: GroupValues) -> [f64; STEP_SCALARS];

    /// The hyper-parameters that a device derives step scalars from; the learning rate comes before
    /// them.
    fn derived_from(&self) -> Vec<f64>;

    /// Codings of the state where it is kept in 8 bits; `None` if this rule's state cannot be.
    const CODINGS: Option<[Coding; STATES]> = None;

    /// The new parameter and state of one element. The gradient's sign is turned already.
    fn element<T: Compute>(
        scalars: &[T; SCALARS],
        step_scalars: &[T; STEP_SCALARS],
        p: T,
        g: T,
        state: [T; STATES],
    ) -> (T, [T; STATES]);
}

/// The update of one element by an [`Equation`].
pub struct ByEquation<E, T, const SCALARS: usize, const STEP_SCALARS: usize> {
    /// Scalars that all tensors share.
    pub scalars: [T; SCALARS],
    /// Whether to step against or along the gradient.
    pub objective: Objective,
    /// The rule.
    pub rule: PhantomData<E>,
}

impl<E, T: Copy, const SCALARS: usize, const STEP_SCALARS: usize> Clone
    for ByEquation<E, T, SCALARS, STEP_SCALARS>
{
    fn clone(&self) -> Self {
        *self
    }
}

impl<E, T: Copy, const SCALARS: usize, const STEP_SCALARS: usize> Copy
    for ByEquation<E, T, SCALARS, STEP_SCALARS>
{
}

impl<E, T, const STATES: usize, const SCALARS: usize, const STEP_SCALARS: usize> Update<T, STATES>
    for ByEquation<E, T, SCALARS, STEP_SCALARS>
where
    E: Equation<STATES, SCALARS, STEP_SCALARS>,
    T: Compute,
{
    type StepScalars = [T; STEP_SCALARS];
    const STEP_SCALAR_BYTES: usize = padded_bytes::<T>(STEP_SCALARS);
    const CODINGS: Option<[Coding; STATES]> = E::CODINGS;

    #[inline(always)]
    fn step_scalars(&self, bytes: &[u8]) -> [T; STEP_SCALARS] {
        read_values(bytes)
    }

    #[inline(always)]
    fn element(
        &self,
        step_scalars: &[T; STEP_SCALARS],
        p: T,
        g: T,
        state: [T; STATES],
    ) -> (T, [T; STATES]) {
        let g = match self.objective {
            Objective::Minimize => g,
            Objective::Maximize => -g,
        };
        E::element(&self.scalars, step_scalars, p, g, state)
    }
}

/// Makes a rule of an [`Equation`] whose settings are `lr`, `objective` and others: its name, which
/// is the stem of its `.cu` file too, its lists of state in the order of a record's addresses, and
/// the numbers of its scalars and step scalars.
#[macro_export]
macro_rules! equation_rule {
    (
        $rule:ident is $stem:literal,
        with [$($role:ident),+], $scalars:literal, $step_scalars:literal
    ) => {
        impl $crate::launch::UpdateRule for $rule {
            fn name(&self) -> &'static str {
                $stem
            }

            fn lr(&self) -> f64 {
                self.lr
            }

            fn hyper_parameters(&self) -> Vec<(&'static str, f64)> {
                $crate::launch::Settings::told(self)
            }

            fn objective(&self) -> Option<$crate::launch::Objective> {
                Some(self.objective)
            }

            fn settings_of_state(&self) -> Vec<(&'static str, String)> {
                $crate::launch::Settings::of_state(self)
            }

            fn validate(&self) -> Result<(), $crate::launch::RuleError> {
                $crate::launch::Settings::check(self)
            }

            fn kernel(
                &self,
                dtype: $crate::tensor::DType,
                precision: $crate::launch::Precision,
            ) -> Result<Box<dyn $crate::launch::MultiTensorKernel>, $crate::launch::RuleError> {
                $crate::element_kernel(self, dtype, precision)
            }
        }

        impl $crate::ElementRule<$scalars, $step_scalars> for $rule {
            const STEM: &'static str = $stem;

            fn entries(format: $crate::launch::Format) -> $crate::Entries {
                $crate::Entries {
                    update: $crate::launch::entry!($stem, format),
                    step_scalars: $crate::launch::step_scalars_entry!($stem, format),
                }
            }

            fn state(&self) -> &'static [$crate::tensor::Role] {
                &[$($crate::tensor::Role::$role),+]
            }

            fn flags(&self) -> u32 {
                match self.objective {
                    $crate::launch::Objective::Minimize => 0,
                    $crate::launch::Objective::Maximize => $crate::FLAG_MAXIMIZE,
                }
            }

            fn scalars(&self) -> [f64; $scalars] {
                $crate::Equation::scalars(self)
            }

            fn step_scalars(&self, values: $crate::launch::GroupValues) -> [f64; $step_scalars] {
                $crate::Equation::step_scalars(self, values)
            }

            fn hyper_parameters_of_step_scalars(&self) -> Vec<f64> {
                $crate::Equation::derived_from(self)
            }

            fn with_update<T: $crate::Compute, V: $crate::UpdateVisitor<T>>(
                &self,
                scalars: [T; $scalars],
                visitor: V,
            ) -> V::Output {
                let update = $crate::ByEquation::<Self, T, $scalars, $step_scalars> {
                    scalars,
                    objective: self.objective,
                    rule: std::marker::PhantomData,
                };
                const STATES: usize = [$($crate::tensor::Role::$role),+].len();
                visitor.visit::<_, STATES>(update)
            }
        }
    };
}

/// Makes the entry of a rule for plain slices: the struct with the tensors of one parameter, and
/// `step` and `step_with` of the rule. The last attributes are the documentation of `step` before
/// its headings.
#[macro_export]
macro_rules! element_slices {
    (
        $(#[$meta:meta])*
        pub struct $tensors:ident of $rule:ident {
            $($(#[$list_meta:meta])+ $list:ident,)+
        }
        $(#[$step_meta:meta])+
        step
    ) => {
        $(#[$meta])*
        #[derive(Debug)]
        pub struct $tensors<'a, T> {
            /// p, updated in place.
            pub param: &'a mut [T],
            /// g, only read.
            pub grad: &'a [T],
            $($(#[$list_meta])+ pub $list: &'a mut [T],)+
        }

        impl $rule {
            /// Applies one step to every tensor, in the calling thread.
            ///
            $(#[$step_meta])+
            ///
            /// # Shapes
            /// A tensor has the same numel in all lists; 0 is allowed.
            /// # Units
            /// `step` (t) counts from 1. `lr` and λ are per step.
            /// # Errors
            /// [`StepError`] naming the list, the tensor and both counts; everything is checked
            /// before anything is written.
            ///
            /// [`StepError`]: fusestep_elementwise::StepError
            pub fn step<T: $crate::Compute>(
                &self,
                step: u64,
                tensors: &mut [$tensors<'_, T>],
            ) -> Result<(), $crate::StepError> {
                $crate::step_slices(self, step, None, slices(tensors))
            }

            /// Applies one step to every tensor on all threads of `pool`.
            ///
            #[doc = concat!("The bits are those of [`", stringify!($rule), "::step`].")]
            ///
            /// # Errors
            #[doc = concat!("As [`", stringify!($rule), "::step`].")]
            pub fn step_with<T: $crate::Compute>(
                &self,
                pool: &$crate::simd::Pool,
                step: u64,
                tensors: &mut [$tensors<'_, T>],
            ) -> Result<(), $crate::StepError> {
                $crate::step_slices(self, step, Some(pool), slices(tensors))
            }
        }

        const STATES: usize = [$(stringify!($list)),+].len();

        fn slices<'a, T>(
            tensors: &'a mut [$tensors<'_, T>],
        ) -> Vec<$crate::SliceTensor<'a, T, STATES>> {
            let slices = tensors.iter_mut().map(|tensor| $crate::SliceTensor {
                param: &mut *tensor.param,
                grad: tensor.grad,
                state: [$(&mut *tensor.$list),+],
            });
            slices.collect()
        }
    };
}
