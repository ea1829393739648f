//! Every setting in the facade and through candle: each acts as the pass that a planner is given by
//! hand, to the bit and to the line of the plan, or is refused by name.

mod cases;
mod faces;

use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, Var};
use candle_nn::Optimizer as _;
use fusestep::planner::Optimizer;
use fusestep::{Alone, Builder, DType, OptionError, Row, StepOptions, Visit, kinds};
use fusestep_candle::{AnyRule, Initial, Solo};

use super::on_ranks;
use cases::{ByHand, Case, Change, case};
use faces::{by_hand, in_facade, through_candle};

const LR: f64 = 1e-2;

/// Sets one row of the table from a text.
struct Set<'a>(&'a str, &'a str);

impl Visit for Set<'_> {
    fn row(&mut self, row: Row<'_>) -> Result<(), OptionError> {
        if row.name == self.0 { (row.set)(self.1) } else { Ok(()) }
    }
}

/// Names of all rows, and their effect in a process that trains alone.
struct Told(Vec<(&'static str, Alone)>);

impl Visit for Told {
    fn row(&mut self, row: Row<'_>) -> Result<(), OptionError> {
        self.0.push((row.name, row.alone));
        Ok(())
    }
}

fn options(rule: Optimizer, settings: &[[&str; 2]]) -> StepOptions {
    let mut options = StepOptions::of(rule);
    for [name, text] in settings {
        // A seed counts for what it is a seed of alone, which stands before it.
        options.each(&mut Set(name, text)).expect("a value in range");
    }
    options
}

/// Rows that leave the plan of ranks in one memory, or that a face has otherwise, and what says so.
const BESIDE: [(&str, &str); 3] = [
    ("comm_streams", "streams_and_first_values_act_beside_the_plan"),
    ("initial", "streams_and_first_values_act_beside_the_plan"),
    // Each face brings its threads; the facade refuses the setting by name.
    ("threads", "threads_are_the_device_s"),
];

/// Rows that count for parameters of 16 bits.
const NARROW: [&str; 6] =
    ["master_weights", "state_dtype", "keep_f32", "rounding", "rounding_seed", "reduce_dtype"];

#[test]
fn every_setting_acts_in_facade_and_candle_as_its_pass_does() {
    let mut rows = Told(Vec::new());
    StepOptions::default().each(&mut rows).expect("defaults");
    for (name, _) in rows.0 {
        let Some(Case { value, beside, by_hand: change }) = case(name) else {
            assert!(BESIDE.iter().any(|(beside, _)| *beside == name), "{name}: no case");
            continue;
        };
        // Rates of layers are a matter of LAMB, and masters and rounding one of 16 bits.
        let of_layers = name == "trust_of";
        let rule = rule_of(of_layers);
        let narrow = NARROW.contains(&name);
        let dtype = if narrow { DType::BF16 } else { DType::F32 };
        let settings = [beside, &[[name, value]]].concat();
        let set = options(rule, &settings);
        let hand = |change: Change| {
            on_ranks(4, |comm| {
                let mut by = ByHand::new(rule, dtype);
                change(&mut by);
                by_hand(by, dtype, comm).expect("a run by hand")
            })
        };
        let expected = hand(change);
        assert!(expected != hand(|_| {}), "{name}: by hand nothing has changed");
        let facade = on_ranks(4, |comm| {
            let trained = if of_layers {
                in_facade(Builder::<kinds::Lamb>::new(LR), &set, dtype, Some(comm))
            } else {
                in_facade(Builder::<kinds::AdamW>::new(LR), &set, dtype, Some(comm))
            };
            trained.expect("a run of the facade")
        });
        let candle = on_ranks(4, |comm| {
            through_candle(rule, &set, dtype, Some(comm)).expect("a run through candle")
        });
        for (face, found) in [("facade", &facade), ("candle", &candle)] {
            for (rank, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert_eq!(found.plan, expected.plan, "{name}: {face}, rank {rank}");
                assert!(found.bytes == expected.bytes, "{name}: {face}, rank {rank}: bits");
            }
        }
    }
}

/// LAMB, whose layers have rates of their own, or AdamW.
fn rule_of(layers: bool) -> Optimizer {
    if layers {
        fusestep::lamb::Lamb { lr: LR, ..Default::default() }.into()
    } else {
        fusestep::fused_adam::Adam { lr: LR, ..Default::default() }.into()
    }
}

#[test]
fn every_setting_acts_on_one_rank_or_is_refused_by_name() {
    let mut rows = Told(Vec::new());
    StepOptions::default().each(&mut rows).expect("defaults");
    for (name, alone) in rows.0 {
        // Rates of layers are a matter of LAMB; 16 bits are tried on ranks.
        let of_layers = name == "trust_of";
        let rule = rule_of(of_layers);
        let narrow = NARROW.contains(&name);
        let Some(Case { value, beside, by_hand: change }) = case(name) else { continue };
        let dtype = if narrow { DType::BF16 } else { DType::F32 };
        let set = options(rule, &[beside, &[[name, value]]].concat());
        let facade = if of_layers {
            in_facade(Builder::<kinds::Lamb>::new(LR), &set, dtype, None)
        } else {
            in_facade(Builder::<kinds::AdamW>::new(LR), &set, dtype, None)
        };
        let candle = through_candle(rule, &set, dtype, None);
        let acts = match alone {
            Alone::Acts => true,
            Alone::ActsWith(other) => beside.iter().any(|[name, _]| *name == other),
            Alone::Idle => false,
        };
        if !acts {
            let refused = facade.map(drop).expect_err(name).to_string();
            assert!(refused.contains("expected an optimizer on ranks"), "{name}: {refused}");
            if name == "distributed" {
                // Slices are this rank's own without ranks, too.
                let mut by = ByHand::new(rule, dtype);
                (by.cap_bytes, by.fused) = (None, false);
                let expected = by_hand(by, dtype, &mut Solo::new()).expect("a run by hand");
                assert!(candle.is_ok_and(|candle| candle.bytes == expected.bytes));
                continue;
            }
            let refused = candle.map(drop).expect_err(name).to_string();
            assert!(refused.contains("expected an optimizer on ranks"), "{name}: {refused}");
            continue;
        }
        let mut by = ByHand::new(rule, dtype);
        (by.cap_bytes, by.fused) = (None, false);
        change(&mut by);
        (by.cap_bytes, by.fused) = (None, false);
        let expected = by_hand(by, dtype, &mut Solo::new()).expect("a run by hand");
        let facade = facade.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(facade.plan, expected.plan, "{name}: facade");
        assert!(facade.bytes == expected.bytes, "{name}: facade: bits");
        let candle = candle.unwrap_or_else(|error| panic!("{name}: candle: {error}"));
        assert!(candle.bytes == expected.bytes, "{name}: candle: bits");
    }
}

#[test]
fn streams_and_first_values_act_beside_the_plan() {
    let rule: Optimizer = fusestep::fused_adam::Adam { lr: LR, ..Default::default() }.into();
    let usual = options(rule, &[]);
    let streams = options(rule, &[["comm_streams", "2"]]);
    let own = options(rule, &[["initial", "own_and_equal"]]);
    let both = |set: &StepOptions| {
        on_ranks(2, |comm| {
            let builder = || Builder::<kinds::AdamW>::new(LR);
            let facade = in_facade(builder(), set, DType::F32, Some(comm)).expect("a run");
            let candle = through_candle(rule, set, DType::F32, Some(comm)).expect("a run");
            assert!(facade == candle, "the faces differ");
            facade
        })
    };
    let (usual, streams, own) = (both(&usual), both(&streams), both(&own));
    for ((usual, streams), own) in usual.iter().zip(&streams).zip(&own) {
        assert!(usual.bytes == streams.bytes && usual == own);
        // What streams reduce is updated apart.
        assert!(usual.plan != streams.plan);
    }
    // Values of rank 0 come to all, or each has its own, which have to be equal.
    let differ = |initial: Initial| {
        on_ranks(2, |comm| {
            let value = comm.rank() as f32;
            let set = StepOptions { initial, ..StepOptions::of(rule) };
            let var = Var::new(&[value], &Device::Cpu).expect("a variable");
            let vars = vec![("w".to_owned(), var.clone())];
            let mut optimizer =
                AnyRule::with_options(vars, rule, &set).and_then(|built| built.on(comm))?;
            let mut grads = GradStore::default();
            grads.insert(&var, Tensor::new(&[0f32], &Device::Cpu)?);
            optimizer.step(&grads)?;
            var.to_vec1::<f32>()
        })
    };
    let brought = differ(Initial::OfRankZero);
    assert!(brought.iter().all(|values| values.as_ref().is_ok_and(|values| *values == [0.0])));
    let refused = differ(Initial::OwnAndEqual);
    assert!(
        refused.iter().all(|values| {
            values.as_ref().is_err_and(|error| error.to_string().contains("rank"))
        })
    );
}
