//! Every rule with the settings under which tests run it, and one step of its definition.

use fusestep_adagrad::{Adagrad, reference as adagrad};
use fusestep_adamax::{Adamax, reference as adamax};
use fusestep_fused_adam::{Adam, SecondMoment, reference as adam};
use fusestep_fused_sgd::{Nesterov, Sgd, reference as sgd};
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::Lars;
use fusestep_launch::{Objective, SettingValue, WeightDecay};
use fusestep_lion::{Lion, reference as lion};
use fusestep_nadam::{NAdam, reference as nadam};
use fusestep_planner::Optimizer;
use fusestep_rmsprop::{Centering, RmsProp, reference as rmsprop};
use fusestep_schedule_free::{ScheduleFree, reference as schedule_free};
use fusestep_tensor::{ParamDesc, Role};

use crate::case::GRAD;

/// Every rule with its defaults, SGD with momentum.
pub fn each_rule() -> Vec<Optimizer> {
    let with_state = |rule| match rule {
        Optimizer::Sgd(_) => Sgd::with_momentum().into(),
        rule => rule,
    };
    Optimizer::all().into_iter().map(with_state).collect()
}

/// Every rule, with every setting that changes its arithmetic; laws run through them all. Rates are
/// large enough that bf16 parameters of a [`crate::Case`] move.
pub fn rules() -> Vec<Optimizer> {
    let mut all = element_rules();
    all.push(Lars { lr: 0.5, trust_coefficient: 0.1, eps: 1e-3, ..Lars::default() }.into());
    all.push(Lamb { lr: 0.01, ..Lamb::default() }.into());
    all
}

/// The rules among [`rules`] that update every element on its own.
pub fn element_rules() -> Vec<Optimizer> {
    let adam = Adam { lr: 1e-2, ..Adam::default() };
    let largest = Adam {
        second_moment: SecondMoment::Largest,
        weight_decay: WeightDecay::L2(0.01),
        objective: Objective::Maximize,
        ..adam
    };
    let lion =
        Lion { lr: 1e-3, weight_decay: 0.1, objective: Objective::Maximize, ..Lion::default() };
    let adagrad = Adagrad {
        lr_decay: 0.1,
        initial_sum: 1e-3,
        weight_decay: 0.01,
        objective: Objective::Maximize,
        ..Adagrad::default()
    };
    let schedule_free =
        ScheduleFree { lr: 1e-2, weight_decay: 0.1, warmup_steps: 2, ..ScheduleFree::default() };
    let mut all: Vec<Optimizer> = vec![adam.into(), largest.into(), lion.into(), adagrad.into()];
    all.push(schedule_free.into());
    let adamax = Adamax { lr: 1e-2, beta2: 0.9, weight_decay: 0.01, ..Adamax::default() };
    all.push(Adamax { objective: Objective::Maximize, ..adamax }.into());
    let nadam = NAdam { lr: 1e-2, weight_decay: WeightDecay::L2(0.01), ..NAdam::default() };
    let decoupled =
        NAdam { weight_decay: WeightDecay::Decoupled(0.1), momentum_decay: 2.0, ..nadam };
    all.push(NAdam { objective: Objective::Maximize, ..nadam }.into());
    all.push(decoupled.into());
    all.extend(sgd_rules().map(Optimizer::from));
    all.extend(rmsprop_rules().map(Optimizer::from));
    all
}

fn sgd_rules() -> [Sgd; 3] {
    let momentum = Sgd { lr: 1.0, weight_decay: WeightDecay::L2(0.01), ..Sgd::with_momentum() };
    let plain = Sgd { momentum: 0.0, rescale: 0.125, ..momentum };
    let dampened = Sgd { dampening: 0.25, weight_decay: WeightDecay::Decoupled(0.1), ..momentum };
    let nesterov = Sgd { nesterov: Nesterov::Nesterov, objective: Objective::Maximize, ..momentum };
    [plain, dampened, nesterov]
}

/// An RMSprop for each combination of state lists.
fn rmsprop_rules() -> [RmsProp; 4] {
    let plain = RmsProp { lr: 1e-3, ..RmsProp::default() };
    let centered = RmsProp { centering: Centering::Centered, ..plain };
    let with_momentum = RmsProp { momentum: 0.9, objective: Objective::Maximize, ..plain };
    let both = RmsProp { momentum: 0.5, weight_decay: 0.01, ..centered };
    [plain, centered, with_momentum, both]
}

/// Most lists of state that a rule has.
const MAX_STATE: usize = 3;

/// The state of an element in the order of its rule's lists.
pub type ElementState = [f64; MAX_STATE];

/// The parameter of one element after a step of the rule's f64 reference.
///
/// # Panics
/// If the rule takes norms of tensors.
pub fn reference_step(
    rule: &Optimizer,
    step: u64,
    param: f64,
    state: &mut ElementState,
    grad: f64,
) -> f64 {
    let [first, second, third] = *state;
    match rule {
        Optimizer::Adam(rule) => {
            let element =
                adam::Element { param, moment1: first, moment2: second, max_moment2: third };
            let new = adam::update(rule, step, element, grad);
            *state = [new.moment1, new.moment2, new.max_moment2];
            new.param
        }
        Optimizer::Sgd(rule) => {
            let velocity = first;
            let new = sgd::update(rule, step, sgd::Element { param, velocity }, grad);
            state[0] = new.velocity;
            new.param
        }
        Optimizer::Lion(rule) => {
            let new = lion::update(rule, lion::Element { param, moment1: first }, grad);
            state[0] = new.moment1;
            new.param
        }
        Optimizer::Adagrad(rule) => {
            let new = adagrad::update(rule, step, adagrad::Element { param, sum: first }, grad);
            state[0] = new.sum;
            new.param
        }
        Optimizer::NAdam(rule) => {
            let element = nadam::Element { param, moment1: first, moment2: second };
            let new = nadam::update(rule, step, element, grad);
            (state[0], state[1]) = (new.moment1, new.moment2);
            new.param
        }
        Optimizer::Adamax(rule) => {
            let element = adamax::Element { param, moment1: first, max_grad: second };
            let new = adamax::update(rule, step, element, grad);
            (state[0], state[1]) = (new.moment1, new.max_grad);
            new.param
        }
        Optimizer::RmsProp(rule) => {
            let centered = rule.centering == Centering::Centered;
            let element = rmsprop::Element {
                param,
                moment2: first,
                moment1: if centered { second } else { 0.0 },
                velocity: if centered { third } else { second },
            };
            let new = rmsprop::update(rule, element, grad);
            *state = if centered {
                [new.moment2, new.moment1, new.velocity]
            } else {
                [new.moment2, new.velocity, 0.0]
            };
            new.param
        }
        Optimizer::ScheduleFree(rule) => {
            let element = schedule_free::Element { param, moment2: first, base: second };
            let new = schedule_free::update(rule, step, element, grad);
            (state[0], state[1]) = (new.moment2, new.base);
            new.param
        }
        other => panic!("{} takes norms of tensors", other.name()),
    }
}

/// Effect of rounding on an element under a rule.
pub(crate) struct Sensitivity {
    pub(crate) state: &'static [Role],
    /// Longest distance that one step moves a parameter.
    pub(crate) update: f64,
    /// The size of a velocity, if there is one.
    pub(crate) velocity: f64,
    /// λ, if it is added to the gradient.
    pub(crate) l2: f64,
    /// Whether an update is as large as its rate even where decay nearly cancels the gradient, so
    /// that few of its digits are left. Moments then keep few digits as well.
    pub(crate) is_normalized: bool,
}

/// The effect that rounding may have on an element of this rule.
pub(crate) fn sensitivity(rule: &Optimizer) -> Sensitivity {
    let normalized =
        |state, update, l2| Sensitivity { state, update, velocity: 0.0, l2, is_normalized: true };
    match rule {
        Optimizer::Adam(rule) => {
            let state: &[Role] = match rule.second_moment {
                SecondMoment::Running => &[Role::Moment1, Role::Moment2],
                SecondMoment::Largest => &[Role::Moment1, Role::Moment2, Role::MaxMoment2],
            };
            normalized(state, rule.lr, l2_of(rule.weight_decay))
        }
        Optimizer::Sgd(rule) => Sensitivity {
            state: if rule.has_velocity() { &[Role::Velocity] } else { &[] },
            update: rule.lr * 3.0 * GRAD,
            velocity: 3.0 * GRAD,
            l2: l2_of(rule.weight_decay),
            is_normalized: false,
        },
        Optimizer::Lion(rule) => Sensitivity {
            state: &[Role::Moment1],
            update: rule.lr,
            velocity: 0.0,
            l2: 0.0,
            is_normalized: false,
        },
        Optimizer::Adagrad(rule) => normalized(&[Role::Sum], rule.lr, rule.weight_decay),
        Optimizer::NAdam(rule) => {
            let l2 = l2_of(rule.weight_decay);
            normalized(&[Role::Moment1, Role::Moment2], 2.0 * rule.lr, l2)
        }
        Optimizer::Adamax(rule) => {
            normalized(&[Role::Moment1, Role::MaxGrad], rule.lr, rule.weight_decay)
        }
        Optimizer::RmsProp(rule) => {
            let state: &[Role] = match (rule.centering, rule.has_velocity()) {
                (Centering::MeanSquare, false) => &[Role::Moment2],
                (Centering::MeanSquare, true) => &[Role::Moment2, Role::Velocity],
                (Centering::Centered, false) => &[Role::Moment2, Role::Moment1],
                (Centering::Centered, true) => &[Role::Moment2, Role::Moment1, Role::Velocity],
            };
            // The first step divides g by the root of (1 − α)·g².
            let velocity = 1.0 / (1.0 - rule.alpha).sqrt() / (1.0 - rule.momentum);
            Sensitivity { velocity, ..normalized(state, rule.lr * velocity, rule.weight_decay) }
        }
        Optimizer::ScheduleFree(rule) => normalized(&[Role::Moment2, Role::Base], rule.lr, 0.0),
        other => panic!("{} takes norms of tensors", other.name()),
    }
}

fn l2_of(weight_decay: WeightDecay) -> f64 {
    match weight_decay {
        WeightDecay::L2(lambda) => lambda,
        WeightDecay::Decoupled(_) => 0.0,
    }
}

/// The rule with the learning rate and the weight decay of one parameter.
pub(crate) fn with_own_hyper_parameters(rule: &Optimizer, param: &ParamDesc) -> Optimizer {
    let mut rule = rule.with_lr(rule.lr() * param.lr_scale);
    rule.each(&mut |setting| {
        let own = param.weight_decay.filter(|_| setting.name == "weight_decay");
        if let (SettingValue::Number(value, _), Some(own)) = (setting.value, own) {
            *value = own;
        }
    });
    rule
}

/// Distance over which rounding of f32 and of the state may take a parameter under a discontinuous
/// rule. It is the sum of the steps whose sign rounding decides.
pub(crate) fn undecided(rule: &Optimizer, param: f64, grads: &[f64], state_error: f64) -> f64 {
    let Optimizer::Lion(rule) = rule else {
        return 0.0;
    };
    let mut element = lion::Element { param, ..lion::Element::default() };
    let mut sum = 0.0;
    for &grad in grads {
        if lion::certainty(rule, element, grad) < 1e-6 + 2.0 * state_error {
            sum += 2.0 * rule.lr;
        }
        element = lion::update(rule, element, grad);
    }
    sum
}
