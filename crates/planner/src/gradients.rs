//! How gradients come: given by the backward pass, added over micro-steps, completed before an
//! update.
//!
//! ```text
//! push_grad, grad_mut ─► segment ─► Reduce, in place ─► Norm, Optimize read it there
//! ```

use fusestep_launch::Backend;
use fusestep_tensor::Role;

use crate::absorb::{Absorb, Divisor};
use crate::arena::{Given, keeps_segments};
use crate::comms::Comms;
use crate::in_backward::update_ready;
use crate::passes::Accumulated;
use crate::tensors::check_len;
use crate::{Plan, PlanError, Stage, State};

impl Plan {
    /// Takes the gradient of one parameter for the micro-step under way, in one pass that copies or
    /// adds it into the arena, and starts reducing every segment that is full, if `comms` has
    /// communication streams.
    ///
    /// A parameter whose gradient is not given before the step is run counts as zero if another
    /// rank, or another micro-step, has given it, else it is left out of the step.
    ///
    /// # Errors
    /// [`PlanError::UnknownName`], [`PlanError::LenBytes`], [`PlanError::GradientTwice`],
    /// [`PlanError::ForeignState`]; [`PlanError::Collective`], and the state refuses further
    /// steps then.
    pub fn push_grad(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        name: &str,
        bytes: &[u8],
    ) -> Result<(), PlanError> {
        self.check_state(state)?;
        let param = state.find(name)?;
        let (storage, _) = state.places[param];
        let dtype = self.storages[storage].grad_dtype();
        let len_bytes = self.params[param].numel() as usize * dtype.len_bytes();
        check_len(Role::Grad, name, len_bytes, bytes.len())?;
        if state.arena.now[param] != Given::No {
            return Err(PlanError::GradientTwice {
                name: name.to_owned(),
            });
        }
        let how = self.how_to_absorb(state, param);
        state.absorb(self, backend, param, Some(bytes), how)?;
        state.arena.now[param] = Given::Pushed;
        state.arena.given[param] += 1;
        self.start_full(state, backend, comms, param)
    }

    /// Says that the gradient of one parameter is whole where its view lies ([`State::grad_mut`],
    /// [`State::grad_on_device`]):
    /// nothing is copied, and every segment that is full starts to be reduced, if `comms` has
    /// communication streams. The view may be written again once the step has been run. With
    /// several micro-steps to an update it counts as given, and is added when the micro-step ends.
    ///
    /// # Errors
    /// As [`Plan::push_grad`]; [`PlanError::NotOnHost`].
    pub fn give_view(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        name: &str,
    ) -> Result<(), PlanError> {
        self.check_state(state)?;
        let param = state.find(name)?;
        if !state.arena.on_host && state.arena.now[param] == Given::Viewed {
            state.take_view_back(backend, param)?;
        } else if state.grad_view(param)?.is_none() {
            return Err(state.not_on_host(Role::Grad, name));
        }
        if self.micro_steps() > 1 {
            return Ok(());
        }
        state.arena.now[param] = Given::Pushed;
        state.arena.given[param] += 1;
        self.start_full(state, backend, comms, param)
    }

    /// Counts a parameter's gradient in its segment and starts every segment that is full, or
    /// updates it if the plan does so in backward.
    fn start_full(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        comms: &mut Comms<'_>,
        param: usize,
    ) -> Result<(), PlanError> {
        let segment = state.arena.regions[param].segment;
        if let Some(segment) = segment.filter(|_| self.params[param].numel() > 0) {
            state.arena.ready.given(segment);
        }
        let last = state.arena.micro_steps + 1 == self.micro_steps();
        if self.in_backward {
            let done = if last && self.params[param].numel() > 0 {
                update_ready(self, state, backend, comms, param)
            } else {
                Ok(())
            };
            if done.is_err() {
                self.poison(state);
            }
            return done;
        }
        let at_once = self.reduces_when_full(comms);
        let early = state.arena.starts_early && comms.has_streams() || at_once;
        if early && (last || self.reduces_each()) {
            self.take_reduced(state, backend)?;
            while let Some(segment) = state.arena.ready.full() {
                self.start_segment(state, backend, comms, segment)?;
            }
            if at_once {
                self.take_reduced(state, backend)?;
            }
        }
        Ok(())
    }

    /// Whether giving gradients makes calls at once and waits for the other ranks: where updates
    /// run in backward, and where `comms` reduces segments when they are full. From the first
    /// gradient of a micro-step until [`Plan::step`] ranks make no other calls then.
    pub fn calls_while_given(&self, comms: &Comms<'_>) -> bool {
        self.in_backward || self.reduces_when_full(comms)
    }

    /// Whether whoever gives a segment's last gradient reduces it, and no more.
    pub(crate) fn reduces_when_full(&self, comms: &Comms<'_>) -> bool {
        let reduces = |stage: &Stage| matches!(stage, Stage::Reduce(_));
        let asked = comms.reduces_when_full() && !self.in_backward;
        asked && !keeps_segments(self) && self.stages.iter().any(reduces)
    }

    /// What a gradient of the micro-step under way does to the sums.
    pub(crate) fn how_to_absorb(&self, state: &State, param: usize) -> Absorb {
        let arena = &state.arena;
        if self.micro_steps() == 1 || self.reduces_each() {
            return Absorb {
                first: true,
                weight: None,
                last: (self.micro_steps() == 1).then_some(Divisor(1.0)),
            };
        }
        let last = arena.micro_steps + 1 == self.micro_steps();
        let weight = arena.weight.unwrap_or(1.0);
        Absorb {
            first: arena.given[param] == 0,
            weight: arena.weight,
            last: last.then(|| self.divisor(state, weight)),
        }
    }

    /// What the sum over micro-steps is divided by, with the weight of the micro-step under way.
    pub(crate) fn divisor(&self, state: &State, weight: f64) -> Divisor {
        match self.accumulation().map(|rule| rule.accumulated) {
            Some(Accumulated::Mean) => Divisor(state.arena.weights + weight),
            Some(Accumulated::Sum) | None => Divisor(1.0),
        }
    }

    /// Finishes gradients that were not pushed in the last micro-step: adds those that were written
    /// through views, divides what earlier micro-steps have added, and writes zeros where there
    /// is nothing.
    pub(crate) fn complete_gradients(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        divisor: Divisor,
    ) -> Result<(), PlanError> {
        let sums = self.micro_steps() > 1 && !self.reduces_each();
        for param in 0..self.params.len() {
            match state.arena.now[param] {
                Given::Pushed => continue,
                Given::Viewed => {
                    state.take_view_back(backend, param)?;
                    let how = Absorb {
                        last: Some(divisor),
                        ..self.how_to_absorb(state, param)
                    };
                    if sums {
                        state.absorb_view(self, backend, param, how)?;
                    }
                    state.arena.given[param] += 1;
                }
                Given::No if sums && state.arena.given[param] > 0 => {
                    let how = Absorb {
                        first: false,
                        weight: None,
                        last: Some(divisor),
                    };
                    state.absorb(self, backend, param, None, how)?;
                }
                // What nobody has given is left out; what other ranks or micro-steps have is zero
                // here.
                Given::No if self.reduces() || self.reduces_each() => {
                    state.write_zeros(self, backend, param)?
                }
                Given::No => {}
            }
        }
        Ok(())
    }

    /// Ends a micro-step that is not the last: what was written through views is added.
    pub(crate) fn add_views(
        &self,
        state: &mut State,
        backend: &dyn Backend,
    ) -> Result<(), PlanError> {
        for param in 0..self.params.len() {
            if state.arena.now[param] == Given::Viewed {
                state.take_view_back(backend, param)?;
                let how = self.how_to_absorb(state, param);
                if !self.reduces_each() {
                    state.absorb_view(self, backend, param, how)?;
                }
                state.arena.given[param] += 1;
            }
        }
        Ok(())
    }
}
impl State {
    /// Weighs the gradients of the micro-step under way, before the first of them is given: the
    /// number of its samples, if updates are means of micro-steps of unequal length.
    pub fn set_weight(&mut self, weight: f64) -> Result<(), PlanError> {
        if weight.is_finite() && weight > 0.0 {
            self.arena.weight = Some(weight);
            return Ok(());
        }
        Err(PlanError::Weight { found: weight })
    }

    /// Micro-steps since the last update that are over.
    pub fn micro_steps(&self) -> u32 {
        self.arena.micro_steps
    }

    /// Segments of gradients whose reduction has been started: with communication streams, while
    /// gradients are still being given.
    pub fn segments_started(&self) -> usize {
        self.arena.ready.started()
    }
}
