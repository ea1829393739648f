//! One rank of a simulated run, from the checkpoint to the end.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use fusestep_checkpoint::{CheckpointFolder, Manifest, Saves, load, save};
use fusestep_collective::Communicator;
use fusestep_cpu::CpuBackend;
use fusestep_planner::{Comms, Plan, PlanError, Run, RunToLoad, RunToSave, State, Topology};
use fusestep_tensor::Role;
use xxhash_rust::xxh3::Xxh3;

use super::communicator::RankFiles;
use super::scenario::Scenario;

/// Folder in which runs save.
pub(super) const FOLDER: &str = "/run/checkpoint";

/// Key of the caller's text in a checkpoint: the number of micro-steps that are over.
pub(super) const AT: &str = "at";

/// Beginning of an error with which a checkpoint was refused.
pub(super) const CANNOT_LOAD: &str = "cannot go on: ";

/// Callbacks on the progress of a rank.
#[derive(Clone, Copy)]
pub(super) struct Told<'a> {
    /// Called with the micro-steps that are over when the rank goes on.
    pub(super) resumed: &'a dyn Fn(u64),
    /// Called for each acknowledged save, with its micro-steps.
    pub(super) saved: &'a dyn Fn(u64),
}

/// A rank's memory, and its saves that are not complete yet.
struct Rank<'a> {
    plan: &'a Plan,
    backend: CpuBackend,
    state: State,
    comms: Comms<'a>,
    files: Arc<RankFiles>,
    /// Saves in the background; `None` if the run waits for each save.
    saves: Option<Saves>,
    /// Micro-steps at which the save in flight was begun.
    saving: u64,
    told: Told<'a>,
}

impl<'a> Rank<'a> {
    /// The run of this rank.
    fn run(&mut self) -> Run<'_, 'a> {
        Run::of(self.plan, &mut self.state, &self.backend, &mut self.comms)
    }

    /// Begins a save in the background, or saves and waits.
    fn save(&mut self, at: u64) -> Result<(), PlanError> {
        let path = Path::new(FOLDER);
        let caller = BTreeMap::from([(AT.to_owned(), at.to_string())]);
        self.finish_saves()?;
        let comms = &mut self.comms;
        if let Some(saves) = &mut self.saves {
            let run = RunToSave::of(self.plan, &self.state, &self.backend);
            saves.begin(run, comms, path, caller)?;
            self.saving = at;
        } else {
            let folder = CheckpointFolder::of(self.files.as_ref(), path);
            save(RunToSave::of(self.plan, &self.state, &self.backend), comms, folder, caller)?;
            (self.told.saved)(at);
        }
        Ok(())
    }

    /// Polls the save in flight.
    fn poll_saves(&mut self) -> Result<(), PlanError> {
        if let Some(saves) = &mut self.saves
            && saves.poll(&mut self.comms)?.is_some()
        {
            (self.told.saved)(self.saving);
        }
        Ok(())
    }

    /// Waits for the save in flight.
    fn finish_saves(&mut self) -> Result<(), PlanError> {
        if let Some(saves) = &mut self.saves
            && saves.finish(&mut self.comms)?.is_some()
        {
            (self.told.saved)(self.saving);
        }
        Ok(())
    }

    /// All parameters, as a hash.
    fn hash(&mut self) -> Result<String, PlanError> {
        let params = self.plan.params().iter();
        let names: Vec<&str> = params.map(|param| param.name.as_str()).collect();
        let gathered = self.run().gather(&names)?;
        let mut hasher = Xxh3::new();
        for at in 0..names.len() {
            hasher.update(gathered.bytes(at));
        }
        Ok(format!("{:016x}", hasher.digest()))
    }
}

/// Runs one rank from the checkpoint to the end, and returns a hash of its last parameters.
pub(super) fn run_rank(
    scenario: &Scenario,
    comm: &mut dyn Communicator,
    files: Arc<RankFiles>,
    told: Told<'_>,
) -> Result<String, String> {
    let in_words = |error: PlanError| error.to_string();
    let topology = Topology::of(comm);
    let plan = scenario.plan(topology).map_err(in_words)?;
    let backend = CpuBackend::new(Scenario::threads());
    let mut state = plan.allocate_on(&backend, comm).map_err(in_words)?;
    for (param, desc) in plan.params().iter().enumerate() {
        let bytes = scenario.first_values(param);
        let written = state.write(&backend, Role::Param, &desc.name, &bytes);
        written.map_err(in_words)?;
    }
    let resumed_at = resume(&plan, &mut state, &backend, &files)?;
    (told.resumed)(resumed_at);
    let looks = scenario.looks;
    let mut rank = Rank {
        plan: &plan,
        backend,
        state,
        comms: Comms::direct(comm),
        saves: looks.map(|looks| Saves::in_turns(files.clone(), looks)),
        files,
        saving: 0,
        told,
    };
    train(scenario, &mut rank, resumed_at).map_err(in_words)?;
    rank.hash().map_err(in_words)
}

/// Goes on from the checkpoint, if there is one, and returns the micro-steps that are over.
fn resume(
    plan: &Plan,
    state: &mut State,
    backend: &CpuBackend,
    files: &RankFiles,
) -> Result<u64, String> {
    let told = |error: PlanError| format!("{CANNOT_LOAD}{error}");
    let folder = CheckpointFolder::of(files, Path::new(FOLDER));
    if Manifest::read_if_any(folder).map_err(told)?.is_none() {
        return Ok(0);
    }
    let caller = load(RunToLoad::of(plan, state, backend), folder).map_err(told)?;
    let at = caller.get(AT).and_then(|text| text.parse().ok());
    Ok(at.ok_or("no position")?)
}

/// Runs the remaining micro-steps with their saves, and the work at the end of a run.
fn train(scenario: &Scenario, rank: &mut Rank<'_>, mut at: u64) -> Result<(), PlanError> {
    let topology = rank.plan.topology();
    let said = [(AT, at.to_string())];
    rank.run().handshake(&said)?;
    if scenario.lanes.is_some() {
        return train_lanes(scenario, rank, at);
    }
    while at < scenario.micro_steps {
        rank.poll_saves()?;
        let mut run = rank.run();
        for (param, desc) in run.plan().params().iter().enumerate().rev() {
            run.push_grad(&desc.name, &scenario.gradient(at, param, topology))?;
        }
        run.step()?;
        at += 1;
        if at.is_multiple_of(scenario.save_every) {
            rank.save(at)?;
        }
    }
    rank.run().flush()?;
    if scenario.averages() {
        rank.run().average_now()?;
    }
    rank.finish_saves()
}

/// Makes the remaining updates of a run with lanes. Some of its saves are within an update.
fn train_lanes(scenario: &Scenario, rank: &mut Rank<'_>, mut at: u64) -> Result<(), PlanError> {
    let within = scenario.saves_within(rank.plan.topology().world);
    let mut goes_on = rank.state.has_gradients();
    while at < scenario.micro_steps {
        rank.poll_saves()?;
        for step in 0.. {
            let mut run = rank.run();
            if let Some(micro_batch) = run.state().micro_batch() {
                for (param, desc) in run.plan().params().iter().enumerate().rev() {
                    run.push_grad(&desc.name, &scenario.gradient_of(at, micro_batch, param))?;
                }
            }
            if run.step()?.update.is_some() {
                break;
            }
            // Of an update that others have begun, ranks may have one micro-step left.
            if within && step == 0 && !goes_on {
                rank.save(at)?;
            }
        }
        goes_on = false;
        at += 1;
        if at.is_multiple_of(scenario.save_every) {
            rank.save(at)?;
        }
    }
    rank.finish_saves()
}
