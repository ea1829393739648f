//! Parameters and state in 16 bits: the same bits however a step runs, master weights, remainders
//! and random rounding.

use std::num::NonZeroUsize;

use fusestep_checkpoint::{load_state, save_state};
use fusestep_cpu::CpuBackend;
use fusestep_fused_adam::{Adam, SecondMoment};
use fusestep_launch::{
    Backend, BackendError, Launch, LaunchLimits, LaunchReport, Master, Precision, Reduce, Rounding,
    StateDType, WeightDecay,
};
use fusestep_planner::{
    ClipByGlobalNorm, Lender, Optimizer, Plan, PlanError, Planner, RunAlone, State, Tensors,
};
use fusestep_simd::{join_bf16, narrow_bf16, narrow_f16};
use fusestep_tensor::{DType, Role};
use fusestep_testkit::{Case, Gradients, check_at, check_bits, outcome};
use half::bf16;

#[path = "precision/bounds.rs"]
mod bounds;
#[path = "precision/rules.rs"]
mod rules;

const NUMELS: [u64; 10] = [0, 1, 15, 16, 17, 33, 511, 513, 65_537, 3];

fn adam() -> Adam {
    Adam { lr: 1e-2, ..Adam::default() }
}

fn cpu() -> CpuBackend {
    CpuBackend::new(NonZeroUsize::new(2).unwrap())
}

fn precision(master: Master, state: StateDType, rounding: Rounding) -> Precision {
    Precision { master, state, rounding, ..Precision::default() }
}

/// Every combination of dtype and precision that there is a kernel for.
fn formats() -> Vec<(DType, Precision)> {
    let (nearest, random) = (Rounding::Nearest, Rounding::Stochastic { seed: 11 });
    let (compute, state16) = (StateDType::Compute, StateDType::Bf16);
    let mut all = vec![
        (DType::F16, precision(Master::None, compute, nearest)),
        (DType::F16, precision(Master::F32, compute, nearest)),
        (DType::BF16, precision(Master::None, compute, random)),
        (DType::F32, precision(Master::None, state16, nearest)),
        (DType::F32, precision(Master::None, state16, random)),
    ];
    for master in [Master::None, Master::F32, Master::Remainder] {
        for (state, rounding) in [(compute, nearest), (state16, nearest), (state16, random)] {
            all.push((DType::BF16, precision(master, state, rounding)));
        }
    }
    all
}

#[test]
fn every_format_keeps_its_bits_however_it_runs() {
    for (dtype, precision) in formats() {
        let case = Case::new(NUMELS, dtype).with_groups();
        check_at(Optimizer::Adam(adam()), precision, &case);
    }
}

#[test]
fn amsgrad_and_l2_keep_their_bits_in_every_format() {
    for (dtype, precision) in formats() {
        let case = Case::new([0, 1, 17, 1100], dtype).with_groups();
        let amsgrad = Adam {
            second_moment: SecondMoment::Largest,
            weight_decay: WeightDecay::L2(0.01),
            ..adam()
        };
        check_at(Optimizer::Adam(amsgrad), precision, &case);
    }
}

#[test]
fn clipping_sees_16_bit_gradients_on_every_backend() {
    for dtype in [DType::F16, DType::BF16] {
        let case = Case::new([0, 1, 17, 1100, 70_001], dtype);
        let master = precision(Master::F32, StateDType::Compute, Rounding::Nearest);
        let bits = |max_norm: f64| {
            check_bits(Optimizer::Adam(adam()), &case, &|planner| {
                let planner = planner.precision(master);
                planner.with(ClipByGlobalNorm::new(max_norm))
            })
        };
        assert!(bits(1e-3) != bits(1e9), "{dtype}: a small limit must show");
    }
}

#[test]
fn extreme_gradients_keep_their_bits_in_every_format() {
    for (dtype, precision) in formats() {
        let case = Case::new([1, 33, 1000], dtype).with_gradients(Gradients::Extreme);
        let eps_0 = Adam { eps: 0.0, ..adam() };
        check_at(Optimizer::Adam(eps_0), precision, &case);
    }
}

/// A plan of a case with its state before the first step.
fn ready(case: &Case, precision: Precision) -> (Plan, State) {
    let planner = Planner::new(Optimizer::Adam(adam())).precision(precision);
    let plan = planner.plan(&case.params).unwrap();
    let mut state = plan.allocate(&cpu()).unwrap();
    for (index, param) in case.params.iter().enumerate() {
        let bytes = case.param_bytes(index);
        state.write(&cpu(), Role::Param, &param.name, &bytes).unwrap();
    }
    (plan, state)
}

fn run(case: &Case, plan: &Plan, state: &mut State, steps: std::ops::RangeInclusive<u64>) {
    for step in steps {
        for (index, param) in case.params.iter().enumerate() {
            let bytes = case.grad_bytes(index, step);
            state.write(&cpu(), Role::Grad, &param.name, &bytes).unwrap();
        }
        RunAlone::of(plan, state, &cpu()).step_all().unwrap();
    }
}

fn read(state: &State, role: Role, name: &str, len_bytes: usize) -> Vec<u8> {
    let mut bytes = vec![0; len_bytes];
    state.read(&cpu(), role, name, &mut bytes).unwrap();
    bytes
}

#[test]
fn a_remainder_is_the_master_bit_for_bit_over_100_steps() {
    let case = Case::new([1000], DType::BF16);
    let of = |master| precision(master, StateDType::Compute, Rounding::Nearest);
    let (plan, mut with_master) = ready(&case, of(Master::F32));
    run(&case, &plan, &mut with_master, 1..=100);
    let (plan, mut with_remainder) = ready(&case, of(Master::Remainder));
    run(&case, &plan, &mut with_remainder, 1..=100);
    let masters: Vec<f32> = with_master.view(Role::Master, "tensor.0").unwrap().to_vec();
    let params: &[bf16] = with_remainder.param("tensor.0").unwrap();
    let remainders: &[u16] = with_remainder.view(Role::Remainder, "tensor.0").unwrap();
    for ((&master, param), &remainder) in masters.iter().zip(params).zip(remainders) {
        assert_eq!(join_bf16(param.to_bits(), remainder).to_bits(), master.to_bits());
    }
    let rounded: &[bf16] = with_master.param("tensor.0").unwrap();
    for (&master, param) in masters.iter().zip(rounded) {
        assert_eq!(narrow_bf16(master), param.to_bits());
    }
}

#[test]
fn masters_take_updates_that_16_bits_alone_would_lose() {
    for dtype in [DType::F16, DType::BF16] {
        let case = Case::new([64], dtype);
        let small = Adam { lr: 1e-6, weight_decay: WeightDecay::L2(0.0), ..Adam::default() };
        let after = |precision| {
            let plan = Planner::new(Optimizer::Adam(small)).precision(precision);
            let plan = plan.plan(&case.params).unwrap();
            let mut state = plan.allocate(&cpu()).unwrap();
            let one = if dtype == DType::F16 { narrow_f16(1.0) } else { narrow_bf16(1.0) };
            let grad = if dtype == DType::F16 { narrow_f16(-0.5) } else { narrow_bf16(-0.5) };
            state.write(&cpu(), Role::Param, "tensor.0", &one.to_le_bytes().repeat(64)).unwrap();
            state.write(&cpu(), Role::Grad, "tensor.0", &grad.to_le_bytes().repeat(64)).unwrap();
            for _ in 0..5000 {
                RunAlone::of(&plan, &mut state, &cpu()).step_all().unwrap();
            }
            read(&state, Role::Param, "tensor.0", 128) != one.to_le_bytes().repeat(64)
        };
        assert!(!after(Precision::default()), "{dtype}: 1 + 1e-6 rounds to 1");
        let master = precision(Master::F32, StateDType::Compute, Rounding::Nearest);
        assert!(after(master), "{dtype}: 5000 updates of 1e-6 must show");
    }
}

#[test]
fn random_rounding_moves_parameters_by_the_update_on_average() {
    let case = Case::new([1 << 16], DType::BF16);
    let random = precision(Master::None, StateDType::Compute, Rounding::Stochastic { seed: 5 });
    let small = Adam { lr: 1e-5, weight_decay: WeightDecay::L2(0.0), ..Adam::default() };
    let plan = Planner::new(Optimizer::Adam(small)).precision(random);
    let plan = plan.plan(&case.params).unwrap();
    let mut state = plan.allocate(&cpu()).unwrap();
    state.view_mut::<bf16>(Role::Param, "tensor.0").unwrap().fill(bf16::ONE);
    state.grad_mut::<bf16>("tensor.0").unwrap().fill(bf16::from_f32(-0.5));
    for _ in 0..100 {
        RunAlone::of(&plan, &mut state, &cpu()).step_all().unwrap();
    }
    let params: &[bf16] = state.param("tensor.0").unwrap();
    let mean = params.iter().map(|p| f64::from(p.to_f32())).sum::<f64>() / params.len() as f64;
    // 100 updates of 1e-5; an element's deviation is at most 2^-7·√(100·0.0013), that of the mean
    // 256 times smaller: 1.1e-5.
    assert!((mean - 1.001).abs() < 6e-5, "{mean}");
}

#[test]
fn seeds_and_steps_draw_apart_and_the_order_of_launches_does_not() {
    let case = Case::new([3000, 70_000, 5], DType::BF16);
    let of = |seed| precision(Master::None, StateDType::Bf16, Rounding::Stochastic { seed });
    let bits = |seed, limits| {
        let planner = Planner::new(Optimizer::Adam(adam())).precision(of(seed));
        outcome(&planner.limits(limits).plan(&case.params).unwrap(), &case, &cpu())
    };
    let small = LaunchLimits {
        argument_bytes: 400,
        chunk_elements: 64,
        chunks_per_launch: 7,
        ..LaunchLimits::default()
    };
    assert!(bits(1, LaunchLimits::default()) == bits(1, small));
    assert!(bits(1, small) != bits(2, small));
}

#[test]
fn a_saved_state_goes_on_with_the_same_bits_in_every_format() {
    let folder = tempfile::tempdir().unwrap();
    for (dtype, precision) in formats() {
        let case = Case::new([70, 1000], dtype);
        let (plan, mut straight) = ready(&case, precision);
        run(&case, &plan, &mut straight, 1..=4);
        let (plan, mut first) = ready(&case, precision);
        run(&case, &plan, &mut first, 1..=2);
        let path = folder.path().join("state");
        save_state(&first, &cpu(), &path).unwrap();
        let mut second = plan.allocate(&cpu()).unwrap();
        // The order in which parameters and state are read back does not matter.
        let load_first = dtype == DType::F16;
        if load_first {
            load_state(&mut second, &cpu(), &path).unwrap();
        }
        for param in &case.params {
            let len_bytes = param.numel() as usize * dtype.len_bytes();
            let bytes = read(&first, Role::Param, &param.name, len_bytes);
            second.write(&cpu(), Role::Param, &param.name, &bytes).unwrap();
        }
        if !load_first {
            load_state(&mut second, &cpu(), &path).unwrap();
        }
        run(&case, &plan, &mut second, 3..=4);
        for param in &case.params {
            for role in straight.roles(&param.name).unwrap() {
                let width = straight.dtype(role, &param.name).unwrap().len_bytes();
                let len_bytes = param.numel() as usize * width;
                let bytes = |state| read(state, role, &param.name, len_bytes);
                assert!(bytes(&straight) == bytes(&second), "{dtype}, {precision}: {role}");
            }
        }
    }
}

#[test]
fn a_parameter_written_through_a_view_reaches_its_master() {
    let case = Case::new([20], DType::BF16);
    let master = precision(Master::F32, StateDType::Compute, Rounding::Nearest);
    let (plan, mut state) = ready(&case, master);
    run(&case, &plan, &mut state, 1..=1);
    state.view_mut::<bf16>(Role::Param, "tensor.0").unwrap().fill(bf16::from_f32(2.0));
    state.grad_mut::<bf16>("tensor.0").unwrap().fill(bf16::ZERO);
    RunAlone::of(&plan, &mut state, &cpu()).step_all().unwrap();
    let params: &[bf16] = state.param("tensor.0").unwrap();
    assert!(params.iter().all(|p| (p.to_f32() - 2.0).abs() < 0.05), "{params:?}");
}

#[test]
fn traffic_is_that_of_the_lists() {
    for (dtype, master, state, bytes) in [
        (DType::F32, Master::None, StateDType::Compute, 28),
        (DType::BF16, Master::None, StateDType::Compute, 22),
        (DType::BF16, Master::F32, StateDType::Compute, 28),
        (DType::BF16, Master::Remainder, StateDType::Compute, 26),
        (DType::BF16, Master::None, StateDType::Bf16, 14),
    ] {
        let case = Case::new([100], dtype);
        let (plan, _) = ready(&case, precision(master, state, Rounding::Nearest));
        assert_eq!(plan.traffic_bytes(), 100 * bytes, "{dtype} {master:?} {state:?}");
    }
}

#[test]
fn what_cannot_be_kept_is_refused_by_name() {
    let mut case = Case::new([4, 5], DType::BF16);
    case.params[1].dtype = DType::F32;
    let master = precision(Master::F32, StateDType::Compute, Rounding::Nearest);
    let planner = || Planner::new(Optimizer::Adam(adam())).precision(master);
    let error = planner().plan(&case.params).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`tensor.1`: adamw: master weights of f32 parameters: expected none, because such a \
         parameter loses nothing, found f32 (setting `master_weights`)"
    );
    let plan = planner().precision_of(DType::F32, Precision::default());
    let plan = plan.plan(&case.params).unwrap();
    let text = plan.to_string();
    assert!(
        text.contains("bf16 parameters: master weights f32, state f32, rounded to nearest"),
        "{text}"
    );
    assert!(text.contains("param bf16, grad bf16, moment1 f32, moment2 f32, master f32"), "{text}");
    let borrowed =
        Planner::new(Optimizer::Adam(adam())).precision(master).tensors(Tensors::Borrowed);
    let plan = borrowed.plan(&case.params[..1]).unwrap();
    let mut state = plan.allocate(&cpu()).unwrap();
    let step = |state: &mut State| {
        RunAlone::of(&plan, state, &cpu()).step_borrowed(&mut LendsNothing(cpu()))
    };
    let error = step(&mut state).unwrap_err();
    assert!(matches!(error, PlanError::BorrowedMaster { .. }), "{error}");
    assert!(error.to_string().contains("`tensor.0`"), "{error}");
    let bytes = case.param_bytes(0);
    let short = state.follow_borrowed(&cpu(), "tensor.0", &bytes[1..]);
    assert!(matches!(short, Err(PlanError::LenBytes { .. })));
    state.follow_borrowed(&cpu(), "tensor.0", &bytes).unwrap();
    step(&mut state).unwrap();
    let masters = state.view::<f32>(Role::Master, "tensor.0").unwrap();
    for (master, bytes) in masters.iter().zip(bytes.chunks_exact(2)) {
        let bits = u16::from_le_bytes([bytes[0], bytes[1]]);
        assert_eq!(*master, bf16::from_bits(bits).to_f32());
    }
}

/// Runs no launch: what a step does besides.
struct LendsNothing(CpuBackend);

impl Lender for LendsNothing {
    fn backend(&self) -> &dyn Backend {
        &self.0
    }

    fn launch(&mut self, _: Launch<'_>) -> Result<LaunchReport, BackendError> {
        Ok(LaunchReport::default())
    }

    fn reduce(&mut self, _: Reduce<'_>) -> Result<LaunchReport, BackendError> {
        Ok(LaunchReport::default())
    }
}
