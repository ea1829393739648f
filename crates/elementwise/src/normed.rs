//! One tensor of a kernel that takes sums first: sums, scalars, update.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use fusestep_launch::{
    CHUNK_ELEMENTS, FINISHED_BYTES, HostCall, HostList, HostRun, HostSpans, MAX_LISTS, MAX_SUMS,
    MultiTensorKernel, NormedKernel, Outcome, UnitSums, tree_sum,
};
use fusestep_simd::{MAX_SHARED, Order, Pool, Split};

use crate::tally::{no_sums, total, units};

/// Elements of a chunk of the fixed tree.
const CHUNK: usize = CHUNK_ELEMENTS as usize;

/// Chunks whose sums are kept at a time, on the stack: 2 KiB, and 16 million elements.
const GROUP: usize = MAX_SHARED;

/// Cuts lie on multiples of this many elements, so that two threads never write one cache line of
/// any dtype.
const CUT_ELEMENTS: u64 = 1024;

/// A tensor's sums of squares that its last update has taken along.
#[derive(Clone, Copy, Debug)]
pub struct Cached<'a> {
    /// The sum over each chunk, as the bits of an f64.
    pub chunks: &'a [AtomicU64],
    /// Whether they are the sums over the parameters as they are now.
    pub valid: &'a AtomicBool,
}

/// A tensor in host memory, or a part of one, and the kernel that updates it.
///
/// For a kernel that takes sums it is a whole tensor, unless `sums` are given. It begins with a
/// chunk if `update_sums` are asked for.
pub struct Tensor<'a> {
    /// The kernel.
    pub kernel: &'a dyn MultiTensorKernel,
    /// The settings and scalars of the kernel's calls.
    pub call: HostCall<'a>,
    /// Index of the tensor's group.
    pub group: u32,
    /// Element count.
    pub numel: usize,
    /// The tensor's position among the caller's parameters.
    pub parameter: u32,
    /// Elements of the tensor before these: 0 unless it was cut.
    pub first_element: u64,
    /// The elements in each of the kernel's lists.
    pub lists: [HostList<'a>; MAX_LISTS],
    /// Sums that the tensor's last update took along, and the place for those of this update.
    /// `None` unless somebody makes sure that they are still the sums of the parameters.
    pub cached: Option<Cached<'a>>,
    /// Σ g² over the whole tensor in the fixed tree, if somebody has taken it.
    pub grad_sum: Option<f64>,
    /// All sums over the whole tensor that the kernel needs, if somebody has taken them: nothing
    /// is read for them then, and `grad_sum` is not looked at. Nothing is cached with them.
    pub sums: Option<[f64; MAX_SUMS]>,
    /// Places for the sums over what the update changes, one for each chunk, if they are wanted; 0
    /// if the tensor is skipped.
    pub update_sums: Option<&'a mut [UnitSums]>,
}

/// Updates one tensor, on all threads of `pool` if there is one; takes its sums before if the
/// kernel needs them.
///
/// # Cost
/// A tensor of a kernel that takes sums is read twice, the second time from cache if it fits; but
/// its parameters once if their sum was cached, and its gradient once if its sum is given.
#[inline]
pub fn step_tensor(tensor: Tensor<'_>, pool: Option<&Pool>) -> Outcome {
    if let Some(normed) = tensor.kernel.normed() {
        return step_normed(tensor, normed, pool);
    }
    update(tensor, pool);
    Outcome::Update
}

fn step_normed(tensor: Tensor<'_>, normed: &dyn NormedKernel, pool: Option<&Pool>) -> Outcome {
    let mut tensor = tensor;
    let sums = match tensor.sums {
        Some(sums) => sums,
        None => tensor_sums(&tensor, pool),
    };
    let mut step_scalars = [0; FINISHED_BYTES];
    let outcome = normed.finish(tensor.call, tensor.group, sums, &mut step_scalars);
    if outcome == Outcome::Update {
        let finished = Tensor {
            kernel: tensor.kernel,
            call: HostCall { step_scalars: &step_scalars, ..tensor.call },
            group: 0,
            lists: tensor.lists,
            ..tensor
        };
        let cached = finished.caching().map(|(_, cached)| cached.valid);
        // During the update nobody may take the sums for those of the parameters, not even a caller
        // that survives a panic.
        if let Some(valid) = cached {
            valid.store(false, Ordering::Relaxed);
        }
        update(finished, pool);
        if let Some(valid) = cached {
            valid.store(true, Ordering::Relaxed);
        }
    } else if let Some(sums) = &mut tensor.update_sums {
        sums.fill(UnitSums::default());
    }
    outcome
}

/// The update, once what it needs of the whole tensor is in its step scalars. The chunks whose sums
/// were taken last come first: they may still be in the cache of the thread that took them.
fn update(tensor: Tensor<'_>, pool: Option<&Pool>) {
    if tensor.kernel.normed().is_none() {
        return match pool {
            Some(pool) => pool.run(tensor),
            None => tensor.run(),
        };
    }
    let pool = match pool {
        Some(pool) if pool.threads() > 1 && tensor.numel > CHUNK => pool,
        _ => return update_backward(tensor),
    };
    let chunks = tensor.numel.div_ceil(CHUNK);
    let of_part = chunks.div_ceil(MAX_SHARED);
    let parts = chunks.div_ceil(of_part);
    let shared: [Mutex<Option<Tensor<'_>>>; MAX_SHARED] = std::array::from_fn(|_| Mutex::new(None));
    let mut rest = tensor;
    for taker in &shared[..parts - 1] {
        let (part, remainder) = rest.split((of_part * CHUNK) as u64);
        *lock(taker) = Some(part);
        rest = remainder;
    }
    *lock(&shared[parts - 1]) = Some(rest);
    pool.share(parts, Order::Backward, &|index| {
        let part = lock(&shared[index]).take();
        if let Some(part) = part {
            update_backward(part);
        }
    });
}

fn update_backward(tensor: Tensor<'_>) {
    let mut rest = tensor;
    while rest.numel > CHUNK {
        let last = (rest.numel - 1) / CHUNK * CHUNK;
        let (before, chunk) = rest.split(last as u64);
        update_chunk(chunk);
        rest = before;
    }
    update_chunk(rest);
}

fn update_chunk(mut chunk: Tensor<'_>) {
    let spans = chunk.spans();
    let place = chunk.caching().and_then(|(_, cached)| {
        let index = (chunk.first_element / u64::from(CHUNK_ELEMENTS)) as usize;
        cached.chunks.get(index)
    });
    let sum = chunk.update_sums.and_then(<[_]>::first_mut);
    if sum.is_none() && place.is_none() {
        let run = HostRun::new(chunk.call, &mut chunk.lists, spans);
        return chunk.kernel.run_host(run);
    }
    let (changes, squares) = (no_sums(), no_sums());
    let call = HostCall {
        changes: sum.is_some().then_some(&changes),
        squares: place.is_some().then_some(&squares),
        ..chunk.call
    };
    let run = HostRun::new(call, &mut chunk.lists, spans);
    chunk.kernel.run_host(run);
    if let Some(sum) = sum {
        *sum = units(&changes);
    }
    if let Some(place) = place {
        place.store(total(&squares).to_bits(), Ordering::Relaxed);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The sums over a tensor: those at hand, and of others its chunks', whoever computed them.
fn tensor_sums(tensor: &Tensor<'_>, pool: Option<&Pool>) -> [f64; MAX_SUMS] {
    let at_hand = tensor.sums_at_hand();
    let wanted = at_hand.map(|sum| sum.is_none());
    if wanted == [false; MAX_SUMS] {
        return at_hand.map(Option::unwrap_or_default);
    }
    let chunks = tensor.numel.div_ceil(CHUNK);
    let pool = pool.filter(|pool| chunks > 1 && pool.threads() > 1);
    let taken = match pool {
        Some(pool) => shared_sums(tensor, pool, chunks, wanted),
        None => tree_sum(chunks, |chunk| chunk_sums(tensor, chunk, wanted)),
    };
    std::array::from_fn(|sum| at_hand[sum].unwrap_or(taken[sum]))
}

/// The sums over a tensor, whose chunks the pool's threads share.
fn shared_sums(
    tensor: &Tensor<'_>,
    pool: &Pool,
    chunks: usize,
    wanted: [bool; MAX_SUMS],
) -> [f64; MAX_SUMS] {
    let partials: [[AtomicU64; MAX_SUMS]; GROUP] =
        std::array::from_fn(|_| std::array::from_fn(|_| AtomicU64::new(0)));
    tree_sum(chunks, |chunk| {
        // The tree asks in order, so the sums of a whole group are taken with its first.
        if chunk.is_multiple_of(GROUP) {
            let count = GROUP.min(chunks - chunk);
            pool.share(count, Order::Forward, &|index| {
                let sums = chunk_sums(tensor, chunk + index, wanted);
                for (partial, sum) in partials[index].iter().zip(sums) {
                    partial.store(sum.to_bits(), Ordering::Relaxed);
                }
            });
        }
        let own = &partials[chunk % GROUP];
        std::array::from_fn(|sum| f64::from_bits(own[sum].load(Ordering::Relaxed)))
    })
}

fn chunk_sums(tensor: &Tensor<'_>, chunk: usize, wanted: [bool; MAX_SUMS]) -> [f64; MAX_SUMS] {
    let Some(normed) = tensor.kernel.normed() else {
        return [0.0; MAX_SUMS];
    };
    let elements = chunk * CHUNK..tensor.numel.min((chunk + 1) * CHUNK);
    let mut lists: [&[u8]; MAX_LISTS] = [&[]; MAX_LISTS];
    for ((bytes, list), declared) in lists.iter_mut().zip(&tensor.lists).zip(tensor.kernel.lists())
    {
        *bytes = &list.bytes()[declared.stride().place(elements.clone())];
    }
    normed.chunk_sums(tensor.call, tensor.group, lists, wanted)
}

impl<'a> Tensor<'a> {
    /// The position of the kernel's sum that can be cached, and where it is, if both are there.
    fn caching(&self) -> Option<(usize, Cached<'a>)> {
        Some((self.kernel.normed()?.param_sum()?, self.cached?))
    }

    /// The sums over the tensor that are there without a look at it.
    fn sums_at_hand(&self) -> [Option<f64>; MAX_SUMS] {
        let mut sums = [None; MAX_SUMS];
        if let Some((position, cached)) = self.caching()
            && cached.valid.load(Ordering::Relaxed)
        {
            let chunk = |at: usize| f64::from_bits(cached.chunks[at].load(Ordering::Relaxed));
            sums[position] = Some(tree_sum(cached.chunks.len(), chunk));
        }
        if let Some(position) = self.kernel.normed().and_then(|normed| normed.grad_sum()) {
            sums[position] = self.grad_sum;
        }
        sums
    }

    fn spans(&self) -> HostSpans<'static> {
        HostSpans::part(self.numel, self.group, self.parameter, self.first_element)
    }
}

/// A part of a tensor, which may be cut once more.
impl Split for Tensor<'_> {
    fn elements(&self) -> u64 {
        self.numel as u64
    }

    fn split(mut self, elements: u64) -> (Self, Self) {
        let cut_elements = match self.update_sums {
            Some(_) => u64::from(CHUNK_ELEMENTS),
            None => CUT_ELEMENTS,
        };
        let at = elements.next_multiple_of(cut_elements).min(self.numel as u64) as usize;
        let mut right: [HostList<'_>; MAX_LISTS] = Default::default();
        let declared = self.kernel.lists();
        for ((list, rest), declared) in self.lists.iter_mut().zip(&mut right).zip(declared) {
            let len_bytes = declared.stride().len_bytes(at);
            (*list, *rest) = std::mem::take(list).split_at(len_bytes);
        }
        let (left_sums, right_sums) = match self.update_sums.take() {
            Some(sums) => {
                let (left, right) = sums.split_at_mut(at.div_ceil(CHUNK).min(sums.len()));
                (Some(left), Some(right))
            }
            None => (None, None),
        };
        let part = |lists, update_sums, first, numel| Tensor {
            kernel: self.kernel,
            call: self.call,
            group: self.group,
            numel,
            parameter: self.parameter,
            first_element: self.first_element + first as u64,
            lists,
            cached: self.cached,
            grad_sum: None,
            sums: None,
            update_sums,
        };
        (part(self.lists, left_sums, 0, at), part(right, right_sums, at, self.numel - at))
    }

    fn run(mut self) {
        if self.update_sums.is_some() {
            let mut rest = self;
            while rest.numel > CHUNK {
                let (chunk, after) = rest.split(CHUNK as u64);
                update_chunk(chunk);
                rest = after;
            }
            return update_chunk(rest);
        }
        let spans = self.spans();
        self.kernel.run_host(HostRun::new(self.call, &mut self.lists, spans));
    }
}
