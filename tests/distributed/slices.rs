//! Parameters of which every rank has a slice of its own.

use std::collections::BTreeMap;
use std::num::{NonZeroU64, NonZeroUsize};

use fusestep_checkpoint::{Manifest, load, save};
use fusestep_collective::{Communicator, Options, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::Lars;
use fusestep_planner::{
    ClipByGlobalNorm, Comms, Distributed, FuseAllReduce, LocalSgd, Optimizer, Plan, Planner, Run,
    RunAlone, RunToLoad, RunToSave, Shard, State, StepReport, Topology, UpdateNorms, ZeroStage,
};
use fusestep_tensor::{DType, ParamDesc, Role, Shape};

use crate::run::noise;

const WORLD: usize = 3;
const STEPS: u64 = 3;
/// Shared parameters, then slices, which end with leaves of the fixed tree: the tensors that they
/// make up have more than one chunk, whose borders lie within slices.
const NUMELS: [u64; 4] = [70_001, 40, 65 * 1_024, 1_024];
const SLICES: [usize; 2] = [2, 3];

fn name(param: usize) -> String {
    format!("layer{param}")
}

/// Parameters of which slices are these parts of the whole.
fn params_of(ranks: usize) -> Vec<ParamDesc> {
    let desc = |param| {
        let numel = NUMELS[param] * slices_of(param, ranks) as u64;
        ParamDesc::new(name(param), Shape::new([numel]).unwrap(), DType::F32)
    };
    (0..NUMELS.len()).map(desc).collect()
}

fn params() -> Vec<ParamDesc> {
    params_of(1)
}

/// How many ranks have a part of their own.
fn slices_of(param: usize, world: usize) -> usize {
    if SLICES.contains(&param) { world } else { 1 }
}

fn bytes(param: usize, key: [u64; 2]) -> Vec<u8> {
    let value = |element| noise([key[0], key[1], (param as u64) << 32 | element]);
    (0..NUMELS[param]).flat_map(|element| value(element).to_le_bytes()).collect()
}

/// First values: one for all ranks, or the rank's own.
fn first(param: usize, rank: usize) -> Vec<u8> {
    let own = if SLICES.contains(&param) { rank as u64 + 1 } else { 0 };
    bytes(param, [100, own])
}

fn planner(zero: ZeroStage) -> Planner {
    planner_of(Adam::default().into(), zero)
}

fn planner_of(rule: Optimizer, zero: ZeroStage) -> Planner {
    let planner = Planner::new(rule)
        .with(FuseAllReduce::of_bytes(100_000))
        .with(Distributed::params(SLICES.map(name)));
    match zero {
        ZeroStage::None => planner,
        zero => planner.with(Shard::new(zero)),
    }
}

fn start(plan: &Plan, backend: &CpuBackend) -> State {
    let mut state = plan.allocate(backend).unwrap();
    for param in 0..NUMELS.len() {
        let value = first(param, plan.topology().rank);
        state.write(backend, Role::Param, &name(param), &value).unwrap();
    }
    state
}

/// The norms of all gradients and of all updates.
#[derive(Clone, Copy, Debug)]
struct Norms {
    grad: Option<f64>,
    update: Option<f64>,
}

fn norms_of(report: &StepReport) -> Norms {
    Norms { grad: report.grad_norm, update: report.update_norm }
}

/// Norms of gradients have the bits of one rank; those of updates are added slice by slice.
fn assert_alike(found: &[Norms], expected: &[Norms], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        let bits = |norm: Option<f64>| norm.map(f64::to_bits);
        assert_eq!(bits(found.grad), bits(expected.grad), "{what}");
        if let (Some(found), Some(expected)) = (found.update, expected.update) {
            assert!((found / expected - 1.0).abs() < 1e-14, "{what}");
        }
    }
}

fn steps(run: &mut Run<'_, '_>, steps: std::ops::Range<u64>) -> Vec<Norms> {
    let rank = run.plan().topology().rank as u64;
    let norms = steps.map(|step| {
        for param in 0..NUMELS.len() {
            let grad = bytes(param, [step, rank]);
            run.push_grad(&name(param), &grad).unwrap();
        }
        let report = run.step().unwrap();
        norms_of(&report.update.unwrap())
    });
    norms.collect()
}

fn all(run: &mut Run<'_, '_>) -> Vec<Vec<u8>> {
    let names: Vec<String> = (0..NUMELS.len()).map(name).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let gathered = run.gather(&names).unwrap();
    (0..names.len()).map(|at| gathered.bytes(at).to_vec()).collect()
}

/// What one rank with everything comes to: shared parameters with the mean of gradients, and the
/// tensors that slices make up.
struct ByHand {
    rule: Optimizer,
    clip: Option<f64>,
    world: usize,
    group: usize,
}

impl ByHand {
    fn of(world: usize, group: usize) -> (Vec<Vec<Vec<u8>>>, Vec<Norms>) {
        let by_hand = Self { rule: Adam::default().into(), clip: Some(1.0), world, group };
        by_hand.run()
    }

    /// The parts of all ranks, one behind the other.
    fn whole(&self, param: usize, of_rank: impl Fn(usize) -> Vec<u8>) -> Vec<u8> {
        (0..slices_of(param, self.world)).flat_map(of_rank).collect()
    }

    /// Each rank's parameters, and the norms of each step.
    fn run(&self) -> (Vec<Vec<Vec<u8>>>, Vec<Norms>) {
        let mut planner = Planner::new(self.rule).naive().with(UpdateNorms);
        if let Some(norm) = self.clip {
            planner = planner.with(ClipByGlobalNorm::new(norm));
        }
        let plan = planner.plan(&params_of(self.world)).unwrap();
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let mut state = plan.allocate(&backend).unwrap();
        for param in 0..NUMELS.len() {
            let value = self.whole(param, |rank| first(param, rank));
            state.write(&backend, Role::Param, &name(param), &value).unwrap();
        }
        let mut norms = Vec::new();
        for step in 0..STEPS {
            for param in 0..NUMELS.len() {
                let grad = if SLICES.contains(&param) {
                    self.whole(param, |rank| bytes(param, [step, rank as u64]))
                } else {
                    mean(param, step, self.world, self.group)
                };
                state.write(&backend, Role::Grad, &name(param), &grad).unwrap();
            }
            let report = RunAlone::of(&plan, &mut state, &backend).step_all().unwrap();
            norms.push(norms_of(&report));
        }
        let read = |param: usize, rank: usize| {
            let len_bytes = NUMELS[param] as usize * 4;
            let mut whole = vec![0; len_bytes * slices_of(param, self.world)];
            state.read(&backend, Role::Param, &name(param), &mut whole).unwrap();
            let at = rank.min(slices_of(param, self.world) - 1) * len_bytes;
            whole[at..at + len_bytes].to_vec()
        };
        let of_rank = |rank| (0..NUMELS.len()).map(|param| read(param, rank)).collect();
        ((0..self.world).map(of_rank).collect(), norms)
    }
}

/// The mean over groups of the means within them, in rank order.
fn mean(param: usize, step: u64, world: usize, group: usize) -> Vec<u8> {
    let grads: Vec<Vec<u8>> = (0..world).map(|rank| bytes(param, [step, rank as u64])).collect();
    let value = |grad: &Vec<u8>, at: usize| {
        f32::from_le_bytes(grad[4 * at..4 * at + 4].try_into().unwrap())
    };
    let mean = |at| {
        let sum = |values: Vec<f32>| values.into_iter().reduce(|sum, value| sum + value);
        let of_group = |group: &[Vec<u8>]| {
            let values = group.iter().map(|grad| value(grad, at)).collect();
            sum(values).unwrap() / group.len() as f32
        };
        let means = grads.chunks(group).map(of_group).collect();
        sum(means).unwrap() / (world / group) as f32
    };
    (0..NUMELS[param] as usize).flat_map(|at| mean(at).to_le_bytes()).collect()
}

#[test]
fn slices_are_updated_by_their_ranks_and_count_once_in_the_norm() {
    let (expected, norms) = ByHand::of(WORLD, WORLD);
    for (at, zero) in
        [ZeroStage::None, ZeroStage::One, ZeroStage::Two, ZeroStage::Three, ZeroStage::Three]
            .into_iter()
            .enumerate()
    {
        // The last one alone does not measure: its shards end inside chunks.
        let planner = planner(zero).with(ClipByGlobalNorm::new(1.0));
        let planner = match at {
            4 => planner,
            _ => planner.with(UpdateNorms),
        };
        let outcomes = run_ranks(WORLD, &Options::default(), |mut comm| {
            let plan = planner.plan_for(&params(), Topology::of(&comm)).unwrap();
            let backend = CpuBackend::new(NonZeroUsize::MIN);
            let mut comms = Comms::with_streams(&mut comm, 1).unwrap();
            let mut state = start(&plan, &backend);
            let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
            let found = steps(&mut run, 0..STEPS);
            (all(&mut run), found)
        });
        for (rank, outcome) in outcomes.unwrap().into_iter().enumerate() {
            let (found, found_norms) = outcome.unwrap();
            assert_alike(&found_norms, &norms, &format!("{zero:?}"));
            assert!(found == expected[rank], "{zero:?}, rank {rank}");
        }
    }
}

#[test]
fn every_rank_has_slices_of_its_own_in_shard_groups_too_and_each_counts_once() {
    for (world, group) in [(4, 2), (6, 3), (3, 1)] {
        let (expected, norms) = ByHand::of(world, group);
        let group = NonZeroUsize::new(group).unwrap();
        for (zero, streams) in [(ZeroStage::One, 0), (ZeroStage::Two, 1), (ZeroStage::Three, 2)] {
            let planner = Planner::new(Optimizer::from(Adam::default()))
                .with(FuseAllReduce::of_bytes(100_000))
                .with(Distributed::params(SLICES.map(name)))
                .with(Shard::new(zero).group(group))
                .with(UpdateNorms)
                .with(ClipByGlobalNorm::new(1.0));
            let folder = tempfile::tempdir().unwrap();
            let outcomes = run_ranks(world, &Options::default(), |mut comm| {
                let plan = planner.plan_for(&params(), Topology::of(&comm)).unwrap();
                let backend = CpuBackend::new(NonZeroUsize::MIN);
                let mut comms = Comms::in_groups(&mut comm, group, streams).unwrap();
                let mut state = start(&plan, &backend);
                let mut found = steps(&mut Run::of(&plan, &mut state, &backend, &mut comms), 0..1);
                let caller = BTreeMap::new();
                save(RunToSave::of(&plan, &state, &backend), &mut comms, folder.path(), caller)
                    .unwrap();
                // The rest of the run goes on from what was saved.
                let mut state = plan.allocate(&backend).unwrap();
                load(RunToLoad::of(&plan, &mut state, &backend), folder.path()).unwrap();
                let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
                found.extend(steps(&mut run, 1..STEPS));
                (all(&mut run), found)
            });
            for (rank, outcome) in outcomes.unwrap().into_iter().enumerate() {
                let (found, found_norms) = outcome.unwrap();
                assert_alike(&found_norms, &norms, &format!("{zero:?}, {world} in {group}s"));
                assert!(found == expected[rank], "{zero:?}, rank {rank} of {world}");
            }
        }
    }
}

#[test]
fn a_tensor_that_is_split_trains_as_the_whole_one_under_rules_with_norms() {
    for rule in [Optimizer::from(Lars::default()), Lamb::default().into()] {
        for (world, clip) in [(2, None), (3, Some(0.5)), (4, None), (4, Some(0.5))] {
            let by_hand = ByHand { rule, clip, world, group: world };
            let (expected, norms) = by_hand.run();
            for zero in [ZeroStage::None, ZeroStage::One, ZeroStage::Two, ZeroStage::Three] {
                let mut planner = planner_of(rule, zero).with(UpdateNorms);
                if let Some(norm) = clip {
                    planner = planner.with(ClipByGlobalNorm::new(norm));
                }
                let outcomes = run_ranks(world, &Options::default(), |mut comm| {
                    let plan = planner.plan_for(&params(), Topology::of(&comm)).unwrap();
                    let backend = CpuBackend::new(NonZeroUsize::MIN);
                    let mut comms = Comms::direct(&mut comm);
                    let mut state = start(&plan, &backend);
                    let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
                    let found = steps(&mut run, 0..STEPS);
                    (all(&mut run), found)
                });
                for (rank, outcome) in outcomes.unwrap().into_iter().enumerate() {
                    let (found, found_norms) = outcome.unwrap();
                    let what = format!("{rule:?} {zero:?} rank {rank} of {world}, {clip:?}");
                    assert_alike(&found_norms, &norms, &what);
                    assert!(found == expected[rank], "{what}");
                }
            }
        }
    }
}

#[test]
fn slices_are_neither_broadcast_nor_averaged() {
    let planner = planner(ZeroStage::None).with(LocalSgd::every(NonZeroU64::MIN));
    let folder = tempfile::tempdir().unwrap();
    let outcomes = run_ranks(WORLD, &Options::default(), |mut comm| {
        let plan = planner.plan_for(&params(), Topology::of(&comm)).unwrap();
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let rank = comm.rank();
        let mut comms = Comms::direct(&mut comm);
        let mut state = start(&plan, &backend);
        let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
        run.broadcast_parameters(1).unwrap();
        let begun = all(&mut run);
        assert!((0..4).all(|param| begun[param] == first(param, rank)));
        steps(&mut run, 0..1);
        let caller = BTreeMap::new();
        save(RunToSave::of(&plan, &state, &backend), &mut comms, folder.path(), caller).unwrap();
        all(&mut Run::of(&plan, &mut state, &backend, &mut comms))
    });
    let manifest = Manifest::read(folder.path()).unwrap();
    let out = tempfile::tempdir().unwrap();
    let error = manifest.average(folder.path(), out.path(), 1).unwrap_err();
    assert!(error.to_string().contains("layer2"), "{error}");
    let two = planner.plan_for(&params(), Topology::new(0, 2).unwrap());
    let (two, backend) = (two.unwrap(), CpuBackend::new(NonZeroUsize::MIN));
    let mut state = two.allocate(&backend).unwrap();
    let error = load(RunToLoad::of(&two, &mut state, &backend), folder.path()).unwrap_err();
    assert!(error.to_string().contains("cannot be averaged"), "{error}");
    let params: Vec<_> = outcomes.unwrap().into_iter().map(Result::unwrap).collect();
    assert!(params[0][0] == params[1][0] && params[1][1] == params[2][1]);
    assert!(params[0][2] != params[1][2] && params[1][3] != params[2][3]);
}

#[test]
fn slices_are_saved_for_their_ranks_and_resumed_by_as_many() {
    for zero in [ZeroStage::None, ZeroStage::Two] {
        let folder = tempfile::tempdir().unwrap();
        let outcomes = run_ranks(WORLD, &Options::default(), |mut comm| {
            let plan = planner(zero).plan_for(&params(), Topology::of(&comm)).unwrap();
            let backend = CpuBackend::new(NonZeroUsize::MIN);
            let mut comms = Comms::direct(&mut comm);
            let mut state = start(&plan, &backend);
            steps(&mut Run::of(&plan, &mut state, &backend, &mut comms), 0..1);
            let caller = BTreeMap::new();
            save(RunToSave::of(&plan, &state, &backend), &mut comms, folder.path(), caller)
                .unwrap();
            steps(&mut Run::of(&plan, &mut state, &backend, &mut comms), 1..3);
            let mut again = plan.allocate(&backend).unwrap();
            load(RunToLoad::of(&plan, &mut again, &backend), folder.path()).unwrap();
            steps(&mut Run::of(&plan, &mut again, &backend, &mut comms), 1..3);
            all(&mut Run::of(&plan, &mut state, &backend, &mut comms))
                == all(&mut Run::of(&plan, &mut again, &backend, &mut comms))
        });
        assert!(outcomes.unwrap().into_iter().all(Result::unwrap), "{zero:?}");
        let two = planner(zero).plan_for(&params(), Topology::new(0, 2).unwrap()).unwrap();
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let mut state = two.allocate(&backend).unwrap();
        let error =
            load(RunToLoad::of(&two, &mut state, &backend), folder.path()).unwrap_err().to_string();
        assert!(error.contains("#2"), "{error}");
    }
}

#[test]
fn what_slices_cannot_do_is_refused() {
    let two = Topology::new(0, 2).unwrap();
    let unknown = planner(ZeroStage::None).plan_for(&params()[..3], two).unwrap_err();
    assert!(unknown.to_string().contains("layer3"), "{unknown}");
    let local =
        planner_of(Lars::default().into(), ZeroStage::None).with(LocalSgd::every(NonZeroU64::MIN));
    let error = local.plan_for(&params(), two).unwrap_err().to_string();
    assert!(error.contains("distributed with lars"), "{error}");
    let averaged = planner(ZeroStage::None)
        .with(LocalSgd::every(NonZeroU64::MIN))
        .with(ClipByGlobalNorm::new(1.0));
    let error = averaged.plan_for(&params(), two).unwrap_err().to_string();
    assert!(error.contains("local_sgd"), "{error}");
    let solo = planner(ZeroStage::None).plan_for(&params(), Topology::SOLO).unwrap();
    assert!(solo.explain().iter().any(|note| note.reason.contains("every slice")));
}
