//! What is rounded at random is keyed by element and parameter, so it does not depend on who rounds
//! it.

use fusestep_launch::{Master, Precision, Rounding, StateDType};
use fusestep_planner::{Ownership, ZeroStage};
use fusestep_testkit::each_rule;

use crate::run::{Case, Mixed};

fn case() -> Case {
    Case {
        mixed: Mixed::Yes,
        // The second is cut by every world from 2 on, at odd elements too.
        numels: vec![1_000, 70_001, 3, 5_001, 0, 9],
        cap: Some(50_000),
        clip: Some(1.0),
        steps: 2,
        ..Case::default()
    }
}

fn at_random(seed: u64, master: Master, state: StateDType) -> Precision {
    let rounding = Rounding::Stochastic { seed };
    Precision { master, state, rounding, ..Precision::default() }
}

#[test]
fn shards_round_at_random_as_whole_tensors_do() {
    let precisions = [
        at_random(5, Master::None, StateDType::Compute),
        at_random(5, Master::None, StateDType::Bf16),
        at_random(5, Master::F32, StateDType::Bf16),
    ];
    for rule in each_rule() {
        for precision in precisions {
            for world in 1..=4 {
                let whole = Case { rule, world, precision: Some(precision), ..case() };
                let expected = whole.run();
                for zero in [ZeroStage::One, ZeroStage::Two, ZeroStage::Three] {
                    let found = Case { zero, ..whole.clone() }.run();
                    assert!(
                        found.params == expected.params,
                        "{} {precision:?} {world} {zero:?}",
                        rule.name()
                    );
                }
            }
        }
    }
}

#[test]
fn owners_of_whole_tensors_round_as_well_and_seeds_draw_apart() {
    let run = |seed, zero, ownership| {
        let precision = Some(at_random(seed, Master::None, StateDType::Compute));
        let case = Case { world: 3, precision, zero, ownership, ..case() };
        case.run().params
    };
    let whole = run(5, ZeroStage::None, Ownership::Elements);
    for zero in [ZeroStage::One, ZeroStage::Two, ZeroStage::Three] {
        assert!(run(5, zero, Ownership::Tensors) == whole, "{zero:?}");
    }
    assert!(run(6, ZeroStage::Two, Ownership::Elements) != whole);
}
