//! State in codes of 8 bits: groups at every edge, cut in every way, with the bits of the host.

use fusestep_cuda::{CudaBackend, DeviceTensor};
use fusestep_launch::{
    Backend, Batchable, Launch, LaunchLimits, Memory as _, MultiTensorKernel, batches,
};
use fusestep_planner::Planner;
use fusestep_tensor::DType;
use fusestep_testkit::{Case, Gradients, outcome, rules};

use crate::common::resident::scaled;
use crate::common::{
    Places, TINY, VALUES, coded_formats, coded_rules, cpu, cuda, first_bytes, same_bits_at,
    step_at, widened,
};
use crate::framework::{Framework, Memory};

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

/// The lists of a tensor after a step on memory that a framework lends, state and units among it.
fn step_lent(
    framework: &Framework,
    backend: &CudaBackend,
    kernel: &dyn MultiTensorKernel,
    lists: &[Vec<u8>],
    numel: u64,
) -> Vec<u8> {
    let memory: Vec<_> = lists.iter().map(|bytes| Memory::of(framework, bytes)).collect();
    let layout = kernel.argument_layout();
    let limits = backend.limits().of(kernel);
    let tensor = Batchable { tensor: 0, first_element: 0, numel, group: 0 };
    let batches = batches("test", [tensor], layout, limits).unwrap();
    let mut scalars = vec![0; layout.scalar_bytes];
    let mut step_scalars = vec![0; layout.step_scalar_bytes];
    kernel.write_scalars(&mut scalars);
    kernel.write_step_scalars(VALUES, &mut step_scalars);
    let mut lend = |_, role| {
        let list = kernel.lists().iter().position(|list| list.role == role)?;
        // SAFETY: the memory is as long as its list, and is read behind the launch.
        Some(unsafe { DeviceTensor::at(memory[list].address(), lists[list].len()) })
    };
    let launch = Launch {
        kernel,
        batches: &batches,
        offsets: &[0],
        members: &[0],
        lists: &mut [],
        firsts: &[],
        scalars: &scalars,
        control: None,
        grad_sums: None,
        tensor_sums: None,
        update_sums: None,
        step_scalars: &step_scalars,
        limits,
    };
    backend.launch_borrowed(launch, &mut lend).unwrap();
    framework.synchronize();
    memory.iter().flat_map(Memory::read).collect()
}

#[test]
fn lent_codes_and_units_give_the_bits_of_the_host() {
    let framework = Framework::new();
    // SAFETY: the framework lives longer than the backend.
    let backend = unsafe { CudaBackend::adopt(framework.context(), framework.stream()) };
    let (backend, numel) = (backend.unwrap(), 4100);
    for (dtype, precision) in coded_formats() {
        for rule in coded_rules(rules()) {
            let kernel = rule.rule().kernel(dtype, precision).unwrap();
            let lists: Vec<_> = (0..kernel.lists().len())
                .map(|list| first_bytes(kernel.as_ref(), list, numel))
                .collect();
            let found = step_lent(&framework, &backend, kernel.as_ref(), &lists, numel);
            let places = Places::whole(&[0], numel);
            let expected = step_at(&cpu(), rule.rule(), places, (dtype, precision));
            assert!(found == expected, "{rule}, {dtype}, {precision}");
        }
    }
}
