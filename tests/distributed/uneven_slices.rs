//! Slices of other lengths on every rank train, save and resume as the whole tensor does.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;

use fusestep_checkpoint::{load, save};
use fusestep_collective::{Communicator, Options, Solo, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_fused_sgd::Sgd;
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::Lars;
use fusestep_planner::{
    ClipByGlobalNorm, Comms, Distributed, FuseAllReduce, FuseReduceIntoUpdate,
    GradientAccumulation, Optimizer, Plan, PlanError, Planner, Run, RunToLoad, RunToSave, Shard,
    State, Topology, UpdateNorms, ZeroStage,
};
use fusestep_tensor::{DType, ParamDesc, Role, Shape};

use crate::run::noise;

const STEPS: u64 = 4;
const SHARED: u64 = 3_001;

/// Lengths of the slices of `head` and of `bias` on each rank.
#[derive(Clone, Debug)]
struct Split {
    head: Vec<u64>,
    bias: Vec<u64>,
}

impl Split {
    /// Slices that end with leaves of the fixed tree: norms have the bits of the whole.
    fn at_leaves(world: usize) -> Self {
        let (head, bias) = ([70 * 1_024, 1_024, 0, 2_048], [6, 0, 0, 0]);
        Self { head: head[..world].to_vec(), bias: bias[..world].to_vec() }
    }

    fn ragged(world: usize) -> Self {
        let (head, bias) = ([501, 500, 0, 7], [3, 2, 1, 0]);
        Self { head: head[..world].to_vec(), bias: bias[..world].to_vec() }
    }

    /// The elements of a parameter that a rank has, or all of them.
    fn range(&self, name: &str, rank: Option<usize>) -> std::ops::Range<u64> {
        let counts = match name {
            "head" => &self.head,
            "bias" => &self.bias,
            _ => return 0..SHARED,
        };
        match rank {
            None => 0..counts.iter().sum(),
            Some(rank) => {
                let first = counts[..rank].iter().sum::<u64>();
                first..first + counts[rank]
            }
        }
    }

    fn params(&self, rank: Option<usize>) -> Vec<ParamDesc> {
        let desc = |name| {
            let range = self.range(name, rank);
            ParamDesc::new(name, Shape::new([range.end - range.start]).unwrap(), DType::F32)
        };
        NAMES.map(desc).to_vec()
    }

    fn shapes(&self, name: &str) -> Vec<Shape> {
        let counts = if name == "head" { &self.head } else { &self.bias };
        counts.iter().map(|&count| Shape::new([count]).unwrap()).collect()
    }
}

const NAMES: [&str; 3] = ["bias", "body", "head"];

fn values(key: u64, name: &str, range: std::ops::Range<u64>) -> Vec<u8> {
    let param = NAMES.iter().position(|known| *known == name).unwrap() as u64;
    let values = range.map(|element| noise([key, 1, param << 32 | element]));
    values.flat_map(f32::to_le_bytes).collect()
}

/// A run and what it is held to.
struct Case {
    rule: Optimizer,
    split: Split,
    zero: ZeroStage,
    clip: Option<f64>,
    micro_steps: u32,
}

/// Values of each parameter, and the norms of each step.
type Trained = (Vec<Vec<f32>>, Vec<[f64; 2]>);

impl Case {
    fn planner(&self) -> Planner {
        let mut planner = Planner::new(self.rule)
            .with(UpdateNorms)
            .with(GradientAccumulation::every(self.micro_steps.try_into().unwrap()));
        if let Some(norm) = self.clip {
            planner = planner.with(ClipByGlobalNorm::new(norm));
        }
        planner
    }

    fn plan(&self, topology: Topology) -> Result<Plan, PlanError> {
        let rank = (topology.world > 1).then_some(topology.rank);
        let params = self.split.params(rank);
        if topology.world == 1 {
            return self.planner().plan(&params);
        }
        let slices = Distributed::default()
            .with_shapes("head", self.split.shapes("head"))
            .with_shapes("bias", self.split.shapes("bias"));
        let planner = self.planner().with(FuseAllReduce::of_bytes(5_000)).with(slices);
        let planner = planner.with(FuseReduceIntoUpdate);
        let planner = match self.zero {
            ZeroStage::None => planner,
            zero => planner.with(Shard::new(zero)),
        };
        planner.plan_for(&params, topology)
    }

    fn start(&self, plan: &Plan, backend: &CpuBackend) -> State {
        let mut state = plan.allocate(backend).unwrap();
        let rank = (plan.topology().world > 1).then_some(plan.topology().rank);
        for name in NAMES {
            let first = values(100, name, self.split.range(name, rank));
            state.write(backend, Role::Param, name, &first).unwrap();
        }
        state
    }

    /// Gradient and update norms of some steps.
    fn step(
        &self,
        (plan, state): (&Plan, &mut State),
        backend: &CpuBackend,
        comms: &mut Comms<'_>,
        steps: std::ops::Range<u64>,
    ) -> Vec<[f64; 2]> {
        let rank = (plan.topology().world > 1).then_some(plan.topology().rank);
        let mut norms = Vec::new();
        for micro in
            steps.start * u64::from(self.micro_steps)..steps.end * u64::from(self.micro_steps)
        {
            let mut run = Run::of(plan, state, backend, comms);
            for name in NAMES.iter().rev() {
                let grad = values(micro, name, self.split.range(name, rank));
                run.push_grad(name, &grad).unwrap();
            }
            if let Some(report) = run.step().unwrap().update {
                norms.push([report.grad_norm.unwrap_or(0.0), report.update_norm.unwrap()]);
            }
        }
        norms
    }

    /// What one rank with the whole tensors comes to.
    fn whole(&self) -> Trained {
        let plan = self.plan(Topology::SOLO).unwrap();
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let mut state = self.start(&plan, &backend);
        let mut solo = Solo::new();
        let mut comms = Comms::direct(&mut solo);
        let norms = self.step((&plan, &mut state), &backend, &mut comms, 0..STEPS);
        let params = NAMES.map(|name| state.param::<f32>(name).unwrap().to_vec());
        (params.to_vec(), norms)
    }

    /// What each rank ends with, of whom all save and resume in the middle.
    fn run(&self) -> Vec<Trained> {
        let folder = tempfile::tempdir().unwrap();
        let world = self.split.head.len();
        let outcomes = run_ranks(world, &Options::default(), |mut comm| {
            let plan = self.plan(Topology::of(&comm)).unwrap();
            let backend = CpuBackend::new(NonZeroUsize::MIN);
            let mut comms = Comms::direct(&mut comm);
            let mut state = self.start(&plan, &backend);
            Run::of(&plan, &mut state, &backend, &mut comms).broadcast_parameters(0).unwrap();
            Run::of(&plan, &mut state, &backend, &mut comms).handshake(&[]).unwrap();
            let (run, half) = ((&plan, &mut state), STEPS / 2);
            let mut norms = self.step(run, &backend, &mut comms, 0..half);
            save(
                RunToSave::of(&plan, &state, &backend),
                &mut comms,
                folder.path(),
                BTreeMap::new(),
            )
            .unwrap();
            let mut state = plan.allocate(&backend).unwrap();
            load(RunToLoad::of(&plan, &mut state, &backend), folder.path()).unwrap();
            Run::of(&plan, &mut state, &backend, &mut comms).handshake(&[]).unwrap();
            norms.extend(self.step((&plan, &mut state), &backend, &mut comms, half..STEPS));
            let whole = Run::of(&plan, &mut state, &backend, &mut comms).gather(&NAMES).unwrap();
            let floats = |at| {
                let values = whole.bytes(at).as_chunks::<4>().0.iter();
                values.map(|bytes| f32::from_le_bytes(*bytes)).collect()
            };
            ((0..NAMES.len()).map(floats).collect(), norms)
        });
        outcomes.unwrap().into_iter().map(Result::unwrap).collect()
    }
}

fn close(found: f64, expected: f64, bound: f64) -> bool {
    (found - expected).abs() <= bound * expected.abs().max(1e-3)
}

#[test]
fn slices_of_any_lengths_step_save_and_resume_as_the_whole_tensor() {
    let rules: [Optimizer; 4] = [
        Adam::default().into(),
        Sgd::with_momentum().into(),
        Lars::default().into(),
        Lamb::default().into(),
    ];
    for (rule, world) in rules.into_iter().flat_map(|rule| [2, 3, 4].map(|world| (rule, world))) {
        // A mean of three equal gradients is rounded.
        for (split, exact) in [(Split::at_leaves(world), world != 3), (Split::ragged(world), false)]
        {
            let case = |zero| Case {
                rule,
                split: split.clone(),
                zero,
                clip: (world != 3).then_some(0.5),
                micro_steps: if world == 3 { 2 } else { 1 },
            };
            let (expected, expected_norms) = case(ZeroStage::None).whole();
            for zero in [ZeroStage::None, ZeroStage::One, ZeroStage::Two, ZeroStage::Three] {
                let case = case(zero);
                let what = format!("{rule:?} {zero:?} {split:?}");
                for (rank, (found, norms)) in case.run().into_iter().enumerate() {
                    for ((name, found), whole) in NAMES.iter().zip(&found).zip(&expected) {
                        let range = split.range(name, Some(rank));
                        let whole = &whole[range.start as usize..range.end as usize];
                        assert_eq!(found.len(), whole.len(), "{what}");
                        for (found, whole) in found.iter().zip(whole) {
                            let bits = found.to_bits() == whole.to_bits();
                            // Norms of slices that cut leaves differ by rounding.
                            let alike = close((*found).into(), (*whole).into(), 1e-5);
                            assert!(bits || (!exact && alike), "{what} {name} on {rank}");
                        }
                    }
                    assert_eq!(norms.len(), expected_norms.len());
                    for (found, whole) in
                        norms.iter().flatten().zip(expected_norms.iter().flatten())
                    {
                        assert!(close(*found, *whole, 1e-6), "{what}: {found} and {whole}");
                    }
                }
            }
        }
    }
}

#[test]
fn other_slices_are_refused_by_name() {
    let case = |split| Case {
        rule: Adam::default().into(),
        split,
        zero: ZeroStage::One,
        clip: None,
        micro_steps: 1,
    };
    let folder = tempfile::tempdir().unwrap();
    let saved = case(Split::ragged(2));
    let outcomes = run_ranks(2, &Options::default(), |mut comm| {
        let plan = saved.plan(Topology::of(&comm)).unwrap();
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let mut comms = Comms::direct(&mut comm);
        let state = saved.start(&plan, &backend);
        save(RunToSave::of(&plan, &state, &backend), &mut comms, folder.path(), BTreeMap::new())
            .unwrap();
    });
    outcomes.unwrap().into_iter().for_each(|outcome| outcome.unwrap());
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let mut turned = Split::ragged(2);
    turned.head.reverse();
    let three = Split { head: vec![501, 500, 0], bias: vec![3, 2, 0] };
    for (split, topology, here) in [
        (turned, Topology::new(0, 2).unwrap(), "in slices [500], [501] here"),
        (three, Topology::new(0, 3).unwrap(), "in slices [3], [2], [0] here"),
        (Split::ragged(2), Topology::SOLO, "whole here"),
    ] {
        let plan = case(split).plan(topology).unwrap();
        let mut state = plan.allocate(&backend).unwrap();
        let error = load(RunToLoad::of(&plan, &mut state, &backend), folder.path())
            .unwrap_err()
            .to_string();
        assert!(error.contains("slices cannot be cut anew") && error.contains(here), "{error}");
    }
    // Shapes that are not this rank's, or of too few ranks.
    let params = Split::ragged(2).params(Some(1));
    for shapes in [vec![500, 501], vec![501], vec![501, 500, 1]] {
        let shapes: Vec<Shape> = shapes.iter().map(|&n| Shape::new([n]).unwrap()).collect();
        let slices = Distributed::params(["bias"]).with_shapes("head", shapes);
        let planner = Planner::new(Adam::default().into()).with(slices);
        let error = planner.plan_for(&params, Topology::new(1, 2).unwrap()).unwrap_err();
        let named = "slices of `head`: expected a shape for each of 2 ranks, of rank 1 [500]";
        assert!(error.to_string().starts_with(named), "{error}");
    }
}

#[test]
fn ranks_tell_each_other_their_shapes_and_differences_are_named() {
    for world in [1, 2, 4] {
        let split = Split::ragged(world);
        let found = run_ranks(world, &Options::default(), |mut comm| {
            let rank = comm.rank();
            let params = split.params(Some(rank));
            let mut comms = Comms::direct(&mut comm);
            let names = ["bias", "head"].map(str::to_owned).into();
            Distributed::of_ranks(&names, &params, &mut comms).unwrap()
        });
        let expected = match world {
            1 => Distributed::params(["bias", "head"]),
            _ => Distributed::default()
                .with_shapes("bias", split.shapes("bias"))
                .with_shapes("head", split.shapes("head")),
        };
        assert!(found.unwrap().into_iter().all(|found| found.unwrap() == expected));
    }
    let told = run_ranks(2, &Options::default(), |mut comm| {
        let rank = comm.rank();
        let dtype = [DType::F32, DType::BF16][rank];
        let params = [ParamDesc::new("w", Shape::new([2]).unwrap(), dtype)];
        let mut comms = Comms::direct(&mut comm);
        let names = ["w".to_owned()].into();
        let dtypes = Distributed::of_ranks(&names, &params, &mut comms).unwrap_err();
        let names = if rank == 0 { names } else { Default::default() };
        let other = Distributed::of_ranks(&names, &params, &mut comms).unwrap_err();
        [dtypes.to_string(), other.to_string()]
    });
    for told in told.unwrap() {
        let [dtypes, names] = told.unwrap();
        assert_eq!(dtypes, "slices of `w`: expected f32 as on rank 0, found bf16 on rank 1");
        assert!(names.starts_with("distributed parameters: expected w as on rank 0, found none"));
    }
}

#[test]
fn a_name_that_one_rank_lacks_is_told_to_all_of_them() {
    let names = std::collections::BTreeSet::from(["head".to_owned()]);
    for lacking in [vec![1], vec![0], vec![0, 1, 2]] {
        let told = run_ranks(3, &Options::default(), |mut comm| {
            let lacks = lacking.contains(&comm.rank());
            let name = if lacks { "body" } else { "head" };
            let params = [ParamDesc::new(name, Shape::new([4]).unwrap(), DType::F32)];
            let mut comms = Comms::direct(&mut comm);
            let slices = Distributed::of_ranks(&names, &params, &mut comms);
            // All of them have come as far.
            comms.compare(&[("end", "1".to_owned())]).unwrap();
            slices.unwrap_err()
        });
        for told in told.unwrap() {
            let told = told.unwrap();
            if lacking.len() == 3 {
                assert!(matches!(&told, PlanError::UnknownName { name, .. } if name == "head"));
                continue;
            }
            let expected = format!(
                "slices of `head`: expected a parameter of this name on every rank, found none on \
                 rank {}",
                lacking[0]
            );
            assert_eq!(told.to_string(), expected);
        }
    }
}
