// The norm of all gradients, the finite check, the clip factor and the loss scale.
//
//     amp_norm    one block per chunk of 65,536 elements: sum of squares in f64, and the count of
//                 infinite and NaN elements
//     amp_fold    one warp per chunk: its sum from those of its leaves, where ranks have taken them
//     amp_finish  one block: sums of tensors, many at a time, and of all, then the control block
//                 that update kernels read
//
// The tree of a sum depends on element indices alone; crates/elementwise/src/norm.rs states it.
// Lane j of a leaf of 1,024 elements adds elements j, j + 64, ...; lanes fold by halves, and the 64
// leaves of a chunk do likewise. Chunks of a tensor and tensors add up as tree.cuh says. The
// conclusion is crates/amp/src/cpu.rs, operation for operation.
#include "storage.cuh"
#include "tree.cuh"

namespace amp {

using multi_tensor::u32;
using multi_tensor::u64;

enum : u32 {
    LANES = 64,
    LEAF_ELEMENTS = 1024,
    ROWS = LEAF_ELEMENTS / LANES,
    // Rows whose accesses a thread starts before it waits for the first. All 16 would spill.
    ROWS_IN_FLIGHT = 4,
    LEAVES = 64,
    CHUNK_ELEMENTS = LEAF_ELEMENTS * LEAVES,
    WARP = 32,
    WARPS_MAX = 16,
    // Of a tensor that one thread adds up.
    CHUNKS_OF_THREAD = 4,
    // Groups of chunks that a warp asks for before it waits for the first.
    GROUPS_IN_FLIGHT = 8,
    // crates/cuda/src/entry.rs: BLOCK_THREADS.
    FINISH_THREADS = 512,
    FINISH_WARPS = FINISH_THREADS / WARP,
    LEVELS = tree::LEVELS * WARP,
};

// crates/launch/src/reduction.rs: SquareSum.
struct SquareSum {
    double sum;
    u64 non_finite;
};

// crates/launch/src/reduction.rs: TensorPartials.
struct TensorPartials {
    u64 first;
    u64 count;
};

// Of a launch of amp_norm; there are no step scalars.
struct NormScalars {
    u64 partials;
};

// The only parameter of amp_fold; crates/cuda/src/leaves.rs. Places say which leaves are a chunk's.
struct Fold {
    u64 leaves;
    u64 places;
    u64 partials;
    u64 chunks;
};

static_assert(sizeof(Fold) == 32, "crates/cuda: FoldArguments");

// Arguments of amp_finish behind the header; crates/launch/src/pack.rs and
// crates/amp/src/device.rs.
struct Finish {
    u64 partials;
    u64 tensors;
    u64 sums;
    u64 tensor_count;
    double max_norm;
    double growth;
    double backoff;
    double floor;
    double ceiling;
    u32 growth_interval;
    u32 backoff_interval;
};

static_assert(sizeof(SquareSum) == 16 && sizeof(TensorPartials) == 16, "crates/launch: reduction.rs");
// The only parameter of `amp_finish`.
struct Conclusion {
    multi_tensor::Header header;
    Finish finish;
};

static_assert(sizeof(Conclusion) == 104, "crates/launch: header and conclusion");
static_assert(sizeof(Finish) == 80, "crates/launch: CONCLUSION_BYTES, crates/amp: FinishScalars");

// A finite value less itself is 0; an infinite one or a NaN is not.
template <class T>
__device__ __forceinline__ bool is_finite(T x) {
    return x - x == T(0);
}

template <class T>
__device__ __forceinline__ void add_square(T stored, double& sum, u32& non_finite) {
    const auto x = storage::widen(stored);
    const double wide = double(x);
    sum = sum + wide * wide;
    non_finite += is_finite(x) ? 0 : 1;
}

// The sum of one leaf, by a group of LANES / PER threads of one warp, of which this is `member`;
// each has PER neighbouring lanes. All threads of the warp arrive here. The result is that of
// member 0.
template <class T>
__device__ __forceinline__ double leaf_sum(const T* leaf, u32 numel, bool packs, u32 member, u32& non_finite) {
    constexpr u32 PER = 16 / sizeof(T);
    constexpr u32 GROUP = LANES / PER;
    const u32 lane = member * PER;
    double sums[PER] = {};
    if (packs && numel == LEAF_ELEMENTS) {
        for (u32 first = 0; first < ROWS; first += ROWS_IN_FLIGHT) {
            multi_tensor::Lanes<PER, T> rows[ROWS_IN_FLIGHT];
            for (u32 row = 0; row < ROWS_IN_FLIGHT; row++) {
                rows[row] = multi_tensor::load_lanes<PER>(leaf + (first + row) * LANES + lane);
            }
            for (u32 row = 0; row < ROWS_IN_FLIGHT; row++) {
                for (u32 i = 0; i < PER; i++) {
                    add_square(rows[row].lane[i], sums[i], non_finite);
                }
            }
        }
    } else {
        ROLLED for (u32 row = lane; row < numel; row += LANES) {
            for (u32 i = 0; i < PER; i++) {
                if (row + i < numel) {
                    add_square(dialect::load(leaf + row + i), sums[i], non_finite);
                }
            }
        }
    }
    for (u32 half = GROUP / 2; half > 0; half /= 2) {
        for (u32 i = 0; i < PER; i++) {
            sums[i] = sums[i] + dialect::shuffle_xor(sums[i], int(half));
        }
    }
    for (u32 half = PER / 2; half > 0; half /= 2) {
        for (u32 i = 0; i < half; i++) {
            sums[i] = sums[i] + sums[i + half];
        }
    }
    return sums[0];
}

// The block's chunk, written to the launch's partial sums.
template <class T>
__device__ __forceinline__ void norm_chunk(const unsigned char* arguments) {
    constexpr u32 GROUP = LANES / (16 / sizeof(T));
    typedef multi_tensor::Table<NormScalars, NormScalars, 1> Table;
    const Table table = Table::of(arguments);
    const multi_tensor::Record<1> record = table.record(table.record_of_chunk(blockIdx.x));
    const multi_tensor::Chunk chunk = multi_tensor::chunk_of_block(table.header(), record);
    const T* elements = multi_tensor::chunk_start<const T>(record, 0, chunk);
    const bool packs = multi_tensor::takes_packs(elements);
    SHARED(double, leaves, LEAVES);
    SHARED(u32, counts, WARPS_MAX);
    const u32 member = threadIdx.x % GROUP;
    u32 non_finite = 0;
    // Leaves with elements, as many as whole warps take; the others are 0 and cost no more.
    constexpr u32 OF_WARP = WARP / GROUP;
    const u32 filled = (chunk.numel + LEAF_ELEMENTS * OF_WARP - 1) / (LEAF_ELEMENTS * OF_WARP) * OF_WARP;
    for (u32 leaf = filled + threadIdx.x; leaf < LEAVES; leaf += blockDim.x) {
        leaves[leaf] = 0.0;
    }
    for (u32 leaf = threadIdx.x / GROUP; leaf < filled; leaf += blockDim.x / GROUP) {
        const u32 first = leaf * LEAF_ELEMENTS;
        const u32 left = first < chunk.numel ? chunk.numel - first : 0;
        const u32 numel = left < LEAF_ELEMENTS ? left : u32(LEAF_ELEMENTS);
        const double sum = leaf_sum(elements + first, numel, packs, member, non_finite);
        if (member == 0) {
            leaves[leaf] = sum;
        }
    }
    for (u32 half = WARP / 2; half > 0; half /= 2) {
        non_finite += dialect::shuffle_xor(non_finite, int(half));
    }
    if (threadIdx.x % WARP == 0) {
        counts[threadIdx.x / WARP] = non_finite;
    }
    dialect::block_sync();
    if (threadIdx.x >= WARP) {
        return;
    }
    double sum = leaves[threadIdx.x] + leaves[threadIdx.x + WARP];
    u32 count = threadIdx.x < blockDim.x / WARP ? counts[threadIdx.x] : 0;
    for (u32 half = WARP / 2; half > 0; half /= 2) {
        sum = sum + dialect::shuffle_xor(sum, int(half));
        count += dialect::shuffle_xor(count, int(half));
    }
    if (threadIdx.x == 0) {
        SquareSum* const partials = reinterpret_cast<SquareSum*>(table.scalars().partials);
        dialect::store(partials + blockIdx.x, SquareSum{sum, count});
    }
}

// The chunk of each warp, folded as `norm_chunk` does.
__device__ __forceinline__ void fold_chunks(const Fold& fold) {
    const u32 lane = threadIdx.x % WARP;
    const u64 chunk = u64(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (chunk >= fold.chunks) {
        return;
    }
    const TensorPartials place = dialect::load(reinterpret_cast<const TensorPartials*>(fold.places) + chunk);
    const SquareSum* const leaves = reinterpret_cast<const SquareSum*>(fold.leaves) + place.first;
    const SquareSum none = {0.0, 0};
    const SquareSum low = lane < place.count ? dialect::load(leaves + lane) : none;
    const SquareSum high = lane + WARP < place.count ? dialect::load(leaves + lane + WARP) : none;
    double sum = low.sum + high.sum;
    u64 count = low.non_finite + high.non_finite;
    for (u32 half = WARP / 2; half > 0; half /= 2) {
        sum = sum + dialect::shuffle_xor(sum, int(half));
        count += dialect::shuffle_xor(count, int(half));
    }
    if (lane == 0) {
        dialect::store(reinterpret_cast<SquareSum*>(fold.partials) + chunk, SquareSum{sum, count});
    }
}

__device__ __forceinline__ u32 saturating_next(u32 count) {
    return count == 0xffffffffu ? count : count + 1;
}

// The control block of a step whose squares sum up to `total`.
__device__ __forceinline__ multi_tensor::Control conclude(const Finish& finish, const SquareSum& total, const multi_tensor::Control& before) {
    multi_tensor::Control after = before;
    after.grad_norm = dialect::square_root(total.sum) / before.loss_scale;
    after.non_finite = total.non_finite;
    const double factor = finish.max_norm / (after.grad_norm + 1e-6);
    after.grad_factor = (factor < 1.0 ? factor : 1.0) / before.loss_scale;
    if (total.non_finite != 0 || !is_finite(after.grad_norm)) {
        after.found = 1;
        after.skipped = before.skipped + 1;
        after.good_steps = 0;
        after.bad_steps = saturating_next(before.bad_steps);
        if (after.bad_steps >= finish.backoff_interval) {
            const double scale = before.loss_scale * finish.backoff;
            after.loss_scale = scale > finish.floor ? scale : finish.floor;
            after.bad_steps = 0;
        }
    } else {
        after.found = 0;
        after.applied = before.applied + 1;
        after.bad_steps = 0;
        after.good_steps = saturating_next(before.good_steps);
        if (after.good_steps >= finish.growth_interval) {
            const double scale = before.loss_scale * finish.growth;
            after.loss_scale = scale < finish.ceiling ? scale : finish.ceiling;
            after.good_steps = 0;
        }
    }
    return after;
}

__device__ __forceinline__ u64 count_of_warp(u64 own) {
    for (u32 half = WARP / 2; half > 0; half /= 2) {
        own += dialect::shuffle_xor(own, int(half));
    }
    return own;
}

// The sum of values, by a warp; the result is every lane's.
__device__ __forceinline__ SquareSum sum_of(const SquareSum* values, u64 count, double* levels) {
    const u32 lane = threadIdx.x % WARP;
    const SquareSum none = {0.0, 0};
    if (count <= WARP) {
        // One group, which most tensors are.
        const SquareSum own = lane < count ? dialect::load(values + lane) : none;
        return {tree::fold(own.sum), count_of_warp(own.non_finite)};
    }
    tree::Groups groups = {levels, 0};
    u64 non_finite = 0;
    ROLLED for (u64 first = 0; first < count; first += WARP * GROUPS_IN_FLIGHT) {
        SquareSum own[GROUPS_IN_FLIGHT];
        for (u32 i = 0; i < GROUPS_IN_FLIGHT; i++) {
            const u64 at = first + i * WARP + lane;
            own[i] = at < count ? dialect::load(values + at) : none;
        }
        double group = 0.0;
        for (u32 i = 0; i < GROUPS_IN_FLIGHT; i++) {
            const double sum = tree::fold(own[i].sum);
            group = lane % GROUPS_IN_FLIGHT == i ? sum : group;
            non_finite += own[i].non_finite;
        }
        groups.add(GROUPS_IN_FLIGHT, group);
    }
    return {groups.total(), count_of_warp(non_finite)};
}

// The sum of a tensor of few chunks: what `sum_of` adds, less what is 0.
__device__ __forceinline__ SquareSum sum_of_few(const SquareSum* values, u32 count) {
    static_assert(u32(CHUNKS_OF_THREAD) == 4, "by halves");
    SquareSum own[CHUNKS_OF_THREAD] = {};
    for (u32 i = 0; i < CHUNKS_OF_THREAD; i++) {
        if (i < count) {
            own[i] = dialect::load(values + i);
        }
    }
    return {(own[0].sum + own[2].sum) + (own[1].sum + own[3].sum),
            own[0].non_finite + own[1].non_finite + own[2].non_finite + own[3].non_finite};
}

__device__ __forceinline__ TensorPartials place_of(const Finish& finish, u64 tensor) {
    const TensorPartials none = {0, 0};
    return tensor < finish.tensor_count ? dialect::load(reinterpret_cast<const TensorPartials*>(finish.tensors) + tensor) : none;
}

// The sums of as many tensors as the block has threads: of few chunks a thread each, others a warp
// each, which leaves it in `sums`. The thread's own is that of the tensor at its `place`.
__device__ __forceinline__ SquareSum sum_tensors(const SquareSum* partials, const TensorPartials& place, double* levels) {
    SHARED(TensorPartials, places, FINISH_THREADS);
    SHARED(SquareSum, sums, FINISH_THREADS);
    const u32 warp = threadIdx.x / WARP;
    const u32 lane = threadIdx.x % WARP;
    places[threadIdx.x] = place;
    SquareSum own = {0.0, 0};
    if (place.count <= CHUNKS_OF_THREAD) {
        own = sum_of_few(partials + place.first, u32(place.count));
    }
    dialect::block_sync();
    // Neighbours, which tend to be alike, go to different warps.
    u32 large = places[lane * FINISH_WARPS + warp].count > CHUNKS_OF_THREAD ? 1u << lane : 0;
    for (u32 half = WARP / 2; half > 0; half /= 2) {
        large |= dialect::shuffle_xor(large, int(half));
    }
    ROLLED for (u32 i = warp; large != 0; i += FINISH_WARPS) {
        if (large % 2 != 0) {
            const TensorPartials tensor = places[i];
            const SquareSum sum = sum_of(partials + tensor.first, tensor.count, levels);
            if (lane == 0) {
                sums[i] = sum;
            }
        }
        large = large >> 1;
    }
    dialect::block_sync();
    return place.count <= CHUNKS_OF_THREAD ? own : sums[threadIdx.x];
}

// One block of FINISH_THREADS.
__device__ __forceinline__ void finish_step(const Conclusion& arguments) {
    const Finish& finish = arguments.finish;
    const SquareSum* const partials = reinterpret_cast<const SquareSum*>(finish.partials);
    if (blockIdx.x != 0) {
        return;
    }
    SHARED(double, of_warps, FINISH_WARPS);
    SHARED(u64, counts, FINISH_WARPS);
    // A warp's own, for tensors; the last ones are those of the first warp, for all of them.
    SHARED(double, levels, (FINISH_WARPS + 1) * LEVELS);
    const u32 warp = threadIdx.x / WARP;
    const u32 lane = threadIdx.x % WARP;
    tree::Groups groups = {levels + FINISH_WARPS * LEVELS, 0};
    u64 non_finite = 0;
    TensorPartials place = place_of(finish, threadIdx.x);
    ROLLED for (u64 first = 0; first < finish.tensor_count; first += FINISH_THREADS) {
        const u64 tensor = first + threadIdx.x;
        // Asked for before the others are waited for.
        const TensorPartials next = place_of(finish, tensor + FINISH_THREADS);
        const SquareSum own = sum_tensors(partials, place, levels + warp * LEVELS);
        if (tensor < finish.tensor_count) {
            dialect::store(reinterpret_cast<SquareSum*>(finish.sums) + tensor, own);
        }
        non_finite += own.non_finite;
        const double group = tree::fold(own.sum);
        if (lane == 0) {
            of_warps[warp] = group;
        }
        dialect::block_sync();
        if (warp == 0) {
            groups.add(FINISH_WARPS, of_warps[lane % FINISH_WARPS]);
        }
        place = next;
    }
    non_finite = count_of_warp(non_finite);
    if (lane == 0) {
        counts[warp] = non_finite;
    }
    dialect::block_sync();
    if (warp != 0) {
        return;
    }
    const SquareSum total = {groups.total(), count_of_warp(lane < FINISH_WARPS ? counts[lane] : 0)};
    if (lane == 0) {
        multi_tensor::Control* const control = reinterpret_cast<multi_tensor::Control*>(arguments.header.control);
        const multi_tensor::Control before = dialect::load(static_cast<const multi_tensor::Control*>(control));
        dialect::store(control, conclude(finish, total, before));
    }
}

}  // namespace amp

#define NORM_ENTRIES(TYPE, ...) \
    ENTRY(amp_norm_##TYPE, (512), multi_tensor::Arguments, amp::norm_chunk<__VA_ARGS__>(arguments.bytes))

NORM_ENTRIES(f32, float)
NORM_ENTRIES(f64, double)
NORM_ENTRIES(f16, storage::F16)
NORM_ENTRIES(bf16, storage::BF16)
ENTRY(amp_finish, (512, 1), amp::Conclusion, amp::finish_step(arguments))
ENTRY(amp_fold, (512), amp::Fold, amp::fold_chunks(arguments))
