//! Steps timed by events, and copies on the device.

use std::num::NonZeroU32;
use std::time::Duration;

use fusestep_cuda::CudaBackend;
use fusestep_launch::{BackendError, Memory};

fn cuda() -> CudaBackend {
    CudaBackend::open(0).unwrap_or_else(|error| panic!("{error}"))
}

const FOUR: NonZeroU32 = NonZeroU32::new(4).unwrap();

#[test]
fn a_copy_moves_as_many_bytes_as_asked_for() {
    let backend = cuda();
    let bytes: Vec<u8> = (0..=255).collect();
    let mut from = backend.allocate(256).unwrap();
    let mut to = backend.allocate(300).unwrap();
    backend.write(from.as_mut(), 0, &bytes).unwrap();
    backend.copy(from.as_ref(), 0, to.as_mut(), 0, 200).unwrap();
    let mut found = vec![9; 300];
    backend.read(to.as_ref(), 0, &mut found).unwrap();
    assert_eq!(found[..200], bytes[..200]);
    assert_eq!(found[200..], [0; 100], "nothing behind the copy is written");
    let error = backend.copy(from.as_ref(), 0, to.as_mut(), 0, 257).unwrap_err();
    let expected =
        BackendError::OutOfBounds { backend: "cuda", offset_bytes: 0, len_bytes: 257, found: 256 };
    assert_eq!(error, expected);
    let other = cuda();
    let error = other.copy(from.as_ref(), 0, to.as_mut(), 0, 1).unwrap_err();
    assert_eq!(error, BackendError::ForeignBuffer { backend: "cuda" });
}

#[test]
fn steps_are_numbered_and_lie_between_the_events() {
    let backend = cuda();
    let mut from = backend.allocate(1 << 20).unwrap();
    let mut to = backend.allocate(1 << 20).unwrap();
    backend.write(from.as_mut(), 0, &[7; 1 << 20]).unwrap();
    let mut seen = Vec::new();
    let time = backend.timed(FOUR, &mut |step| {
        seen.push(step);
        backend.copy(from.as_ref(), 0, to.as_mut(), 0, 1 << 20)
    });
    let time = time.unwrap();
    assert_eq!((seen, time.steps), (vec![0, 1, 2, 3], FOUR));
    assert!(time.device > Duration::ZERO, "{time:?}");
    // The host's clock starts first and ends last; the device's may count in half microseconds.
    let slack = Duration::from_micros(100) + time.wall / 10;
    assert!(time.device <= time.wall + slack, "{time:?}");
    let mut found = vec![0; 1 << 20];
    backend.read(to.as_ref(), 0, &mut found).unwrap();
    assert!(found.iter().all(|&byte| byte == 7));
}

#[test]
fn the_first_error_ends_the_steps_and_leaves_the_backend_usable() {
    let backend = cuda();
    let mut calls = 0;
    let failed = BackendError::ForeignBuffer { backend: "cuda" };
    let error = backend.timed(FOUR, &mut |step| {
        calls += 1;
        match step {
            1 => Err(failed.clone()),
            _ => Ok(()),
        }
    });
    assert_eq!((error.unwrap_err(), calls), (failed, 2));
    let done: Result<_, BackendError> = backend.timed(FOUR, &mut |_| Ok(()));
    assert_eq!(done.unwrap().steps, FOUR);
}
