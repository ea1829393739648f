// The part of the CUDA language that kernels may use, for a host compiler.
//
// kernels/dialect.cuh includes this file where no CUDA compiler reads it. Every access to global memory goes through `dialect`
// and is checked for the bounds of its allocation and for alignment; a wait hands the processor to the next CUDA thread.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#ifndef __restrict__
#define __restrict__ __restrict
#endif

namespace emulator {

struct Index3 {
    unsigned x, y, z;
};

// Where the running CUDA thread stands.
struct Position {
    Index3 thread, block, block_size, grid_size;
};

enum class Access { Load, Store };

// The running thread's position; the scheduler sets it before a thread runs.
extern const Position* position;

// Throws, and so ends the launch, unless [address, address + len_bytes) lies in one live allocation and is aligned.
void check_access(const void* address, std::size_t len_bytes, std::size_t alignment, Access access);
// The block's memory for one SHARED declaration, which `site` identifies.
void* shared_memory(const void* site, std::size_t len_bytes);
void block_sync();
void grid_sync();
// Gives `value` (at most 16 bytes) to the lane whose number differs in `lane_mask` and returns that lane's value in its place.
void shuffle(void* value, std::size_t len_bytes, int lane_mask);

}  // namespace emulator

#define threadIdx (::emulator::position->thread)
#define blockIdx (::emulator::position->block)
#define blockDim (::emulator::position->block_size)
#define gridDim (::emulator::position->grid_size)

#define SHARED(T, name, count)    \
    static char name##_site;      \
    T* const name = static_cast<T*>(::emulator::shared_memory(&name##_site, sizeof(T) * (count)))

namespace dialect {

template <class T>
inline T load(const T* address) {
    static_assert(std::is_trivially_copyable<T>::value, "global memory holds plain values");
    emulator::check_access(address, sizeof(T), alignof(T), emulator::Access::Load);
    T value;
    std::memcpy(&value, address, sizeof(T));
    return value;
}

template <class T>
inline void store(T* address, T value) {
    static_assert(std::is_trivially_copyable<T>::value, "global memory holds plain values");
    emulator::check_access(address, sizeof(T), alignof(T), emulator::Access::Store);
    std::memcpy(address, &value, sizeof(T));
}

// Elements of one 16-byte access.
template <class T>
struct alignas(16) Pack {
    T lane[16 / sizeof(T)];
};

template <class T>
inline Pack<T> load_pack(const T* address) {
    emulator::check_access(address, 16, 16, emulator::Access::Load);
    Pack<T> pack;
    std::memcpy(&pack, address, 16);
    return pack;
}

template <class T>
inline void store_pack(T* address, Pack<T> pack) {
    emulator::check_access(address, 16, 16, emulator::Access::Store);
    std::memcpy(address, &pack, 16);
}

inline void block_sync() { emulator::block_sync(); }
inline void grid_sync() { emulator::grid_sync(); }

template <class T>
inline T shuffle_xor(T value, int lane_mask) {
    static_assert(std::is_trivially_copyable<T>::value && sizeof(T) <= 16, "a lane passes at most 16 bytes");
    emulator::shuffle(&value, sizeof(T), lane_mask);
    return value;
}

// IEEE 754 asks for a correctly rounded square root, and hosts give it.
inline float square_root(float value) { return std::sqrt(value); }
inline double square_root(double value) { return std::sqrt(value); }

}  // namespace dialect
