//! The backend in a context and on a stream that a framework has made, by raw calls of the driver
//! here.

use std::process::Command;

use cust::sys::{self, CUgraph};
use fusestep_cuda::{ContextHandle, CudaBackend, StreamHandle};
use fusestep_fused_adam::Adam;
use fusestep_lamb::Lamb;
use fusestep_launch::{BackendError, Memory as _};
use fusestep_planner::{ClipByGlobalNorm, Optimizer, Plan, Planner, RunAlone, State, TableKind};
use fusestep_tensor::{DType, Role};
use fusestep_testkit::{Case, EDGE_NUMELS, outcome};

use crate::common::{cpu, cuda};
use crate::framework::{Framework, LEGACY_STREAM, Memory};

/// The backend on a stream of the framework.
fn adopted(framework: &Framework, stream: StreamHandle) -> CudaBackend {
    // SAFETY: the framework lives longer than what its tests make.
    unsafe { CudaBackend::adopt(framework.context(), stream) }.unwrap_or_else(|e| panic!("{e}"))
}

/// The error of an adoption that must fail.
fn refusal(context: ContextHandle, stream: StreamHandle) -> BackendError {
    // SAFETY: handles of live contexts and streams of the driver.
    unsafe { CudaBackend::adopt(context, stream) }.expect_err("it does not fit")
}

#[test]
fn an_adopted_stream_gives_the_bits_of_an_opened_backend_and_of_the_host() {
    let _legacy = LEGACY_STREAM.lock();
    let framework = Framework::new();
    let case = Case::new(EDGE_NUMELS, DType::F32).with_groups();
    for optimizer in [Optimizer::from(Adam::default()), Optimizer::from(Lamb::default())] {
        for stream in [framework.stream(), StreamHandle::LEGACY] {
            let backend = adopted(&framework, stream);
            for table in [TableKind::Arguments, TableKind::Resident] {
                let planner = Planner::new(optimizer).limits(backend.limits()).table(table);
                let plan = planner.with(ClipByGlobalNorm::new(1.0)).plan(&case.params);
                let plan = plan.unwrap();
                let expected = outcome(&plan, &case, &cpu());
                assert!(outcome(&plan, &case, &cuda()) == expected, "{optimizer}, opened");
                assert!(outcome(&plan, &case, &backend) == expected, "{optimizer}, {stream:?}");
            }
        }
    }
}

/// A plan whose first step is done, so that the next one is launches alone.
struct Begun<'a> {
    backend: &'a CudaBackend,
    plan: Plan,
    state: State,
    name: String,
}

impl<'a> Begun<'a> {
    fn on(backend: &'a CudaBackend) -> Self {
        let case = Case::new([100], DType::F32);
        let plan = Planner::new(Optimizer::from(Adam::default())).limits(backend.limits());
        let plan = plan.table(TableKind::Resident).plan(&case.params).unwrap();
        let mut state = plan.allocate(backend).unwrap();
        let name = case.params[0].name.clone();
        let grad = case.grad_bytes(0, 1);
        state.write(backend, Role::Grad, &name, &grad).unwrap();
        RunAlone::of(&plan, &mut state, backend).step_all().unwrap();
        Self { backend, plan, state, name }
    }

    fn enqueue(&mut self) {
        RunAlone::of(&self.plan, &mut self.state, self.backend).enqueue().unwrap();
    }

    fn param(&self) -> Vec<u8> {
        let mut bytes = vec![0; 400];
        let read = self.state.read(self.backend, Role::Param, &self.name, &mut bytes);
        read.unwrap();
        bytes
    }

    /// Requires that what the framework has recorded is a step, and no more was done than that.
    fn is_recorded_in(&self, framework: &Framework, graph: CUgraph, before: &[u8]) {
        assert!(self.param() == before, "done although the stream records");
        framework.run(graph);
        assert!(self.param() != before, "not recorded");
    }
}

#[test]
fn launches_go_to_the_adopted_stream() {
    let framework = Framework::new();
    let backend = adopted(&framework, framework.stream());
    let mut step = Begun::on(&backend);
    let before = step.param();
    let graph = framework.record(|| step.enqueue()).unwrap();
    step.is_recorded_in(&framework, graph, &before);
}

#[test]
fn streams_are_ordered_by_events() {
    let _legacy = LEGACY_STREAM.lock();
    let framework = Framework::new();
    let backend = cuda();
    let mut step = Begun::on(&backend);
    let before = step.param();
    // A stream that waits for one that records is recorded with it.
    let mut behind = |awaited: bool| {
        framework.record(|| {
            // SAFETY: the framework's stream, in the same context.
            unsafe { backend.wait_for(framework.stream()) }.unwrap();
            step.enqueue();
            if awaited {
                // SAFETY: as above.
                unsafe { backend.make_wait(framework.stream()) }.unwrap();
            }
        })
    };
    let graph = behind(true).unwrap();
    // And what was recorded has to be awaited by the stream that the recording began with.
    let unjoined = sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    assert_eq!(behind(false).unwrap_err(), unjoined);
    step.is_recorded_in(&framework, graph, &before);
}

#[test]
fn a_recording_cannot_wait_for_what_went_before_it() {
    let framework = Framework::new();
    let other = Framework::new();
    let backend = adopted(&framework, framework.stream());
    let mut step = Begun::on(&backend);
    let spoiled = framework.record(|| {
        // SAFETY: a stream of the same context.
        let error = unsafe { backend.wait_for(other.stream()) }.unwrap_err();
        let isolation = matches!(error, BackendError::Device { code: 905, .. });
        assert!(isolation, "{error}");
        // Nothing more is recorded then.
        assert!(RunAlone::of(&step.plan, &mut step.state, step.backend).enqueue().is_err());
    });
    let invalidated = sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    assert_eq!(spoiled.unwrap_err(), invalidated);
}

#[test]
fn what_belongs_to_the_framework_outlives_the_backend() {
    let framework = Framework::new();
    let memory = Memory::of(&framework, &[5; 100]);
    let backend = adopted(&framework, framework.stream());
    let mut buffer = backend.allocate(100).unwrap();
    backend.write(buffer.as_mut(), 0, &[1; 100]).unwrap();
    drop(backend);
    drop(buffer);
    assert_eq!(memory.read(), [5; 100]);
    framework.synchronize();
}

#[test]
fn the_context_outlives_the_frameworks_hold_on_it() {
    // In a process of its own, where nobody else holds it.
    let program = std::env::current_exe().expect("the test's own path");
    let test = "adopted::a_context_that_only_the_backend_holds";
    let mut alone = Command::new(program);
    let output = alone.args(["--exact", test, "--ignored"]).output();
    let output = output.expect("the test's own program starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("1 passed"), "{text}");
}

#[test]
#[ignore = "run by `the_context_outlives_the_frameworks_hold_on_it`"]
fn a_context_that_only_the_backend_holds() {
    let framework = Framework::new();
    let backend = adopted(&framework, StreamHandle::LEGACY);
    let mut buffer = backend.allocate(8).unwrap();
    drop(framework);
    backend.write(buffer.as_mut(), 0, &[3; 8]).unwrap();
    let mut bytes = [0; 8];
    backend.read(buffer.as_ref(), 0, &mut bytes).unwrap();
    assert_eq!(bytes, [3; 8]);
}

#[test]
fn handles_that_do_not_fit_are_named() {
    let framework = Framework::new();
    let other = framework.another_context();
    let null = ContextHandle(std::ptr::null_mut());
    let device = framework.device_name();
    for (context, stream, expected) in [
        (
            null,
            StreamHandle::LEGACY,
            "expected the context that a framework works in, found a null handle".to_owned(),
        ),
        (
            other.context(),
            other.stream(),
            format!(
                "expected the primary context of device 0 ({device}), which PyTorch, cudarc and \
                 candle use, found another context of it"
            ),
        ),
        (
            framework.context(),
            other.stream(),
            "expected a stream of the context to be adopted, found one of another context"
                .to_owned(),
        ),
        (
            framework.context(),
            StreamHandle::PER_THREAD,
            "expected a stream that is the same on every thread, found the per-thread default \
             stream; open the device and order the streams by `wait_for` and `make_wait`"
                .to_owned(),
        ),
    ] {
        framework.enter();
        assert_eq!(refusal(context, stream).to_string(), format!("cuda: {expected}"));
        let mut current = std::ptr::null_mut();
        // SAFETY: writes one handle.
        let status = unsafe { sys::cuCtxGetCurrent(&mut current) };
        assert_eq!(status, sys::CUresult::CUDA_SUCCESS);
        assert_eq!(ContextHandle(current.cast()), framework.context());
    }
}

#[test]
fn handles_that_the_driver_does_not_know_are_its_errors() {
    let framework = Framework::new();
    if !framework.device_name().contains("emulator") {
        println!("skipped: a driver may look behind any handle; only the emulated one compares");
        return;
    }
    let unknown = std::ptr::without_provenance_mut(64);
    for (context, stream, expected) in [
        (
            ContextHandle(unknown),
            StreamHandle::LEGACY,
            "entering the context to be adopted failed with code 201: \
             CUDA_ERROR_INVALID_CONTEXT, invalid device context",
        ),
        (
            framework.context(),
            StreamHandle(unknown),
            "asking for the context of the stream to be adopted failed with code 400: \
             CUDA_ERROR_INVALID_HANDLE, invalid resource handle",
        ),
    ] {
        let error = refusal(context, stream).to_string();
        assert_eq!(error, format!("cuda: {expected}"));
    }
}
