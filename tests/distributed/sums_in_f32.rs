//! Gradients of 16-bit parameters that are added up in f32: the bits of f32 parameters, rounded
//! once at the end; and gradients of f32 that travel in 16 bits.

use std::num::{NonZeroU32, NonZeroUsize};

use fusestep_collective::{Communicator, Options, Solo, run_ranks};
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::Adam;
use fusestep_launch::{Master, Precision};
use fusestep_planner::{
    ClipByGlobalNorm, Comms, FuseAllReduce, FuseReduceIntoUpdate, GradientAccumulation, Lanes,
    Optimizer, PlanError, Planner, ReduceDType, ReducedWhen, Run, Shard, Topology, ZeroStage,
};
use fusestep_simd::{narrow_bf16, narrow_f16, split_bf16, widen_bf16, widen_f16};
use fusestep_tensor::{DType, ParamDesc, Role, Shape};
use fusestep_testkit::each_rule;

use crate::run::{Case, lacking, noise, whole_params};

const NUMELS: [u64; 6] = [3_001, 3, 0, 1, 2_048, 17];

/// Type of the gradients that a program gives.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Given {
    AsParameters,
    AsSums,
}

#[derive(Clone, Debug)]
struct Wide {
    rule: Optimizer,
    dtype: DType,
    master: Master,
    given: Given,
    world: usize,
    zero: ZeroStage,
    streams: usize,
    fused: bool,
    clip: Option<f64>,
    every: u32,
    lanes: Option<u32>,
}

impl Default for Wide {
    fn default() -> Self {
        Self {
            rule: Adam::default().into(),
            dtype: DType::BF16,
            master: Master::F32,
            given: Given::AsSums,
            world: 1,
            zero: ZeroStage::None,
            streams: 0,
            fused: false,
            clip: None,
            every: 1,
            lanes: None,
        }
    }
}

fn narrow(dtype: DType, value: f32) -> u16 {
    if dtype == DType::F16 { narrow_f16(value) } else { narrow_bf16(value) }
}

fn rounded(dtype: DType, value: f32) -> f32 {
    let bits = narrow(dtype, value);
    if dtype == DType::F16 { widen_f16(bits) } else { widen_bf16(bits) }
}

impl Wide {
    fn params(&self, dtype: DType) -> Vec<ParamDesc> {
        let names = NUMELS.iter().enumerate();
        names
            .map(|(at, n)| ParamDesc::new(format!("p{at}"), Shape::new([*n]).unwrap(), dtype))
            .collect()
    }

    fn planner(&self) -> Planner {
        let mut planner = Planner::new(self.rule).with(FuseAllReduce::of_bytes(5_000));
        if let Some(norm) = self.clip {
            planner = planner.with(ClipByGlobalNorm::new(norm));
        }
        if self.every > 1 {
            planner =
                planner.with(GradientAccumulation::every(NonZeroU32::new(self.every).unwrap()));
        }
        if let Some(lanes) = self.lanes.and_then(NonZeroU32::new) {
            planner = planner.with(Lanes::new(lanes));
        }
        if self.zero != ZeroStage::None {
            planner = planner.with(Shard::new(self.zero));
        }
        if self.fused { planner.with(FuseReduceIntoUpdate) } else { planner }
    }

    /// A gradient's values, as a program has computed them.
    fn gradient(&self, rank: usize, step: u64, param: usize) -> Vec<f32> {
        let value = |element: u64| {
            let value = noise([rank as u64 + 1, step + 1, (param as u64) << 32 | element]);
            if self.given == Given::AsParameters { rounded(self.dtype, value) } else { value }
        };
        (0..NUMELS[param]).map(value).collect()
    }

    fn rank(&self, comm: &mut dyn Communicator, dtype: DType) -> Vec<Vec<u8>> {
        let is_twin = dtype == DType::F32;
        let backend = CpuBackend::new(NonZeroUsize::MIN);
        let mut planner = self.planner();
        if !is_twin {
            let precision = Precision { master: self.master, ..Precision::default() };
            planner = planner.precision(precision).reduce_dtype(ReduceDType::F32);
        }
        let plan = planner.plan_for(&self.params(dtype), Topology::of(comm)).unwrap();
        let rank = comm.rank();
        let mut comms = match self.streams {
            0 if self.world.is_multiple_of(2) => Comms::direct(comm).reducing_when_full(),
            0 => Comms::direct(comm),
            streams => Comms::with_streams(comm, streams).unwrap(),
        };
        let mut state = plan.allocate_on(&backend, comms.communicator()).unwrap();
        for (param, desc) in plan.params().iter().enumerate() {
            let first = (0..NUMELS[param]).map(|at| noise([7, param as u64, at]) * 0.1);
            let bytes: Vec<u8> = match dtype {
                DType::F32 => first.flat_map(|x| rounded(self.dtype, x).to_le_bytes()).collect(),
                _ => first.flat_map(|x| narrow(dtype, x).to_le_bytes()).collect(),
            };
            state.write(&backend, Role::Param, &desc.name, &bytes).unwrap();
        }
        let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
        let mut updates = 0;
        for step in 0.. {
            let (from, number) = match run.state().micro_batch() {
                Some(number) => (0, updates * 100 + number),
                None => (rank, step),
            };
            for (param, desc) in plan.params().iter().enumerate() {
                let values = self.gradient(from, number, param);
                let bytes: Vec<u8> = if is_twin || self.given == Given::AsSums {
                    values.into_iter().flat_map(f32::to_le_bytes).collect()
                } else {
                    values.into_iter().flat_map(|x| narrow(dtype, x).to_le_bytes()).collect()
                };
                run.push_grad(&desc.name, &bytes).unwrap();
            }
            if run.step().unwrap().update.is_some() {
                updates += 1;
            }
            if updates == 2 {
                break;
            }
        }
        assert_eq!(run.state().memory_bytes(), plan.memory_bytes(), "{self:?}");
        whole_params(&mut run)
    }

    fn run(&self, dtype: DType) -> Vec<Vec<u8>> {
        if self.world == 1 {
            return self.rank(&mut Solo::new(), dtype);
        }
        let body = |mut comm| self.rank(&mut comm, dtype);
        let ends = run_ranks(self.world, &Options::default(), body).unwrap();
        let mut ends = ends.into_iter().map(|end| end.unwrap());
        let first = ends.next().unwrap();
        assert!(ends.all(|end| end == first), "ranks end apart: {self:?}");
        first
    }

    /// Parameters of f32 that are stepped alike, as parameters of 16 bits show them.
    fn twin(&self) -> Vec<Vec<u8>> {
        let shown = |value: f32| match self.master {
            Master::Remainder => split_bf16(value).0,
            _ => narrow(self.dtype, value),
        };
        let of_param = |bytes: Vec<u8>| {
            let values = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
            values.flat_map(|value| shown(value).to_le_bytes()).collect()
        };
        self.run(DType::F32).into_iter().map(of_param).collect()
    }

    fn is_its_twin(&self) {
        assert!(self.run(self.dtype) == self.twin(), "{self:?}");
    }
}

const STAGES: [ZeroStage; 4] = [ZeroStage::None, ZeroStage::One, ZeroStage::Two, ZeroStage::Three];

#[test]
fn every_rule_steps_from_sums_that_were_never_rounded() {
    for rule in each_rule() {
        for (dtype, master) in [
            (DType::BF16, Master::F32),
            (DType::BF16, Master::Remainder),
            (DType::F16, Master::F32),
        ] {
            for world in [1, 2, 3] {
                for given in [Given::AsSums, Given::AsParameters] {
                    Wide { rule, dtype, master, world, given, ..Wide::default() }.is_its_twin();
                }
            }
        }
    }
}

#[test]
fn stages_streams_and_one_pass_change_no_bit() {
    for world in 1..=4 {
        for zero in STAGES {
            for (streams, fused, clip) in
                [(0, false, None), (0, true, None), (2, false, Some(0.5)), (0, false, Some(0.5))]
            {
                Wide { world, zero, streams, fused, clip, ..Wide::default() }.is_its_twin();
            }
        }
    }
}

#[test]
fn micro_steps_and_lanes_add_in_f32_until_the_update() {
    for world in 1..=4 {
        for (every, lanes) in [(3, None), (1, Some(4)), (1, Some(6)), (2, Some(5))] {
            for given in [Given::AsSums, Given::AsParameters] {
                for zero in [ZeroStage::None, ZeroStage::Two] {
                    let case = Wide { world, every, lanes, given, zero, ..Wide::default() };
                    case.is_its_twin();
                    if lanes.is_some() {
                        let alone = Wide { world: 1, zero: ZeroStage::None, ..case.clone() };
                        assert!(case.run(case.dtype) == alone.run(case.dtype), "{case:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn sums_in_sixteen_bits_lose_what_these_keep() {
    // If rounding on the way did not matter, the tests above would pin nothing.
    let case = Wide { world: 3, ..Wide::default() };
    let given = Wide { given: Given::AsParameters, ..case.clone() };
    assert!(case.run(case.dtype) != given.run(case.dtype));
}

#[test]
fn gradients_of_other_lengths_and_models_without_use_are_refused() {
    let case = Wide::default();
    let planner = case.planner().reduce_dtype(ReduceDType::F32);
    let refused = planner.plan(&case.params(DType::F32)).unwrap_err();
    assert!(matches!(refused, PlanError::Conflict { .. }));
    let text = refused.to_string();
    assert!(text.contains("reduce_dtype") && text.contains("f16 or bf16"), "{text}");

    let plan = planner.plan(&case.params(DType::BF16)).unwrap();
    let backend = CpuBackend::new(NonZeroUsize::MIN);
    let mut state = plan.allocate(&backend).unwrap();
    let mut comms = Comms::alone();
    let mut run = Run::of(&plan, &mut state, &backend, &mut comms);
    for len in [0, 1, 3 * 2 - 1, 3 * 4 - 2, 3 * 4 + 4, 3 * 8] {
        let told = run.push_grad("p1", &vec![0; len]).unwrap_err().to_string();
        assert!(told.contains("`p1`") && told.contains("12"), "{len}: {told}");
    }
    run.push_grad("p1", &[0; 6]).unwrap();
}

const TRAVELLING: [ReduceDType; 2] = [ReduceDType::Bf16, ReduceDType::F16];

#[test]
fn what_travels_in_sixteen_bits_is_rounded_once_by_each_rank() {
    for reduce_dtype in TRAVELLING {
        for world in 2..=5 {
            for zero in STAGES {
                for streams in [0, 2] {
                    let case = Case {
                        reduce_dtype,
                        world,
                        zero,
                        streams,
                        clip: Some(0.5),
                        numels: NUMELS.to_vec(),
                        cap: Some(5_000),
                        without_gradient: lacking(world, 1),
                        ..Case::default()
                    };
                    let found = case.run();
                    assert!(found.params == case.by_hand().params, "{case:?}");
                    let whole = Case { reduce_dtype: ReduceDType::Param, ..case };
                    assert!(found.params != whole.run().params, "nothing was rounded: {whole:?}");
                }
            }
        }
    }
}

#[test]
fn scales_micro_steps_and_infinite_values_travel_as_well() {
    for reduce_dtype in TRAVELLING {
        for world in [2, 3] {
            let scaled = Case {
                reduce_dtype,
                world,
                numels: NUMELS.to_vec(),
                scaled: Some(1024.0),
                infinite: Some((world - 1, 1, 0)),
                steps: 3,
                ..Case::default()
            };
            let found = scaled.run();
            assert!(found.params == scaled.by_hand().params, "{scaled:?}");
            assert_eq!(found.skipped, 1, "{scaled:?}");
            for reduced in [ReducedWhen::PerWindow, ReducedWhen::PerMicroStep] {
                let case = Case { merge: 2, reduced, numels: NUMELS.to_vec(), ..Case::default() };
                let case = Case { reduce_dtype, world, ..case };
                let shared = Case { zero: ZeroStage::Two, ..case.clone() };
                assert!(case.run().params == shared.run().params, "{case:?}");
            }
        }
    }
}

#[test]
fn plans_tell_of_half_the_bytes() {
    let told = |reduce_dtype, zero| {
        let case = Case { reduce_dtype, zero, world: 2, numels: vec![4_096], ..Case::default() };
        let topology = Topology::new(0, 2).unwrap();
        let plan = case.planner().plan_for(&case.params(), topology).unwrap();
        plan.calls().iter().map(|call| call.times * call.bytes_sent).sum::<u64>()
    };
    // At stage 2 ranks send gradients and parameters; at stage 0 gradients and their sums.
    for zero in [ZeroStage::Two, ZeroStage::None] {
        let (whole, less) = (told(ReduceDType::Param, zero), told(ReduceDType::Bf16, zero));
        let difference = whole - less;
        assert!(difference.abs_diff(4_096 * 2 / 2) < 64, "{zero:?}: {whole} and {less} bytes");
    }
}

#[test]
fn models_and_passes_that_nothing_travels_narrower_for_are_refused() {
    let case = Case { world: 2, reduce_dtype: ReduceDType::Bf16, ..Case::default() };
    let of = |planner: Planner, dtype| {
        let params = Wide::default().params(dtype);
        planner.plan_for(&params, Topology::new(0, 2).unwrap()).map(drop).unwrap_err().to_string()
    };
    let text = of(case.planner(), DType::BF16);
    assert!(text.contains("reduce_dtype bf16") && text.contains("parameters of f32"), "{text}");
    let lanes = Lanes::new(NonZeroU32::new(4).unwrap());
    let text = of(case.planner().with(lanes), DType::F32);
    assert!(text.contains("reduce_dtype bf16") && text.contains("lanes"), "{text}");
    let local = fusestep_planner::LocalSgd::every(std::num::NonZeroU64::new(2).unwrap());
    let text = of(case.planner().with(local), DType::F32);
    assert!(text.contains("reduce_dtype bf16") && text.contains("local_sgd"), "{text}");
}
