//! Launches that leave sums over what they change, on the device: in every way there is to run a
//! step, cut in every way, and with the bits of the host. What the emulator finds in kernels that
//! sum wrongly is at the end: mutants, each in a process of its own.

mod common;

use common::mutants::{Mutant, check_mutants};
use common::resident::{WayOfStep, allocate, read_all, same_bits_of, scaled, write_grads};
use common::{cpu, cuda, formats};
use fusestep_fused_adam::Adam;
use fusestep_fused_sgd::Sgd;
use fusestep_lamb::Lamb;
use fusestep_lars_momentum::Lars;
use fusestep_launch::{
    Backend, BackendError, Batchable, GroupValues, Launch, LaunchLimits, ListBuffer,
    MultiTensorKernel, Precision, UnitSums, UpdateSums, batches,
};
use fusestep_planner::{Optimizer, Planner, RunAlone, TableKind, UpdateNorms};
use fusestep_tensor::{DType, Role};
use fusestep_testkit::{Case, Gradients, rules};

fn measured(planner: Planner) -> Planner {
    planner.with(UpdateNorms)
}

#[test]
fn every_rule_cut_in_every_way_has_the_norms_of_the_host() {
    let cut = LaunchLimits {
        argument_bytes: 700,
        chunk_elements: 64,
        chunks_per_launch: 3,
        ..LaunchLimits::default()
    };
    let small = Case::new([0, 1, 63, 64, 65, 500, 0, 191, 2048], DType::F32).with_groups();
    let mut large = Case::new([5, 65_536 * 4 + 1, 0, 65_535, 9], DType::F32);
    large.steps = 2;
    let extreme = Case::new([700, 65_537], DType::F32).with_gradients(Gradients::Extreme);
    for rule in rules() {
        same_bits_of(rule, &measured, &small, &cuda().with_limits(cut));
        same_bits_of(rule, &measured, &large, &cuda().with_limits(cut));
        let skips = |planner| measured(scaled(planner));
        same_bits_of(rule, &skips, &extreme, &cuda());
    }
    for rule in [Optimizer::from(Lars::default()), Lamb::default().into()] {
        same_bits_of(rule, &measured, &large, &cuda());
    }
}

#[test]
fn every_rule_and_format_has_the_norms_of_the_host() {
    for (dtype, precision) in formats() {
        let mut case = Case::new([0, 1, 1500], dtype).with_groups();
        case.steps = 2;
        let passes = |planner: Planner| measured(planner.precision(precision));
        for rule in rules() {
            same_bits_of(rule, &passes, &case, &cuda());
        }
    }
}

/// Steps some of which are skipped, and after each the norms of the updates; then all bits.
fn train(rule: Optimizer, way: WayOfStep, backend: &dyn Backend) -> (Vec<Vec<f64>>, Vec<u8>) {
    let case = Case::new([70, 3, 0, 1300], DType::F32).with_groups();
    let planner = measured(scaled(Planner::new(rule))).limits(backend.limits());
    let plan = planner.plan(&case.params).unwrap();
    assert_eq!(plan.table(), TableKind::Resident);
    let mut state = allocate(&plan, &case, backend);
    let graph = match way {
        WayOfStep::Replayed => Some(RunAlone::of(&plan, &mut state, backend).capture().unwrap()),
        _ => None,
    };
    let mut norms = Vec::new();
    for step in 1..=4u64 {
        write_grads(&mut state, &case, step, backend);
        if step == 3 {
            let bytes = f32::INFINITY.to_le_bytes().repeat(3);
            state.write(backend, Role::Grad, "tensor.1", &bytes).unwrap();
        }
        match (way, &graph) {
            (WayOfStep::Replayed, Some(graph)) => {
                RunAlone::of(&plan, &mut state, backend).replay(graph).unwrap()
            }
            (WayOfStep::Enqueued, _) => RunAlone::of(&plan, &mut state, backend).enqueue().unwrap(),
            _ => drop(RunAlone::of(&plan, &mut state, backend).step_all().unwrap()),
        }
        norms.push(state.update_norms(backend).unwrap().unwrap());
    }
    state.settle(backend).unwrap();
    (norms, read_all(&state, &case, backend))
}

#[test]
fn norms_are_there_after_steps_that_nobody_waits_for() {
    for rule in rules() {
        let expected = train(rule, WayOfStep::Run, &cpu());
        assert_eq!(expected.0[2], [0.0; 4], "skipped");
        assert!(expected.0[3][3] > 0.0, "{rule}");
        for way in [WayOfStep::Run, WayOfStep::Enqueued, WayOfStep::Replayed] {
            let found = train(rule, way, &cuda());
            assert!(found == expected, "{rule}, {way:?}");
        }
    }
}

/// A kernel's lists, of so many values.
fn lists_of(
    backend: &dyn Backend,
    kernel: &dyn MultiTensorKernel,
    numel: u64,
) -> Result<Vec<ListBuffer>, BackendError> {
    let mut lists = Vec::new();
    for (index, &list) in kernel.lists().iter().enumerate() {
        let value = |i: u64| (i * 7 % 1000 + index as u64 * 3 + 1) as f32 / 64.0;
        let bytes: Vec<u8> = (0..numel).flat_map(|i| value(i).to_le_bytes()).collect();
        let mut buffer = backend.allocate(bytes.len())?;
        backend.write(buffer.as_mut(), 0, &bytes)?;
        lists.push(ListBuffer { list, buffer });
    }
    Ok(lists)
}

/// One step of a rule over tensors at these offsets, which lie in rows of their own; with so many
/// rows for so many chunks.
fn step_at(
    backend: &dyn Backend,
    rule: &Optimizer,
    (offsets, numel): (&[u64], u64),
    (rows, chunk_elements): (usize, u32),
) -> Result<(Vec<Vec<u8>>, Vec<UnitSums>), BackendError> {
    let rule = rule.rule();
    let kernel = rule.kernel(DType::F32, Precision::default()).unwrap();
    let limits = LaunchLimits { chunk_elements, ..LaunchLimits::default() };
    let tensors = (0..offsets.len() as u32).map(|tensor| Batchable {
        tensor,
        first_element: 0,
        numel,
        group: 0,
    });
    let layout = kernel.argument_layout();
    let batches = batches("test", tensors, layout, limits).unwrap();
    let mut lists = lists_of(backend, kernel.as_ref(), offsets.last().unwrap() + numel)?;
    let mut scalars = vec![0; layout.scalar_bytes];
    let mut step_scalars = vec![0; layout.step_scalar_bytes];
    kernel.write_scalars(&mut scalars);
    let values = GroupValues { lr: 0.01, lr_scale: 1.0, weight_decay: None, trust: None, step: 1 };
    kernel.write_step_scalars(values, &mut step_scalars);
    let members: Vec<u32> = (0..offsets.len() as u32).collect();
    let tensors = 0..=offsets.len() as u64;
    let firsts: Vec<u64> = tensors.map(|t| t * numel.div_ceil(65_536)).collect();
    let mut sums = backend.allocate(rows * size_of::<UnitSums>())?;
    let launch = Launch {
        kernel: kernel.as_ref(),
        batches: &batches,
        offsets,
        members: &members,
        lists: &mut lists,
        firsts: &[],
        scalars: &scalars,
        control: None,
        grad_sums: None,
        tensor_sums: None,
        update_sums: Some(UpdateSums { rows: sums.as_mut(), firsts: &firsts }),
        step_scalars: &step_scalars,
        limits,
    };
    match backend.device() {
        Some(device) => {
            let table = device.place_table(&launch, &[values])?;
            device.launch_table(launch, table.as_ref())?
        }
        None => backend.launch(launch)?,
    };
    let mut all = vec![];
    for list in &lists {
        let mut bytes = vec![0; list.buffer.len_bytes()];
        backend.read(list.buffer.as_ref(), 0, &mut bytes)?;
        all.push(bytes);
    }
    let mut found = vec![UnitSums::default(); rows];
    backend.read(sums.as_ref(), 0, bytemuck::cast_slice_mut(&mut found))?;
    Ok((all, found))
}

fn one_of_each_shape() -> [Optimizer; 3] {
    [Adam::default().into(), Sgd::with_momentum().into(), Lars::default().into()]
}

#[test]
fn addresses_that_no_pack_fits_have_the_sums_of_the_host_and_touch_no_other() {
    for rule in one_of_each_shape() {
        for shift in 0..4 {
            let places = (&[shift, 3301 + shift, 6640][..], 3299);
            let found = step_at(&cuda(), &rule, places, (5, 65_536)).unwrap();
            let expected = step_at(&cpu(), &rule, places, (5, 65_536)).unwrap();
            assert!(found == expected, "{rule}, shift {shift}");
            let [sums @ .., behind, last] = &found.1[..] else { panic!("five rows") };
            assert!(sums.iter().all(|units| units[0] > 0.0), "{rule}");
            assert_eq!((behind, last), (&[0.0; 8], &[0.0; 8]), "{rule}");
        }
    }
}

#[test]
fn rows_that_do_not_fit_are_refused_before_anything_is_written() {
    let places = (&[0, 70_016][..], 70_000);
    for rule in one_of_each_shape() {
        for backend in [&cuda() as &dyn Backend, &cpu()] {
            let error = step_at(backend, &rule, places, (3, 65_536)).unwrap_err();
            assert!(
                matches!(error, BackendError::OutOfBounds { len_bytes: 256, found: 192, .. }),
                "{rule}: {error}"
            );
            assert!(step_at(backend, &rule, places, (4, 65_536)).is_ok());
        }
        let error = step_at(&cuda(), &rule, places, (4, 64)).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("chunks of 65536 elements, the launch has chunks of 64"),
            "{rule}: {text}"
        );
    }
}

#[test]
fn arguments_have_no_entries_that_measure() {
    let backend = cuda();
    let case = Case::new([70], DType::F32);
    let planner = measured(Planner::new(Adam::default().into()));
    let plan = planner.table(TableKind::Arguments).plan(&case.params);
    let plan = plan.unwrap();
    assert_eq!(plan.table(), TableKind::Resident);
    let notes = plan.explain().iter().map(ToString::to_string);
    let notes: Vec<String> = notes.collect();
    let says_why = notes.iter().any(|note| note.contains("resident, for pass `update_norms`"));
    assert!(says_why, "{notes:?}");
    let mut state = allocate(&plan, &case, &backend);
    assert!(RunAlone::of(&plan, &mut state, &backend).step_all().is_ok());
}

const MUTANTS: [Mutant; 5] = [
    Mutant {
        name: "leaves_read_before_they_are_written",
        edits: &[(
            "update_sums.cu",
            "        dialect::block_sync();\n        if (threadIdx.x < UNITS) {",
            "        if (threadIdx.x < UNITS) {",
        )],
    },
    Mutant {
        name: "rows_beyond_the_tensor",
        edits: &[(
            "update_sums.cu",
            "if (packs && first + LEAF <= numel) {",
            "if (packs && first < numel) {",
        )],
    },
    Mutant {
        name: "sums_of_all_tensors_in_one_place",
        edits: &[(
            "update_sums.cu",
            "const u64 sum = record.address[W::FIRST_SUM] + ",
            "const u64 sum = ",
        )],
    },
    Mutant {
        name: "sum_of_one_unit_for_all",
        edits: &[("update_sums.cu", "(leaves + threadIdx.x)", "(leaves)")],
    },
    // Values would be compared with those of the step before.
    Mutant {
        name: "nothing_kept",
        edits: &[(
            "update_sums.cu",
            "    if constexpr (PART == Part::keep) {\n",
            "    if constexpr (PART == Part::keep) {\n        return;\n",
        )],
    },
];

#[test]
fn mutants_that_sum_wrongly_are_found() {
    const KERNELS: [&str; 3] = ["fused_adam.cu", "lars_momentum.cu", "update_sums.cu"];
    let alone = "alone_adam_and_lars_have_the_norms_of_the_host";
    check_mutants(&MUTANTS, &KERNELS, alone);
}

#[test]
#[ignore = "run by mutants_that_sum_wrongly_are_found on drivers built from mutants"]
fn alone_adam_and_lars_have_the_norms_of_the_host() {
    let mut case = Case::new([65_536 * 2 + 7, 3, 9000], DType::F32);
    case.steps = 1;
    for rule in [Optimizer::from(Adam::default()), Lars::default().into()] {
        same_bits_of(rule, &measured, &case, &cuda());
    }
}
