//! Errors of the CUDA backend when things go wrong. A fault of the device stays until its process
//! ends, and the emulated driver is put into a state by the environment. So those tests run in
//! processes of their own.

mod common;

use std::process::Command;

use common::{Places, cpu, cuda, launch_at, step_at};
use fusestep_cuda::CudaBackend;
use fusestep_fused_adam::Adam;
use fusestep_launch::{
    ArgumentLayout, Backend, BackendError, GroupValues, HostRun, LaunchLimits, Memory,
    MultiTensorKernel, Precision, TensorList, UpdateRule,
};
use fusestep_planner::{Optimizer, Planner, RunAlone};
use fusestep_tensor::{DType, Role};
use fusestep_testkit::Case;

/// Runs one of the ignored tests of this file in a process of its own, on the emulator; elsewhere
/// it is skipped.
fn alone(test: &str, environment: &[(&str, &str)]) -> Option<String> {
    if !cuda().device_info().name.contains("emulator") {
        println!("skipped {test}: only the emulated driver can be put into this state");
        return None;
    }
    let program = std::env::current_exe().expect("the test's own path");
    let output = Command::new(program)
        .args(["--exact", test, "--ignored", "--nocapture"])
        .envs(environment.iter().copied())
        .output()
        .expect("the test's own program starts");
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    Some(text.into_owned())
}

/// Launches `kernel` on 100 elements at `offset` in buffers of 400 bytes.
fn launch_one(
    backend: &CudaBackend,
    kernel: &dyn MultiTensorKernel,
    offset: u64,
) -> Result<(), BackendError> {
    launch_at(backend, kernel, Places::cut(&[offset], 100), &mut |_| vec![0; 400]).map(|_| ())
}

fn adam(dtype: DType) -> Box<dyn MultiTensorKernel> {
    Adam::default().kernel(dtype, Precision::default()).unwrap()
}

#[test]
fn a_launch_beyond_its_buffers_is_refused_before_it_starts() {
    let kernel = adam(DType::F32);
    launch_one(&cuda(), kernel.as_ref(), 0).unwrap();
    assert_eq!(
        launch_one(&cuda(), kernel.as_ref(), 1).unwrap_err(),
        BackendError::OutOfBounds { backend: "cuda", offset_bytes: 4, len_bytes: 400, found: 400 }
    );
    assert!(launch_one(&cuda(), kernel.as_ref(), u64::MAX / 8).is_err());
}

/// An f64 kernel that declares its lists as f32: the device reads twice as far as the buffers
/// reach.
struct Liar {
    kernel: Box<dyn MultiTensorKernel>,
    lists: Vec<TensorList>,
}

impl MultiTensorKernel for Liar {
    fn stem(&self) -> &'static str {
        self.kernel.stem()
    }

    fn entry(&self) -> &'static str {
        self.kernel.entry()
    }

    fn lists(&self) -> &[TensorList] {
        &self.lists
    }

    fn argument_layout(&self) -> ArgumentLayout {
        self.kernel.argument_layout()
    }

    fn flags(&self) -> u32 {
        self.kernel.flags()
    }

    fn write_scalars(&self, out: &mut [u8]) {
        self.kernel.write_scalars(out);
    }

    fn write_step_scalars(&self, values: GroupValues, out: &mut [u8]) {
        self.kernel.write_step_scalars(values, out);
    }

    fn run_host(&self, run: HostRun<'_, '_>) {
        self.kernel.run_host(run);
    }
}

#[test]
fn a_fault_of_the_device_shows_with_its_code_and_stays() {
    if let Some(text) = alone("alone_out_of_bounds", &[]) {
        assert!(
            text.contains("fused_adam_f64 block (0, 0, 0) thread (")
                && text.contains("is out of bounds"),
            "{text}"
        );
    }
}

#[test]
#[ignore = "faults; run by a_fault_of_the_device_shows_with_its_code_and_stays"]
fn alone_out_of_bounds() {
    let kernel = adam(DType::F64);
    let dtype = DType::F32;
    let lists = kernel.lists().iter().map(|&list| TensorList { dtype, ..list }).collect();
    let backend = cuda();
    let state = backend.allocate(16).unwrap();
    let error = launch_one(&backend, &Liar { kernel, lists }, 0).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cuda: waiting for the device failed with code 700: CUDA_ERROR_ILLEGAL_ADDRESS, an \
         illegal memory access was encountered"
    );
    for error in [
        backend.read(state.as_ref(), 0, &mut [0]).unwrap_err(),
        backend.allocate(16).unwrap_err(),
        backend.synchronize().unwrap_err(),
    ] {
        assert!(matches!(error, BackendError::Device { code: 700, .. }), "{error}");
    }
}

#[test]
fn the_device_decides_what_an_entry_is_loaded_from() {
    for (capability, driver, just_in_time, expected) in [
        ("80", "12040", "0", "machine code for sm_80"),
        ("86", "12040", "0", "machine code for sm_80"),
        ("90", "12040", "0", "machine code for sm_90"),
        ("103", "12090", "0", "machine code for sm_100"),
        // The driver is older than the code's format.
        ("103", "12040", "0", "PTX"),
        ("70", "12040", "0", "PTX"),
        ("120", "12090", "0", "PTX"),
        ("90", "12040", "1", "PTX"),
    ] {
        // What runs the text of modules refuses all machine code.
        let runs_ptx = std::env::var("FUSESTEP_EMULATOR_CODE").is_ok_and(|code| code == "ptx");
        alone(
            "alone_loaded_from",
            &[
                ("FUSESTEP_EMULATOR_CAPABILITY", capability),
                ("FUSESTEP_EMULATOR_DRIVER", driver),
                ("CUDA_FORCE_PTX_JIT", just_in_time),
                ("EXPECTED_CODE", if runs_ptx { "PTX" } else { expected }),
            ],
        );
    }
}

#[test]
#[ignore = "needs a device of a kind; run by the_device_decides_what_an_entry_is_loaded_from"]
fn alone_loaded_from() {
    let backend = cuda();
    assert_eq!(backend.loaded_entries(), []);
    let rule = Optimizer::from(Adam::default());
    let format = (DType::F32, Precision::default());
    let places = Places::whole(&[0, 300], 299);
    let step = |backend: &dyn Backend| step_at(backend, rule.rule(), places, format);
    let expected = step(&cpu());
    for _ in 0..2 {
        assert!(step(&backend) == expected);
        let loaded: Vec<_> = backend
            .loaded_entries()
            .iter()
            .map(|(entry, code)| format!("{entry}: {code}"))
            .collect();
        let code = std::env::var("EXPECTED_CODE").unwrap();
        assert_eq!(loaded, [format!("fused_adam_f32: {code}")]);
    }
}

#[test]
fn a_machine_without_a_device_says_so() {
    alone("alone_no_device", &[("FUSESTEP_EMULATOR_DEVICES", "0")]);
}

#[test]
#[ignore = "needs a driver without a device; run by a_machine_without_a_device_says_so"]
fn alone_no_device() {
    assert_eq!(
        CudaBackend::open(0).unwrap_err().to_string(),
        "cuda: the driver does not start, with code 100: CUDA_ERROR_NO_DEVICE, no CUDA-capable \
         device is detected; check the output of `nvidia-smi`, or use the cpu backend"
    );
}

#[test]
fn an_old_driver_refuses_newer_ptx() {
    alone("alone_old_driver", &[("FUSESTEP_EMULATOR_DRIVER", "12000")]);
}

#[test]
#[ignore = "needs an old driver; run by an_old_driver_refuses_newer_ptx"]
fn alone_old_driver() {
    let backend = cuda();
    assert_eq!(backend.device_info().driver_version, (12, 0));
    let error = launch_one(&backend, adam(DType::F32).as_ref(), 0).unwrap_err();
    assert!(
        matches!(error, BackendError::Device { code: 222, .. })
            && error.to_string().contains("a newer driver reads it; ")
            && error.to_string().contains("machine code for sm_90 was refused with code 20"),
        "{error}"
    );
    // Batches made for another device's limits.
    let case = Case::new(vec![1; 700], DType::F32);
    let plan = Planner::new(Optimizer::Adam(Adam::default()))
        .limits(LaunchLimits::with_argument_bytes(65_536))
        .plan(&case.params)
        .unwrap();
    let mut state = plan.allocate(&backend).unwrap();
    for param in &case.params {
        state.write(&backend, Role::Grad, &param.name, &[0; 4]).unwrap();
    }
    let error = RunAlone::of(&plan, &mut state, &backend).step_all().unwrap_err().to_string();
    assert!(
        error.contains("this device takes 32764; plan with the limits of the backend"),
        "{error}"
    );
}
