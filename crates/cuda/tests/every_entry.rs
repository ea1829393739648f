//! Every entry of every module on tensors that a slow interpreter of PTX gets through: what `cargo
//! xtask execute-ptx` runs before anything else. Together these tests launch each entry at least
//! once; that command counts.

#[path = "every_entry/accumulate.rs"]
mod accumulate;
mod common;
#[path = "every_entry/leaves.rs"]
mod leaves;
#[path = "every_entry/rank_order.rs"]
mod rank_order;
#[path = "every_entry/tensor_sums.rs"]
mod tensor_sums;

use std::collections::BTreeSet;

use common::resident::scaled;
use common::{Places, TINY, coded_formats, cpu, cuda, formats, step_at, wide_formats, widened};
use fusestep_cuda::CudaBackend;
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::Lars;
use fusestep_launch::{Backend, Master, Memory, Precision, Rounding, StateDType};
use fusestep_planner::{Optimizer, Planner, TableKind, UpdateNorms};
use fusestep_tensor::DType;
use fusestep_testkit::{Case, Gradients, outcome, rules};

/// One rule of each kernel, and SGD with and without a velocity: state in codes is its velocity.
fn rule_of_each_kernel() -> Vec<Optimizer> {
    let mut stems = BTreeSet::new();
    let mut is_new = |rule: &Optimizer| {
        let kernel = rule.rule().kernel(DType::F32, Precision::default()).unwrap();
        stems.insert((kernel.stem(), matches!(rule, Optimizer::Sgd(sgd) if sgd.momentum > 0.0)))
    };
    rules().into_iter().filter(|rule| is_new(rule)).collect()
}

/// Tensors of no element, of one, of less than a warp takes, and of more than a block loads before
/// it waits, with a rest that fills no pack.
fn case_of(dtype: DType) -> Case {
    let mut case = Case::new([0, 1, 37, 8705], dtype).with_groups();
    case.steps = 2;
    case
}

/// Every format, the plain ones first.
fn each_format() -> Vec<(DType, Precision)> {
    let plain = [DType::F32, DType::F64].map(|dtype| (dtype, Precision::default()));
    plain.into_iter().chain(formats()).chain(coded_formats()).collect()
}

/// Whether the rule can keep its tensors so.
fn has_format(rule: &Optimizer, (dtype, precision): (DType, Precision)) -> bool {
    rule.rule().kernel(dtype, precision).is_ok()
}

/// Requires the host's bits of a rule.
fn same_bits_of(
    backend: &CudaBackend,
    rule: Optimizer,
    way: &dyn Fn(Planner) -> Planner,
    case: &Case,
) {
    let naive = way(Planner::new(rule).naive()).plan(&case.params).unwrap();
    let plan = way(Planner::new(rule)).limits(backend.limits());
    let plan = plan.plan(&case.params);
    let found = outcome(&plan.unwrap(), case, backend);
    let expected = outcome(&naive, case, &cpu());
    let first = found.iter().zip(&expected).position(|(a, b)| a != b);
    let length = expected.len();
    assert!(found == expected, "{rule}: first difference at byte {first:?} of {length}, {naive}");
}

/// [`same_bits_of`] every rule in every format, with gradients that are clipped and scaled.
fn same_bits_of_all(backend: &CudaBackend, rules: &[Optimizer], way: &dyn Fn(Planner) -> Planner) {
    for (dtype, precision) in each_format() {
        let case = case_of(dtype);
        for &rule in rules.iter().filter(|rule| has_format(rule, (dtype, precision))) {
            same_bits_of(
                backend,
                rule,
                &|planner| way(scaled(planner.precision(precision))),
                &case,
            );
        }
    }
}

fn normed_rules() -> Vec<Optimizer> {
    let mut rules = rule_of_each_kernel();
    rules.retain(|rule| matches!(rule, Optimizer::Lars(_) | Optimizer::Lamb(_)));
    assert_eq!(rules.len(), 2);
    rules
}

fn in_arguments(planner: Planner) -> Planner {
    planner.table(TableKind::Arguments)
}

fn resident(planner: Planner) -> Planner {
    planner.table(TableKind::Resident)
}

fn measured(planner: Planner) -> Planner {
    resident(planner).with(UpdateNorms)
}

#[test]
fn entries_with_tables_in_arguments_give_the_bits_of_the_host() {
    same_bits_of_all(&cuda(), &rule_of_each_kernel(), &in_arguments);
}

#[test]
fn gradients_in_f32_give_the_bits_of_the_host() {
    let coded = coded_formats().into_iter().filter_map(widened);
    for (dtype, precision) in wide_formats().into_iter().chain(coded) {
        let case = case_of(dtype);
        for rule in rule_of_each_kernel() {
            if !has_format(&rule, (dtype, precision)) {
                continue;
            }
            let way = |planner: Planner| in_arguments(scaled(planner.precision(precision)));
            same_bits_of(&cuda(), rule, &way, &case);
        }
    }
}

#[test]
fn entries_with_resident_tables_give_the_bits_of_the_host() {
    same_bits_of_all(&cuda(), &rule_of_each_kernel(), &resident);
}

#[test]
fn entries_that_measure_give_the_bits_of_the_host() {
    same_bits_of_all(&cuda(), &rule_of_each_kernel(), &measured);
}

// What mutants of single entries run on: less than the tests above, since there are many.

#[test]
fn adam_alone_gives_the_bits_of_the_host() {
    let whole = case_of(DType::F32);
    let cut = Case::new([0, 1, 63, 64, 65, 500, 0, 193], DType::F32).with_groups();
    let skipped = cut.clone().with_gradients(Gradients::Extreme);
    let clipped = |planner| in_arguments(scaled(planner));
    for rule in rules().into_iter().take(2) {
        assert!(matches!(rule, Optimizer::Adam(_)));
        for case in [&whole, &skipped] {
            same_bits_of(&cuda(), rule, &clipped, case);
            same_bits_of(&cuda(), rule, &in_arguments, case);
        }
        same_bits_of(&cuda().with_limits(TINY), rule, &clipped, &cut);
        // Addresses that no pack fits.
        let plain = (DType::F32, Precision::default());
        for places in [Places::cut(&[1, 302], 299), Places::whole(&[1, 2200], 2150)] {
            let step = |backend: &dyn Backend| step_at(backend, rule.rule(), places, plain);
            assert!(step(&cuda()) == step(&cpu()), "{rule}");
        }
    }
}

#[test]
fn adam_in_16_bits_alone_gives_the_bits_of_the_host() {
    let precision =
        Precision { master: Master::F32, state: StateDType::Bf16, ..Precision::default() };
    let way = |planner: Planner| resident(scaled(planner.precision(precision)));
    for rule in rules().into_iter().take(2) {
        same_bits_of(&cuda(), rule, &way, &case_of(DType::BF16));
    }
}

#[test]
fn adam_with_gradients_in_f32_alone_gives_the_bits_of_the_host() {
    let rule = rules()[0];
    for (dtype, precision) in wide_formats() {
        // Addresses that every, and that no pack fits.
        for places in [Places::whole(&[0, 2200], 2150), Places::whole(&[1, 2203], 2150)] {
            let step =
                |backend: &dyn Backend| step_at(backend, rule.rule(), places, (dtype, precision));
            assert!(step(&cuda()) == step(&cpu()), "{rule} {dtype} {precision}");
        }
    }
}

#[test]
fn norms_of_updates_alone_have_the_bits_of_the_host() {
    let way = |planner| measured(scaled(planner));
    let rule = rules()[0];
    same_bits_of(&cuda(), rule, &way, &case_of(DType::F32));
}

#[test]
fn a_norm_over_many_tensors_has_the_bits_of_the_host() {
    // More tensors than a block has threads, and some of so many chunks that a warp adds them up.
    let mut case = Case::new((0..600).map(|tensor| tensor % 3), DType::F32);
    case.steps = 1;
    let mut long = Case::new([3, 65_536 * 5 + 1, 9], DType::F32);
    long.steps = 1;
    for case in [case, long] {
        same_bits_of(&cuda(), rules()[0], &|planner| in_arguments(scaled(planner)), &case);
    }
}

#[test]
fn norms_alone_give_the_bits_of_the_host() {
    // Two units of sums for a block, and two tensors.
    let mut long = Case::new([140_000, 70_000, 5], DType::F32);
    long.steps = 1;
    // Blocks of a leaf's threads.
    let mut small = Case::new([1000, 5, 64], DType::F32);
    small.steps = 1;
    let clipped = |planner| in_arguments(scaled(planner));
    for rule in normed_rules() {
        same_bits_of(&cuda(), rule, &clipped, &case_of(DType::F32));
        same_bits_of(&cuda(), rule, &in_arguments, &long);
        same_bits_of(&cuda(), rule, &in_arguments, &small);
    }
}

/// The rule with another rate.
fn at_rate(rule: Optimizer, lr: f64) -> Optimizer {
    match rule {
        Optimizer::Lars(rule) => Lars { lr, ..rule }.into(),
        Optimizer::Lamb(rule) => Lamb { lr, ..rule }.into(),
        other => panic!("expected a rule with norms, found {other}"),
    }
}

/// The least rate above `low` that gives other bits than `low`, on the host.
fn next_edge(rule: Optimizer, case: &Case, low: f64) -> f64 {
    let bits = |lr: f64| {
        let plan = Planner::new(at_rate(rule, lr)).plan(&case.params).unwrap();
        outcome(&plan, case, &cpu())
    };
    let (mut below, mut above) = (low.to_bits(), (low * 1.001).to_bits());
    let first = bits(low);
    assert!(bits(f64::from_bits(above)) != first);
    while above - below > 1 {
        let middle = below.midpoint(above);
        if bits(f64::from_bits(middle)) == first {
            below = middle;
        } else {
            above = middle;
        }
    }
    f64::from_bits(above)
}

#[test]
fn norms_have_the_bits_of_the_host_to_the_last() {
    // Rates are rounded to f32, which hides most of what a norm in f64 may do wrong. Beside the
    // edge of that rounding its last bit shows.
    for rule in normed_rules() {
        for seed in 1..9 {
            let mut case = Case::new([1500], DType::F32);
            (case.seed, case.steps) = (seed, 1);
            let edge = next_edge(rule, &case, 0.01);
            for lr in [edge, edge.next_down()] {
                let plan = Planner::new(at_rate(rule, lr)).plan(&case.params).unwrap();
                let (found, expected) =
                    (outcome(&plan, &case, &cuda()), outcome(&plan, &case, &cpu()));
                assert!(found == expected, "{rule}, seed {seed}, rate {lr:e}");
            }
        }
    }
}

/// Runs one step of each entry over one tensor, as long as the environment says: the difference of
/// two lengths is what an element costs, for `cargo xtask execute-ptx --counts`.
#[test]
#[ignore = "run by `cargo xtask execute-ptx --counts`, which counts what entries do"]
fn one_tensor_of_the_length_that_the_environment_says() {
    let numel = std::env::var("FUSESTEP_COUNT_ELEMENTS").expect("a length");
    let numel = numel.parse().expect("a number");
    let rounding = std::env::var("FUSESTEP_COUNT_ROUNDING").expect("`nearest` or `random`");
    for (dtype, precision) in each_format() {
        if (precision.rounding == Rounding::Nearest) != (rounding == "nearest") {
            continue;
        }
        let mut case = Case::new([numel], dtype);
        case.steps = 1;
        let run = |backend: &CudaBackend, rule, way: &dyn Fn(Planner) -> Planner| {
            let planner = way(scaled(Planner::new(rule).precision(precision)));
            let plan = planner.limits(backend.limits()).plan(&case.params);
            outcome(&plan.unwrap(), &case, backend);
        };
        for way in [in_arguments, resident, measured] {
            for rule in rule_of_each_kernel() {
                if has_format(&rule, (dtype, precision)) {
                    run(&cuda(), rule, &way);
                }
            }
        }
    }
}
