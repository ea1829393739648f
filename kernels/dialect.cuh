// The CUDA features that kernels may use, under names of our own.
//
// This is the only file of the folder that knows which compiler reads it. NVRTC and nvcc take the
// definitions below; any other compiler takes the same names from `device_language.hpp` of the
// emulator, which runs the kernels on the host and checks every access for bounds and alignment.
// Kernels therefore touch global memory through these functions only.
#pragma once

#ifdef __CUDACC__

// Before a loop: its turns one after the other, each in the registers of the one before.
#define ROLLED _Pragma("unroll 1")

// A kernel that the driver finds by its name, for blocks of up to so many threads: BOUNDS are
// those, in parentheses, and perhaps how many such blocks a multiprocessor is to hold. Its
// `arguments` are passed by value; what follows them is its body.
#define ENTRY(NAME, BOUNDS, TYPE, ...) \
    extern "C" __global__ void __launch_bounds__ BOUNDS NAME(const __grid_constant__ TYPE arguments) { __VA_ARGS__; }

// Memory of the block: `count` values of `T`, not initialised.
#define SHARED(T, name, count) __shared__ T name[count]

namespace dialect {

// What one access to global memory takes: sixteen bytes, the most there is, or fewer lanes.
template <class T, int LANES = 16 / sizeof(T)>
struct alignas(LANES * sizeof(T)) Pack {
    T lane[LANES];
};

// Addresses arrive as integers in the argument table. Without this promise the compiler has to
// allow for shared and local memory.
template <class T>
__device__ __forceinline__ T* global(T* address) {
    __builtin_assume(__isGlobal(address));
    return address;
}

template <class T>
__device__ __forceinline__ T load(const T* address) {
    return *global(address);
}

template <class T>
__device__ __forceinline__ void store(T* address, T value) {
    *global(address) = value;
}

// A part of an argument table: the launch's own, or one in global memory.
template <class T>
__device__ __forceinline__ T load_table(const T* address, bool is_global) {
    return *address;
}

// `address` is aligned to 16 bytes.
template <class T>
__device__ __forceinline__ Pack<T> load_pack(const T* address) {
    return *global(reinterpret_cast<const Pack<T>*>(address));
}

// `address` is aligned to 16 bytes.
template <class T>
__device__ __forceinline__ void store_pack(T* address, Pack<T> pack) {
    *global(reinterpret_cast<Pack<T>*>(address)) = pack;
}

// `address` is aligned to the pack.
template <int LANES, class T>
__device__ __forceinline__ Pack<T, LANES> load_lanes(const T* address) {
    return *global(reinterpret_cast<const Pack<T, LANES>*>(address));
}

// `address` is aligned to the pack.
template <int LANES, class T>
__device__ __forceinline__ void store_lanes(T* address, Pack<T, LANES> pack) {
    *global(reinterpret_cast<Pack<T, LANES>*>(address)) = pack;
}

// All threads of the block arrive, and see what the others wrote before, before any goes on.
__device__ __forceinline__ void block_sync() {
    __syncthreads();
}

// The value of the thread of the same warp whose lane differs in the bits of `lane_mask`. All 32
// lanes take part.
template <class T>
__device__ __forceinline__ T shuffle_xor(T value, int lane_mask) {
    return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}

// The value of the first of `LANES` neighbouring threads of a warp, a power of two. All 32 lanes
// take part.
template <int LANES, class T>
__device__ __forceinline__ T shuffle_first(T value) {
    return __shfl_sync(0xffffffffu, value, 0, LANES);
}

// Correctly rounded, to nearest even.
__device__ __forceinline__ float square_root(float x) {
    return __fsqrt_rn(x);
}

__device__ __forceinline__ double square_root(double x) {
    return __dsqrt_rn(x);
}

// a·b + c, rounded once. Updates have none: only what derives scalars, as the host does.
__device__ __forceinline__ double multiply_add(double a, double b, double c) {
    return __fma_rn(a, b, c);
}

__device__ __forceinline__ float float_of(unsigned bits) {
    return __uint_as_float(bits);
}

__device__ __forceinline__ unsigned bits_of(float value) {
    return __float_as_uint(value);
}

// The upper half of `low` below that of `high`, in one instruction.
__device__ __forceinline__ unsigned upper_halves(unsigned low, unsigned high) {
    return __byte_perm(low, high, 0x7632);
}

// Byte `index` of `word` below the upper three of `upper`, in one instruction.
__device__ __forceinline__ unsigned byte_below(unsigned word, int index, unsigned upper) {
    return __byte_perm(word, upper, 0x7650 + index);
}

// Byte `INDEX` of each word, the first lowest.
template <int INDEX>
__device__ __forceinline__ unsigned bytes_of(unsigned a, unsigned b, unsigned c, unsigned d) {
    constexpr unsigned BOTH = 0x40 + 0x11 * INDEX;
    return __byte_perm(__byte_perm(a, b, BOTH), __byte_perm(c, d, BOTH), 0x5410);
}

// The smaller and the larger; of a number and a NaN the number.
__device__ __forceinline__ float smaller(float a, float b) {
    return fminf(a, b);
}

__device__ __forceinline__ float larger(float a, float b) {
    return fmaxf(a, b);
}

// Exact.
__device__ __forceinline__ float widen_f16(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// To nearest, ties to even; subnormals are kept.
__device__ __forceinline__ unsigned short narrow_f16(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

}  // namespace dialect

#else
#include "device_language.hpp"
#endif
