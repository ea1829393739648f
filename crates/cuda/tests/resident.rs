//! Resident tables, steps that the host does not wait for, and graphs: the bits of tables in
//! arguments and of the host. What the emulator finds in kernels that read a table wrongly is at
//! the end: mutants, each in a process of its own.

mod common;

use common::mutants::{Mutant, check_mutants};
use common::resident::*;
use common::{Places, cpu, cuda, formats, step_at};
use fusestep_collective::Solo;
use fusestep_fused_adam::Adam;
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::{Lars, Trust};
use fusestep_launch::{
    Backend, DeviceStream, LaunchLimits, Launches, Memory, Precision, Rounding, StateDType,
};
use fusestep_planner::{Comms, Optimizer, PlanError, Planner, Run, RunAlone, TableKind};
use fusestep_tensor::DType;
use fusestep_testkit::{Case, EDGE_NUMELS, Gradients, outcome, rules};

#[test]
fn every_rule_gives_the_bits_of_the_host() {
    for dtype in [DType::F32, DType::F64] {
        let mut case = Case::new(EDGE_NUMELS, dtype).with_groups();
        case.params[4].trust = Some(Trust::Plain);
        case.params[7].trust = Some(Trust::Ratio);
        let extreme = Case::new([1, 33, 1000], dtype).with_gradients(Gradients::Extreme);
        for rule in rules() {
            same_bits_of(rule, &|planner| planner, &case, &cuda());
            same_bits_of(rule, &|planner| planner, &extreme, &cuda());
        }
    }
}

#[test]
fn every_16_bit_format_gives_the_bits_of_the_host() {
    for (dtype, precision) in formats() {
        let case = Case::new([0, 1, 65], dtype).with_groups();
        for rule in rules() {
            same_bits_of(rule, &|planner| planner.precision(precision), &case, &cuda());
        }
    }
}

#[test]
fn any_number_of_tensors_is_one_launch_with_the_bits_of_the_host() {
    let many =
        |count: u64| Case::new((0..count).map(|i| [64, 0, 1, 63, 65][i as usize % 5]), DType::F32);
    for count in [0, 1, 161, 10_000] {
        let mut case = many(count).with_groups();
        case.steps = 2;
        let rules = [Optimizer::from(Adam::default()), Lars::default().into()];
        // Blocks of 512 threads for every tensor take the emulator long.
        let few = if count > 200 { 1 } else { 2 };
        for rule in rules.into_iter().take(few) {
            let backend = cuda().with_limits(LaunchLimits::with_argument_bytes(4096));
            let planner = || Planner::new(rule).table(TableKind::Resident);
            let plan = planner().limits(backend.limits()).plan(&case.params).unwrap();
            let found = outcome(&plan, &case, &backend);
            let host = planner().plan(&case.params).unwrap();
            assert!(found == outcome(&host, &case, &cpu()), "{count} tensors, {rule}");
            let report = RunAlone::of(&plan, &mut plan.allocate(&backend).unwrap(), &backend)
                .step_all()
                .unwrap();
            // Rules that take norms have one for these besides.
            let normed = u64::from(matches!(rule, Optimizer::Lars(_)));
            assert_eq!(report.launches, u64::from(count > 0) * (2 + normed), "{count}, {rule}");
            assert_eq!(plan.launches() as u64, u64::from(count > 0) * 2);
        }
    }
}

#[test]
fn chunks_and_launches_of_any_size_give_the_bits_of_the_host() {
    let cut = LaunchLimits {
        argument_bytes: 700,
        chunk_elements: 64,
        chunks_per_launch: 3,
        ..LaunchLimits::default()
    };
    let small = Case::new([0, 1, 63, 64, 65, 500, 0, 191, 193], DType::F32).with_groups();
    let mut large = Case::new([5, 65_536 * 4 + 1, 0, 65_535, 9], DType::F32);
    large.steps = 2;
    for rule in rules() {
        same_bits_of(rule, &|planner| planner, &small, &cuda().with_limits(cut));
    }
    for rule in [Optimizer::from(Lars::default()), Lamb::default().into()] {
        same_bits_of(rule, &|planner| planner, &large, &cuda().with_limits(cut));
        same_bits_of(rule, &|planner| planner, &large, &cuda());
    }
}

#[test]
fn clipped_and_scaled_steps_give_the_bits_of_the_host() {
    let case = Case::new([0, 700, 1, 65_537], DType::F32).with_groups();
    let extreme = case.clone().with_gradients(Gradients::Extreme);
    for rule in rules() {
        same_bits_of(rule, &scaled, &case, &cuda());
        same_bits_of(rule, &scaled, &extreme, &cuda());
    }
}

#[test]
fn a_graph_replays_the_whole_tail_with_the_bits_of_plain_steps() {
    for rule in rules() {
        let expected = train(rule, TableKind::Arguments, WayOfStep::Run, &cpu());
        assert_eq!(expected.1[..2], [6, 2]);
        for way in [WayOfStep::Run, WayOfStep::Enqueued, WayOfStep::Replayed] {
            let found = train(rule, TableKind::Resident, way, &cuda());
            assert_eq!(found.1, expected.1, "{rule}, {way:?}");
            assert!(found.0 == expected.0, "{rule}, {way:?}");
        }
        let found = train(rule, TableKind::Arguments, WayOfStep::Run, &cuda());
        assert!(found == expected, "{rule}, arguments");
    }
}

#[test]
fn random_rounding_draws_the_same_in_a_graph() {
    let precision = Precision {
        state: StateDType::Bf16,
        rounding: Rounding::Stochastic { seed: 5 },
        ..Precision::default()
    };
    let case = Case::new([700, 3, 1025], DType::BF16);
    for rule in [Optimizer::from(Adam::default()), Lars::default().into()] {
        let planner = Planner::new(rule).precision(precision);
        let plan = planner.table(TableKind::Resident).plan(&case.params).unwrap();
        let host = cpu();
        let mut expected = allocate(&plan, &case, &host);
        let backend = cuda();
        let mut state = allocate(&plan, &case, &backend);
        let graph = RunAlone::of(&plan, &mut state, &backend).capture().unwrap();
        for step in 1..=4 {
            write_grads(&mut expected, &case, step, &host);
            RunAlone::of(&plan, &mut expected, &host).step_all().unwrap();
            write_grads(&mut state, &case, step, &backend);
            RunAlone::of(&plan, &mut state, &backend).replay(&graph).unwrap();
            assert_eq!(state.step(), step, "no gradient is read, so every step counts");
        }
        let found = read_all(&state, &case, &backend);
        assert!(found == read_all(&expected, &case, &host), "{rule}");
    }
}

#[test]
fn absent_parameters_and_set_steps_build_the_tables_anew() {
    let case = Case::new([700, 3, 1025], DType::F32);
    for planner in
        [Planner::new(Adam::default().into()), scaled(Planner::new(Adam::default().into()))]
    {
        let plan = planner.table(TableKind::Resident).plan(&case.params).unwrap();
        let run = |backend: &dyn Backend| {
            let mut state = allocate(&plan, &case, backend);
            for step in 1..=6 {
                write_grads(&mut state, &case, step, backend);
                if step == 2 || step == 3 {
                    state.set_without_gradient("tensor.1").unwrap();
                }
                if step == 5 {
                    state.set_step(40);
                }
                RunAlone::of(&plan, &mut state, backend).enqueue().unwrap();
            }
            state.settle(backend).unwrap();
            let steps = ["tensor.0", "tensor.1"].map(|name| state.step_of(name).unwrap());
            (read_all(&state, &case, backend), steps)
        };
        let (found, expected) = (run(&cuda()), run(&cpu()));
        assert_eq!(found.1, [42, 42]);
        let first = found.0.iter().zip(&expected.0).position(|(a, b)| a != b);
        assert_eq!((first, found.1), (None, expected.1), "{plan}");
    }
}

#[test]
fn what_cannot_be_recorded_is_refused() {
    let case = Case::new([700, 3], DType::F32);
    let backend = cuda();
    let in_arguments = scaled(Planner::new(Adam::default().into())).plan(&case.params).unwrap();
    let mut state = allocate(&in_arguments, &case, &backend);
    let expected = "step: expected one that the device runs without the host, found that its \
                    tables are in arguments; plan with resident tables, or use `step_all`";
    let error = RunAlone::of(&in_arguments, &mut state, &backend).capture().unwrap_err();
    assert_eq!(error.to_string(), expected);
    let error = RunAlone::of(&in_arguments, &mut state, &backend).enqueue().unwrap_err();
    assert_eq!(error.to_string(), expected);

    let planner = Planner::new(Adam::default().into()).table(TableKind::Resident);
    let plan = planner.plan(&case.params).unwrap();
    let mut state = allocate(&plan, &case, &backend);
    let graph = RunAlone::of(&plan, &mut state, &backend).capture().unwrap();
    RunAlone::of(&plan, &mut state, &backend).replay(&graph).unwrap();
    state.set_without_gradient("tensor.1").unwrap();
    let stale = PlanError::StaleGraph;
    assert_eq!(RunAlone::of(&plan, &mut state, &backend).replay(&graph).unwrap_err(), stale);
    assert!(
        RunAlone::of(&plan, &mut state, &backend)
            .capture()
            .unwrap_err()
            .to_string()
            .contains("without gradient")
    );
    RunAlone::of(&plan, &mut state, &backend).step_all().unwrap();
    assert_eq!(RunAlone::of(&plan, &mut state, &backend).replay(&graph).unwrap_err(), stale);
    let mut other = allocate(&plan, &case, &backend);
    assert_eq!(RunAlone::of(&plan, &mut other, &backend).replay(&graph).unwrap_err(), stale);
    let host = cpu();
    let mut on_host = allocate(&plan, &case, &host);
    let error = RunAlone::of(&plan, &mut on_host, &host).capture().unwrap_err();
    assert_eq!(
        error.to_string(),
        "cpu: launches cannot be recorded here; run the steps one by one"
    );
    // A recording that fails leaves the backend usable.
    let waits = backend.capture(&mut || backend.synchronize());
    assert!(waits.is_err());
    RunAlone::of(&plan, &mut state, &backend).step_all().unwrap();
    assert_eq!(state.step(), 3);
}

#[test]
fn parameters_asked_for_before_an_enqueued_step_are_known_to_be_stale() {
    let case = Case::new([700, 3], DType::F32);
    let planner = Planner::new(Adam::default().into()).table(TableKind::Resident);
    let plan = planner.plan(&case.params).unwrap();
    let backend = cuda();
    let mut state = allocate(&plan, &case, &backend);
    let mut solo = Solo::new();
    let mut comms = Comms::direct(&mut solo);
    let ahead = Run::of(&plan, &mut state, &backend, &mut comms).prefetch(&["tensor.0"]).unwrap();
    write_grads(&mut state, &case, 1, &backend);
    RunAlone::of(&plan, &mut state, &backend).enqueue().unwrap();
    state.settle(&backend).unwrap();
    let stale = ahead.wait(&state).unwrap_err();
    assert!(matches!(stale, PlanError::StaleParams { changes: 1 }), "{stale}");
}

#[test]
fn a_view_that_is_refused_leaves_its_gradient_as_not_given() {
    let case = Case::new([700, 3], DType::F32);
    let plan = Planner::new(Adam::default().into()).plan(&case.params).unwrap();
    let backend = cuda();
    let mut state = allocate(&plan, &case, &backend);
    let mut solo = Solo::new();
    let mut comms = Comms::direct(&mut solo);
    let refused = state.grad_mut::<f32>("tensor.0").unwrap_err();
    assert!(matches!(refused, PlanError::NotOnHost { .. }), "{refused}");
    Run::of(&plan, &mut state, &backend, &mut comms).step().unwrap();
    // What nobody has given is left out.
    assert_eq!(state.step_of("tensor.0").unwrap(), 0);
}

#[test]
fn a_graph_keeps_the_memory_that_it_runs_on() {
    let case = Case::new([700], DType::F32);
    let planner = Planner::new(Lars::default().into()).table(TableKind::Resident);
    let plan = planner.plan(&case.params).unwrap();
    let backend = cuda();
    let mut state = allocate(&plan, &case, &backend);
    let mut run = RunAlone::of(&plan, &mut state, &backend);
    run.step_all().unwrap();
    let graph = backend.capture(&mut || run.enqueue().map_err(|error| panic!("{error}"))).unwrap();
    drop(state);
    backend.take_skipped().unwrap();
    drop(backend);
    graph.launch().unwrap();
    cuda().synchronize().unwrap();
}

#[test]
fn tensors_skipped_by_a_resident_table_are_counted_once_it_is_gone() {
    let case = Case::new([1, 33, 1000, 70_001], DType::F32).with_gradients(Gradients::Extreme);
    let planner = || Planner::new(Lars::default().into()).table(TableKind::Resident);
    let plan = planner().plan(&case.params).unwrap();
    let run = |backend: &dyn Backend| {
        outcome(&plan, &case, backend);
        outcome(&plan, &case, backend);
        (backend.take_skipped().unwrap(), backend.take_skipped().unwrap())
    };
    let (expected, found) = (run(&cpu()), run(&cuda()));
    assert!(expected.0 >= 6 && found == expected, "{found:?} of {expected:?}");
}

const MUTANTS: [Mutant; 5] = [
    Mutant {
        name: "last_chunk_dropped",
        edits: &[(
            "multi_tensor.cuh",
            "record_count) + chunk * ",
            "record_count) + (chunk + 1 == gridDim.x && chunk > 0 ? chunk - 1 : chunk) * ",
        )],
    },
    // What 32 bits do to a tensor of 2^32 elements, at a size that a test can have.
    Mutant {
        name: "product_of_16_bits",
        edits: &[(
            "multi_tensor.cuh",
            "u64(blockIdx.x - record.first_chunk) * header.chunk_elements;",
            "u16((blockIdx.x - record.first_chunk) * header.chunk_elements);",
        )],
    },
    Mutant {
        name: "length_of_16_bits",
        edits: &[(
            "multi_tensor.cuh",
            "u32(left) : header.chunk_elements};",
            "u32(left) : u16(header.chunk_elements)};",
        )],
    },
    Mutant {
        name: "misaligned_packs",
        edits: &[
            (
                "multi_tensor.cuh",
                "reinterpret_cast<u64>(address) % 16 == 0;",
                "reinterpret_cast<u64>(address) % 4 == 0;",
            ),
            // Gradients are looked at by themselves: their type is known from the header alone.
            ("fused_adam.cu", "body.grad % 16 == 0 &&", "body.grad % 4 == 0 &&"),
        ],
    },
    Mutant {
        name: "steps_counted_when_skipped",
        edits: &[(
            "resident.cuh",
            "    if (multi_tensor::is_skipped(header)) {\n        return;\n    }\n",
            "",
        )],
    },
];

#[test]
fn mutants_that_read_a_table_wrongly_are_found() {
    check_mutants(&MUTANTS, &["fused_adam.cu", "amp.cu"], "alone_adam_has_the_bits_of_the_host");
}

#[test]
#[ignore = "run by mutants_that_read_a_table_wrongly_are_found on drivers built from mutants"]
fn alone_adam_has_the_bits_of_the_host() {
    let rule = Optimizer::from(Adam::default());
    let found = train(rule, TableKind::Resident, WayOfStep::Enqueued, &cuda());
    assert!(found == train(rule, TableKind::Arguments, WayOfStep::Run, &cpu()));
    let mut case = Case::new([65_536 * 2 + 7, 3, 131_071], DType::F32);
    case.steps = 1;
    // Chunks whose length takes more than 16 bits.
    let long = cuda().with_limits(LaunchLimits::default());
    same_bits_of(rule, &|planner| planner, &case, &long);
    let format = (DType::F32, Precision::default());
    let places = Places::cut(&[1, 302], 299);
    let step = |backend: &dyn Backend| step_at(backend, rule.rule(), places, format);
    assert!(step(&cuda()) == step(&cpu()));
}
