//! The update of one tensor: at once where the kernel takes its lists as they are, else in blocks.
//!
//! Lists that are written and not read again soon, copies for a device and what was before, go past
//! the caches where tensors exceed them (`benches/peers/offload.py`).

use bytemuck::{cast_slice, cast_slice_mut};
use fusestep_launch::{HostCall, HostList, HostRun, HostSpans, MAX_LISTS, MultiTensorKernel};
use fusestep_simd::{StreamingCopies, streaming};
use fusestep_tensor::{DType, Role};

use super::lists::FloatsMut;
use super::tensor::MixedTensor;

/// Elements of a block, a multiple of a group of codes. All lists of a block lie in the second
/// cache. With 1,024 a step with copies beside gradients of f32 takes a fifth longer, as the memory
/// waits at the end of each block.
const BLOCK: usize = 8192;

/// Elements from which on a tensor's lists exceed the second cache.
const LARGE: usize = 64 * 1024;

/// Room for the values of a block, taken when a tensor first needs it.
#[derive(Default)]
pub(super) struct Buffers(Vec<f32>);

impl Buffers {
    /// Room for the values of `lists` lists.
    fn room(&mut self, lists: usize) -> &mut [f32] {
        if self.0.len() < lists * BLOCK {
            self.0.resize(lists * BLOCK, 0.0);
        }
        &mut self.0
    }
}

/// Updates one tensor, whose lists have been checked.
pub(super) fn update<const N: usize>(
    kernel: &dyn MultiTensorKernel,
    call: HostCall<'_>,
    tensor: MixedTensor<'_, N>,
    buffers: &mut Buffers,
) {
    let places = Places::of(kernel, &tensor);
    let declared = kernel.lists();
    let is_direct = tensor.before.is_none()
        && tensor.copy.is_some() == (places.copy == Copy::InKernel)
        && places.copy != Copy::Scratch
        && tensor.param.dtype() == declared[places.param].dtype
        && tensor.grad.dtype() == declared[1].dtype
        && tensor.state.iter().zip(&declared[2..]).all(|(own, list)| own.dtype() == list.dtype);
    if is_direct {
        return update_block(kernel, call, tensor, &mut [], None);
    }
    let room = buffers.room(N + 3);
    if tensor.param.numel() < LARGE {
        return update_blocks(kernel, call, tensor, room, None);
    }
    streaming(call.level, |past| update_blocks(kernel, call, tensor, room, Some(past)));
}

fn update_blocks<const N: usize>(
    kernel: &dyn MultiTensorKernel,
    call: HostCall<'_>,
    tensor: MixedTensor<'_, N>,
    room: &mut [f32],
    past: Option<&StreamingCopies>,
) {
    let mut rest = tensor;
    while rest.param.numel() > BLOCK {
        let (block, behind) = rest.split_at(BLOCK);
        update_block(kernel, call, block, room, past);
        rest = behind;
    }
    update_block(kernel, call, rest, room, past);
}

/// The way of a parameter's copy.
#[derive(Clone, Copy, PartialEq)]
enum Copy {
    /// The kernel writes it, and the parameter is its master.
    InKernel,
    /// The kernel writes a copy that nobody has asked for.
    Scratch,
    /// The kernel knows of none.
    Behind,
}

/// Places of a tensor's lists among those of the kernel.
struct Places {
    param: usize,
    copy: Copy,
}

impl Places {
    fn of<const N: usize>(kernel: &dyn MultiTensorKernel, tensor: &MixedTensor<'_, N>) -> Self {
        let declared = kernel.lists();
        let last = declared.len() - 1;
        if declared[last].role != Role::Master {
            return Self { param: 0, copy: Copy::Behind };
        }
        let own = tensor.copy.as_ref().map(FloatsMut::dtype);
        let copy = if own == Some(declared[0].dtype) { Copy::InKernel } else { Copy::Scratch };
        Self { param: last, copy }
    }
}

/// Updates a block; `room` is for the values of its lists, and unused if the kernel takes all.
fn update_block<const N: usize>(
    kernel: &dyn MultiTensorKernel,
    call: HostCall<'_>,
    mut tensor: MixedTensor<'_, N>,
    room: &mut [f32],
    past: Option<&StreamingCopies>,
) {
    keep(&mut tensor, past);
    let places = Places::of(kernel, &tensor);
    let (declared, level) = (kernel.lists(), call.level);
    let numel = tensor.param.numel();
    let mut room = room.chunks_exact_mut(BLOCK).map(|values| &mut values[..numel]);
    let mut lists: [HostList<'_>; MAX_LISTS] = Default::default();
    let mut param = Values::of(tensor.param.dtype(), declared[places.param].dtype, &mut room);
    param.read(|values| tensor.param.read().widen(level, values));
    let mut grad = Values::of(tensor.grad.dtype(), declared[1].dtype, &mut room);
    grad.read(|values| tensor.grad.widen(level, values));
    let mut state: [Values<'_>; N] = std::array::from_fn(|at| {
        let own = &tensor.state[at].list;
        let mut values = Values::of(own.dtype(), declared[2 + at].dtype, &mut room);
        values.read(|values| own.read().widen(level, values));
        values
    });
    let scratch = room.next().unwrap_or_default();
    lists[places.param] = param.list(&mut tensor.param);
    match (&mut tensor.copy, places.copy) {
        (Some(copy), Copy::InKernel) => lists[0] = HostList::ReadWrite(copy.bytes_mut()),
        (_, Copy::Scratch) => {
            let len_bytes = numel * declared[0].dtype.len_bytes();
            lists[0] = HostList::ReadWrite(&mut cast_slice_mut(scratch)[..len_bytes]);
        }
        _ => {}
    }
    lists[1] = match &grad.0 {
        Some(values) => HostList::Read(cast_slice(values)),
        None => HostList::Read(tensor.grad.bytes()),
    };
    let (codes, units) = lists[2..].split_at_mut(N);
    let all = codes.iter_mut().zip(units);
    for ((codes, units), (own, values)) in all.zip(tensor.state.iter_mut().zip(&mut state)) {
        if own.dtype() == DType::U8 {
            *units = HostList::ReadWrite(cast_slice_mut(own.units));
        }
        *codes = values.list(&mut own.list);
    }
    kernel.run_host(HostRun::new(call, &mut lists, HostSpans::one(numel, 0)));
    param.write(|values| tensor.param.narrow(level, values));
    for (values, own) in state.iter().zip(&mut tensor.state) {
        values.write(|values| own.list.narrow(level, values));
    }
    if let Some(copy) = tensor.copy.as_mut().filter(|_| places.copy != Copy::InKernel) {
        copy.narrow_past(level, tensor.param.read().elements(), scratch, past);
    }
}

/// Copies parameter and state to the room that there is for them.
fn keep<const N: usize>(tensor: &mut MixedTensor<'_, N>, past: Option<&StreamingCopies>) {
    if let Some(before) = &mut tensor.before {
        before.param.copy_from(tensor.param.read().bytes(), past);
        for (before, own) in before.state.iter_mut().zip(&tensor.state) {
            before.list.copy_from(own.list.read().bytes(), past);
            before.units.copy_from_slice(own.units);
        }
    }
}

/// The values of a list that the kernel does not take as it is; `None` for one that it takes.
struct Values<'a>(Option<&'a mut [f32]>);

impl<'a> Values<'a> {
    fn of(own: DType, declared: DType, room: &mut impl Iterator<Item = &'a mut [f32]>) -> Self {
        if own == declared { Self(None) } else { Self(room.next()) }
    }

    fn read(&mut self, widen: impl FnOnce(&mut [f32])) {
        if let Some(values) = &mut self.0 {
            widen(values);
        }
    }

    fn write(&self, narrow: impl FnOnce(&[f32])) {
        if let Some(values) = &self.0 {
            narrow(values);
        }
    }

    /// The list that the kernel updates.
    fn list<'b>(&'b mut self, own: &'b mut FloatsMut<'_>) -> HostList<'b> {
        match &mut self.0 {
            Some(values) => HostList::ReadWrite(cast_slice_mut(values)),
            None => HostList::ReadWrite(own.bytes_mut()),
        }
    }
}
