//! Description of a run, and a copy of what a rank saves of it.

use std::ops::Range;

use fusestep_coalesce::zeroed_bytes;
use fusestep_launch::Backend;
use fusestep_tensor::{DType, Role};

use crate::error::{PlanError, Result};
use crate::plan::segments::sum_stride;
use crate::plan::settings::ZeroStage;
use crate::plan::storage::Extent;
use crate::plan::value::Plan;
use crate::run::image::borrowed::RunToSave;
use crate::run::image::counts::RunCounts;
use crate::run::image::rules::RulesImage;
use crate::run::image::value::{List, ListImage, ParamImage, PartImage, RunImage};
use crate::run::memory::lane_views;
use crate::run::memory::segment_state::Given;
use crate::run::memory::state::State;
use crate::run::memory::storage::Held;

/// Name of the texts in a safetensors file; no tensor can have that name.
const METADATA_NAME: &str = "__metadata__";

impl RunImage {
    /// Describes a run without its elements.
    ///
    /// # Errors
    /// [`PlanError::ForeignState`], [`PlanError::Poisoned`].
    pub fn describe(plan: &Plan, state: &State) -> Result<Self> {
        state.check_plan(plan)?;
        let params = (0..plan.params().len()).map(|param| param_image(plan, param));
        Ok(Self {
            topology: plan.topology(),
            tensors: plan.tensors,
            params: params.collect::<Result<_>>()?,
            counts: RunCounts::of_run(plan, state),
            rules: RulesImage::of(state),
            schedule: plan.schedule().cloned(),
            accumulation: plan.accumulation(),
            lanes: plan.lanes,
            averaging: plan.averaging(),
            averages: state.averages_ranks,
            loss_scale: state.loss_scale(),
            ..Self::default()
        })
    }

    /// [`RunImage::describe_state`] of a state that can be saved.
    ///
    /// # Errors
    /// [`PlanError::Poisoned`]; [`PlanError::Unsettled`]; [`PlanError::StepUnderWay`]; counts that
    /// no reader takes.
    pub fn describe_saved(state: &State) -> Result<Self> {
        if let Some(step) = state.poisoned {
            return Err(PlanError::Poisoned { step });
        }
        state.tables.check_settled()?;
        state.check_between_steps("saving")?;
        state.check_counts()?;
        Self::describe_state(state)
    }

    /// Describes the tensors that a state keeps for its rules, without their elements and without
    /// parameters.
    ///
    /// # Errors
    /// None but for a state that contradicts itself.
    pub fn describe_state(state: &State) -> Result<Self> {
        let params = state.params.iter().enumerate().map(|(param, desc)| {
            let roles = state.roles(&desc.name)?.into_iter().filter(|role| role.is_state());
            let list = |role| Ok(ListImage { role, dtype: state.dtype(role, &desc.name)? });
            let spec = &state.storages[state.places[param].0].spec;
            Ok(ParamImage {
                name: desc.name.clone(),
                shape: desc.shape.clone(),
                slices: Vec::new(),
                lists: roles.map(list).collect::<Result<_>>()?,
                sums: DType::F32,
                own: spec.distributed || state.averages_ranks,
                distributed: spec.distributed,
                whole: false,
            })
        });
        Ok(Self {
            tensors: state.tensors,
            params: params.collect::<Result<_>>()?,
            counts: RunCounts::of(state),
            rules: RulesImage::of(state),
            averages: state.averages_ranks,
            loss_scale: state.loss_scale(),
            ..Self::default()
        })
    }

    /// Replaces the image by one of this moment: its description, and a copy of the elements that
    /// this rank saves. Between two micro-steps only.
    ///
    /// # Errors
    /// As [`RunImage::describe`]; [`PlanError::Conflict`] between the gradients of a micro-step;
    /// [`PlanError::Checkpoint`] without memory for the copy; errors of the backend and of the
    /// caller's parameters.
    /// # Cost
    /// One copy of what this rank saves; the first one also waits for its memory.
    pub fn take(&mut self, run: RunToSave<'_>) -> Result<()> {
        check_between(run.state)?;
        let bytes = std::mem::take(&mut self.bytes);
        *self = Self { bytes, ..Self::describe(run.plan, run.state)? };
        let parts = self.list_parts(&run)?;
        for (part, source) in parts {
            let bytes = &mut self.bytes[part.place.clone()];
            match (source, run.params) {
                (Source::Held(role, held), _) => {
                    run.state.read_held(run.backend, role, part.param, &held, bytes)?;
                }
                (Source::Param, Some(params)) => params.read(part.param, bytes)?,
                (Source::Param, None) => {
                    let name = &self.params[part.param].name;
                    run.state.read(run.backend, Role::Param, name, bytes)?;
                }
                (Source::Copied(own), _) => bytes.copy_from_slice(&own),
            }
            self.parts.push(part);
        }
        Ok(())
    }

    /// Lists the parts that this rank saves, one behind the other, and makes room for them.
    fn list_parts(&mut self, run: &RunToSave<'_>) -> Result<Vec<(PartImage, Source)>> {
        let RunToSave { plan, state, .. } = *run;
        let rank = plan.topology().rank;
        let (mut parts, mut room) = (Vec::new(), Room::default());
        let mut add = |param, list: List, dtype, elements: Range<u64>, whole, source| {
            let entries = list.entries(elements);
            let place = room.for_elements(entries.end - entries.start, dtype);
            let part = PartImage { param, list, dtype, first: entries.start, whole, place };
            parts.push((part, source));
        };
        for (param, image) in self.params.iter().enumerate() {
            // Values that all ranks have alike are saved once.
            let shared = image.own || plan.saves_shared();
            for &ListImage { role, dtype } in &image.lists {
                let list = List::Role(role);
                if role == Role::Param && image.whole {
                    if rank == 0 {
                        add(param, list, dtype, 0..image.shape.numel(), true, Source::Param);
                        continue;
                    } else if !image.own {
                        continue;
                    }
                }
                if !shared {
                    continue;
                }
                for held in state.shard_places(role, param)? {
                    let elements = held.elements.clone();
                    add(param, list, dtype, elements, false, Source::Held(role, held));
                }
            }
        }
        for (param, image) in self.params.iter().enumerate() {
            for Sums { first, bytes } in sums_of(plan, state, run.backend, param)? {
                let numel = (bytes.len() / image.sums.len_bytes()) as u64;
                let source = Source::Copied(bytes);
                add(param, List::Sums, image.sums, first..first + numel, false, source);
            }
        }
        let micro_steps = state.arena.micro_steps;
        let window = state.arena.window.as_ref();
        for (param, image) in self.params.iter().enumerate() {
            let Some(lanes) = &self.counts.lanes else {
                break;
            };
            for part in (0..lanes.parts()).filter(|&part| lanes.ranks[part] == rank) {
                let slot = window.and_then(|own| own.slot_of(lanes, part, micro_steps));
                let sum = lane_views::lane_sum(state, run.backend, param, slot.unwrap_or(0))?;
                let (list, numel) = (List::Lanes(part), image.shape.numel());
                add(param, list, image.sums, 0..numel, false, Source::Copied(sum));
            }
        }
        let end = room.end;
        self.make_room(end)?;
        Ok(parts)
    }

    /// Makes room for so many bytes; the old content is lost.
    fn make_room(&mut self, len_bytes: usize) -> Result<()> {
        if let Some(more) = len_bytes.checked_sub(self.bytes.len()) {
            self.bytes.try_reserve_exact(more).map_err(|_| PlanError::Checkpoint {
                path: "checkpoint".to_owned(),
                what: "memory".to_owned(),
                expected: format!("{len_bytes} bytes beside the state"),
                found: "less; save on more ranks".to_owned(),
            })?;
            self.bytes.resize(len_bytes, 0);
        }
        Ok(())
    }
}

/// Source of the bytes of a part.
enum Source {
    /// Elements of this rank's shard.
    Held(Role, Held),
    /// A whole parameter.
    Param,
    /// Sums, which have been copied.
    Copied(Vec<u8>),
}

/// Places handed out in one memory.
#[derive(Default)]
struct Room {
    end: usize,
}

impl Room {
    /// The place of so many elements; it begins where elements of any type may lie.
    fn for_elements(&mut self, numel: u64, dtype: DType) -> Range<usize> {
        let start = self.end.next_multiple_of(8);
        self.end = start + numel as usize * dtype.len_bytes();
        start..self.end
    }
}

fn param_image(plan: &Plan, param: usize) -> Result<ParamImage> {
    let desc = &plan.params()[param];
    let kernel = plan.kernel_of(param as u32)?;
    let lists = kernel.lists().iter();
    let mut lists: Vec<ListImage> =
        lists.map(|list| ListImage { role: list.role, dtype: list.dtype }).collect();
    lists.retain(|list| list.role.is_state() || list.role == Role::Param);
    lists.sort_by_key(|list| list.role != Role::Param);
    let distributed = plan.is_distributed(param);
    Ok(ParamImage {
        name: desc.name.clone(),
        shape: desc.shape.clone(),
        slices: plan.slices.get(&param).cloned().unwrap_or_default(),
        lists,
        sums: match plan.storages[plan.places[param].0].grad_dtype() {
            DType::F16 | DType::BF16 => DType::F32,
            dtype => dtype,
        },
        own: plan.has_own(param),
        distributed,
        // At ZeRO stage 3 no rank has a whole parameter, and a parameter in slices is never whole.
        whole: plan.zero() != ZeroStage::Three && !distributed && desc.name != METADATA_NAME,
    })
}

/// Consecutive sums of a parameter's gradients.
struct Sums {
    first: u64,
    bytes: Vec<u8>,
}

/// This rank's sums of a parameter's gradients in the update to come; none between two updates.
fn sums_of(plan: &Plan, state: &State, backend: &dyn Backend, param: usize) -> Result<Vec<Sums>> {
    if plan.accumulation().is_none() || state.arena.micro_steps == 0 || plan.lanes.is_some() {
        return Ok(Vec::new());
    }
    if !plan.reduces_each() {
        return Ok(vec![Sums { first: 0, bytes: state.sums_so_far(backend, param)? }]);
    }
    if !plan.has_own(param) && !plan.saves_shared() {
        return Ok(Vec::new());
    }
    let (storage, tensor) = plan.places[param];
    let spec = &plan.storages[storage];
    let Some(sums) = &state.arena.reduced_sums[storage] else {
        return Ok(Vec::new());
    };
    let stride = sum_stride(spec.grad_dtype());
    let of_shard = spec.held_of_shard(tensor, Extent::Shard).map(|held| {
        let place = held.place(stride);
        let mut bytes = zeroed_bytes(place.len())?;
        backend.read(sums.as_ref(), place.start, &mut bytes)?;
        Ok(Sums { first: held.elements.start, bytes })
    });
    of_shard.collect()
}

/// Refuses a copy of counts that no reader takes, or between the gradients of a micro-step.
fn check_between(state: &State) -> Result<()> {
    state.check_counts()?;
    if state.arena.now.iter().all(|given| *given == Given::No) {
        return Ok(());
    }
    Err(PlanError::Conflict {
        first: "a checkpoint".to_owned(),
        second: "gradients of a micro-step under way".to_owned(),
        why: "do not go together; end the micro-step by `step` before saving",
    })
}
