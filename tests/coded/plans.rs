//! State in int8 through plans of one rank: the bits of steps on slices, however a step runs.

use std::num::NonZeroUsize;

use fusestep_cpu::CpuBackend;
use fusestep_elementwise::coded::{CodedState, Dither, ParamSlices};
use fusestep_launch::{GradDType, Master, Precision, StateDType};
use fusestep_planner::{
    ClipByGlobalNorm, LEAST_INT8_ELEMENTS, LossScaling, Plan, Planner, RunAlone, State, UpdateNorms,
};
use fusestep_simd::{Level, Pool, join_bf16_24, split_bf16, split_bf16_24};
use fusestep_tensor::{DType, ParamDesc, Role, Shape};
use half::bf16;

use super::{List, Rule, draw, grads, rules};

/// Sizes at the border of int8, and with groups that end early.
const NUMELS: [usize; 8] = [4_095, 4_096, 4_097, 31, 4_127, 70_000, 0, 4_129];

pub(super) fn params(dtype: DType) -> Vec<ParamDesc> {
    let names = NUMELS.iter().enumerate();
    let desc = |(at, numel): (usize, &usize)| {
        ParamDesc::new(format!("p{at}"), Shape::new([*numel as u64]).unwrap(), dtype)
    };
    names.map(desc).collect()
}

pub(super) fn int8() -> Precision {
    Precision { state: StateDType::Int8, ..Precision::default() }
}

fn first_values(at: usize) -> Vec<f32> {
    (0..NUMELS[at]).map(|element| draw(at * 100_000 + element)).collect()
}

/// A run of one rank.
struct Trained {
    plan: Plan,
    state: State,
    backend: CpuBackend,
}

/// Where a step runs.
#[derive(Clone, Copy, Debug)]
struct Place {
    level: Level,
    threads: usize,
}

const ALONE: Place = Place { level: Level::PORTABLE, threads: 1 };

impl Trained {
    fn new(planner: &Planner, place: Place) -> Self {
        let threads = NonZeroUsize::new(place.threads).unwrap();
        let backend = CpuBackend::new(threads).at_level(place.level);
        let plan = planner.plan(&params(DType::F32)).unwrap();
        let mut state = plan.allocate(&backend).unwrap();
        assert_eq!(state.memory_bytes(), plan.memory_bytes());
        for at in 0..NUMELS.len() {
            let bytes: Vec<u8> = first_values(at).into_iter().flat_map(f32::to_le_bytes).collect();
            state.write(&backend, Role::Param, &format!("p{at}"), &bytes).unwrap();
        }
        Self { plan, state, backend }
    }

    /// Steps with these gradients; parameters in `without` have none.
    fn step(&mut self, number: u64, without: &[usize]) {
        for (at, numel) in NUMELS.iter().enumerate() {
            let name = format!("p{at}");
            if without.contains(&at) {
                self.state.set_without_gradient(&name).unwrap();
                continue;
            }
            let grad = grads(*numel, number).into_iter().flat_map(f32::to_le_bytes);
            let bytes: Vec<u8> = grad.collect();
            self.state.write(&self.backend, Role::Grad, &name, &bytes).unwrap();
        }
        RunAlone::of(&self.plan, &mut self.state, &self.backend).step_all().unwrap();
    }

    /// All bytes of a parameter and its state, list by list.
    fn bytes(&self, at: usize) -> Vec<Vec<u8>> {
        let name = format!("p{at}");
        let roles = self.state.roles(&name).unwrap().into_iter();
        let roles = roles.filter(|role| *role != Role::Grad);
        let of = |role: Role| {
            let dtype = self.state.dtype(role, &name).unwrap();
            let entries = role.entries(NUMELS[at] as u64) as usize;
            let mut bytes = vec![0; entries * dtype.len_bytes()];
            self.state.read(&self.backend, role, &name, &mut bytes).unwrap();
            bytes
        };
        roles.map(of).collect()
    }

    fn all(&self) -> Vec<Vec<Vec<u8>>> {
        (0..NUMELS.len()).map(|at| self.bytes(at)).collect()
    }
}

/// A parameter and its state after steps on slices, as [`Trained::bytes`] has them.
fn on_slices(rule: &Rule, at: usize, steps: u64) -> Vec<Vec<u8>> {
    let numel = NUMELS[at];
    let mut param = first_values(at);
    let mut lists = vec![List::zeros(numel); rule.codings.len()];
    let mut plain = vec![vec![0.0; numel]; rule.codings.len()];
    let is_coded = numel as u64 >= LEAST_INT8_ELEMENTS;
    for step in 1..=steps {
        let grad = grads(numel, step);
        if is_coded {
            let state = lists.iter_mut();
            let state = state.map(|l| CodedState { codes: &mut l.codes, units: &mut l.units });
            let slices = ParamSlices::F32 { param: &mut param, grad: &grad };
            (rule.coded)(&Pool::new(NonZeroUsize::MIN), step, slices, state.collect());
        } else {
            (rule.plain)(step, &mut param, &grad, &mut plain);
        }
    }
    let of_f32 = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let mut all: Vec<Vec<u8>> = vec![of_f32(&param)];
    if is_coded {
        all.extend(lists.iter().map(|list| list.codes.clone()));
        all.extend(lists.iter().map(|list| of_f32(&list.units)));
    } else {
        all.extend(plain.iter().map(|list| of_f32(list)));
    }
    all
}

fn places() -> Vec<Place> {
    let levels = Level::available().into_iter();
    levels.flat_map(|level| [1, 3].map(|threads| Place { level, threads })).collect()
}

#[test]
fn plans_step_as_slices_do_by_every_rule_at_every_level() {
    for rule in rules() {
        let planner = Planner::new(rule.optimizer).precision(int8());
        for place in places() {
            let mut trained = Trained::new(&planner, place);
            (1..=3).for_each(|step| trained.step(step, &[]));
            for at in 0..NUMELS.len() {
                let expected = on_slices(&rule, at, 3);
                assert!(trained.bytes(at) == expected, "{}, p{at}, {place:?}", rule.name);
            }
        }
    }
}

#[test]
fn parameters_of_bf16_step_as_on_slices_alone_and_with_8_bits_beside() {
    let pool = Pool::new(NonZeroUsize::MIN);
    for rule in rules() {
        for (master, place) in [Master::None, Master::Remainder8].into_iter().zip(places()) {
            let planner = Planner::new(rule.optimizer).precision(Precision { master, ..int8() });
            let backend = CpuBackend::new(NonZeroUsize::new(2).unwrap()).at_level(place.level);
            let numel = 4_127;
            let desc = ParamDesc::new("p", Shape::new([numel as u64]).unwrap(), DType::BF16);
            let plan = planner.plan(&[desc]).unwrap();
            let mut state = plan.allocate(&backend).unwrap();
            let mut param: Vec<bf16> = (0..numel).map(|at| bf16::from_f32(draw(at))).collect();
            state.write(&backend, Role::Param, "p", bytemuck::cast_slice(&param)).unwrap();
            let mut remainder = vec![0i8; numel];
            let mut lists = vec![List::zeros(numel); rule.codings.len()];
            for step in 1..=3 {
                let grad: Vec<bf16> = grads(numel, step).into_iter().map(bf16::from_f32).collect();
                state.write(&backend, Role::Grad, "p", bytemuck::cast_slice(&grad)).unwrap();
                RunAlone::of(&plan, &mut state, &backend).step_all().unwrap();
                let own = lists.iter_mut();
                let own = own.map(|l| CodedState { codes: &mut l.codes, units: &mut l.units });
                let slices = match master {
                    Master::None => ParamSlices::Bf16 { param: &mut param, grad: &grad },
                    _ => ParamSlices::Bf16Remainder8 {
                        param: &mut param,
                        remainder: &mut remainder,
                        grad: &grad,
                    },
                };
                (rule.coded)(&pool, step, slices, own.collect());
            }
            assert!(state.param::<bf16>("p").unwrap() == param, "{} {master:?}", rule.name);
            if master == Master::Remainder8 {
                let found: &[u8] = state.view(Role::Remainder, "p").unwrap();
                assert!(found == bytemuck::cast_slice::<i8, u8>(&remainder), "{}", rule.name);
            }
        }
    }
}

/// A value as a parameter of bf16 keeps it.
fn kept(master: Master, value: f32) -> f32 {
    match master {
        Master::None => bf16::from_f32(value).to_f32(),
        Master::F32 | Master::Remainder => value,
        Master::Remainder8 => {
            let (upper, lower) = split_bf16_24(value);
            join_bf16_24(upper, lower)
        }
    }
}

/// The parameter of bf16 beside what keeps the rest of a value.
fn stored(master: Master, value: f32) -> bf16 {
    match master {
        Master::None | Master::F32 => bf16::from_f32(value),
        Master::Remainder => bf16::from_bits(split_bf16(value).0),
        Master::Remainder8 => bf16::from_bits(split_bf16_24(value).0),
    }
}

#[test]
fn gradients_of_f32_beside_parameters_of_bf16_lose_nothing() {
    let masters = [Master::None, Master::F32, Master::Remainder, Master::Remainder8];
    for rule in rules() {
        for (master, place) in masters.into_iter().zip(places().into_iter().cycle()) {
            let precision = Precision { master, grad: GradDType::Compute, ..int8() };
            let planner = Planner::new(rule.optimizer).precision(precision);
            let threads = NonZeroUsize::new(place.threads).unwrap();
            let backend = CpuBackend::new(threads).at_level(place.level);
            let numel = 66_015;
            let desc = ParamDesc::new("p", Shape::new([numel as u64]).unwrap(), DType::BF16);
            let plan = planner.plan(&[desc]).unwrap();
            let mut state = plan.allocate(&backend).unwrap();
            let first: Vec<bf16> = (0..numel).map(|at| bf16::from_f32(draw(at))).collect();
            state.write(&backend, Role::Param, "p", bytemuck::cast_slice(&first)).unwrap();
            let mut expected: Vec<f32> = first.iter().map(|value| value.to_f32()).collect();
            let mut lists = vec![List::zeros(numel); rule.codings.len()];
            for step in 1..=3 {
                let grad = grads(numel, step);
                state.write(&backend, Role::Grad, "p", bytemuck::cast_slice(&grad)).unwrap();
                RunAlone::of(&plan, &mut state, &backend).step_all().unwrap();
                let read = lists.iter().zip(rule.codings);
                let mut values: Vec<Vec<f32>> =
                    read.map(|(list, coding)| list.read(*coding)).collect();
                (rule.plain)(step, &mut expected, &grad, &mut values);
                expected.iter_mut().for_each(|value| *value = kept(master, *value));
                let dither = Dither::of_step(step);
                for ((list, coding), values) in lists.iter_mut().zip(rule.codings).zip(&values) {
                    *list = List::written(*coding, values, &dither);
                }
            }
            let params: Vec<bf16> =
                expected.into_iter().map(|value| stored(master, value)).collect();
            let found = state.param::<bf16>("p").unwrap();
            assert!(found == params, "{} {master:?} {place:?}", rule.name);
            let role = state.roles("p").unwrap()[2];
            let codes: &[u8] = state.view(role, "p").unwrap();
            assert!(codes == lists[0].codes, "{} {master:?} {place:?}", rule.name);
        }
    }
}

#[test]
fn naive_plans_and_measured_updates_change_no_bit() {
    for rule in rules() {
        let planner = || Planner::new(rule.optimizer).precision(int8());
        let ready = |planner: Planner, place| {
            let mut trained = Trained::new(&planner, place);
            (1..=2).for_each(|step| trained.step(step, &[2]));
            (3..=4).for_each(|step| trained.step(step, &[]));
            trained
        };
        let fused = ready(planner(), ALONE);
        for place in places() {
            assert!(ready(planner().naive(), place).all() == fused.all(), "{}", rule.name);
            let measured = ready(planner().with(UpdateNorms), place);
            assert!(measured.all() == fused.all(), "{}", rule.name);
        }
        // A tensor without gradient keeps its bits, and goes on with the dither of its own step.
        assert_eq!(fused.state.step_of("p2").unwrap(), 2);
    }
}

#[test]
fn skipped_steps_keep_the_number_of_the_dither() {
    for rule in rules() {
        let planner = || {
            let planner = Planner::new(rule.optimizer).precision(int8());
            planner.with(ClipByGlobalNorm::new(1e9)).with(LossScaling::fixed(1.0))
        };
        let mut straight = Trained::new(&planner(), ALONE);
        let mut skipping = Trained::new(&planner(), ALONE);
        for step in 1..=3 {
            straight.step(step, &[]);
            let before = skipping.all();
            let nan = f32::NAN.to_le_bytes().repeat(NUMELS[1]);
            skipping.state.write(&skipping.backend, Role::Grad, "p1", &nan).unwrap();
            let run = &mut skipping;
            RunAlone::of(&run.plan, &mut run.state, &run.backend).step_all().unwrap();
            assert!(skipping.all() == before, "{}", rule.name);
            skipping.step(step, &[]);
        }
        assert!(straight.all() == skipping.all(), "{}", rule.name);
    }
}

#[test]
fn a_gradient_that_is_not_finite_makes_its_group_nan_and_no_other() {
    let rule = &rules()[0];
    let mut trained = Trained::new(&Planner::new(rule.optimizer).precision(int8()), ALONE);
    trained.step(1, &[]);
    let mut grad = grads(NUMELS[4], 2);
    grad[NUMELS[4] - 1] = f32::NAN;
    let bytes: Vec<u8> = grad.into_iter().flat_map(f32::to_le_bytes).collect();
    trained.state.write(&trained.backend, Role::Grad, "p4", &bytes).unwrap();
    for _ in 0..2 {
        let run = &mut trained;
        RunAlone::of(&run.plan, &mut run.state, &run.backend).step_all().unwrap();
    }
    let values: &[f32] = trained.state.view(Role::Param, "p4").unwrap();
    let last_group = NUMELS[4] / 32 * 32;
    assert!(values[..last_group].iter().all(|value| value.is_finite()));
    assert!(values[last_group..].iter().all(|value| value.is_nan()));
}

#[test]
fn names_that_are_kept_stay_in_f32_and_the_plan_says_so() {
    let rule = &rules()[0];
    let planner = Planner::new(rule.optimizer).precision(int8()).keep_f32(["p4", "p7"]);
    let plan = planner.plan(&params(DType::F32)).unwrap();
    let note = "keep_f32 split: state stays in f32, not int8, of 3 tensors of fewer than 4,096 \
                elements and of 1 tensor with `p4` in the name and of 1 tensor with `p7` in the \
                name";
    let text = plan.to_string();
    assert!(text.contains(note), "{text}");
    let trained = Trained::new(&planner, ALONE);
    let dtype = |name: &str| trained.state.dtype(Role::Moment1, name).unwrap();
    let found = ["p0", "p1", "p4", "p5", "p7"].map(dtype);
    assert_eq!(found, [DType::F32, DType::U8, DType::F32, DType::U8, DType::F32]);
}
