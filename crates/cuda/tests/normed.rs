//! LARS and LAMB on the device: all sums, then all updates, with the bits of the host. What the
//! emulator finds in kernels that sum or wait wrongly is at the end: mutants, each in a process of
//! its own.

mod common;

use common::mutants::{Mutant, check_mutants};
use common::{Places, cpu, cuda, formats, launch_at, same_bits_on};
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::{Excluded, Lars, Trust};
use fusestep_launch::{Backend, LaunchLimits, Launches, Precision, Rounding, StateDType};
use fusestep_planner::{Optimizer, Planner, RunAlone};
use fusestep_tensor::{DType, Role};
use fusestep_testkit::{Case, EDGE_NUMELS, Gradients, outcome};

fn rules() -> [Optimizer; 2] {
    [
        Optimizer::Lars(Lars { lr: 0.5, rescale: 0.25, eps: 1e-3, ..Lars::default() }),
        Optimizer::Lamb(Lamb { lr: 0.01, ..Lamb::default() }),
    ]
}

/// Three chunks to a launch: tensors go on over launches.
fn three_chunks() -> LaunchLimits {
    LaunchLimits { chunks_per_launch: 3, ..LaunchLimits::with_argument_bytes(4096) }
}

#[test]
fn every_dtype_gives_the_bits_of_the_host() {
    for dtype in [DType::F32, DType::F64] {
        let mut case = Case::new(EDGE_NUMELS, dtype).with_groups();
        case.params[4].trust = Some(Trust::Plain);
        case.steps = 2;
        for rule in rules() {
            println!("{rule}, {dtype}");
            same_bits_on(&cuda(), rule, Precision::default(), &case);
        }
    }
}

#[test]
fn every_16_bit_format_gives_the_bits_of_the_host() {
    for (index, (dtype, precision)) in formats().into_iter().enumerate() {
        // Two chunks take the emulator seconds; every fifth format goes through them.
        let longest = if index % 5 == 0 { 65_537 } else { 1500 };
        let mut case = Case::new([0, 1, longest], dtype).with_groups();
        case.steps = 2;
        let mut extreme = Case::new([700], dtype).with_gradients(Gradients::Extreme);
        extreme.steps = 1;
        for rule in rules() {
            println!("{rule}, {dtype}, {precision}");
            same_bits_on(&cuda(), rule, precision, &case);
            same_bits_on(&cuda(), rule, precision, &extreme);
        }
    }
}

#[test]
fn tensors_cut_over_launches_give_the_bits_of_the_host() {
    // Random bits are those of the tensor's elements, however launches cut it.
    let random = Precision {
        state: StateDType::Bf16,
        rounding: Rounding::Stochastic { seed: 5 },
        ..Precision::default()
    };
    for (dtype, precision) in [(DType::F32, Precision::default()), (DType::BF16, random)] {
        cut_over_launches(dtype, precision);
    }
}

fn cut_over_launches(dtype: DType, precision: Precision) {
    let mut case = Case::new([5, 65_536 * 7 + 1, 0, 65_536, 9, 65_536 * 2 + 513], dtype);
    case.steps = 2;
    for rule in rules() {
        let plan = Planner::new(rule)
            .precision(precision)
            .limits(three_chunks())
            .plan(&case.params)
            .unwrap();
        assert_eq!(plan.launches(), 5);
        let backend = cuda().with_limits(three_chunks());
        same_bits_on(&backend, rule, precision, &case);
    }
}

#[test]
fn many_tensors_in_few_launches_give_the_bits_of_the_host() {
    let mut case = Case::new((0..200).map(|i| [0, 1, 511, 512, 513, 1025][i % 6]), DType::F32);
    case.steps = 2;
    for rule in rules() {
        for argument_bytes in [700, 32_764] {
            let limits = LaunchLimits::with_argument_bytes(argument_bytes);
            same_bits_on(&cuda().with_limits(limits), rule, Precision::default(), &case);
        }
    }
}

#[test]
fn tensors_of_a_leaf_at_most_give_the_bits_of_the_host() {
    let numels = (0..90).map(|i| [1, 0, 63, 64, 65, 512, 1023, 1024, 5][i % 9]);
    for (dtype, precision) in formats().into_iter().chain([(DType::F32, Precision::default())]) {
        let mut case = Case::new(numels.clone(), dtype).with_groups();
        case.steps = 2;
        let mut extreme = case.clone().with_gradients(Gradients::Extreme);
        extreme.steps = 1;
        for rule in rules() {
            println!("{rule}, {dtype}, {precision}");
            let backend = cuda();
            same_bits_on(&backend, rule, precision, &case);
            same_bits_on(&backend, rule, precision, &extreme);
        }
    }
    // The rest of a long tensor in a launch of its own, whose block has a leaf's threads.
    let backend = cuda().with_limits(three_chunks());
    let mut case = Case::new([65_536 * 6 + 1000], DType::F32);
    case.steps = 2;
    for rule in rules() {
        same_bits_on(&backend, rule, Precision::default(), &case);
    }
}

#[test]
fn excluded_tensors_take_the_rate_that_the_option_says() {
    let mut case = Case::new([33, 1000, 700], DType::F32);
    case.params[1].weight_decay = Some(0.0);
    for excluded in [Excluded::PlainLr, Excluded::TrustRatio] {
        let lars = Lars { excluded, ..Lars::default() };
        same_bits_on(&cuda(), Optimizer::Lars(lars), Precision::default(), &case);
        let lamb = Lamb { excluded, ..Lamb::default() };
        same_bits_on(&cuda(), Optimizer::Lamb(lamb), Precision::default(), &case);
    }
}

#[test]
fn tensors_that_are_not_finite_are_left_and_counted() {
    let case = Case::new([1, 33, 1000, 70_001], DType::F32).with_gradients(Gradients::Extreme);
    for rule in rules() {
        let backend = cuda();
        same_bits_on(&backend, rule, Precision::default(), &case);
        let host = cpu();
        let run = |backend: &dyn Backend| {
            backend.take_skipped().unwrap();
            outcome(&Planner::new(rule).plan(&case.params).unwrap(), &case, backend);
            backend.take_skipped().unwrap()
        };
        let (expected, found) = (run(&host), run(&backend));
        assert!(expected >= 6 && found == expected, "{rule}: {found} of {expected}");
    }
    // A tensor of several launches is counted once.
    let case = Case::new([65_536 * 7 + 1], DType::F32);
    let backend = cuda().with_limits(three_chunks());
    let plan = Planner::new(rules()[0]).limits(three_chunks()).plan(&case.params).unwrap();
    let mut state = plan.allocate(&backend).unwrap();
    let bytes = case.param_bytes(0);
    state.write(&backend, Role::Param, "tensor.0", &bytes).unwrap();
    let infinite = f32::INFINITY.to_le_bytes().repeat(65_536 * 7 + 1);
    state.write(&backend, Role::Grad, "tensor.0", &infinite).unwrap();
    RunAlone::of(&plan, &mut state, &backend).step_all().unwrap();
    assert_eq!(backend.take_skipped(), Ok(1));
}

#[test]
fn addresses_that_no_pack_fits_give_the_same_bits_and_touch_nothing_else() {
    for rule in rules() {
        for shift in 0..4u64 {
            let kernel = rule.rule().kernel(DType::F32, Precision::default()).unwrap();
            let offsets = [shift, 3301 + shift, 6640];
            let places = Places::cut(&offsets, 3299);
            let run = |backend: &dyn Backend| {
                let mut fill = |list: usize| -> Vec<u8> {
                    let value = |i: u64| (i * 7 % 1000 + list as u64 * 3 + 1) as f32 / 64.0;
                    (0..9940).flat_map(|i| value(i).to_le_bytes()).collect()
                };
                let lists = launch_at(backend, kernel.as_ref(), places, &mut fill).unwrap();
                let mut all = Vec::new();
                for list in &lists {
                    let mut bytes = vec![0; list.buffer.len_bytes()];
                    backend.read(list.buffer.as_ref(), 0, &mut bytes).unwrap();
                    all.extend(bytes);
                }
                all
            };
            assert!(run(&cuda()) == run(&cpu()), "{rule}, shift {shift}");
        }
    }
}

const MUTANTS: [Mutant; 7] = [
    // A tensor would read the sums of another one that has been summed since.
    Mutant {
        name: "one_row_for_all_chunks",
        edits: &[("normed.cuh", ".rows) + index * ROW_VALUES", ".rows) + 0 * index * ROW_VALUES")],
    },
    // Where most units have no elements, a block goes on to others.
    Mutant {
        name: "one_turn_for_each_block",
        edits: &[("normed.cuh", "turn += gridDim.x", "turn += units")],
    },
    Mutant {
        name: "unfinished_block_sum",
        edits: &[(
            "normed.cuh",
            "        dialect::block_sync();\n        // The lower half of a leaf's lanes is a whole warp.\n",
            "",
        )],
    },
    Mutant {
        name: "last_chunk_dropped",
        edits: &[(
            "normed.cuh",
            "        return last.first_chunk + chunks_of(last);\n",
            "        return last.first_chunk + chunks_of(last) - 1;\n",
        )],
    },
    // Blocks of one leaf: the other leaves and units of a chunk are 0.
    Mutant {
        name: "leaves_without_threads_kept",
        edits: &[("normed.cuh", "leaves[threadIdx.x] = 0.0;", "")],
    },
    Mutant {
        name: "units_without_blocks_kept",
        edits: &[(
            "normed.cuh",
            "} else if (is_small() && threadIdx.x < UNITS * SUMS) {",
            "} else if (false) {",
        )],
    },
    // The tree over chunks: more groups than are added up at a time.
    Mutant {
        name: "groups_of_chunks_lost",
        edits: &[(
            "normed.cuh",
            "row(tensor.first_row + first + own_chunk)",
            "row(tensor.first_row + own_chunk)",
        )],
    },
];

#[test]
fn mutants_that_wait_wrongly_are_found() {
    let alone = "alone_lars_has_the_bits_of_the_host";
    check_mutants(&MUTANTS, &["lars_momentum.cu"], alone);
}

#[test]
#[ignore = "run by mutants_that_wait_wrongly_are_found on drivers built from mutants"]
fn alone_lars_has_the_bits_of_the_host() {
    let mut case = Case::new([1000, 65_536 * 2 + 5, 9, 65_536 * 3, 513, 70_000], DType::F32);
    case.steps = 2;
    // On rows that others have used.
    let backend = cuda();
    for mut case in [case, Case::new([9; 20], DType::F32)] {
        case.steps = 1;
        same_bits_on(&backend, rules()[0], Precision::default(), &case);
    }
    let mut few_leaves = Case::new([1100; 20], DType::F32);
    few_leaves.steps = 1;
    let mut groups = Case::new([65_536 * 256 + 1], DType::F32);
    groups.steps = 1;
    for case in [few_leaves, groups] {
        same_bits_on(&backend, rules()[0], Precision::default(), &case);
    }
}
