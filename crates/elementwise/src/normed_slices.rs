//! The entry of a rule with norms for plain slices.

/// Makes the entry of a rule with norms for plain slices: the struct with the tensors of one
/// parameter and its own hyper-parameters, and `step` and `step_with` of the rule.
///
/// The last attributes are the documentation of `step` before its headings. `step(step)` takes the
/// number of the step, `step()` is for a rule whose steps are all alike.
#[macro_export]
macro_rules! normed_slices {
    (
        pub struct $tensors:ident of $rule:ident {
            $($(#[$list_meta:meta])+ $list:ident,)+
        }
        $(#[$step_meta:meta])+
        step($($step:ident)?)
    ) => {
        /// Tensors of one parameter, and its own hyper-parameters. All slices have the same numel;
        /// 0 is allowed.
        #[derive(Debug)]
        pub struct $tensors<'a, T> {
            /// p, updated in place.
            pub param: &'a mut [T],
            /// g, only read.
            pub grad: &'a [T],
            $($(#[$list_meta])+ pub $list: &'a mut [T],)+
            /// Factor on the learning rate; usually 1.
            pub lr_scale: f64,
            #[doc = concat!("λ of this tensor; `None` takes that of [`", stringify!($rule), "`].")]
            pub weight_decay: Option<f64>,
            /// Whether the trust ratio scales the rate.
            ///
            #[doc = concat!("`None` leaves the choice to [`", stringify!($rule), "::excluded`].")]
            pub trust: Option<$crate::tensor::Trust>,
        }

        impl<'a, T> $tensors<'a, T> {
            /// Tensors with the optimizer's own hyper-parameters.
            pub fn new(param: &'a mut [T], grad: &'a [T], $($list: &'a mut [T]),+) -> Self {
                Self { param, grad, $($list,)+ lr_scale: 1.0, weight_decay: None, trust: None }
            }
        }

        impl $rule {
            /// Applies one step to every tensor, in the calling thread. Returns the positions of
            /// tensors that stay as they are because a norm or the rate is not finite.
            ///
            $(#[$step_meta])+
            ///
            /// # Shapes
            /// A tensor has the same numel in all lists; 0 is allowed.
            /// # Units
            $(#[doc = concat!("`", stringify!($step), "` (t) counts from 1.")])?
            /// `lr` and λ are per step.
            /// # Errors
            /// [`StepError`] naming the list, the tensor and both counts, or a hyper-parameter out
            /// of range; everything is checked before anything is written.
            ///
            /// [`StepError`]: fusestep_elementwise::StepError
            pub fn step<T: $crate::Compute>(
                &self,
                $($step: u64,)?
                tensors: &mut [$tensors<'_, T>],
            ) -> Result<Vec<usize>, $crate::StepError> {
                // Where steps are alike, each is taken as the first.
                let step = [$($step,)? 1][0];
                $crate::step_normed_slices(self, step, None, slices(tensors))
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
                $($step: u64,)?
                tensors: &mut [$tensors<'_, T>],
            ) -> Result<Vec<usize>, $crate::StepError> {
                let step = [$($step,)? 1][0];
                $crate::step_normed_slices(self, step, Some(pool), slices(tensors))
            }
        }

        const STATES: usize = [$(stringify!($list)),+].len();

        fn slices<'a, T>(
            tensors: &'a mut [$tensors<'_, T>],
        ) -> Vec<($crate::SliceTensor<'a, T, STATES>, $crate::OwnHyper)> {
            let slices = tensors.iter_mut().map(|tensor| {
                let own = $crate::OwnHyper {
                    lr_scale: tensor.lr_scale,
                    weight_decay: tensor.weight_decay,
                    trust: tensor.trust,
                };
                let slices = $crate::SliceTensor {
                    param: &mut *tensor.param,
                    grad: tensor.grad,
                    state: [$(&mut *tensor.$list),+],
                };
                (slices, own)
            });
            slices.collect()
        }
    };
}
