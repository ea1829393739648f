//! The entry of a rule with norms for plain slices with state of 8 bits.

/// Makes the entry of a rule with norms for plain slices with coded state: the struct with the
/// lists of one parameter and its own hyper-parameters, and `step_coded` and `step_coded_with` of
/// the rule. The last attributes are the documentation of `step_coded` before its headings.
#[macro_export]
macro_rules! coded_normed_slices {
    (
        pub struct $tensors:ident of $rule:ident {
            $($(#[$list_meta:meta])+ $list:ident,)+
        }
        $(#[$step_meta:meta])+
        step_coded
    ) => {
        /// Lists of one parameter with state of 8 bits, and its own hyper-parameters. All lists
        /// have the same numel; 0 is allowed.
        #[derive(Debug)]
        pub struct $tensors<'a> {
            /// p and g, by how p is kept.
            pub param: $crate::coded::ParamSlices<'a>,
            $($(#[$list_meta])+ pub $list: $crate::coded::CodedState<'a>,)+
            /// Factor on the learning rate; usually 1.
            pub lr_scale: f64,
            #[doc = concat!("λ of this tensor; `None` takes that of [`", stringify!($rule), "`].")]
            pub weight_decay: Option<f64>,
            /// Whether the trust ratio scales the rate.
            ///
            #[doc = concat!("`None` leaves the choice to [`", stringify!($rule), "::excluded`].")]
            pub trust: Option<$crate::tensor::Trust>,
        }

        impl<'a> $tensors<'a> {
            /// Tensors with the optimizer's own hyper-parameters.
            pub fn new(
                param: $crate::coded::ParamSlices<'a>,
                $($list: $crate::coded::CodedState<'a>),+
            ) -> Self {
                Self { param, $($list,)+ lr_scale: 1.0, weight_decay: None, trust: None }
            }
        }

        impl $rule {
            /// Applies one step to every tensor, in the calling thread, with state of 8 bits.
            /// Returns the positions of tensors that stay as they are because a norm or the rate is
            /// not finite.
            ///
            $(#[$step_meta])+
            ///
            /// # Shapes
            /// A tensor has the same numel in all lists, and a unit for each 32 elements, rounded
            /// up; 0 is allowed.
            /// # Units
            /// `step` (t) counts from 1. `lr` and λ are per step.
            /// # Errors
            /// [`StepError`] naming the list, the tensor and both counts, or a hyper-parameter out
            /// of range; everything is checked before anything is written. Any code and any unit is
            /// read.
            ///
            /// [`StepError`]: fusestep_elementwise::StepError
            pub fn step_coded(
                &self,
                step: u64,
                tensors: &mut [$tensors<'_>],
            ) -> Result<Vec<usize>, $crate::StepError> {
                $crate::coded::step_coded_normed_slices(self, step, None, NAMES, slices(tensors))
            }

            /// Applies one step to every tensor on all threads of `pool`.
            ///
            #[doc = concat!("The bits are those of [`", stringify!($rule), "::step_coded`].")]
            ///
            /// # Errors
            #[doc = concat!("As [`", stringify!($rule), "::step_coded`].")]
            pub fn step_coded_with(
                &self,
                pool: &$crate::simd::Pool,
                step: u64,
                tensors: &mut [$tensors<'_>],
            ) -> Result<Vec<usize>, $crate::StepError> {
                let slices = slices(tensors);
                $crate::coded::step_coded_normed_slices(self, step, Some(pool), NAMES, slices)
            }
        }

        const NAMES: [&str; [$(stringify!($list)),+].len()] = [$(stringify!($list)),+];

        fn slices<'a>(
            tensors: &'a mut [$tensors<'_>],
        ) -> Vec<$crate::coded::NormedCodedTensor<'a, { NAMES.len() }>> {
            let slices = tensors.iter_mut().map(|tensor| $crate::coded::NormedCodedTensor {
                slices: $crate::coded::CodedTensor {
                    param: tensor.param.reborrow(),
                    state: [$(tensor.$list.reborrow()),+],
                },
                own: $crate::OwnHyper {
                    lr_scale: tensor.lr_scale,
                    weight_decay: tensor.weight_decay,
                    trust: tensor.trust,
                },
            });
            slices.collect()
        }
    };
}
