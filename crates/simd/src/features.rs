//! Features of x86-64 processors, whose values prove that this processor has them.

macro_rules! level {
    ($(#[$doc:meta])* $name:ident, $($feature:tt),+) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub(crate) struct $name(());

        impl $name {
            /// The level, if this processor has all of its instructions.
            pub(super) fn detect() -> Option<Self> {
                let found = $(is_x86_feature_detected!($feature))&&+;
                found.then_some(Self(()))
            }

            /// Calls `body` compiled for the level.
            #[inline(always)]
            pub(super) fn run<R>(self, body: impl FnOnce() -> R) -> R {
                #[inline]
                $(#[target_feature(enable = $feature)])+
                fn compiled<R>(body: impl FnOnce() -> R) -> R {
                    body()
                }
                // SAFETY: only `detect` makes a value of this type, where it has found every
                // feature that the function is compiled for.
                unsafe { compiled(body) }
            }
        }
    };
}

level!(
    /// The level that compilers call x86-64-v3, as far as loops gain by it.
    Avx2, "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "lzcnt"
);
level!(
    /// The level that compilers call x86-64-v4.
    Avx512, "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "lzcnt", "avx512f", "avx512bw",
    "avx512cd", "avx512dq", "avx512vl"
);
