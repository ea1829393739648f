//! Borrowed tensors: variables and gradients in memory that candle locks. A thread holds one lock
//! at a time.

use std::cell::{Cell, RefCell};

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, InplaceOp1, InplaceOp2, Layout, Storage, Tensor, Var};
use fusestep_cpu::{BorrowedPiece, CpuBackend};
use fusestep_launch::{Backend, BackendError, Launch, LaunchReport, Reduce};
use fusestep_planner::{BorrowedParams, Lender};
use half::slice::HalfFloatSliceExt;

/// Variables and their gradients, in plan order.
pub(crate) struct BorrowedFromCandle<'a> {
    pub(crate) backend: &'a CpuBackend,
    pub(crate) vars: &'a [(String, Var)],
    pub(crate) grads: &'a [Option<Tensor>],
}

impl Lender for BorrowedFromCandle<'_> {
    fn backend(&self) -> &dyn Backend {
        self.backend
    }

    fn launch(&mut self, launch: Launch<'_>) -> Result<LaunchReport, BackendError> {
        let members = launch.members;
        self.backend.launch_borrowed(launch, &|piece| {
            let member = members[piece.tensor()] as usize;
            match &self.grads[member] {
                Some(grad) => lend(&self.vars[member], grad, piece),
                None => Ok(()),
            }
        })
    }

    fn reduce(&mut self, reduce: Reduce<'_>) -> Result<LaunchReport, BackendError> {
        let members = reduce.members;
        self.backend.reduce_borrowed(reduce, &|gradient| {
            let member = members[gradient.tensor()] as usize;
            let Some(grad) = &self.grads[member] else {
                return Ok(());
            };
            let (storage, layout) = grad.storage_and_layout();
            let bytes = bytes_of(&storage, layout)
                .map_err(|error| failed("reading the gradient of", &self.vars[member].0, &error))?;
            gradient.read(bytes)
        })
    }
}

fn failed(what: &str, name: &str, error: &candle_core::Error) -> BackendError {
    BackendError::Device {
        backend: "cpu",
        operation: format!("{what} variable `{name}`"),
        code: 0,
        text: error.to_string(),
    }
}

/// Runs `work` on the bytes of a contiguous tensor, in host memory or as a copy from a device.
/// Waits for the copy.
pub(crate) fn with_bytes<R>(
    tensor: &Tensor,
    work: impl FnOnce(&[u8]) -> candle_core::Result<R>,
) -> candle_core::Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cuda(own) => {
            let copy = Storage::Cpu(own.to_cpu_storage()?);
            work(bytes_of(&copy, layout)?)
        }
        _ => work(bytes_of(&storage, layout)?),
    }
}

/// The elements of a contiguous tensor in host memory, as bytes.
pub(crate) fn bytes_of<'a>(storage: &'a Storage, layout: &Layout) -> candle_core::Result<&'a [u8]> {
    let Storage::Cpu(storage) = storage else {
        candle_core::bail!("expected a tensor on the cpu, found one on another device")
    };
    let Some((start, end)) = layout.contiguous_offsets() else {
        candle_core::bail!("expected a contiguous tensor, found strides")
    };
    let width = storage.dtype().size_in_bytes();
    let all = bytes(storage);
    let elements = all.and_then(|bytes| bytes.get(start * width..end * width));
    match elements {
        Some(elements) => Ok(elements),
        None => candle_core::bail!("expected f32, f64, f16 or bf16 elements within their storage"),
    }
}

/// The planner's dtype for a floating-point dtype of candle; `None` for any other.
pub(crate) fn dtype_of(dtype: DType) -> Option<fusestep_tensor::DType> {
    Some(match dtype {
        DType::F32 => fusestep_tensor::DType::F32,
        DType::F64 => fusestep_tensor::DType::F64,
        DType::F16 => fusestep_tensor::DType::F16,
        DType::BF16 => fusestep_tensor::DType::BF16,
        _ => return None,
    })
}

/// A storage's bytes; `None` if it is not floating point.
pub(crate) fn bytes(storage: &CpuStorage) -> Option<&[u8]> {
    Some(match storage {
        CpuStorage::F32(values) => bytemuck::cast_slice(values),
        CpuStorage::F64(values) => bytemuck::cast_slice(values),
        CpuStorage::F16(values) => bytemuck::cast_slice(values.reinterpret_cast()),
        CpuStorage::BF16(values) => bytemuck::cast_slice(values.reinterpret_cast()),
        _ => return None,
    })
}

pub(crate) fn bytes_mut(storage: &mut CpuStorage) -> Option<&mut [u8]> {
    Some(match storage {
        CpuStorage::F32(values) => bytemuck::cast_slice_mut(values),
        CpuStorage::F64(values) => bytemuck::cast_slice_mut(values),
        CpuStorage::F16(values) => bytemuck::cast_slice_mut(values.reinterpret_cast_mut()),
        CpuStorage::BF16(values) => bytemuck::cast_slice_mut(values.reinterpret_cast_mut()),
        _ => return None,
    })
}

/// Updates a variable in place, while candle holds the locks of the variable and its gradient.
fn lend(
    (name, var): &(String, Var),
    grad: &Tensor,
    piece: BorrowedPiece<'_>,
) -> Result<(), BackendError> {
    let update = Update(Cell::new(Some(piece)));
    let done = var.as_tensor().inplace_op2(grad, &update);
    done.map_err(|error| failed("updating", name, &error))
}

/// An update as an in-place operation of candle, which takes the update out of its cell and calls
/// it once.
struct Update<'a>(Cell<Option<BorrowedPiece<'a>>>);

impl InplaceOp2 for Update<'_> {
    fn name(&self) -> &'static str {
        "fused-step"
    }

    fn cpu_fwd(
        &self,
        param: &mut CpuStorage,
        param_layout: &Layout,
        grad: &CpuStorage,
        grad_layout: &Layout,
    ) -> candle_core::Result<()> {
        let name = InplaceOp2::name(self);
        let (Some(param_range), Some(grad_range)) =
            (param_layout.contiguous_offsets(), grad_layout.contiguous_offsets())
        else {
            candle_core::bail!("{name}: expected contiguous tensors, found strides")
        };
        let Some(piece) = self.0.take() else {
            candle_core::bail!("{name}: expected one call for each update, found a second")
        };
        let (width, grad_width) = (param.dtype().size_in_bytes(), grad.dtype().size_in_bytes());
        let (Some(param), Some(grad)) = (bytes_mut(param), bytes(grad)) else {
            candle_core::bail!("{name}: expected f32, f64, f16 or bf16 tensors")
        };
        let param = &mut param[param_range.0 * width..param_range.1 * width];
        let grad = &grad[grad_range.0 * grad_width..grad_range.1 * grad_width];
        piece.update(param, grad).map_err(candle_core::Error::wrap)
    }
}

/// Runs `work` on a variable's elements in place.
pub(crate) fn write_in_place(
    var: &Var,
    work: &mut dyn FnMut(&mut [u8]) -> candle_core::Result<()>,
) -> candle_core::Result<()> {
    if var.elem_count() == 0 {
        // An empty variable may have a stride of 0, which candle takes for overlapping elements.
        return work(&mut []);
    }
    let write = InPlace(RefCell::new(work));
    var.as_tensor().inplace_op1(&write)
}

type Work<'a> = &'a mut dyn FnMut(&mut [u8]) -> candle_core::Result<()>;

struct InPlace<'a>(RefCell<Work<'a>>);

impl InplaceOp1 for InPlace<'_> {
    fn name(&self) -> &'static str {
        "fused-write"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let name = InplaceOp1::name(self);
        let width = storage.dtype().size_in_bytes();
        let place = layout.contiguous_offsets();
        let elements =
            place.and_then(|(start, end)| bytes_mut(storage)?.get_mut(start * width..end * width));
        match elements {
            Some(elements) => (self.0.borrow_mut())(elements),
            None => candle_core::bail!("{name}: expected a contiguous tensor, found strides"),
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        storage: &mut candle_core::CudaStorage,
        layout: &Layout,
    ) -> candle_core::Result<()> {
        crate::cuda::write_through_host(storage, layout, &mut **self.0.borrow_mut())
    }
}

/// Variables of a plan that borrows them, as saving and resuming read and write them.
pub(crate) struct KeptByCandle<'a>(pub(crate) &'a [(String, Var)]);

impl BorrowedParams for KeptByCandle<'_> {
    fn read(&self, param: usize, into: &mut [u8]) -> Result<(), BackendError> {
        let (name, var) = &self.0[param];
        let read = with_bytes(var.as_tensor(), |bytes| copy(bytes, into));
        read.map_err(|error| failed("reading", name, &error))
    }

    fn write(&self, param: usize, from: &[u8]) -> Result<(), BackendError> {
        let (name, var) = &self.0[param];
        let written = write_in_place(var, &mut |own| copy(from, own));
        written.map_err(|error| failed("writing", name, &error))
    }
}

/// Copies bytes between slices, which must have the same length.
pub(crate) fn copy(from: &[u8], to: &mut [u8]) -> candle_core::Result<()> {
    if from.len() != to.len() {
        candle_core::bail!("expected {} bytes, found {}", to.len(), from.len());
    }
    to.copy_from_slice(from);
    Ok(())
}
