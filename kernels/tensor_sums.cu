// The sums over whole tensors of which ranks update parts, from those of leaves that all ranks have
// filled in.
//
//     tensor_sums_fold    one warp per chunk of 65,536 elements: its sums from those of its leaves
//     tensor_sums_place   one warp per record of an update: the sums of its tensor, where the
//                         update looks for them
//
// Sums of leaves lie in rows as the entries of normed.cuh leave them for records of eight leaves
// at most, one to a unit. The tree is that of all sums, see crates/elementwise/src/norm.rs and
// tree.cuh.
#include "normed_memory.cuh"

namespace tensor_sums {

using normed::SUMS;
using normed::ROW_VALUES;
using normed::UNITS;
using multi_tensor::u32;
using multi_tensor::u64;

enum : u32 {
    WARP = normed::WARP,
    LEVELS = tree::LEVELS * WARP,
    // Warps of a block that places.
    PLACING_WARPS = 4,
    // Groups of chunks that a warp asks for before it waits for the first.
    GROUPS_IN_FLIGHT = 4,
    // crates/cuda/src/tensor_sums.rs: MOST_PLACES.
    MOST_PLACES = 2044,
};

// What a rule sums up, side by side.
struct alignas(16) Sums {
    double value[SUMS];
};

// crates/launch/src/reduction.rs: TensorPartials.
struct alignas(16) Range {
    u64 first;
    u64 count;
};

// The only parameter of tensor_sums_fold; crates/cuda/src/tensor_sums.rs.
struct Fold {
    u64 rows;
    // For every leaf the place of its sums, in pairs of values.
    u64 leaves;
    // For every chunk its leaves.
    u64 chunks;
    // Where the sums of every chunk go.
    u64 sums;
    u64 count;
};

static_assert(sizeof(Fold) == 40, "crates/cuda: FoldArguments");

// One record of an update.
struct Place {
    // Among those that `tensors` tells of.
    u32 tensor;
    u32 first_row;
    // Rows of the record.
    u32 rows;
    u32 reserved;
};

// The only parameter of tensor_sums_place; crates/cuda/src/tensor_sums.rs.
struct Places {
    u64 rows;
    // Of every chunk.
    u64 sums;
    // For every tensor its chunks.
    u64 tensors;
    u64 count;
    Place place[MOST_PLACES];
};

static_assert(sizeof(Places) == 32 + 16 * MOST_PLACES, "crates/cuda: PlaceArguments");

// Every lane's own, by halves.
__device__ __forceinline__ Sums fold(const Sums& own) {
    Sums total;
    for (u32 sum = 0; sum < SUMS; sum++) {
        total.value[sum] = tree::fold(own.value[sum]);
    }
    return total;
}

// The sums of a leaf, or zeros behind the last.
__device__ __forceinline__ Sums leaf_of(const Fold& arguments, const Range& leaves, u32 index) {
    if (index >= leaves.count) {
        return {};
    }
    const u32 place = dialect::load(reinterpret_cast<const u32*>(arguments.leaves) + leaves.first + index);
    return dialect::load(reinterpret_cast<const Sums*>(arguments.rows) + place);
}

// The chunk of each warp.
__device__ __forceinline__ void fold_chunks(const Fold& arguments) {
    const u32 lane = threadIdx.x % WARP;
    const u64 chunk = u64(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (chunk >= arguments.count) {
        return;
    }
    const Range leaves = dialect::load(reinterpret_cast<const Range*>(arguments.chunks) + chunk);
    const Sums low = leaf_of(arguments, leaves, lane);
    const Sums high = leaf_of(arguments, leaves, lane + WARP);
    Sums own;
    for (u32 sum = 0; sum < SUMS; sum++) {
        own.value[sum] = low.value[sum] + high.value[sum];
    }
    own = fold(own);
    if (lane == 0) {
        dialect::store(reinterpret_cast<Sums*>(arguments.sums) + chunk, own);
    }
}

// The sums of all chunks of a tensor; every lane has them.
__device__ __forceinline__ Sums add_up(const Sums* chunks, u64 count, double* levels) {
    const u32 lane = threadIdx.x % WARP;
    if (count <= WARP) {
        // One group, which most tensors are.
        const Sums none = {};
        return fold(lane < count ? dialect::load(chunks + lane) : none);
    }
    tree::Groups groups[SUMS] = {{levels, 0}, {levels + LEVELS, 0}};
    ROLLED for (u64 first = 0; first < count; first += WARP * GROUPS_IN_FLIGHT) {
        Sums own[GROUPS_IN_FLIGHT];
        for (u32 i = 0; i < GROUPS_IN_FLIGHT; i++) {
            const u64 at = first + i * WARP + lane;
            const Sums none = {};
            own[i] = at < count ? dialect::load(chunks + at) : none;
        }
        for (u32 sum = 0; sum < SUMS; sum++) {
            double group = 0.0;
            for (u32 i = 0; i < GROUPS_IN_FLIGHT; i++) {
                const double total = tree::fold(own[i].value[sum]);
                group = lane % GROUPS_IN_FLIGHT == i ? total : group;
            }
            groups[sum].add(GROUPS_IN_FLIGHT, group);
        }
    }
    return {groups[0].total(), groups[1].total()};
}

// The record of each warp: its first row has all there is of the tensor, the others nothing.
__device__ __forceinline__ void place_sums(const Places& arguments) {
    SHARED(double, levels, PLACING_WARPS * SUMS * LEVELS);
    const u32 lane = threadIdx.x % WARP;
    const u32 warp = threadIdx.x / WARP;
    const u64 index = u64(blockIdx.x) * PLACING_WARPS + warp;
    if (index >= arguments.count) {
        return;
    }
    const Place place = arguments.place[index];
    const Range chunks = dialect::load(reinterpret_cast<const Range*>(arguments.tensors) + place.tensor);
    const Sums* const first = reinterpret_cast<const Sums*>(arguments.sums) + chunks.first;
    const Sums sums = add_up(first, chunks.count, levels + warp * (SUMS * LEVELS));
    // A lane has one value of every second row.
    constexpr u32 VALUES = UNITS * SUMS;
    const u32 value = lane % VALUES;
    const double sum = value == 0 ? sums.value[0] : sums.value[1];
    double* const own = reinterpret_cast<double*>(arguments.rows) + u64(place.first_row) * ROW_VALUES + value;
    ROLLED for (u32 row = lane / VALUES; row < place.rows; row += WARP / VALUES) {
        const bool has_sum = row == 0 && value < SUMS;
        dialect::store(own + u64(row) * ROW_VALUES, has_sum ? sum : 0.0);
    }
}

}  // namespace tensor_sums

ENTRY(tensor_sums_fold, (512), tensor_sums::Fold, tensor_sums::fold_chunks(arguments))
ENTRY(tensor_sums_place, (128), tensor_sums::Places, tensor_sums::place_sums(arguments))
