// The upper part of the tree of all sums: chunks of a tensor, and tensors of a step.
//
// Neighbours fold by halves, 32 at a time, counted from the first; groups of 32 likewise, until one
// is left. Values that are missing are 0. crates/launch/src/tree_sum.rs is the same tree.
#pragma once

#include "multi_tensor.cuh"

namespace tree {

using multi_tensor::u32;
using multi_tensor::u64;

enum : u32 {
    WIDTH = 32,
    WIDTH_BITS = 5,
    // Levels above the groups: 32^7 values are more than a u32 counts.
    LEVELS = 6,
};

// The values of a warp, by halves; the result is every lane's.
__device__ __forceinline__ double fold(double value) {
    for (u32 half = WIDTH / 2; half > 0; half /= 2) {
        value = value + dialect::shuffle_xor(value, int(half));
    }
    return value;
}

// What groups add up to, by a warp. A lane has one place of each level in shared memory, which it
// alone reads and writes: of those that are under way it is the sum of what lies below. A level has
// what it had before until its first place is taken, which makes all others 0.
struct Groups {
    // LEVELS times WIDTH.
    double* levels;
    // 32 times as many values.
    u32 count;

    // The next so many groups, of which 32 are a whole number of times; zeros behind the last
    // change nothing. Each lane brings the sum of group `lane % added` of them.
    __device__ __forceinline__ void add(u32 added, double own) {
        const u32 lane = threadIdx.x % WIDTH;
        const u32 first = count % WIDTH;
        if (lane - first < added) {
            levels[lane] = own;
        } else if (first == 0) {
            levels[lane] = 0.0;
        }
        count += added;
        // Closes what is full.
        u32 done = count;
        ROLLED for (u32 at = 0; at + 1 < LEVELS && done % WIDTH == 0; at++) {
            done = done >> WIDTH_BITS;
            const double sum = fold(levels[at * WIDTH + lane]);
            const u32 place = (done - 1) % WIDTH;
            if (lane == place) {
                levels[(at + 1) * WIDTH + lane] = sum;
            } else if (place == 0) {
                levels[(at + 1) * WIDTH + lane] = 0.0;
            }
        }
    }

    // The result is every lane's.
    __device__ __forceinline__ double total() const {
        const u32 lane = threadIdx.x % WIDTH;
        double below = 0.0;
        u32 done = count;
        ROLLED for (u32 at = 0; at < LEVELS && done != 0; at++) {
            const u32 place = done % WIDTH;
            const double own = lane < place ? levels[at * WIDTH + lane] : 0.0;
            below = fold(lane == place ? below : own);
            done = done >> WIDTH_BITS;
        }
        return below;
    }
};

}  // namespace tree
