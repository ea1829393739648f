//! The CUDA backend, on whatever driver the process finds: the emulated one under `cargo xtask
//! emulate`, a real one under `cargo xtask gpu`. What only the emulator can show is skipped
//! elsewhere, and the skip is printed.

#[path = "emulated/adopted.rs"]
mod adopted;
#[path = "emulated/borrowed.rs"]
mod borrowed;
#[path = "emulated/coded.rs"]
mod coded;
mod common;
#[path = "emulated/framework.rs"]
mod framework;
#[path = "emulated/lanes.rs"]
mod lanes;

use common::{Places, TINY, cpu, cuda, formats, same_bits, same_bits_at, step_at};
use fusestep_cuda::CudaBackend;
use fusestep_fused_adam::{Adam, SecondMoment};
use fusestep_launch::{
    Backend, BackendError, LaunchLimits, Memory, Objective, Precision, WeightDecay,
};
use fusestep_planner::{Optimizer, Planner, RunAlone};
use fusestep_tensor::DType;
use fusestep_testkit::{Case, EDGE_NUMELS, Gradients, element_rules};

#[test]
fn every_element_wise_rule_gives_the_bits_of_the_host() {
    for dtype in [DType::F32, DType::F64] {
        let case = Case::new(EDGE_NUMELS, dtype).with_groups();
        let extreme = Case::new([1, 33, 1000], dtype).with_gradients(Gradients::Extreme);
        let cut = Case::new([0, 1, 63, 64, 65, 500, 0, 191, 193], dtype).with_groups();
        for rule in element_rules() {
            same_bits(rule, &case, cuda().limits());
            same_bits(rule, &extreme, cuda().limits());
            same_bits(rule, &cut, TINY);
        }
    }
}

#[test]
fn every_option_and_dtype_gives_the_bits_of_the_host() {
    for dtype in [DType::F32, DType::F64] {
        let case = Case::new(EDGE_NUMELS, dtype).with_groups();
        for weight_decay in [WeightDecay::Decoupled(0.01), WeightDecay::L2(0.1)] {
            for (second_moment, objective) in [
                (SecondMoment::Running, Objective::Minimize),
                (SecondMoment::Largest, Objective::Maximize),
            ] {
                let adam = Adam { weight_decay, second_moment, objective, ..Adam::default() };
                same_bits(adam, &case, cuda().limits());
            }
        }
    }
}

#[test]
fn limits_change_the_launches_and_not_the_bits() {
    let case = Case::new((0..700).map(|i| i % 9 * 13), DType::F32).with_groups();
    let launches = |limits: LaunchLimits| {
        let backend = cuda().with_limits(limits);
        let planner = Planner::new(Optimizer::Adam(Adam::default())).limits(limits);
        let plan = planner.plan(&case.params).unwrap();
        RunAlone::of(&plan, &mut plan.allocate(&backend).unwrap(), &backend)
            .step_all()
            .unwrap()
            .launches
    };
    for (limits, expected) in
        [(LaunchLimits::default(), 1), (LaunchLimits::with_argument_bytes(4096), 8)]
    {
        assert_eq!(launches(limits), expected, "{limits:?}");
        same_bits(Adam::default(), &case, limits);
    }
}

#[test]
fn chunks_of_64_elements_three_to_a_launch_give_the_same_bits() {
    let case = Case::new([0, 1, 63, 64, 65, 500, 0, 191, 192, 193, 0], DType::F32);
    for second_moment in [SecondMoment::Running, SecondMoment::Largest] {
        let adam = Adam { second_moment, ..Adam::default() };
        same_bits(adam, &case.clone().with_groups(), TINY);
    }
}

#[test]
fn nan_infinities_and_subnormals_give_the_same_bits() {
    for dtype in [DType::F32, DType::F64] {
        for second_moment in [SecondMoment::Running, SecondMoment::Largest] {
            let case = Case::new([1, 33, 1000, 70_001], dtype).with_gradients(Gradients::Extreme);
            let adam = Adam { eps: 0.0, second_moment, ..Adam::default() };
            same_bits(adam, &case, cuda().limits());
        }
    }
}

#[test]
fn empty_tensors_may_stand_anywhere() {
    for numels in [&[0, 5, 7][..], &[5, 0, 7], &[5, 7, 0], &[0], &[0, 0]] {
        let case = Case::new(numels.iter().copied(), DType::F32);
        for limits in [cuda().limits(), TINY] {
            same_bits(Adam::default(), &case, limits);
        }
    }
}

#[test]
fn addresses_that_no_pack_fits_give_the_same_bits_and_touch_nothing_else() {
    let plain = [DType::F32, DType::F64].map(|dtype| (dtype, Precision::default()));
    let same = |rule: Optimizer, places: Places, format| {
        let step = |backend: &dyn Backend| step_at(backend, rule.rule(), places, format);
        let shift = places.offsets[0];
        assert!(step(&cuda()) == step(&cpu()), "{rule}, {format:?}, shift {shift}");
    };
    for format in plain.into_iter().chain(formats()) {
        let adam = Optimizer::from(Adam::default());
        for rule in [adam].into_iter().chain(element_rules()) {
            for shift in 0..4 {
                same(rule, Places::cut(&[shift, 301 + shift, 640], 299), format);
            }
            // Enough that every thread takes several elements at a time.
            same(rule, Places::whole(&[1, 2200], 2150), format);
        }
    }
}

#[test]
fn every_16_bit_format_gives_the_bits_of_the_host() {
    for (dtype, precision) in formats() {
        let case = Case::new(EDGE_NUMELS, dtype).with_groups();
        same_bits_at(Adam::default(), precision, &case, cuda().limits());
        let case = Case::new([0, 1, 63, 64, 65, 500, 0, 193, 0], dtype).with_groups();
        for second_moment in [SecondMoment::Running, SecondMoment::Largest] {
            let adam = Adam { second_moment, ..Adam::default() };
            same_bits_at(adam, precision, &case, TINY);
            let extreme = case.clone().with_gradients(Gradients::Extreme);
            same_bits_at(adam, precision, &extreme, TINY);
        }
    }
}

#[test]
fn every_16_bit_format_of_every_rule_gives_the_bits_of_the_host() {
    for rule in element_rules() {
        for (dtype, precision) in formats() {
            let case = Case::new([0, 1, 63, 64, 65, 500, 0, 193, 4097], dtype);
            let case = case.with_groups();
            same_bits_at(rule, precision, &case, cuda().limits());
            same_bits_at(rule, precision, &case, TINY);
            let extreme = Case::new([1, 65, 193], dtype).with_gradients(Gradients::Extreme);
            same_bits_at(rule, precision, &extreme, TINY);
        }
    }
}

#[test]
fn memory_is_zeroed_and_bounded() {
    let backend = cuda();
    let mut buffer = backend.allocate(1000).unwrap();
    let mut bytes = vec![1; 1000];
    backend.read(buffer.as_ref(), 0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|&byte| byte == 0));
    backend.write(buffer.as_mut(), 990, &[7; 10]).unwrap();
    backend.read(buffer.as_ref(), 991, &mut bytes[..9]).unwrap();
    assert_eq!(bytes[..9], [7; 9]);
    let error = backend.write(buffer.as_mut(), 991, &[7; 10]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cuda: copy of 10 bytes at offset 991: expected a buffer of at least that length, found \
         1000 bytes"
    );
    assert!(backend.read(buffer.as_ref(), usize::MAX, &mut [0; 2]).is_err());
    let mut empty = backend.allocate(0).unwrap();
    backend.write(empty.as_mut(), 0, &[]).unwrap();
    assert!(backend.read(empty.as_ref(), 0, &mut [0]).is_err());
    assert_eq!(
        backend.allocate(1 << 50).unwrap_err(),
        BackendError::OutOfMemory { backend: "cuda", len_bytes: 1 << 50 }
    );
}

#[test]
fn buffers_of_others_are_refused() {
    let backend = cuda();
    let mut host = cpu().allocate(16).unwrap();
    let foreign = BackendError::ForeignBuffer { backend: "cuda" };
    assert_eq!(backend.write(host.as_mut(), 0, &[1]).unwrap_err(), foreign);
    let other = cuda().allocate(16).unwrap();
    assert_eq!(backend.read(other.as_ref(), 0, &mut [0]).unwrap_err(), foreign);
    let mut own = backend.allocate(16).unwrap();
    assert!(cpu().write(own.as_mut(), 0, &[1]).is_err());
}

#[test]
fn threads_share_a_backend_and_buffers_outlive_it() {
    let backend = cuda();
    let mut buffer =
        std::thread::scope(|scope| scope.spawn(|| backend.allocate(64).unwrap()).join().unwrap());
    backend.write(buffer.as_mut(), 0, &[9; 64]).unwrap();
    drop(backend);
    std::thread::spawn(move || drop(buffer)).join().unwrap();
}

#[test]
fn devices_that_are_not_there_are_named() {
    let error = CudaBackend::open(1_000_000).unwrap_err().to_string();
    assert!(
        error.starts_with("cuda: expected a device number below")
            && error.ends_with("found 1000000"),
        "{error}"
    );
    let info = cuda().device_info().clone();
    assert!(info.multiprocessors > 0 && info.memory_bytes > 0 && !info.name.is_empty());
}
