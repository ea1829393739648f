//! The entry of a rule for plain slices with state of 8 bits.

/// Makes the entry of a rule for plain slices with coded state: the struct with the lists of one
/// parameter, and `step_coded` and `step_coded_with` of the rule. The last attributes are the
/// documentation of `step_coded` before its headings.
#[macro_export]
macro_rules! coded_slices {
    (
        $(#[$meta:meta])*
        pub struct $tensors:ident of $rule:ident {
            $($(#[$list_meta:meta])+ $list:ident,)+
        }
        $(#[$step_meta:meta])+
        step_coded
    ) => {
        $(#[$meta])*
        #[derive(Debug)]
        pub struct $tensors<'a> {
            /// p and g, by how p is kept.
            pub param: $crate::coded::ParamSlices<'a>,
            $($(#[$list_meta])+ pub $list: $crate::coded::CodedState<'a>,)+
        }

        impl $rule {
            /// Applies one step to every tensor, in the calling thread, with state of 8 bits.
            ///
            $(#[$step_meta])+
            ///
            /// # Shapes
            /// A tensor has the same numel in all lists, and a unit for each 32 elements, rounded
            /// up; 0 is allowed.
            /// # Units
            /// `step` (t) counts from 1. `lr` and λ are per step.
            /// # Errors
            /// [`StepError`] naming the list, the tensor and both counts; everything is checked
            /// before anything is written. Any code and any unit is read.
            ///
            /// [`StepError`]: fusestep_elementwise::StepError
            pub fn step_coded(
                &self,
                step: u64,
                tensors: &mut [$tensors<'_>],
            ) -> Result<(), $crate::StepError> {
                $crate::coded::step_coded_slices(self, step, None, NAMES, slices(tensors))
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
            ) -> Result<(), $crate::StepError> {
                $crate::coded::step_coded_slices(self, step, Some(pool), NAMES, slices(tensors))
            }
        }

        const NAMES: [&str; [$(stringify!($list)),+].len()] = [$(stringify!($list)),+];

        fn slices<'a>(
            tensors: &'a mut [$tensors<'_>],
        ) -> Vec<$crate::coded::CodedTensor<'a, { NAMES.len() }>> {
            let slices = tensors.iter_mut().map(|tensor| $crate::coded::CodedTensor {
                param: tensor.param.reborrow(),
                state: [$(tensor.$list.reborrow()),+],
            });
            slices.collect()
        }
    };
}
