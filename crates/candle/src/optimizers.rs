//! Optimizers by their names, each with its hyper-parameters.

use candle_nn::ParamsAdamW;
use fusestep_planner::Optimizer as Rule;

use crate::fused::Fused;

/// AdamW: a drop-in for [`candle_nn::AdamW`].
pub type AdamW = Fused<'static, ParamsAdamW>;

/// Any rule of the planner, chosen as the program runs.
pub type AnyRule = Fused<'static, Rule>;

/// The optimizer of one rank of many, by its name in versions before 0.3.
pub type Ranked<'c, P> = Fused<'c, P>;

/// Optimizers of rules, each with its hyper-parameters, which are those of the rule's crate.
macro_rules! optimizers {
    ($(
        $(#[doc = $doc:literal])* #[cfg($feature:meta)] $rule:ident, $params:ident of $module:ident;
    )*) => {$(
        #[cfg($feature)]
        pub use fusestep::$module::$rule as $params;

        $(#[doc = $doc])*
        #[cfg($feature)]
        pub type $rule = Fused<'static, $params>;

        #[cfg($feature)]
        impl crate::params::Params for $params {
            fn rule(&self) -> Rule {
                Rule::$rule(*self)
            }

            fn set_lr(&mut self, lr: f64) {
                self.lr = lr;
            }
        }
    )*};
}

optimizers! {
    /// SGD, with momentum, Nesterov, dampening and decay where [`candle_nn::SGD`] has a learning
    /// rate.
    #[cfg(feature = "sgd")]
    Sgd, ParamsSgd of fused_sgd;
    /// Lion.
    #[cfg(feature = "lion")]
    Lion, ParamsLion of lion;
    /// Adagrad.
    #[cfg(feature = "adagrad")]
    Adagrad, ParamsAdagrad of adagrad;
    /// RMSprop.
    #[cfg(feature = "rmsprop")]
    RmsProp, ParamsRmsProp of rmsprop;
    /// Schedule-Free AdamW.
    #[cfg(feature = "schedule-free")]
    ScheduleFree, ParamsScheduleFree of schedule_free;
    /// LARS: momentum with a rate for each layer.
    #[cfg(feature = "lars")]
    Lars, ParamsLars of lars_momentum;
    /// LAMB: Adam with a rate for each layer.
    #[cfg(feature = "lamb")]
    Lamb, ParamsLamb of lamb;
    /// Adamax.
    #[cfg(feature = "adamax")]
    Adamax, ParamsAdamax of adamax;
    /// NAdam.
    #[cfg(feature = "nadam")]
    NAdam, ParamsNAdam of nadam;
}
