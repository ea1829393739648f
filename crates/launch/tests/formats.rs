//! Hyper-parameters and formats of rules, as devices and people read them.

use fusestep_launch::{
    CHUNK_ELEMENTS, Domain, FLAG_STOCHASTIC, Format, KEY_BYTES, LaunchLimits, Master, Objective,
    Precision, Rounding, RuleError, SquareSum, StateDType, Summand, WeightDecay, check_hyper,
    random_bits::step_key,
};
use fusestep_tensor::DType;

#[test]
fn hyper_parameters_are_held_to_their_domains() {
    let cases = [
        (
            Domain::NotNegative,
            "a finite value of at least 0",
            [0.0, 1e300],
            [-1e-300, f64::INFINITY],
        ),
        (Domain::BelowOne, "a value in [0, 1)", [0.0, 0.999], [1.0, -0.1]),
        (Domain::Positive, "a finite value above 0", [1e-300, 1e300], [0.0, f64::INFINITY]),
    ];
    for (domain, text, good, bad) in cases {
        for value in good {
            assert_eq!(check_hyper(&[("x", value, domain)]), Ok(()), "{value}");
        }
        for found in bad {
            let expected = RuleError::Hyper { what: "b", expected: text, found };
            let values = [("a", good[0], domain), ("b", found, domain), ("c", found, domain)];
            assert_eq!(check_hyper(&values), Err(expected));
        }
        assert!(check_hyper(&[("x", f64::NAN, domain)]).is_err());
    }
}

#[test]
fn decay_and_direction_are_what_a_device_reads() {
    let (l2, decoupled) = (WeightDecay::L2(0.5), WeightDecay::Decoupled(0.25));
    assert_eq!((l2.lambda(), decoupled.lambda()), (0.5, 0.25));
    let scalars = (l2.decoupled_scalar(), decoupled.decoupled_scalar());
    assert_eq!(scalars, (0.0, 1.0));
    assert_eq!(l2.with_lambda(3.0), WeightDecay::L2(3.0));
    assert_eq!(decoupled.with_lambda(3.0), WeightDecay::Decoupled(3.0));
    let names = [Objective::Minimize, Objective::Maximize].map(Objective::name);
    assert_eq!(names, ["minimize", "maximize"]);
}

#[test]
fn random_rounding_is_flagged_and_keyed() {
    let nearest = Precision::default();
    let rounding = Rounding::Stochastic { seed: 7 };
    let random = Precision { rounding, state: StateDType::Bf16, ..nearest };
    let plain = Format::new("test", DType::F64, nearest).unwrap();
    assert_eq!((plain.flags(), plain.key_bytes(), plain.seed()), (0, 0, 0));
    assert_eq!((plain.rounding(), plain.state()), (Rounding::Nearest, DType::F64));
    let keyed = Format::new("test", DType::BF16, random).unwrap();
    assert_eq!((keyed.flags(), FLAG_STOCHASTIC), (0x8000_0000, 0x8000_0000));
    assert_eq!((keyed.key_bytes(), keyed.seed()), (KEY_BYTES, 7));
    assert_eq!((keyed.rounding(), keyed.state()), (rounding, DType::BF16));
    let mut step_scalars = [0; 24];
    assert_eq!(keyed.write_key(3, &mut step_scalars).len(), 16);
    let key = step_key(7, 3).to_le_bytes();
    assert_eq!((&step_scalars[..16], &step_scalars[16..]), (&[0; 16][..], &key[..]));
    let mut finished = [1; 20];
    keyed.copy_key(&step_scalars[16..], &mut finished[10..]);
    assert_eq!(
        (&finished[..10], &finished[10..18], &finished[18..]),
        (&[1; 10][..], &key[..], &[1; 2][..])
    );
    assert_eq!(
        random.to_string(),
        "master weights none, state bf16, rounded at random with seed 7"
    );
    let master = Precision { master: Master::F32, ..nearest };
    assert_eq!(master.to_string(), "master weights f32, state as computed, rounded to nearest");
}

#[test]
fn sums_of_squares_are_added_and_launches_of_sums_have_whole_chunks() {
    let sum = |sum, non_finite| SquareSum { sum, non_finite };
    assert_eq!(sum(1.5, 2).plus(sum(0.25, 5)), sum(1.75, 7));
    let limits = LaunchLimits {
        chunk_elements: 10,
        chunks_per_launch: 3,
        ..LaunchLimits::with_argument_bytes(500)
    };
    let measured = LaunchLimits { chunk_elements: CHUNK_ELEMENTS, ..limits };
    assert_eq!(limits.measured(), measured);
}
