// The memory of updates that need sums over the whole of a tensor first: shapes, rows and what the
// threads of a block share.
#pragma once

#include "tree.cuh"

namespace normed {

using multi_tensor::u32;
using multi_tensor::u64;

enum Shape : u32 {
    BLOCK_THREADS = 512,
    LEAF = 1024,
    LEAF_LANES = 64,
    CHUNK = 65536,
    UNITS = 8,
    UNIT_ELEMENTS = CHUNK / UNITS,
    SUMS = 2,
    // Sums of each unit, then how often the tensor was skipped, and whether it was in the last
    // step.
    ROW_VALUES = UNITS * SUMS + 2,
    WARP = 32,
    WARPS = BLOCK_THREADS / WARP,
};

static_assert(BLOCK_THREADS == UNITS * LEAF_LANES, "a unit's leaves fill the block, a thread to a lane");

// First part of the scalars, written by the backend; crates/launch/src/normed.rs: Workspace.
struct Workspace {
    u64 rows;
    u32 first_row;
    u32 head_chunks;
    u32 tail_chunks;
    u32 reserved;
};

static_assert(sizeof(Workspace) == 24, "crates/launch: WORKSPACE_BYTES");

// The chunks of one record, and the rows of the whole tensor that it belongs to.
struct Tensor {
    u32 record;
    u32 chunks;
    u64 first_row;
    u64 rows;
    bool starts_here;
};

// Shared memory stands outside of the engine, so that an entry with two engines has it once.
__device__ __forceinline__ double* shared_lanes() {
    SHARED(double, lanes, BLOCK_THREADS * SUMS);
    return lanes;
}

__device__ __forceinline__ double* shared_leaves() {
    SHARED(double, leaves, UNITS * SUMS);
    return leaves;
}

__device__ __forceinline__ double* shared_groups() {
    SHARED(double, of_groups, 2 * WARPS);
    return of_groups;
}

__device__ __forceinline__ double* shared_levels() {
    SHARED(double, levels, SUMS * tree::LEVELS * WARP);
    return levels;
}

__device__ __forceinline__ double* shared_total() {
    SHARED(double, total, SUMS);
    return total;
}

}  // namespace normed
