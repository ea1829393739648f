//! Builders: a rule by its name, and settings one after the other.

use fusestep_collective::Communicator;
use fusestep_launch::{Precision, WeightDecay};
use fusestep_planner::{Initial, LossScaling, Optimizer, ReduceDType, Schedule};
use fusestep_tensor::ParamDesc;

use crate::{Device, Error, Figures, OwnRule, Session, SessionError, StepOptions};

/// An update rule as its name promises it, at one learning rate.
pub trait Kind {
    /// The rule with its settings.
    type Rule: Copy + std::fmt::Debug + Into<Optimizer>;

    /// The rule with its defaults.
    fn rule(lr: f64) -> Self::Rule;
}

/// Kinds of rules, each with its builder, its type and where its defaults differ from the type's.
macro_rules! kinds {
    ($($(#[doc = $doc:literal])* $(#[cfg($feature:meta)])? $kind:ident
        of $crate_name:ident::$rule:ident $({ $($field:ident: $value:expr),* })?;)*) => {
        /// The kinds of rules that builders have.
        pub mod kinds {
            $($(#[doc = $doc])* $(#[cfg($feature)])? #[derive(Debug)] pub struct $kind;)*
        }

        $(
            $(#[cfg($feature)])?
            impl Kind for kinds::$kind {
                type Rule = $crate_name::$rule;

                fn rule(lr: f64) -> Self::Rule {
                    Self::Rule {
                        lr,
                        $($($field: $value,)*)?
                        ..Default::default()
                    }
                }
            }

            $(#[doc = $doc])*
            $(#[cfg($feature)])?
            pub type $kind = Builder<kinds::$kind>;
        )*
    };
}

kinds! {
    /// AdamW: Adam with decoupled weight decay, 0.01 unless settings say otherwise.
    AdamW of fusestep_fused_adam::Adam;
    /// Adam without weight decay.
    Adam of fusestep_fused_adam::Adam { weight_decay: WeightDecay::L2(0.0) };
    /// Stochastic gradient descent; settings give it momentum.
    #[cfg(feature = "sgd")]
    Sgd of fusestep_fused_sgd::Sgd;
    /// Lion: the sign of a moving mean.
    #[cfg(feature = "lion")]
    Lion of fusestep_lion::Lion;
    /// Adagrad: steps scaled by the sum of squared gradients.
    #[cfg(feature = "adagrad")]
    Adagrad of fusestep_adagrad::Adagrad;
    /// RMSprop: steps scaled by a moving mean of squared gradients.
    #[cfg(feature = "rmsprop")]
    RmsProp of fusestep_rmsprop::RmsProp;
    /// Schedule-Free AdamW: an average of the iterates in place of a schedule.
    #[cfg(feature = "schedule-free")]
    ScheduleFree of fusestep_schedule_free::ScheduleFree;
    /// LARS: momentum with a rate for each layer.
    #[cfg(feature = "lars")]
    Lars of fusestep_lars_momentum::Lars;
    /// LAMB: Adam with a rate for each layer.
    #[cfg(feature = "lamb")]
    Lamb of fusestep_lamb::Lamb;
    /// Adamax: Adam scaled by the largest gradient.
    #[cfg(feature = "adamax")]
    Adamax of fusestep_adamax::Adamax;
    /// NAdam: Adam with Nesterov's momentum.
    #[cfg(feature = "nadam")]
    NAdam of fusestep_nadam::NAdam;
}

/// An update rule and what is done around it; [`Builder::build`] makes a session of it.
///
/// Values are checked when the plan is made. Settings without a method of their own are set by
/// [`Builder::options`].
#[derive(Debug)]
pub struct Builder<K: Kind> {
    rule: K::Rule,
    options: StepOptions,
    /// The first value that could not be taken; [`Builder::build`] returns it.
    refused: Option<Error>,
}

impl<K: Kind> Builder<K> {
    /// The rule with its defaults at this learning rate.
    pub fn new(lr: f64) -> Self {
        let rule = K::rule(lr);
        Self { rule, options: StepOptions::of(rule), refused: None }
    }

    /// Changes the rule's own settings: `AdamW::new(1e-3).settings(|adam| adam.beta2 = 0.95)`.
    pub fn settings(mut self, change: impl FnOnce(&mut K::Rule)) -> Self {
        change(&mut self.rule);
        self
    }

    /// Changes any setting of the step: `AdamW::new(1e-3).options(|step| step.separate = true)`.
    pub fn options(mut self, change: impl FnOnce(&mut StepOptions)) -> Self {
        change(&mut self.options);
        self
    }

    /// Scales gradients down whose norm, of all together, is larger.
    pub fn clip_norm(self, max_norm: f64) -> Self {
        self.options(|step| step.clip_norm = Some(max_norm))
    }

    /// Takes the loss scale out of gradients, and skips steps with one that is not finite.
    pub fn loss_scale(mut self, scaling: LossScaling) -> Self {
        match scaling.scale() {
            Ok(scale) => self.options.loss_scale = Some(scale),
            Err(error) => self.refused = self.refused.or(Some(error.into())),
        }
        self
    }

    /// Says what ranks share out: 1 optimizer state, 2 gradients too, 3 parameters too; 0 is
    /// nothing.
    pub fn zero(self, stage: u8) -> Self {
        self.options(|step| step.zero = stage)
    }

    /// Adds the gradients of this many micro-steps before each update.
    pub fn accumulate(self, micro_steps: u32) -> Self {
        self.options(|step| step.accumulate = micro_steps)
    }

    /// Adds gradients along a tree over this many lanes of the global batch, with the same bits at
    /// any number of ranks. [`State::micro_batch`](fusestep_planner::State::micro_batch) says which
    /// micro-batch a rank gives next.
    pub fn lanes(self, lanes: u32) -> Self {
        self.options(|step| step.lanes = Some(lanes))
    }

    /// Sets the type in which gradients are added up and travel between ranks. With
    /// [`ReduceDType::F32`] those of 16-bit parameters may be given in f32 as well.
    pub fn reduce_dtype(self, dtype: ReduceDType) -> Self {
        self.options(|step| step.reduce_dtype = dtype)
    }

    /// Sets how many MiB of gradients one call between ranks reduces at most; 25 by default.
    ///
    /// With [`Builder::update_in_backward`], this also caps the gradients that one rank updates at
    /// once.
    pub fn bucket_cap_mib(self, cap_mib: f64) -> Self {
        self.options(|step| step.bucket_cap_mib = Some(cap_mib))
    }

    /// Sets on how many streams buckets are reduced while gradients are still being given.
    ///
    /// The default is 2. It is 0 where ranks see each other's memory, since a bucket is reduced and
    /// updated in one pass there.
    pub fn comm_streams(self, streams: usize) -> Self {
        self.options(|step| step.comm_streams = Some(streams))
    }

    /// Promises that a backward pass reads no parameter of a bucket once all the bucket's gradients
    /// are given.
    ///
    /// The call that gives the last of them then reduces and updates the bucket at once.
    /// [`Session::step`] does what is left. The bits of the results stay.
    ///
    /// It cannot go with clipping, loss scaling or ZeRO stage 3. On several ranks it cannot go with
    /// LARS and LAMB either, which have to know all gradients first.
    pub fn update_in_backward(self) -> Self {
        self.options(|step| step.update_in_backward = true)
    }

    /// Chooses settings that are left open from a machine's figures, [`Figures::of_this_machine`]
    /// for example; the plan says which and why, and ranks take the choice of rank 0. The bits
    /// stay.
    pub fn figures(self, figures: Figures) -> Self {
        self.options(|step| step.figures = Some(figures))
    }

    /// Averages parameters every this many steps in place of gradients every step.
    pub fn local_sgd(self, every: u64) -> Self {
        self.options(|step| step.local_sgd = Some(every))
    }

    /// Names parameters of which every rank has a slice of its own: those of a layer that is split
    /// over the ranks. Their gradients are not reduced and their values not brought from rank 0;
    /// norms are those of the tensors that the slices make up ([`fusestep_planner::Distributed`]).
    /// Slices may be of any lengths, which ranks tell each other in [`Joined::build`].
    pub fn distributed(self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.options(|step| step.distributed.extend(names.into_iter().map(Into::into)))
    }

    /// Says whose first values ranks train; those of rank 0 by default. Ranks meet in their first
    /// common call that gives a gradient, steps, gathers or saves: values of rank 0 come then.
    pub fn initial(self, initial: Initial) -> Self {
        self.options(|step| step.initial = initial)
    }

    /// Says how exactly parameters and state are kept.
    pub fn precision(self, precision: Precision) -> Self {
        self.options(|step| step.precision = precision)
    }

    /// Gives some parameters a rule of their own.
    pub fn group(
        self,
        names: impl IntoIterator<Item = impl Into<String>>,
        rule: impl Into<Optimizer>,
    ) -> Self {
        self.options(|step| step.groups.push(OwnRule::of(names, rule)))
    }

    /// Multiplies the learning rate, each group's own, by the schedule's factor at every update:
    /// `.schedule(Schedule::warmup(100).then(Schedule::cosine(900)))`. The factor follows from the
    /// step count, so that a run that is resumed goes on in the middle of it.
    pub fn schedule(self, schedule: impl Into<Schedule>) -> Self {
        let schedule = schedule.into();
        self.options(|step| step.schedule = Some(schedule))
    }

    /// These settings as one rank of `comm`.
    pub fn on(self, comm: &mut dyn Communicator) -> Joined<'_, K> {
        Joined { builder: self, comm }
    }

    /// The session of a process that trains alone. Parameters are zero until
    /// [`Session::set_param`].
    ///
    /// # Errors
    /// As [`Session::new`]; each names what is wrong.
    pub fn build(
        self,
        params: &[ParamDesc],
        device: impl Device + 'static,
    ) -> Result<Session<'static>, Error> {
        let options = self.checked()?;
        Session::new(&options, params, Box::new(device)).map_err(SessionError::into_inner)
    }

    /// The settings with the rule.
    fn checked(self) -> Result<StepOptions, Error> {
        if let Some(refused) = self.refused {
            return Err(refused);
        }
        if let Some(threads) = self.options.threads {
            let told = "expected none, since the device brings its own, found";
            return Err(format!("threads: {told} {threads}; use `Cpu::with_threads`").into());
        }
        Ok(StepOptions { rule: self.rule.into(), ..self.options })
    }
}

/// A [`Builder`] with the communicator of one rank.
pub struct Joined<'c, K: Kind> {
    builder: Builder<K>,
    comm: &'c mut dyn Communicator,
}

impl<K: Kind + std::fmt::Debug> std::fmt::Debug for Joined<'_, K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Joined")
            .field("builder", &self.builder)
            .field("rank", &self.comm.rank())
            .finish_non_exhaustive()
    }
}

impl<'c, K: Kind> Joined<'c, K> {
    /// The session of this rank; all ranks call it together.
    ///
    /// # Errors
    /// As [`Session::on`]; each names what is wrong.
    pub fn build(
        self,
        params: &[ParamDesc],
        device: impl Device + 'static,
    ) -> Result<Session<'c>, Error> {
        let options = self.builder.checked()?;
        let made = Session::on(&options, params, Box::new(device), self.comm);
        made.map_err(SessionError::into_inner)
    }
}
