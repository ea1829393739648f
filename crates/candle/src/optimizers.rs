//! Optimizers by their names, each with its hyper-parameters.

use candle_nn::ParamsAdamW;
use fusestep_planner::Optimizer as Rule;

use crate::fused::Fused;
use crate::params::Params;

/// AdamW: a drop-in for [`candle_nn::AdamW`].
pub type AdamW = Fused<ParamsAdamW>;

/// Any rule of the planner, chosen as the program runs.
pub type AnyRule = Fused<Rule>;

/// Optimizers of rules, each with its hyper-parameters, which are those of the rule's crate.
macro_rules! optimizers {
    ($($(#[$doc:meta])* $rule:ident, $params:ident of $module:ident;)*) => {$(
        pub use fusestep::$module::$rule as $params;

        $(#[$doc])*
        pub type $rule = Fused<$params>;

        impl Params for $params {
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
    Sgd, ParamsSgd of fused_sgd;
    /// Lion.
    Lion, ParamsLion of lion;
    /// Adagrad.
    Adagrad, ParamsAdagrad of adagrad;
    /// RMSprop.
    RmsProp, ParamsRmsProp of rmsprop;
    /// Schedule-Free AdamW.
    ScheduleFree, ParamsScheduleFree of schedule_free;
    /// LARS: momentum with a rate for each layer.
    Lars, ParamsLars of lars_momentum;
    /// LAMB: Adam with a rate for each layer.
    Lamb, ParamsLamb of lamb;
    /// Adamax.
    Adamax, ParamsAdamax of adamax;
    /// NAdam.
    NAdam, ParamsNAdam of nadam;
}
