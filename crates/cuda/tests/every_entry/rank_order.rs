//! The kernel that sums what ranks have sent, which only the engine for NCCL launches: here without
//! that engine.

use cust::launch;
use cust::memory::{CopyDestination, DeviceBuffer};
use cust::module::Module;
use cust::stream::{Stream, StreamFlags};
use fusestep_collective::{ReduceOp, reduce_slices};
use fusestep_simd::Level;
use fusestep_tensor::DType;

const RANKS: usize = 3;
const OWN_RANK: usize = 1;

/// The arguments, as `kernels/rank_order.cu` reads them.
#[repr(C)]
#[derive(Clone, Copy)]
struct Arguments {
    own: u64,
    received: u64,
    stride_bytes: u64,
    result: u64,
    numel: u64,
    ranks: u32,
    own_rank: u32,
    op: u32,
    reserved: u32,
}

// SAFETY: numbers and addresses of the device, no reference.
unsafe impl cust::memory::DeviceCopy for Arguments {}

/// The numbers of a rank: any bits, but for exponents that make NaN of them.
fn bytes_of(rank: usize, dtype: DType, numel: usize) -> Vec<u8> {
    let mut state = rank as u32 * 7 + 1;
    let mut draw = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as u8
    };
    let width = dtype.len_bytes();
    let mut bytes: Vec<u8> = (0..numel * width).map(|_| draw()).collect();
    if matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64) {
        bytes.iter_mut().skip(width - 1).step_by(width).for_each(|high| *high &= 0xbf);
    }
    bytes
}

fn reduced(module: &Module, dtype: DType, code: u32, numel: usize) -> Vec<u8> {
    let stream = Stream::new(StreamFlags::NON_BLOCKING, None).unwrap();
    let len_bytes = numel * dtype.len_bytes();
    let stride_bytes = len_bytes.next_multiple_of(16);
    let mut sent = vec![0u8; RANKS * stride_bytes];
    for rank in (0..RANKS).filter(|&rank| rank != OWN_RANK) {
        let of_rank = &mut sent[rank * stride_bytes..][..len_bytes];
        of_rank.copy_from_slice(&bytes_of(rank, dtype, numel));
    }
    let own = DeviceBuffer::from_slice(&bytes_of(OWN_RANK, dtype, numel)).unwrap();
    let received = DeviceBuffer::from_slice(&sent).unwrap();
    let result = DeviceBuffer::from_slice(&vec![0u8; len_bytes]).unwrap();
    let arguments = Arguments {
        own: own.as_device_ptr().as_raw(),
        received: received.as_device_ptr().as_raw(),
        stride_bytes: stride_bytes as u64,
        result: result.as_device_ptr().as_raw(),
        numel: numel as u64,
        ranks: RANKS as u32,
        own_rank: OWN_RANK as u32,
        op: code,
        reserved: 0,
    };
    let function = module.get_function(format!("rank_order_{dtype}")).unwrap();
    // SAFETY: the entry takes one block of these arguments; the buffers have the stated lengths and
    // live until the stream was waited for.
    unsafe { launch!(function<<<2, 512, 0, stream>>>(arguments)) }.unwrap();
    stream.synchronize().unwrap();
    let mut bytes = vec![0; len_bytes];
    result.copy_to(&mut bytes[..]).unwrap();
    bytes
}

#[test]
fn sums_in_rank_order_are_those_of_the_host() {
    let _context = cust::quick_init().unwrap();
    let text = fusestep_kernels::ptx("rank_order").unwrap();
    let module = Module::from_ptx(text, &[]).unwrap();
    let ops = [ReduceOp::Sum, ReduceOp::Average, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min];
    let dtypes = [DType::F32, DType::F64, DType::F16, DType::BF16];
    let integers = [DType::I32, DType::I64, DType::U16, DType::U8];
    for dtype in dtypes.into_iter().chain(integers) {
        for (code, op) in (0..).zip(ops) {
            if op == ReduceOp::Average && integers.contains(&dtype) {
                continue;
            }
            for numel in [1, 700] {
                let sent: Vec<_> = (0..RANKS).map(|rank| bytes_of(rank, dtype, numel)).collect();
                let inputs: Vec<&[u8]> = sent.iter().map(Vec::as_slice).collect();
                let mut expected = vec![0; inputs[0].len()];
                reduce_slices(Level::detect(), dtype, op, &inputs, &mut expected);
                let found = reduced(&module, dtype, code, numel);
                assert!(found == expected, "{dtype}, {op:?}, {numel} elements");
            }
        }
    }
}
