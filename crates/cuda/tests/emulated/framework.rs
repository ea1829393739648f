//! A framework of which the backend knows nothing: a context, a stream and memory made by raw calls
//! of the driver.

use std::ptr;
use std::sync::Mutex;

use cust::sys::{self, CUcontext, CUgraph, CUresult, CUstream};
use fusestep_cuda::{ContextHandle, CudaBackend, StreamHandle};

fn check(status: CUresult) {
    assert_eq!(status, CUresult::CUDA_SUCCESS);
}

/// The primary context of device 0, or another, and a stream of it.
pub(crate) struct Framework {
    context: CUcontext,
    stream: CUstream,
    is_primary: bool,
}

impl Framework {
    pub(crate) fn new() -> Self {
        let mut context = ptr::null_mut();
        // SAFETY: starts the driver and retains a context.
        unsafe {
            check(sys::cuInit(0));
            check(sys::cuDevicePrimaryCtxRetain(&mut context, 0));
        }
        Self::of(context, true)
    }

    /// A context beside the primary one.
    pub(crate) fn another_context(&self) -> Self {
        let mut context = ptr::null_mut();
        // SAFETY: writes one handle; the driver has started.
        unsafe { check(sys::cuCtxCreate_v2(&mut context, 0, 0)) };
        Self::of(context, false)
    }

    fn of(context: CUcontext, is_primary: bool) -> Self {
        let mut stream = ptr::null_mut();
        // SAFETY: the context lives; the call writes one handle. 1: it waits for no default stream.
        unsafe {
            check(sys::cuCtxSetCurrent(context));
            check(sys::cuStreamCreate(&mut stream, 1));
        }
        Self { context, stream, is_primary }
    }

    pub(crate) fn context(&self) -> ContextHandle {
        ContextHandle(self.context.cast())
    }

    pub(crate) fn stream(&self) -> StreamHandle {
        StreamHandle(self.stream.cast())
    }

    pub(crate) fn enter(&self) {
        // SAFETY: the context lives as long as `self`.
        check(unsafe { sys::cuCtxSetCurrent(self.context) });
    }

    pub(crate) fn synchronize(&self) {
        self.enter();
        // SAFETY: the stream lives as long as `self`.
        check(unsafe { sys::cuStreamSynchronize(self.stream) });
    }

    pub(crate) fn device_name(&self) -> String {
        CudaBackend::open(0).unwrap().device_info().name.clone()
    }

    /// Records what `enqueue` enqueues on the framework's stream, or what the driver says at its
    /// end.
    pub(crate) fn record(&self, enqueue: impl FnOnce()) -> Result<CUgraph, CUresult> {
        self.enter();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream lives as long as `self`.
        check(unsafe { sys::cuStreamBeginCapture_v2(self.stream, mode) });
        enqueue();
        let mut graph = ptr::null_mut();
        // SAFETY: as above; the call writes one handle.
        match unsafe { sys::cuStreamEndCapture(self.stream, &mut graph) } {
            CUresult::CUDA_SUCCESS => Ok(graph),
            refused => Err(refused),
        }
    }

    /// Runs what was recorded, and waits for it.
    pub(crate) fn run(&self, graph: CUgraph) {
        let mut executable = ptr::null_mut();
        // SAFETY: the graph was recorded above and is destroyed here.
        unsafe {
            check(sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0));
            check(sys::cuGraphLaunch(executable, self.stream));
            check(sys::cuStreamSynchronize(self.stream));
            check(sys::cuGraphExecDestroy(executable));
            check(sys::cuGraphDestroy(graph));
        }
    }
}

impl Drop for Framework {
    fn drop(&mut self) {
        self.enter();
        // SAFETY: both were made in `of` or before, and nothing of this test uses them any more.
        unsafe {
            check(sys::cuStreamDestroy_v2(self.stream));
            if self.is_primary {
                check(sys::cuDevicePrimaryCtxRelease_v2(0));
            } else {
                check(sys::cuCtxDestroy_v2(self.context));
            }
        }
    }
}

/// Held by a test that records on a stream which waits for the legacy default one, and by those
/// that use the latter: a driver refuses both at a time.
pub(crate) static LEGACY_STREAM: Mutex<()> = Mutex::new(());

/// Memory of the framework, copied on its stream.
pub(crate) struct Memory {
    stream: CUstream,
    address: u64,
    len_bytes: usize,
}

impl Memory {
    /// Memory that holds these bytes, as long as the framework lives.
    pub(crate) fn of(framework: &Framework, bytes: &[u8]) -> Self {
        framework.enter();
        let mut address = 0;
        let len_bytes = bytes.len();
        // SAFETY: the context lives; the call writes one address.
        check(unsafe { sys::cuMemAlloc_v2(&mut address, len_bytes.max(1)) });
        let memory = Self { stream: framework.stream, address, len_bytes };
        memory.write(0, bytes);
        memory
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len_bytes);
        let (to, from) = (self.address + at as u64, bytes.as_ptr().cast());
        // SAFETY: the range lies in the memory, and the copy is waited for.
        unsafe {
            check(sys::cuMemcpyHtoDAsync_v2(to, from, bytes.len(), self.stream));
            check(sys::cuStreamSynchronize(self.stream));
        }
    }

    pub(crate) fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len_bytes];
        let to = bytes.as_mut_ptr().cast();
        // SAFETY: as above.
        unsafe {
            check(sys::cuMemcpyDtoHAsync_v2(to, self.address, self.len_bytes, self.stream));
            check(sys::cuStreamSynchronize(self.stream));
        }
        bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated in `of` and freed once. The framework may be gone with its context.
        let _ = unsafe { sys::cuMemFree_v2(self.address) };
    }
}

/// The byte between tensors, which must stay as it is.
const BETWEEN: u8 = 0xA5;

/// The tensors of one role in one allocation, at odd places.
pub(crate) struct Arena {
    pub(crate) memory: Memory,
    pub(crate) places: Vec<usize>,
}

impl Arena {
    /// The address of tensor `i` is 1 + i modulo 5 elements behind the end of the one before.
    pub(crate) fn of(framework: &Framework, tensors: &[Vec<u8>], width: usize) -> Self {
        let (mut bytes, mut places) = (Vec::new(), Vec::new());
        for (index, tensor) in tensors.iter().enumerate() {
            bytes.resize(bytes.len() + (1 + index % 5) * width, BETWEEN);
            places.push(bytes.len());
            bytes.extend_from_slice(tensor);
        }
        bytes.resize(bytes.len() + 64, BETWEEN);
        Self { memory: Memory::of(framework, &bytes), places }
    }

    /// Each tensor, after a look at what lies between them.
    pub(crate) fn read(&self, len_bytes: &[usize]) -> Vec<Vec<u8>> {
        let mut all = self.memory.read();
        let mut read = Vec::new();
        for (&at, &len) in self.places.iter().zip(len_bytes) {
            read.push(all[at..at + len].to_vec());
            all[at..at + len].fill(BETWEEN);
        }
        assert!(all.iter().all(|&byte| byte == BETWEEN), "written beside a tensor");
        read
    }
}
