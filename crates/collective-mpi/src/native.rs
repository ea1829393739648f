//! All-reduce of the MPI itself, for [`Reduction::Engine`](crate::Reduction::Engine).

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use fusestep_collective::{Buffers, Call, CollectiveError, Operation, ReduceOp};
use fusestep_tensor::DType;
use mpi::ffi;

use crate::MpiError;
use crate::group::Group;
use crate::library::{Handle, Mpi, check};

/// Communicators and constants for the MPI's own collectives.
#[derive(Clone, Debug)]
pub(crate) struct Native {
    world: Handle,
    /// The ranks of the group; lives as long as MPI does.
    comm: Handle,
    /// Address that stands for `MPI_IN_PLACE`, if it is known. The standard leaves the value to
    /// each MPI, and the bindings lack it.
    in_place: Option<usize>,
}

impl Native {
    /// Makes a communicator of all processes; all of them make this call when MPI starts.
    ///
    /// It is apart from the engine's own: MPI makes groups by messages with the caller's tags,
    /// which the engine's probes would take.
    pub(crate) fn world(mpi: &Arc<Mpi>) -> Result<Self, MpiError> {
        let in_place = match &mpi.version {
            version if version.starts_with("Open MPI") => Some(1),
            version if version.starts_with("MPICH") || version.starts_with("Intel(R) MPI") => {
                Some(usize::MAX)
            }
            _ => None,
        };
        // SAFETY: a constant of the library.
        let mut comm = unsafe { ffi::RSMPI_COMM_NULL };
        // SAFETY: MPI runs as long as `mpi` does.
        let made = check(unsafe { ffi::MPI_Comm_dup(mpi.world.0, &mut comm) });
        made.map_err(MpiError::of_call("MPI_Comm_dup"))?;
        Ok(Self { world: Handle(comm), comm: Handle(comm), in_place })
    }

    /// Makes a communicator of some processes; all of them make this call. Groups that are made at
    /// the same time differ in `number`.
    pub(crate) fn of_members(&self, members: &[usize], number: u32) -> Result<Self, String> {
        let ranks: Vec<c_int> = members.iter().map(|&member| member as c_int).collect();
        // SAFETY: constants of the library, which the two calls below replace.
        let (mut all, mut some) = unsafe { (ffi::RSMPI_GROUP_NULL, ffi::RSMPI_GROUP_NULL) };
        // SAFETY: as above.
        let mut comm = unsafe { ffi::RSMPI_COMM_NULL };
        // SAFETY: `ranks` are ranks of the world; every member makes this call (they have just
        // exchanged headers for it).
        unsafe {
            check(ffi::MPI_Comm_group(self.world.0, &mut all))?;
            check(ffi::MPI_Group_incl(all, ranks.len() as c_int, ranks.as_ptr(), &mut some))?;
            let tag = (number & 0x7fff) as c_int;
            check(ffi::MPI_Comm_create_group(self.world.0, some, tag, &mut comm))?;
            ffi::MPI_Group_free(&mut all);
            ffi::MPI_Group_free(&mut some);
        }
        Ok(Self { comm: Handle(comm), ..self.clone() })
    }
}

/// MPI's names for a dtype and a reduction; `None` for a dtype that is not left to MPI.
fn names(dtype: DType, op: ReduceOp) -> Option<(ffi::MPI_Datatype, ffi::MPI_Op)> {
    // SAFETY: constants of the library.
    unsafe {
        let dtype = match dtype {
            DType::F32 => ffi::RSMPI_FLOAT,
            DType::F64 => ffi::RSMPI_DOUBLE,
            DType::I32 => ffi::RSMPI_INT32_T,
            DType::I64 => ffi::RSMPI_INT64_T,
            // Open MPI 4.1 adds bytes with saturation where the processor has AVX.
            DType::U8 | DType::U16 | DType::F16 | DType::BF16 => return None,
        };
        let op = match op {
            ReduceOp::Sum | ReduceOp::Average => ffi::RSMPI_SUM,
            ReduceOp::Prod => ffi::RSMPI_PROD,
            ReduceOp::Max => ffi::RSMPI_MAX,
            ReduceOp::Min => ffi::RSMPI_MIN,
            // Its order is this library's.
            ReduceOp::Tree(_) => return None,
        };
        Some((dtype, op))
    }
}

/// Makes an all-reduce by the MPI's own, if options ask for it and it fits the call. Otherwise
/// hands the buffers back. `begun_ns` is when all ranks had come.
pub(crate) fn all_reduce<'a>(
    native: Option<&Native>,
    group: &Group,
    begun_ns: u64,
    call: Call<'a>,
    op: ReduceOp,
) -> Result<Option<Buffers<'a>>, CollectiveError> {
    let (Some(native), Operation::AllReduce(_)) = (native, call.operation) else {
        return Ok(Some(call.buffers));
    };
    // A division by a power of two that only the caller knows takes as long as ten other
    // instructions.
    let shift = call.dtype.len_bytes().trailing_zeros();
    let aligned = |bytes: &[u8]| (bytes.as_ptr() as usize).trailing_zeros() >= shift;
    let fits = match &call.buffers {
        Buffers::InPlace(buffer) => native.in_place.is_some() && aligned(buffer),
        Buffers::OutOfPlace { send, receive } => aligned(send) && aligned(receive),
    };
    let (Some((dtype, mpi_op)), true) = (names(call.dtype, op), fits) else {
        return Ok(Some(call.buffers));
    };
    let limit = group.options.chunk_limit_bytes.clamp(1, i32::MAX as usize);
    let limit = (limit >> shift).max(1) << shift;
    let receive = match call.buffers {
        Buffers::InPlace(buffer) => buffer,
        Buffers::OutOfPlace { send, receive } => {
            receive.copy_from_slice(send);
            receive
        }
    };
    let in_place = native.in_place.unwrap_or_default() as *const c_void;
    let _watched = group.watched(begun_ns);
    for chunk in receive.chunks_mut(limit) {
        // SAFETY: `chunk` is a borrowed slice of whole, aligned elements, in use until the call
        // returns. All ranks make the same calls, which they have compared. This
        // level of reduction was given only with an MPI for many threads.
        let code = unsafe {
            ffi::MPI_Allreduce(
                in_place,
                chunk.as_mut_ptr().cast::<c_void>(),
                (chunk.len() >> shift) as c_int,
                dtype,
                mpi_op,
                native.comm.0,
            )
        };
        check(code).map_err(|reason| group.failed("all-reduce", reason))?;
    }
    if op == ReduceOp::Average {
        divide(call.dtype, receive, group.world_size());
    }
    Ok(None)
}

/// Divides sums by the world size; elements are aligned.
fn divide(dtype: DType, bytes: &mut [u8], world_size: usize) {
    match dtype {
        DType::F32 => {
            let sums: &mut [f32] = bytemuck::cast_slice_mut(bytes);
            sums.iter_mut().for_each(|sum| *sum /= world_size as f32);
        }
        DType::F64 => {
            let sums: &mut [f64] = bytemuck::cast_slice_mut(bytes);
            sums.iter_mut().for_each(|sum| *sum /= world_size as f64);
        }
        other => panic!("an average of {other} is refused before any data is read"),
    }
}
