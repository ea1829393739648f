//! Settings that nobody has given, chosen from a machine's figures and cores.

use std::fmt::Display;

use fusestep_collective::{CollectiveError, Collectives, Communicator};
use fusestep_launch::LaunchLimits;
use fusestep_planner::{
    CostModel, EventKind, FuseAllReduce, Note, Plan, PlanError, Planner, Reach, TableKind,
    Topology, Verdict,
};
use fusestep_tensor::{ParamDesc, counted};
use serde::{Deserialize, Serialize};

use super::{OptionError, Row, StepOptions, Visit};
use crate::WorldFigures;

/// The pass in whose name notes say what was chosen.
const PASS: &str = "figures";

/// The setting that follows from cores, in whose name notes say so.
const STREAMS: &str = "comm_streams";

/// Share of a step that other buckets have to save.
const LEAST_SAVING: f64 = 0.01;

/// Share of a step that another way to reduce and update has to save. It moves other bytes by
/// other figures, whose errors do not cancel as those of two caps do.
const LEAST_SAVING_OF_WAYS: f64 = 0.2;

/// Share of a step that sums in another order may differ by.
const ROUNDING: f64 = 1e-6;

/// Bytes of a MiB.
const MIB: f64 = 1_048_576.0;

/// MiB of a bucket by default.
const USUAL_CAP_MIB: f64 = FuseAllReduce::DEFAULT_CAP_BYTES as f64 / MIB;

/// Fewest MiB of a bucket that are chosen.
const LEAST_CAP_MIB: f64 = 0.25;

/// Most MiB of a bucket that are chosen.
const MOST_CAP_MIB: f64 = 100.0;

/// Most bytes that rank 0 tells other ranks of its choice.
const MOST_TOLD_BYTES: usize = 1 << 20;

/// Settings as they were given, with those that figures have decided.
#[derive(Clone, Debug)]
pub struct Chosen {
    /// All settings, without figures: there is nothing left to choose.
    pub options: StepOptions,
    /// Choices and their reasons, with which the plan begins its notes.
    pub notes: Vec<Note>,
}

/// Choices that all ranks take.
#[derive(Default, Serialize, Deserialize)]
struct Choices {
    /// Names and texts of settings.
    settings: Vec<(String, String)>,
    notes: Vec<Note>,
}

impl Chosen {
    /// Adds the reason of a choice that the settings do not hold, if there is one.
    pub fn note(&mut self, reason: Option<String>) {
        self.notes.extend(reason.map(|reason| note(Verdict::Applied, reason)));
    }

    /// The planner of these settings, whose plans say what was chosen and why.
    ///
    /// # Errors
    /// As [`StepOptions::planner`].
    pub fn planner(
        &self,
        params: &[ParamDesc],
        topology: Topology,
        limits: LaunchLimits,
    ) -> Result<Planner, OptionError> {
        let planner = self.options.planner(params, topology, limits)?;
        Ok(self.notes.iter().cloned().fold(planner, Planner::note))
    }
}

impl StepOptions {
    /// These settings with those chosen that were not given, by the cost model,
    /// [`StepOptions::figures`] and [`StepOptions::rank_cores`]. The same figures and cores choose
    /// the same; the step's bits stay as they are.
    ///
    /// # Errors
    /// As [`StepOptions::check`].
    /// # Cost
    /// Eight plans at most.
    pub fn chosen(
        &self,
        params: &[ParamDesc],
        topology: Topology,
        limits: LaunchLimits,
    ) -> Result<Chosen, OptionError> {
        self.taking(self.choices(params, topology, limits)?)
    }

    /// Settings of ranks, chosen as by [`StepOptions::chosen`]: the choice of rank 0 is that of
    /// all. A setting that was given stays on each rank; all ranks call it together.
    ///
    /// # Errors
    /// Calls that fail. Settings out of range stay as they are, for the planner to refuse.
    pub fn agreed(
        &self,
        params: &[ParamDesc],
        limits: LaunchLimits,
        comm: &mut dyn Communicator,
    ) -> Result<Chosen, PlanError> {
        let topology = Topology::of(comm);
        // Settings that rank 0 refuses are refused below, on each rank in its own words.
        let own = match topology.rank {
            0 => self.choices(params, topology, limits).unwrap_or_default(),
            _ => Choices::default(),
        };
        let told = tell(&own, comm)?;
        let unchosen = || Chosen { options: self.without_choices(), notes: Vec::new() };
        Ok(self.taking(told).unwrap_or_else(|_| unchosen()))
    }

    /// The place of tables on a backend of these limits, which has one to choose or none.
    pub(super) fn table_kind(&self, limits: LaunchLimits) -> TableKind {
        match self.tables {
            TableKind::Auto if !limits.keeps_tables => TableKind::Arguments,
            asked => asked,
        }
    }

    /// The way to reduce and update in words, where it is another than that of `base`.
    fn told_way(&self, topology: Topology, base: &Self) -> Option<String> {
        let [own, usual] = [self, base].map(|options| options.streams(topology));
        if own != usual {
            let streams = counted(own as u64, "communication stream");
            return Some(format!("{streams} in place of {usual}"));
        }
        let is_apart = self.separate && !base.separate;
        is_apart.then(|| "reduction, update and gather stay apart".to_owned())
    }

    /// The choices of this rank.
    fn choices(
        &self,
        params: &[ParamDesc],
        topology: Topology,
        limits: LaunchLimits,
    ) -> Result<Choices, OptionError> {
        self.check(topology.world)?;
        let is_open = topology.world > 1 && !self.naive && self.leaves_ways_open();
        let Some(cores) = self.rank_cores.filter(|_| is_open) else {
            return self.choices_by_figures(params, topology, limits);
        };
        let (streams, why) = match self.comm_streams {
            // Given here, and told to ranks that it was not given to.
            Some(given) => (given, None),
            None => {
                let (streams, why) = cores.streams(topology);
                (streams, Some(Note { pass: STREAMS.to_owned(), ..note(Verdict::Applied, why) }))
            }
        };
        let with = Self { comm_streams: Some(streams), ..self.clone() };
        let Choices { mut settings, mut notes } =
            with.choices_by_figures(params, topology, limits)?;
        settings.push((STREAMS.to_owned(), streams.to_string()));
        notes.extend(why);
        Ok(Choices { settings, notes })
    }

    /// The choices of this rank by figures alone.
    fn choices_by_figures(
        &self,
        params: &[ParamDesc],
        topology: Topology,
        limits: LaunchLimits,
    ) -> Result<Choices, OptionError> {
        let Some(figures) = &self.figures else {
            return Ok(Choices::default());
        };
        if topology.world == 1 || self.naive {
            return Ok(Choices::default());
        }
        let Some(world) = figures.world(topology) else {
            let ranks = match topology.reach {
                Reach::SharedMemory => "ranks that share memory",
                Reach::Calls => "ranks that reach each other by calls",
            };
            let other = match topology.reach {
                Reach::SharedMemory => Reach::Calls,
                Reach::Calls => Reach::SharedMemory,
            };
            let known = figures.world(Topology { reach: other, ..topology });
            let other = known.map_or_else(String::new, |known| {
                format!(
                    ", only those of engine {0}, for `fusestep plan --engine {0}`",
                    known.engine
                )
            });
            let reason = format!(
                "no figures of {ranks} are known{other}; `fusestep check --engine` measures them \
                 where such ranks run"
            );
            let note = note(Verdict::Skipped, reason);
            return Ok(Choices { settings: Vec::new(), notes: vec![note] });
        };
        let whole = |param: &&ParamDesc| !self.distributed.contains(&param.name);
        let judge = Judge {
            params: params.iter().filter(whole).cloned().collect(),
            topology,
            limits,
            model: world.model(),
            backward: figures.backward_seconds,
        };
        let base = Self { figures: None, distributed: Vec::new(), ..self.clone() };
        let Some(taken) = judge.choose(&base, &source(world)) else {
            return Ok(Choices::default());
        };
        Ok(Choices { settings: base.differences(&taken.options)?, notes: taken.notes })
    }

    /// These settings, of which none is chosen any more.
    fn without_choices(&self) -> Self {
        Self { figures: None, rank_cores: None, ..self.clone() }
    }

    /// The choices as settings.
    fn taking(&self, choices: Choices) -> Result<Chosen, OptionError> {
        let mut options = self.without_choices();
        let usual = Self::of(self.rule);
        let Choices { settings, notes } = choices;
        for (name, text) in settings {
            // A setting that this rank was given stays.
            let mut set = Unset { name: &name, text: &text, usual: usual.value_of(&name)? };
            options.each(&mut set)?;
        }
        Ok(Chosen { options, notes })
    }
}

/// A note on a choice.
fn note(verdict: Verdict, reason: String) -> Note {
    Note { pass: PASS.to_owned(), verdict, reason }
}

/// Origin of figures, as part of a sentence.
fn source(world: &WorldFigures) -> String {
    format!(
        "figures of {}, engine {}, measured {} by `fusestep check`",
        counted(world.ranks as u64, "rank"),
        world.engine,
        world.measured
    )
}

/// Brings the choices of rank 0 to all ranks.
fn tell(own: &Choices, comm: &mut dyn Communicator) -> Result<Choices, PlanError> {
    let text = serde_json::to_vec(own).unwrap_or_default();
    let mut len = [text.len() as i64];
    comm.broadcast(&mut len, 0)?;
    let rank = comm.rank();
    let refused = |found: &dyn Display| {
        let reason = format!("expected rank 0's choice of settings, found {found}");
        PlanError::from(CollectiveError::refused(rank, "choice of settings", reason))
    };
    let room = usize::try_from(len[0]).ok().filter(|len| *len <= MOST_TOLD_BYTES);
    let room = room.ok_or_else(|| refused(&format_args!("{} bytes", len[0])))?;
    let mut told = vec![0u8; room];
    if rank == 0 {
        told.copy_from_slice(&text);
    }
    comm.broadcast(&mut told, 0)?;
    serde_json::from_slice(&told).map_err(|error| refused(&error))
}

/// Sets one setting where it has its default.
struct Unset<'a> {
    name: &'a str,
    text: &'a str,
    usual: Option<String>,
}

impl Visit for Unset<'_> {
    fn row(&mut self, row: Row<'_>) -> Result<(), OptionError> {
        if row.name == self.name && row.value == self.usual {
            return (row.set)(self.text);
        }
        Ok(())
    }
}

/// Settings with all choices, and notes on these.
struct Choice {
    options: StepOptions,
    notes: Vec<Note>,
}

/// The cost model, asked about plans of the same parameters.
struct Judge {
    params: Vec<ParamDesc>,
    topology: Topology,
    limits: LaunchLimits,
    model: CostModel,
    backward: Option<f64>,
}

/// A choice, with what it was preferred to.
struct Preferred {
    options: StepOptions,
    predicted: Predicted,
    usual: Predicted,
}

/// Predicted seconds of a step.
#[derive(Clone, Copy)]
struct Predicted {
    /// By the model as it is known.
    seconds: f64,
    /// Beside a backward pass as long as the step's calls, which is assumed where streams reduce
    /// and nobody has told how long it takes.
    beside: Option<f64>,
}

impl Predicted {
    /// Seconds by which choices are compared.
    fn judged(self) -> f64 {
        self.beside.unwrap_or(self.seconds)
    }
}

impl Judge {
    /// The settings that cost least, with notes; `None` where ranks reduce nothing.
    fn choose(&self, base: &StepOptions, source: &str) -> Option<Choice> {
        let mut notes = Vec::new();
        let ways = base.ways(self.topology, self.backward.is_some());
        let way = self.cheapest(base, ways, LEAST_SAVING_OF_WAYS)?;
        if let Some(told) = way.options.told_way(self.topology, base) {
            notes.push(note(Verdict::Applied, format!("{told}: {}; {source}", way.text())));
        }
        let base = way.options;
        if base.bucket_cap_mib.is_some() {
            return Some(Choice { options: base, notes });
        }
        let caps = self.caps(&base)?.into_iter();
        let capped = caps.map(|cap| StepOptions { bucket_cap_mib: Some(cap), ..base.clone() });
        let best = self.cheapest(&base, capped.collect(), LEAST_SAVING)?;
        let usual = USUAL_CAP_MIB;
        if let Some(cap) = best.options.bucket_cap_mib {
            let why = best.text();
            let reason = format!("buckets of {cap} MiB in place of {usual}: {why}; {source}");
            notes.push(note(Verdict::Applied, reason));
        } else if self.plan(&base)?.buckets().len() > 1 {
            let reason =
                format!("buckets of {usual} MiB stay: no others save 1 % of a step; {source}");
            notes.push(note(Verdict::Skipped, reason));
        }
        Some(Choice { options: best.options, notes })
    }

    /// The cheapest of these, or `base` where none saves enough.
    fn cheapest(
        &self,
        base: &StepOptions,
        others: Vec<StepOptions>,
        least_saving: f64,
    ) -> Option<Preferred> {
        let usual = self.predicted(base)?;
        let mut best = Preferred { options: base.clone(), predicted: usual, usual };
        let enough = usual.judged() * (1.0 - least_saving);
        for options in others {
            let Some(found) = self.predicted(&options) else {
                continue;
            };
            let judged = found.judged();
            let is_no_slower = found.seconds <= usual.seconds * (1.0 + ROUNDING);
            if judged <= enough && judged < best.predicted.judged() && is_no_slower {
                best = Preferred { options, predicted: found, ..best };
            }
        }
        Some(best)
    }

    /// Predicted time of a step; `None` for settings that no plan can be made of.
    fn predicted(&self, options: &StepOptions) -> Option<Predicted> {
        let plan = self.plan(options)?;
        let end = |model: CostModel| Some(plan.timeline(&model).last()?.end);
        let streams = options.streams(self.topology);
        let backward_seconds = self.backward.unwrap_or(0.0);
        let seconds = end(CostModel { streams, backward_seconds, ..self.model })?;
        if self.backward.is_some() || streams == 0 {
            return Some(Predicted { seconds, beside: None });
        }
        let events = plan.timeline(&CostModel { streams: 0, ..self.model });
        let reduced = events.iter().filter(|event| event.kind == EventKind::Reduce);
        let bytes: u64 = reduced.map(|event| event.len_bytes).sum();
        let backward_seconds = bytes as f64 / self.model.link.beta_bytes_per_second;
        // On one stream, so that the latency of every call counts.
        let beside = end(CostModel { streams: 1, backward_seconds, ..self.model })?;
        Some(Predicted { seconds, beside: Some(beside) })
    }

    /// The plan of these settings.
    fn plan(&self, options: &StepOptions) -> Option<Plan> {
        let planner = options.planner(&self.params, self.topology, self.limits).ok()?;
        planner.plan_for(&self.params, self.topology).ok()
    }

    /// Caps of buckets to try, in MiB.
    fn caps(&self, base: &StepOptions) -> Option<Vec<f64>> {
        let plan = self.plan(base)?;
        let proposed = plan.rank_summary(self.model).proposed_bucket_cap_bytes as f64 / MIB;
        if proposed == 0.0 {
            return None;
        }
        // From stage 2 on buckets are memory that the user has asked to save.
        let most = if base.zero >= 2 { USUAL_CAP_MIB } else { MOST_CAP_MIB };
        let even = rounded(proposed);
        let mut caps = vec![even, even / 2.0, even * 2.0, most];
        caps.iter_mut().for_each(|cap| *cap = cap.clamp(LEAST_CAP_MIB, most));
        caps.dedup();
        Some(caps)
    }
}

impl Preferred {
    /// The comparison, as part of a sentence.
    fn text(&self) -> String {
        let [taken, usual] = [self.predicted, self.usual].map(|of| of.judged() * 1e3);
        let beside = match self.predicted.beside {
            Some(_) => " beside a backward pass as long as its calls",
            None => "",
        };
        format!("a step of {taken:.3} ms{beside} is predicted in place of {usual:.3} ms")
    }
}

/// The nearest of 1, 1.5, 2, 3, 4, 6, … and their halves.
fn rounded(mib: f64) -> f64 {
    let below = mib.max(LEAST_CAP_MIB).log2().floor().exp2();
    let near = [1.0, 1.5, 2.0].map(|factor| factor * below);
    let distance = |cap: &f64| (cap / mib).ln().abs();
    near.into_iter().min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap_or(below)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caps_are_rounded_to_sizes_that_can_be_read() {
        for (mib, expected) in
            [(6.1, 6.0), (1.0, 1.0), (1.3, 1.5), (7.9, 8.0), (0.01, 0.25), (90.0, 96.0)]
        {
            assert_eq!(rounded(mib), expected, "{mib}");
        }
    }
}
