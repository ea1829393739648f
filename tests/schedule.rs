//! Learning-rate schedules against PyTorch's, in steps, and in checkpoints.

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroUsize;
use std::path::Path;

use bytemuck::pod_collect_to_vec;
use fusestep_checkpoint::{StateTensors, load, save};
use fusestep_collective::{Solo, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_fused_sgd::Sgd;
use fusestep_planner::{
    Comms, LossScaling, Plan, PlanError, Planner, Run, RunAlone, RunToLoad, RunToSave, Schedule,
    State, Topology,
};
use fusestep_schedule_free::ScheduleFree;
use fusestep_tensor::{DType, Role};
use fusestep_testkit::{Case, backends, each_rule};
use safetensors::SafeTensors;
use serde::Deserialize;

/// What `tests/golden/schedule.py` wrote.
const GOLDEN: &[u8] = include_bytes!("golden/schedule.safetensors");

/// One golden case, as its script writes it.
#[derive(Clone, Deserialize)]
struct Golden {
    schedule: String,
    base: f64,
}

/// The largest differences of any step of a case, relative to the base rate: from the scheduler's
/// closed form, and from its own steps. A cosine's 1 + cos cancels towards the end in PyTorch and
/// here, so units of the rate itself would measure which cosine was taken.
fn differences(name: &str, schedule: &Schedule, base: f64) -> (f64, f64) {
    let golden = SafeTensors::deserialize(GOLDEN).unwrap();
    let largest = |list: &str| {
        let tensor = golden.tensor(&format!("{name}.{list}")).ok()?;
        let rates = pod_collect_to_vec::<u8, f64>(tensor.data());
        assert_eq!(rates.len(), 1001);
        let rates = rates.into_iter().enumerate();
        let rate = |step: usize| base * schedule.factor(step as u64);
        let differences = rates.map(|(step, lr)| (rate(step) - lr).abs() / base);
        Some(differences.fold(0.0, f64::max))
    };
    (largest("closed").unwrap_or(0.0), largest("chained").unwrap())
}

#[test]
fn rates_are_those_of_pytorch_at_every_step() {
    let (_, header) = SafeTensors::read_metadata(GOLDEN).unwrap();
    let metadata: HashMap<String, String> = header.metadata().clone().unwrap();
    let mut cases = 0;
    for (key, text) in metadata {
        let Some(name) = key.strip_prefix("case.") else {
            continue;
        };
        let case: Golden = serde_json::from_str(&text).unwrap();
        let (closed, chained) = differences(name, &case.schedule.parse().unwrap(), case.base);
        assert!(closed <= 4.0 * f64::EPSILON, "{name}: {closed} of the base rate");
        assert!(chained <= 1e-12, "{name}: {chained} of the base rate");
        cases += 1;
    }
    assert_eq!(cases, 14);
}

#[test]
fn the_golden_comparison_can_fail() {
    let differ = |text: &str| differences("cosine_floor", &text.parse().unwrap(), 1e-3);
    assert!(differ("cosine:1000:0.1").0 <= 4.0 * f64::EPSILON);
    let (closed, chained) = differ("cosine:1001:0.1");
    assert!(closed > 1e-6 && chained > 1e-6);
}

const SCHEDULE: &str = "warmup:3,polynomial:5:2:0.1";

fn backend() -> CpuBackend {
    CpuBackend::new(NonZeroUsize::MIN)
}

fn case() -> Case {
    Case::new([70, 3, 0, 130], DType::F32)
}

fn start(plan: &Plan, case: &Case, backend: &CpuBackend) -> State {
    let mut state = plan.allocate(backend).unwrap();
    for (index, param) in case.params.iter().enumerate() {
        let bytes = case.param_bytes(index);
        state.write(backend, Role::Param, &param.name, &bytes).unwrap();
    }
    state
}

/// Runs a step whose gradients are the case's of that number; the report's rate is the state's.
fn step(plan: &Plan, state: &mut State, case: &Case, backend: &CpuBackend, number: u64) {
    for (index, param) in case.params.iter().enumerate() {
        let bytes = case.grad_bytes(index, number);
        state.write(backend, Role::Grad, &param.name, &bytes).unwrap();
    }
    RunAlone::of(plan, state, backend).step_all().unwrap();
}

fn bits(state: &State, backend: &CpuBackend) -> Vec<u8> {
    let tensors = StateTensors::of(state, backend).unwrap().tensors;
    let mut all: Vec<u8> = tensors.iter().flat_map(|(_, t)| t.bytes.to_vec()).collect();
    all.extend(state.parameters_xxh3(backend).unwrap().unwrap().bytes());
    all
}

#[test]
fn steps_take_the_rates_of_the_schedule_whatever_the_rule() {
    let (case, backend) = (case(), backend());
    let schedule: Schedule = SCHEDULE.parse().unwrap();
    for rule in each_rule() {
        let scheduled = Planner::new(rule).schedule(schedule.clone()).plan(&case.params);
        if matches!(scheduled, Err(PlanError::Conflict { .. })) {
            continue;
        }
        let scheduled = scheduled.unwrap();
        let by_hand = Planner::new(rule).plan(&case.params).unwrap();
        let mut states = [&scheduled, &by_hand].map(|plan| start(plan, &case, &backend));
        for number in 1..=10 {
            let lr = rule.lr() * schedule.factor(number - 1);
            assert_eq!(states[0].lr().to_bits(), lr.to_bits());
            states[1].set_lr(lr).unwrap();
            for (plan, state) in [&scheduled, &by_hand].into_iter().zip(&mut states) {
                step(plan, state, &case, &backend, number);
            }
            let [found, expected] = states.each_ref().map(|state| bits(state, &backend));
            assert!(found == expected, "{rule}, step {number}");
        }
    }
}

#[test]
fn groups_keep_their_own_base_rates_and_every_backend_has_the_same_bits() {
    let case = case();
    let slow = Sgd { lr: 1e-3, ..Sgd::default() };
    let planner = Planner::new(Adam::default().into())
        .group(["tensor.1"], slow.into())
        .schedule(Schedule::warmup(4));
    let plan = planner.plan(&case.params).unwrap();
    let mut state = plan.allocate(&backend()).unwrap();
    assert_eq!(state.lr_of(1).unwrap(), 1e-3 * (1.0 / 5.0));
    state.set_lr_of(1, 2e-3).unwrap();
    assert_eq!(state.lr_of(1).unwrap(), 2e-3 * (1.0 / 5.0));
    assert_eq!(state.lr(), Adam::default().lr * (1.0 / 5.0));
    assert!(state.lr_of(2).is_err());
    let mut outcomes = backends().into_iter().map(|(name, backend)| {
        let outcome = fusestep_testkit::outcome(&plan, &case, backend.as_ref());
        (name, outcome)
    });
    let (_, first) = outcomes.next().unwrap();
    for (name, outcome) in outcomes {
        assert!(outcome == first, "{name}");
    }
}

#[test]
fn a_step_that_is_skipped_does_not_move_the_schedule() {
    let (case, backend) = (case(), backend());
    let planner = Planner::new(Adam::default().into()).with(LossScaling::dynamic());
    let plan = planner.schedule(Schedule::warmup(9)).plan(&case.params);
    let plan = plan.unwrap();
    let mut state = start(&plan, &case, &backend);
    let rate = state.lr();
    let infinite = f32::INFINITY.to_le_bytes().repeat(3);
    state.write(&backend, Role::Grad, "tensor.1", &infinite).unwrap();
    assert!(RunAlone::of(&plan, &mut state, &backend).step_all().unwrap().skipped);
    assert_eq!(state.lr(), rate);
    step(&plan, &mut state, &case, &backend, 1);
    assert_eq!(state.lr(), 2.0 * rate);
}

#[test]
fn plans_show_their_schedule_and_refuse_what_has_no_meaning() {
    let params = case().params;
    let planner = |text: &str| Planner::new(Adam::default().into()).schedule(text.parse().unwrap());
    let plan = planner(SCHEDULE).plan(&params).unwrap();
    assert!(plan.to_string().contains(&format!("learning rates follow {SCHEDULE}\n")));
    assert!(plan.to_html().contains(SCHEDULE));
    let shown = plan.summary().schedule.unwrap();
    assert_eq!(shown.parse(), Ok(plan.schedule().unwrap().clone()));
    let another = planner("warmup:4").plan(&params).unwrap();
    assert_ne!(plan.hash(), another.hash());
    let bad = fusestep_planner::Phase::Cosine { steps: 9, floor: -1.0 };
    let bad = Planner::new(Adam::default().into()).schedule(bad.into()).plan(&params);
    let error = bad.unwrap_err().to_string();
    assert!(error.contains("floor of cosine: expected a number from 0 to 1"), "{error}");
    let rule = ScheduleFree::default().into();
    let own = Planner::new(rule).schedule(Schedule::cosine(5)).plan(&params);
    assert!(own.unwrap_err().to_string().contains("its average takes the place"));
}

/// A run of this schedule up to a step, from the folder's checkpoint if there is one; saves then.
fn run(folder: &Path, schedule: Option<&str>, until: u64) -> Result<Vec<u8>, PlanError> {
    let (case, backend) = (case(), backend());
    let mut planner = Planner::new(Adam::default().into());
    if let Some(text) = schedule {
        planner = planner.schedule(text.parse().unwrap());
    }
    let plan = planner.plan(&case.params)?;
    let mut state = start(&plan, &case, &backend);
    if folder.join("manifest.json").exists() {
        load(RunToLoad::of(&plan, &mut state, &backend), folder)?;
    }
    while state.step() < until {
        let number = state.step() + 1;
        step(&plan, &mut state, &case, &backend, number);
    }
    let mut solo = Solo::new();
    save(
        RunToSave::of(&plan, &state, &backend),
        &mut Comms::direct(&mut solo),
        folder,
        BTreeMap::new(),
    )?;
    Ok(bits(&state, &backend))
}

#[test]
fn a_resumed_run_goes_on_in_its_schedule_and_another_schedule_is_refused_by_name() {
    let folders = [0; 2].map(|_| tempfile::tempdir().unwrap());
    let [whole, parts] = folders.each_ref().map(|folder| folder.path());
    let expected = run(whole, Some(SCHEDULE), 10).unwrap();
    run(parts, Some(SCHEDULE), 4).unwrap();
    for other in [None, Some("warmup:2,polynomial:5:2:0.1")] {
        let error = run(parts, other, 10).unwrap_err().to_string();
        let named = [
            format!("`schedule`: expected `{}`", other.unwrap_or("none")),
            format!("found `{SCHEDULE}`: another rate at step 1"),
        ];
        assert!(named.iter().all(|word| error.contains(word)), "{error}");
    }
    assert!(run(parts, Some(SCHEDULE), 10).unwrap() == expected);
}

#[test]
fn a_run_without_a_schedule_can_be_given_one_for_what_is_left() {
    let folder = tempfile::tempdir().unwrap();
    run(folder.path(), None, 4).unwrap();
    let error = run(folder.path(), Some("cosine:5"), 8).unwrap_err().to_string();
    assert!(error.contains("found `none`: another rate at step 2"), "{error}");
    run(folder.path(), Some("constant:4,cosine:5"), 8).unwrap();
}

#[test]
fn ranks_of_other_schedules_are_told_so() {
    let params = case().params;
    let outcomes = run_ranks(2, &fusestep_collective::Options::default(), |mut comm| {
        let topology = Topology::of(&comm);
        let schedule = Schedule::warmup(4 + topology.rank as u64);
        let planner = Planner::new(Adam::default().into()).schedule(schedule);
        let plan = planner.plan_for(&params, topology).unwrap();
        let mut state = plan.allocate_on(&backend(), &mut comm).unwrap();
        let mut comms = Comms::direct(&mut comm);
        Run::of(&plan, &mut state, &backend(), &mut comms).handshake(&[])
    });
    for outcome in outcomes.unwrap() {
        let error = outcome.unwrap().unwrap_err().to_string();
        let named = ["schedule", "warmup:4", "warmup:5"];
        assert!(named.iter().all(|word| error.contains(word)), "{error}");
    }
}
