//! State in codes of 8 bits: groups at every edge, cut in every way, with the bits of the host.

use fusestep_launch::{Backend, LaunchLimits, Memory};
use fusestep_planner::Planner;
use fusestep_tensor::DType;
use fusestep_testkit::{Case, Gradients, outcome, rules};

use crate::common::resident::scaled;
use crate::common::{
    Places, TINY, coded_formats, coded_rules, cpu, cuda, same_bits_at, step_at, widened,
};

/// Tensors at the border of int8, some of which stay in f32, and with groups that end early.
const NUMELS: [u64; 6] = [4095, 4096, 4097, 0, 4127, 20_000];

fn case_of(dtype: DType) -> Case {
    let mut case = Case::new(NUMELS, dtype).with_groups();
    case.steps = 2;
    case
}

#[test]
fn every_rule_and_format_gives_the_bits_of_the_host() {
    for (dtype, precision) in coded_formats() {
        let extreme = Case::new([4097], dtype).with_gradients(Gradients::Extreme);
        for rule in coded_rules(rules()) {
            println!("{rule}, {dtype}, {precision}");
            same_bits_at(rule, precision, &case_of(dtype), cuda().limits());
            same_bits_at(rule, precision, &extreme, cuda().limits());
        }
    }
}

#[test]
fn gradients_in_f32_give_the_bits_of_the_host() {
    for (dtype, precision) in coded_formats().into_iter().filter_map(widened) {
        for rule in coded_rules(rules()) {
            same_bits_at(rule, precision, &Case::new([4100], dtype), cuda().limits());
        }
    }
}

#[test]
fn launches_that_cut_tensors_give_the_bits_of_the_host() {
    let (dtype, precision) = coded_formats()[0];
    // No chunk ends inside of a group, whatever it is asked to be.
    let of_groups = LaunchLimits { chunk_elements: 96, ..TINY };
    let uneven = LaunchLimits { chunk_elements: 70, ..TINY };
    for rule in coded_rules(rules()) {
        for limits in [TINY, of_groups, uneven] {
            same_bits_at(rule, precision, &Case::new([4097, 4160], dtype), limits);
        }
    }
}

#[test]
fn clipped_and_skipped_steps_give_the_bits_of_the_host() {
    for (dtype, precision) in coded_formats() {
        let ordinary = case_of(dtype);
        let skipped = case_of(dtype).with_gradients(Gradients::Extreme);
        for rule in coded_rules(rules()) {
            for case in [&ordinary, &skipped] {
                let passes = |planner: Planner| scaled(planner.precision(precision));
                let naive = passes(Planner::new(rule).naive()).plan(&case.params).unwrap();
                let plan = passes(Planner::new(rule)).limits(cuda().limits());
                let found = outcome(&plan.plan(&case.params).unwrap(), case, &cuda());
                assert!(found == outcome(&naive, case, &cpu()), "{rule}, {dtype}, {precision}");
            }
        }
    }
}

#[test]
fn groups_of_any_number_give_the_bits_of_the_host_and_touch_nothing_else() {
    for format in coded_formats() {
        for rule in coded_rules(rules()) {
            for numel in [1, 31, 32, 33, 127, 128, 129, 255, 4095, 4096, 4097] {
                for first in [0, 32, 96] {
                    let offsets = [first, first + 4128];
                    let places = Places::whole(&offsets, numel);
                    let step =
                        |backend: &dyn Backend| step_at(backend, rule.rule(), places, format);
                    assert!(step(&cuda()) == step(&cpu()), "{rule}, {format:?}, {numel}, {first}");
                }
            }
        }
    }
}
