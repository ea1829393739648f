// Sums over what an update changes: sum of (new - old)^2 in f64, taken while both are in registers.
//
// The tree is that of all sums; crates/elementwise/src/norm.rs states it. A chunk leaves the sums
// of its eight units: unit u is the fold of leaves u, u + 8, ..., u + 56 by 32, 16 and 8.
#pragma once

#include "storage.cuh"

namespace update_sums {

using multi_tensor::u32;
using multi_tensor::u64;

enum Shape : u32 {
    LANES = 64,
    LEAF = 1024,
    ROWS = LEAF / LANES,
    LEAVES = 64,
    CHUNK = LEAF * LEAVES,
    UNITS = 8,
};

// Of a visit whose changes nobody wants.
struct Ignored {
    template <class T>
    __device__ __forceinline__ void add(int, T, T) {}
};

// Of neighbouring lanes of a leaf, each to its own sum.
template <int WIDTH>
struct Squares {
    double sums[WIDTH];

    template <class T>
    __device__ __forceinline__ void add(int lane, T before, T after) {
        const double change = double(after) - double(before);
        sums[lane] = sums[lane] + change * change;
    }
};

// Eight values, `STRIDE` apart, by halves.
template <int STRIDE>
__device__ __forceinline__ double fold_8(const double* values) {
    double half[4], quarter[2];
    for (int i = 0; i < 4; i++) {
        half[i] = values[i * STRIDE] + values[(i + 4) * STRIDE];
    }
    for (int i = 0; i < 2; i++) {
        quarter[i] = half[i] + half[i + 2];
    }
    return quarter[0] + quarter[1];
}

// One leaf, updated by a group of LANES / WIDTH threads of one warp, of which this is `member`;
// each has WIDTH neighbouring lanes. All threads of the warp arrive here. The result is that of
// member 0.
template <int WIDTH, class Body>
__device__ __forceinline__ double update_leaf(const Body& body, u32 first, u32 numel, bool packs, u32 member) {
    Squares<WIDTH> squares = {};
    const u32 at = first + member * WIDTH;
    if (packs && first + LEAF <= numel) {
        ROLLED for (u32 row = 0; row < ROWS; row++) {
            body.template watch<WIDTH, 1>(at + row * LANES, LANES, squares);
        }
    } else {
        ROLLED for (u32 row = 0; row < ROWS; row++) {
            for (int i = 0; i < WIDTH; i++) {
                const u32 element = at + row * LANES + i;
                if (element < numel) {
                    Squares<1> own = {{squares.sums[i]}};
                    body.template watch<1, 1>(element, LANES, own);
                    squares.sums[i] = own.sums[0];
                }
            }
        }
    }
    for (u32 half = LANES / WIDTH / 2; half > 0; half /= 2) {
        for (int i = 0; i < WIDTH; i++) {
            squares.sums[i] = squares.sums[i] + dialect::shuffle_xor(squares.sums[i], int(half));
        }
    }
    for (int half = WIDTH / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) {
            squares.sums[i] = squares.sums[i] + squares.sums[i + half];
        }
    }
    return squares.sums[0];
}

// The block's chunk of `numel` elements, whose sums go to `slot`. A body has `watch<WIDTH,
// IN_FLIGHT>(first, stride, squares)`, which updates as `visit` does and adds what it changes.
template <int WIDTH, class Body>
__device__ __forceinline__ void update_chunk(const Body& body, u32 numel, bool packs, double* slot) {
    constexpr u32 GROUP = LANES / WIDTH;
    static_assert(GROUP <= 32, "a leaf is a warp's at most");
    SHARED(double, leaves, LEAVES);
    ROLLED for (u32 leaf = threadIdx.x / GROUP; leaf < LEAVES; leaf += blockDim.x / GROUP) {
        const double sum = update_leaf<WIDTH>(body, leaf * LEAF, numel, packs, threadIdx.x % GROUP);
        if (threadIdx.x % GROUP == 0) {
            leaves[leaf] = sum;
        }
    }
    dialect::block_sync();
    if (threadIdx.x < UNITS) {
        dialect::store(slot + threadIdx.x, fold_8<UNITS>(leaves + threadIdx.x));
    }
}

}  // namespace update_sums
