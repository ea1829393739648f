// The part of the CUDA language that kernels may use, for a host compiler.
//
// kernels/dialect.cuh includes this file where no CUDA compiler reads it. Every access to global
// memory goes through `dialect` and is checked for the bounds of its allocation and for alignment;
// a wait hands the processor to the next CUDA thread.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#define __device__
#define __host__
#define __forceinline__ inline
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

// Throws, and so ends the launch, unless [address, address + len_bytes) lies in one live allocation
// and is aligned.
void check_access(const void* address, std::size_t len_bytes, std::size_t alignment, Access access);
// The block's memory for one SHARED declaration, which `site` identifies.
void* shared_memory(const void* site, std::size_t len_bytes);
void block_sync();
// Gives `value` (at most 16 bytes) to the lane whose number differs in `lane_mask` and returns that
// lane's value in its place.
void shuffle(void* value, std::size_t len_bytes, int lane_mask);
// Gives the value of the first of `lanes` neighbouring lanes, a power of two.
void shuffle_first(void* value, std::size_t len_bytes, int lanes);

namespace ptx {
struct Entry;
}

// A kernel that was compiled in, or an entry of a PTX text.
struct Kernel {
    const char* name;
    std::size_t argument_bytes;
    unsigned block_threads_max;
    void (*run)(const void* arguments);
    ptx::Entry* entry;
};
// All of them; they register themselves when the library is loaded.
std::vector<Kernel>& kernels();
struct Registration {
    explicit Registration(const Kernel& kernel) { kernels().push_back(kernel); }
};
// Blocks for each multiprocessor bound registers, which the host has not.
constexpr unsigned threads_max(unsigned threads, unsigned = 0) { return threads; }

}  // namespace emulator

#define threadIdx (::emulator::position->thread)
#define blockIdx (::emulator::position->block)
#define blockDim (::emulator::position->block_size)
#define gridDim (::emulator::position->grid_size)

#define ROLLED

// Arguments are passed by reference, which is what a grid constant is: a copy for each of a block's
// threads would cost more than the kernel.
#define ENTRY(NAME, BOUNDS, TYPE, ...)                                                                 \
    static void NAME(const TYPE& arguments) { __VA_ARGS__; }                                           \
    static const ::emulator::Registration register_##NAME({#NAME, sizeof(TYPE), ::emulator::threads_max BOUNDS, \
        [](const void* at) { NAME(*static_cast<const TYPE*>(at)); }, nullptr});

#define SHARED(T, name, count)    \
    static char name##_site;      \
    T* const name = static_cast<T*>(::emulator::shared_memory(&name##_site, sizeof(T) * (count)))

namespace dialect {

// The launch's own arguments are no global memory.
template <class T>
inline T load_table(const T* address, bool is_global) {
    if (is_global) emulator::check_access(address, sizeof(T), alignof(T), emulator::Access::Load);
    return *address;
}

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

// Elements of one access, of 16 bytes or fewer.
template <class T, int LANES = 16 / sizeof(T)>
struct alignas(LANES * sizeof(T)) Pack {
    T lane[LANES];
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

template <int LANES, class T>
inline Pack<T, LANES> load_lanes(const T* address) {
    Pack<T, LANES> pack;
    emulator::check_access(address, sizeof(pack), alignof(decltype(pack)), emulator::Access::Load);
    std::memcpy(&pack, address, sizeof(pack));
    return pack;
}

template <int LANES, class T>
inline void store_lanes(T* address, Pack<T, LANES> pack) {
    emulator::check_access(address, sizeof(pack), alignof(decltype(pack)), emulator::Access::Store);
    std::memcpy(address, &pack, sizeof(pack));
}

inline void block_sync() { emulator::block_sync(); }

template <class T>
inline T shuffle_xor(T value, int lane_mask) {
    static_assert(std::is_trivially_copyable<T>::value && sizeof(T) <= 16, "a lane passes at most 16 bytes");
    emulator::shuffle(&value, sizeof(T), lane_mask);
    return value;
}

template <int LANES, class T>
inline T shuffle_first(T value) {
    static_assert(std::is_trivially_copyable<T>::value && sizeof(T) <= 16, "a lane passes at most 16 bytes");
    emulator::shuffle_first(&value, sizeof(T), LANES);
    return value;
}

// IEEE 754 asks for a correctly rounded square root, and hosts give it.
inline float square_root(float value) { return std::sqrt(value); }
inline double square_root(double value) { return std::sqrt(value); }

inline double multiply_add(double a, double b, double c) { return std::fma(a, b, c); }

inline float float_of(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

inline unsigned bits_of(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}

inline unsigned upper_halves(unsigned low, unsigned high) {
    return low >> 16 | (high & 0xffff0000u);
}

inline unsigned byte_below(unsigned word, int index, unsigned upper) {
    return (upper & 0xffffff00u) | (word >> (8 * index) & 0xff);
}

template <int INDEX>
inline unsigned bytes_of(unsigned a, unsigned b, unsigned c, unsigned d) {
    const auto byte = [](unsigned word) { return word >> (8 * INDEX) & 0xff; };
    return byte(a) | byte(b) << 8 | byte(c) << 16 | byte(d) << 24;
}

inline float smaller(float a, float b) { return std::fmin(a, b); }
inline float larger(float a, float b) { return std::fmax(a, b); }

// A value of 10 bits of mantissa: powers of two scale it exactly.
inline float widen_f16(unsigned short bits) {
    const unsigned exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float sign = bits & 0x8000 ? -1.0f : 1.0f;
    if (exponent == 31) {
        return float_of((bits & 0x8000u) << 16 | 0x7f800000u | (mantissa ? 0x00400000u | mantissa << 13 : 0u));
    }
    return sign * (exponent == 0 ? std::ldexp(float(mantissa), -24) : std::ldexp(float(mantissa + 1024), int(exponent) - 25));
}

// By the definition: the multiple of the last place nearest to the value, ties to even, as the
// default rounding mode has it.
inline unsigned short narrow_f16(float value) {
    const unsigned sign = bits_of(value) >> 16 & 0x8000u;
    if (std::isnan(value)) {
        return static_cast<unsigned short>(sign | 0x7e00u);
    }
    const float magnitude = std::fabs(value);
    if (magnitude >= 65520.0f) {
        return static_cast<unsigned short>(sign | 0x7c00u);
    }
    int exponent = -14;
    if (magnitude >= 6.103515625e-05f) {
        exponent = std::ilogb(magnitude);
    }
    // At most 2048, so it converts exactly; a carry into the exponent comes by itself.
    const unsigned places = static_cast<unsigned>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
    return static_cast<unsigned short>(sign | ((static_cast<unsigned>(exponent + 14) << 10) + places));
}

}  // namespace dialect
