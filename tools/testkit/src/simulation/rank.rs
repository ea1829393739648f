//! One rank of a simulated run, from the checkpoint to the end.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use fusestep::{Cpu, Session, SessionError};
use fusestep_checkpoint::Checkpoints;
use fusestep_collective::Communicator;
use fusestep_planner::PlanError;
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

/// A rank's session, and its save that is not complete yet.
struct Rank<'a> {
    session: Session<'a>,
    /// Whether saves are written while the run goes on; otherwise it waits for each.
    saves_behind: bool,
    /// Micro-steps at which the save in flight was begun.
    saving: u64,
    told: Told<'a>,
}

impl Rank<'_> {
    /// Begins a save, and waits for it where the scenario does.
    fn save(&mut self, at: u64) -> Result<(), PlanError> {
        self.finish_saves()?;
        let texts = BTreeMap::from([(AT.to_owned(), at.to_string())]);
        self.session.begin_save_with(FOLDER, texts)?;
        self.saving = at;
        if self.saves_behind { Ok(()) } else { self.finish_saves() }
    }

    /// Acknowledges a save that the session has completed meanwhile.
    fn hear_of_saves(&mut self) {
        if self.session.take_saved().is_some() {
            (self.told.saved)(self.saving);
        }
    }

    /// Waits for the save in flight, and acknowledges it.
    fn finish_saves(&mut self) -> Result<(), PlanError> {
        self.session.finish_saves()?;
        self.hear_of_saves();
        Ok(())
    }

    /// All parameters, as a hash.
    fn hash(&mut self) -> Result<String, PlanError> {
        let params = self.session.plan().params().to_vec();
        let names: Vec<&str> = params.iter().map(|param| param.name.as_str()).collect();
        let gathered = self.session.gather(&names)?;
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
    let options = scenario.options(comm.world_size());
    let cpu = Cpu::with_threads(Scenario::threads());
    let session = Session::on(&options, &scenario.params(), Box::new(cpu), comm);
    let session = session.map_err(|error: SessionError| error.to_string())?;
    let looks = scenario.looks;
    let session = session.saving_to(Checkpoints::in_turns(files, looks.unwrap_or(1)));
    let mut rank = Rank { session, saves_behind: looks.is_some(), saving: 0, told };
    let done = resume(scenario, &mut rank);
    let done = done.and_then(|at| {
        let trained = train(scenario, &mut rank, at).and_then(|()| rank.hash());
        trained.map_err(|error| error.to_string())
    });
    if let Err(error) = &done {
        // Others may be anywhere: what a program says whose own work has failed.
        rank.session.fail(error);
    }
    done
}

/// Goes on from the checkpoint, if there is one, and returns the micro-steps that are over.
fn resume(scenario: &Scenario, rank: &mut Rank<'_>) -> Result<u64, String> {
    for (param, desc) in scenario.params().iter().enumerate() {
        let bytes = scenario.first_values(param);
        let written = rank.session.write_param(&desc.name, &bytes);
        written.map_err(|error| error.to_string())?;
    }
    let at = |_: &Path, texts: &BTreeMap<String, String>| {
        Ok(texts.get(AT).and_then(|text| text.parse::<u64>().ok()))
    };
    let resumed = rank.session.resume_with(FOLDER, at);
    let resumed = resumed.map_err(|error| format!("{CANNOT_LOAD}{error}"))?;
    let at = resumed.map_or(Ok(0), |at| at.ok_or("no position"))?;
    (rank.told.resumed)(at);
    Ok(at)
}

/// Runs the remaining micro-steps with their saves, and the work at the end of a run.
fn train(scenario: &Scenario, rank: &mut Rank<'_>, mut at: u64) -> Result<(), PlanError> {
    rank.session.compare_also([(AT, at.to_string())]);
    if scenario.lanes.is_some() {
        return train_lanes(scenario, rank, at);
    }
    let params = scenario.params();
    let topology = rank.session.plan().topology();
    while at < scenario.micro_steps {
        rank.session.begin_step()?;
        rank.hear_of_saves();
        for (param, desc) in params.iter().enumerate().rev() {
            let gradient = scenario.gradient(at, param, topology);
            rank.session.push_grad_bytes(&desc.name, &gradient)?;
        }
        rank.session.step()?;
        at += 1;
        if at.is_multiple_of(scenario.save_every) {
            rank.save(at)?;
        }
    }
    rank.session.flush()?;
    if scenario.averages() {
        rank.session.average_now()?;
    }
    rank.finish_saves()
}

/// Makes the remaining updates of a run with lanes. Some of its saves are within an update.
fn train_lanes(scenario: &Scenario, rank: &mut Rank<'_>, mut at: u64) -> Result<(), PlanError> {
    let params = scenario.params();
    let within = scenario.saves_within(rank.session.plan().topology().world);
    let mut goes_on = rank.session.state().has_gradients();
    while at < scenario.micro_steps {
        for step in 0.. {
            if let Some(micro_batch) = rank.session.state().micro_batch() {
                for (param, desc) in params.iter().enumerate().rev() {
                    let gradient = scenario.gradient_of(at, micro_batch, param);
                    rank.session.push_grad_bytes(&desc.name, &gradient)?;
                }
            }
            if rank.session.step()?.update.is_some() {
                break;
            }
            // Of an update that others have begun, ranks may have one micro-step left.
            if within && step == 0 && !goes_on {
                rank.save(at)?;
            }
        }
        goes_on = false;
        at += 1;
        rank.hear_of_saves();
        if at.is_multiple_of(scenario.save_every) {
            rank.save(at)?;
        }
    }
    rank.finish_saves()
}
