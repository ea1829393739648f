// The sizes of a chunk's unit sums, and the fold that ends them.
//
// The tree is that of all sums; crates/elementwise/src/norm.rs states it. A chunk leaves the sums
// of its eight units: unit u is the fold of leaves u, u + 8, ..., u + 56 by 32, 16 and 8.
#pragma once

namespace update_sums {

enum Shape : unsigned {
    LANES = 64,
    LEAF = 1024,
    ROWS = LEAF / LANES,
    LEAVES = 64,
    CHUNK = LEAF * LEAVES,
    UNITS = 8,
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

}  // namespace update_sums
