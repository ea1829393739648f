//! Parameters of which every rank has a slice of its own.

use std::collections::BTreeMap;
use std::num::{NonZeroU64, NonZeroUsize};

use fusestep_collective::{Communicator, Options, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_lars_momentum::Lars;
use fusestep_planner::{
    ClipByGlobalNorm, Comms, Distributed, FuseAllReduce, LocalSgd, Manifest, Optimizer, Plan,
    Planner, Shard, State, StepReport, Topology, UpdateNorms, ZeroStage,
};
use fusestep_tensor::{DType, ParamDesc, Role, Shape};

use crate::run::noise;

const WORLD: usize = 3;
const STEPS: u64 = 3;
/// Shared parameters, then slices.
const NUMELS: [u64; 4] = [70_001, 40, 66_000, 7];
const SLICES: [usize; 2] = [2, 3];

fn name(param: usize) -> String {
    format!("layer{param}")
}

fn desc(name: String, param: usize) -> ParamDesc {
    ParamDesc::new(name, Shape::new([NUMELS[param]]).unwrap(), DType::F32)
}

fn params() -> Vec<ParamDesc> {
    (0..NUMELS.len())
        .map(|param| desc(name(param), param))
        .collect()
}

fn bytes(param: usize, key: [u64; 2]) -> Vec<u8> {
    let value = |element| noise([key[0], key[1], (param as u64) << 32 | element]);
    (0..NUMELS[param])
        .flat_map(|element| value(element).to_le_bytes())
        .collect()
}

/// First values: one for all ranks, or the rank's own.
fn first(param: usize, rank: usize) -> Vec<u8> {
    let own = if SLICES.contains(&param) {
        rank as u64 + 1
    } else {
        0
    };
    bytes(param, [100, own])
}

fn planner(zero: ZeroStage) -> Planner {
    let planner = Planner::new(Optimizer::from(Adam::default()))
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
        state
            .write(backend, Role::Param, &name(param), &value)
            .unwrap();
    }
    state
}

/// Bits of the norms of all gradients and of all updates.
type Norms = [Option<u64>; 2];

fn norms_of(report: &StepReport) -> Norms {
    [report.grad_norm, report.update_norm].map(|norm| norm.map(f64::to_bits))
}

fn steps(
    plan: &Plan,
    state: &mut State,
    backend: &CpuBackend,
    comms: &mut Comms<'_>,
    steps: std::ops::Range<u64>,
) -> Vec<Norms> {
    let rank = plan.topology().rank as u64;
    let norms = steps.map(|step| {
        for param in 0..NUMELS.len() {
            let grad = bytes(param, [step, rank]);
            plan.push_grad(state, backend, comms, &name(param), &grad)
                .unwrap();
        }
        let report = plan.step(state, backend, comms).unwrap();
        norms_of(&report.update.unwrap())
    });
    norms.collect()
}

fn all(plan: &Plan, state: &State, backend: &CpuBackend, comms: &mut Comms<'_>) -> Vec<Vec<u8>> {
    let names: Vec<String> = (0..NUMELS.len()).map(name).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let gathered = plan.gather(state, backend, comms, &names).unwrap();
    (0..names.len())
        .map(|at| gathered.bytes(at).to_vec())
        .collect()
}

/// One plan of everything: shared parameters with the mean of gradients, and the slices of all
/// ranks under names of their own.
fn by_hand(world: usize, group: usize) -> (Vec<Vec<Vec<u8>>>, Vec<Norms>) {
    let slices = (0..world).flat_map(|rank| SLICES.map(|param| (param, rank)));
    let whole: Vec<(usize, usize)> = [(0, 0), (1, 0)].into_iter().chain(slices).collect();
    let label = |param: usize, rank: usize| format!("layer{param}#{rank}");
    let descs: Vec<ParamDesc> = whole.iter().map(|&(p, r)| desc(label(p, r), p)).collect();
    let plan = Planner::new(Adam::default().into())
        .naive()
        .with(ClipByGlobalNorm::new(1.0))
        .with(UpdateNorms)
        .plan(&descs)
        .unwrap();
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let mut state = plan.allocate(&backend).unwrap();
    for &(param, rank) in &whole {
        let value = first(param, rank);
        state
            .write(&backend, Role::Param, &label(param, rank), &value)
            .unwrap();
    }
    let mut norms = Vec::new();
    for step in 0..STEPS {
        for &(param, rank) in &whole {
            let grad = if SLICES.contains(&param) {
                bytes(param, [step, rank as u64])
            } else {
                mean(param, step, world, group)
            };
            state
                .write(&backend, Role::Grad, &label(param, rank), &grad)
                .unwrap();
        }
        let report = plan.run(&mut state, &backend).unwrap();
        norms.push(norms_of(&report));
    }
    let read = |param: usize, rank: usize| {
        let of = if SLICES.contains(&param) { rank } else { 0 };
        let mut value = vec![0; NUMELS[param] as usize * 4];
        state
            .read(&backend, Role::Param, &label(param, of), &mut value)
            .unwrap();
        value
    };
    let ranks = (0..world).map(|rank| (0..NUMELS.len()).map(|p| read(p, rank)).collect());
    (ranks.collect(), norms)
}

/// The mean over groups of the means within them, in rank order.
fn mean(param: usize, step: u64, world: usize, group: usize) -> Vec<u8> {
    let grads: Vec<Vec<u8>> = (0..world)
        .map(|rank| bytes(param, [step, rank as u64]))
        .collect();
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
    (0..NUMELS[param] as usize)
        .flat_map(|at| mean(at).to_le_bytes())
        .collect()
}

#[test]
fn slices_are_updated_by_their_ranks_and_count_once_in_the_norm() {
    let (expected, norms) = by_hand(WORLD, WORLD);
    for (at, zero) in [
        ZeroStage::None,
        ZeroStage::One,
        ZeroStage::Two,
        ZeroStage::Three,
        ZeroStage::Three,
    ]
    .into_iter()
    .enumerate()
    {
        // The last one alone does not measure: its shards end inside chunks.
        let planner = planner(zero).with(ClipByGlobalNorm::new(1.0));
        let (planner, norms) = match at {
            4 => (
                planner,
                norms.iter().map(|[grad, _]| [*grad, None]).collect(),
            ),
            _ => (planner.with(UpdateNorms), norms.clone()),
        };
        let outcomes = run_ranks(WORLD, &Options::default(), |mut comm| {
            let plan = planner.plan_for(&params(), Topology::of(&comm)).unwrap();
            let backend = CpuBackend::new(NonZeroUsize::MIN);
            let mut comms = Comms::with_streams(&mut comm, 1).unwrap();
            let mut state = start(&plan, &backend);
            let found = steps(&plan, &mut state, &backend, &mut comms, 0..STEPS);
            (all(&plan, &state, &backend, &mut comms), found)
        });
        for (rank, outcome) in outcomes.unwrap().into_iter().enumerate() {
            let (found, found_norms) = outcome.unwrap();
            assert_eq!(found_norms, norms, "{zero:?}");
            assert!(found == expected[rank], "{zero:?}, rank {rank}");
        }
    }
}

#[test]
fn every_rank_has_slices_of_its_own_in_shard_groups_too_and_each_counts_once() {
    for (world, group) in [(4, 2), (6, 3), (3, 1)] {
        let (expected, norms) = by_hand(world, group);
        let group = NonZeroUsize::new(group).unwrap();
        for (zero, streams) in [
            (ZeroStage::One, 0),
            (ZeroStage::Two, 1),
            (ZeroStage::Three, 2),
        ] {
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
                let mut found = steps(&plan, &mut state, &backend, &mut comms, 0..1);
                let caller = BTreeMap::new();
                plan.save(&state, &backend, &mut comms, folder.path(), caller)
                    .unwrap();
                // The rest of the run goes on from what was saved.
                let mut state = plan.allocate(&backend).unwrap();
                plan.load(&mut state, &backend, folder.path()).unwrap();
                found.extend(steps(&plan, &mut state, &backend, &mut comms, 1..STEPS));
                (all(&plan, &state, &backend, &mut comms), found)
            });
            for (rank, outcome) in outcomes.unwrap().into_iter().enumerate() {
                let (found, found_norms) = outcome.unwrap();
                assert_eq!(found_norms, norms, "{zero:?}, {world} in {group}s");
                assert!(found == expected[rank], "{zero:?}, rank {rank} of {world}");
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
        plan.broadcast_parameters(&mut state, &backend, &mut comms, 1)
            .unwrap();
        let begun = all(&plan, &state, &backend, &mut comms);
        assert!((0..4).all(|param| begun[param] == first(param, rank)));
        steps(&plan, &mut state, &backend, &mut comms, 0..1);
        let caller = BTreeMap::new();
        plan.save(&state, &backend, &mut comms, folder.path(), caller)
            .unwrap();
        all(&plan, &state, &backend, &mut comms)
    });
    let manifest = Manifest::read(folder.path()).unwrap();
    let out = tempfile::tempdir().unwrap();
    let error = manifest.average(folder.path(), out.path(), 1).unwrap_err();
    assert!(error.to_string().contains("layer2"), "{error}");
    let two = planner.plan_for(&params(), Topology::new(0, 2).unwrap());
    let (two, backend) = (two.unwrap(), CpuBackend::new(NonZeroUsize::MIN));
    let mut state = two.allocate(&backend).unwrap();
    let error = two.load(&mut state, &backend, folder.path()).unwrap_err();
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
            let plan = planner(zero)
                .plan_for(&params(), Topology::of(&comm))
                .unwrap();
            let backend = CpuBackend::new(NonZeroUsize::MIN);
            let mut comms = Comms::direct(&mut comm);
            let mut state = start(&plan, &backend);
            steps(&plan, &mut state, &backend, &mut comms, 0..1);
            let caller = BTreeMap::new();
            plan.save(&state, &backend, &mut comms, folder.path(), caller)
                .unwrap();
            steps(&plan, &mut state, &backend, &mut comms, 1..3);
            let mut again = plan.allocate(&backend).unwrap();
            plan.load(&mut again, &backend, folder.path()).unwrap();
            steps(&plan, &mut again, &backend, &mut comms, 1..3);
            all(&plan, &state, &backend, &mut comms) == all(&plan, &again, &backend, &mut comms)
        });
        assert!(
            outcomes.unwrap().into_iter().all(Result::unwrap),
            "{zero:?}"
        );
        let two = planner(zero)
            .plan_for(&params(), Topology::new(0, 2).unwrap())
            .unwrap();
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let mut state = two.allocate(&backend).unwrap();
        let error = two
            .load(&mut state, &backend, folder.path())
            .unwrap_err()
            .to_string();
        assert!(error.contains("#2"), "{error}");
    }
}

#[test]
fn what_slices_cannot_do_is_refused() {
    let two = Topology::new(0, 2).unwrap();
    let unknown = planner(ZeroStage::None)
        .plan_for(&params()[..3], two)
        .unwrap_err();
    assert!(unknown.to_string().contains("layer3"), "{unknown}");
    let lars = Planner::new(Lars::default().into()).with(Distributed::params(["layer2"]));
    let error = lars.plan_for(&params(), two).unwrap_err().to_string();
    assert!(error.contains("distributed and lars"), "{error}");
    let averaged = planner(ZeroStage::None)
        .with(LocalSgd::every(NonZeroU64::MIN))
        .with(ClipByGlobalNorm::new(1.0));
    let error = averaged.plan_for(&params(), two).unwrap_err().to_string();
    assert!(error.contains("local_sgd"), "{error}");
    let solo = planner(ZeroStage::None)
        .plan_for(&params(), Topology::SOLO)
        .unwrap();
    assert!(
        solo.explain()
            .iter()
            .any(|note| note.reason.contains("every slice"))
    );
}
