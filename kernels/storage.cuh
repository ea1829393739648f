// How parameters and state are kept: f32, f64, f16 or bf16, with a master or a remainder beside the
// parameter, rounded to nearest or at random; codes.cuh has state in 8 bits. Arithmetic is in the
// compute type; every format has `widen` and `narrow`, and a kernel is written once for all.
//
// The host's versions are crates/simd/src/narrow.rs, crates/elementwise/src/param_storage.rs, and
// crates/launch/src/random_bits.rs; the bits are the same.
#pragma once

#include "multi_tensor.cuh"

namespace storage {

using multi_tensor::Lanes;
using multi_tensor::u16;
using multi_tensor::u32;
using multi_tensor::u64;

enum Bits : u32 { INFINITE = 0x7f800000, QUIET = 0x00400000 };

// crates/launch/src/precision.rs.
enum Flag : u32 { FLAG_STOCHASTIC = 1u << 31, FLAG_WIDE_GRADS = 1u << 29 };

struct F16 {
    u16 bits;
};

struct BF16 {
    u16 bits;
};

// A bf16 in the upper half of a word, as f32 has it: the lower half is 0 where it was loaded and
// means nothing where it was rounded, so that neither takes an instruction.
struct HeldBF16 {
    u32 bits;
};

// What a master differs from its bf16 parameter by.
struct Remainder {
    u16 bits;
};

// What the 24 bits that are kept of a master differ from its bf16 parameter by, in 256. No
// structure: the compiler refuses pointers to those of one byte.
enum class Remainder8 : unsigned char {};

// A remainder in bits 15 to 8; the others mean nothing.
struct HeldRemainder8 {
    u32 bits;
};

// State in 8 bits; codes.cuh.
enum class Code : unsigned char {};

// No list beside the parameter.
struct Nothing {};

}  // namespace storage

namespace multi_tensor {

template <>
struct Held<storage::BF16> {
    typedef storage::HeldBF16 Type;

    __device__ __forceinline__ static Type of(storage::BF16 element) { return {u32(element.bits) << 16}; }
    __device__ __forceinline__ static storage::BF16 element(Type held) { return {u16(held.bits >> 16)}; }
    __device__ __forceinline__ static Type lower(u32 pair) { return {pair << 16}; }
    __device__ __forceinline__ static Type upper(u32 pair) { return {pair & 0xffff0000}; }
    __device__ __forceinline__ static u32 pair(Type lower, Type upper) { return dialect::upper_halves(lower.bits, upper.bits); }
};

template <>
struct Held<storage::Remainder8> {
    typedef storage::HeldRemainder8 Type;

    __device__ __forceinline__ static Type of(storage::Remainder8 element) { return {u32(element) << 8}; }
    __device__ __forceinline__ static storage::Remainder8 element(Type held) { return storage::Remainder8(held.bits >> 8 & 0xff); }
    __device__ __forceinline__ static Type of_byte(u32 word, int index) { return {index == 0 ? word << 8 : word >> (8 * index - 8)}; }
    __device__ __forceinline__ static u32 word(const Type* held) { return dialect::bytes_of<1>(held[0].bits, held[1].bits, held[2].bits, held[3].bits); }
};

}  // namespace multi_tensor

namespace storage {

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ double widen(double value) { return value; }
__device__ __forceinline__ float widen(F16 value) { return dialect::widen_f16(value.bits); }
__device__ __forceinline__ float widen(HeldBF16 value) { return dialect::float_of(value.bits); }
__device__ __forceinline__ float widen(BF16 value) { return dialect::float_of(u32(value.bits) << 16); }

// Gradients of `COUNT` visits of `WIDTH` elements each, `stride` elements apart. Gradients of
// 16-bit parameters are f32 if the flag says so. They are widened here, and so waited for: what
// else a visit loads comes first.
template <int WIDTH, int COUNT, class T, bool IS_NARROW = sizeof(T) == 2>
struct Gradients {
    T value[COUNT][WIDTH];

    template <class Index>
    __device__ __forceinline__ void load(u64 list, Index at, u32 stride, u32) {
        load_as<T>(list, at, stride);
    }

    template <class From, class Index>
    __device__ __forceinline__ void load_as(u64 list, Index at, u32 stride) {
        Lanes<WIDTH, From> lanes[COUNT];
        for (int i = 0; i < COUNT; i++) {
            lanes[i] = multi_tensor::load_lanes<WIDTH>(reinterpret_cast<const From*>(list) + (at + i * stride));
        }
        for (int i = 0; i < COUNT; i++) {
            for (int lane = 0; lane < WIDTH; lane++) {
                value[i][lane] = widen(lanes[i].lane[lane]);
            }
        }
    }
};

template <int WIDTH, int COUNT, class T>
struct Gradients<WIDTH, COUNT, T, true> : Gradients<WIDTH, COUNT, float> {
    template <class Index>
    __device__ __forceinline__ void load(u64 list, Index at, u32 stride, u32 flags) {
        if ((flags & FLAG_WIDE_GRADS) != 0) {
            this->template load_as<float>(list, at, stride);
        } else {
            this->template load_as<T>(list, at, stride);
        }
    }
};

// Bytes of a gradient.
template <class T>
__device__ __forceinline__ u32 grad_bytes(u32 flags) {
    return sizeof(T) == 2 && (flags & FLAG_WIDE_GRADS) != 0 ? u32(sizeof(float)) : u32(sizeof(T));
}

// `narrow` to nearest, ties to even; at random by the lower 16 bits of `draw` where something is
// lost and nothing keeps it.
template <bool AT_RANDOM>
__device__ __forceinline__ void narrow(float& to, float value, u32) {
    to = value;
}

template <bool AT_RANDOM>
__device__ __forceinline__ void narrow(double& to, double value, u32) {
    to = value;
}

template <bool AT_RANDOM>
__device__ __forceinline__ void narrow(F16& to, float value, u32) {
    to.bits = dialect::narrow_f16(value);
}

// The upper half after less than 2^16 was added; NaN stay NaN, and those that have no bit set in
// their upper half, which no operation gives, get one.
template <bool AT_RANDOM>
__device__ __forceinline__ void narrow(HeldBF16& to, float value, u32 draw) {
    const u32 bits = dialect::bits_of(value);
    const u32 addend = AT_RANDOM ? draw & 0xffff : 0x7fff + (bits >> 16 & 1);
    to.bits = value != value ? bits | QUIET : bits + addend;
}

// A parameter by itself; `S` is the type of state.
template <class P, class S, class C>
struct Plain {
    typedef P Param;
    typedef Nothing Master;
    typedef S State;
    typedef C Compute;
    enum : int { MASTER_LISTS = 0, READS_PARAM = 1 };

    template <class Held>
    __device__ __forceinline__ static C value(Held param, Nothing) {
        return widen(param);
    }

    template <bool AT_RANDOM, class Held>
    __device__ __forceinline__ static void keep(Held& param, Nothing&, C value, u32 draw) {
        narrow<AT_RANDOM>(param, value, draw);
    }
};

// A master in f32; the parameter is only written.
template <class P, class S>
struct WithMaster {
    typedef P Param;
    typedef float Master;
    typedef S State;
    typedef float Compute;
    enum : int { MASTER_LISTS = 1, READS_PARAM = 0 };

    template <class Held>
    __device__ __forceinline__ static float value(Held, float master) {
        return master;
    }

    template <bool AT_RANDOM, class Held>
    __device__ __forceinline__ static void keep(Held& param, float& master, float value, u32) {
        narrow<false>(param, value, 0);
        master = value;
    }
};

// A bf16 parameter, the nearest to the master with ties away from zero, and the signed difference
// of the bits.
template <class S>
struct WithRemainder {
    typedef BF16 Param;
    typedef Remainder Master;
    typedef S State;
    typedef float Compute;
    enum : int { MASTER_LISTS = 1, READS_PARAM = 1 };

    template <class Held>
    __device__ __forceinline__ static float value(Held param, Remainder remainder) {
        return dialect::float_of(dialect::bits_of(widen(param)) + u32(int(short(remainder.bits))));
    }

    template <bool AT_RANDOM>
    __device__ __forceinline__ static void keep(HeldBF16& param, Remainder& remainder, float value, u32) {
        const u32 bits = value != value ? u32(INFINITE | QUIET) : dialect::bits_of(value);
        param.bits = bits + 0x8000;
        remainder.bits = u16(bits);
    }
};

// A bf16 parameter, the nearest to the upper 24 bits of the master, and the signed difference of
// these bits; ties are away from zero in both.
template <class S>
struct WithRemainder8 {
    typedef BF16 Param;
    typedef Remainder8 Master;
    typedef S State;
    typedef float Compute;
    enum : int { MASTER_LISTS = 1, READS_PARAM = 1 };

    template <class Held>
    __device__ __forceinline__ static float value(Held param, HeldRemainder8 remainder) {
        return dialect::float_of(dialect::bits_of(widen(param)) + u32(int(short(remainder.bits & 0xff00))));
    }

    template <bool AT_RANDOM>
    __device__ __forceinline__ static void keep(HeldBF16& param, HeldRemainder8& remainder, float value, u32) {
        const u32 bits = value != value ? u32(INFINITE | QUIET) : dialect::bits_of(value);
        remainder.bits = bits + 0x80;
        param.bits = remainder.bits + 0x8000;
    }
};

// Elements that one thread takes at a time: a pack of 16 bytes in the widest list, so that every
// list is accessed without gaps, and at most four where registers are scarce.
template <class Format>
struct Width {
    enum : int {
        STATE = int(sizeof(typename Format::State)),
        PARAM = int(sizeof(typename Format::Param)),
        MASTER = int(sizeof(typename Format::Master)),
        WIDER = STATE > PARAM ? STATE : PARAM,
        FITTING = 16 / (WIDER > MASTER ? WIDER : MASTER),
        VALUE = FITTING > 4 ? 4 : FITTING,
    };
};

template <class T>
struct IsBf16 {
    enum : int { VALUE = 0 };
};

template <>
struct IsBf16<BF16> {
    enum : int { VALUE = 1 };
};

template <class T>
struct IsCode {
    enum : int { VALUE = 0 };
};

template <>
struct IsCode<Code> {
    enum : int { VALUE = 1 };
};

// Whether state is in codes.
template <class Format>
struct IsCoded : IsCode<typename Format::State> {};

// Whether something of the format may be rounded at random: bf16 that nothing keeps the rest of,
// but not beside state in codes.
template <class Format>
struct MayDraw {
    enum : int {
        PARAM = IsBf16<typename Format::Param>::VALUE && Format::MASTER_LISTS == 0,
        VALUE = (PARAM || IsBf16<typename Format::State>::VALUE) && !IsCoded<Format>::VALUE,
    };
};

// Step scalars as the host writes them: behind the kernel's own, the key of the step.
template <class Own, bool AT_RANDOM>
struct KeyedStepScalars {
    Own own;
};

template <class Own>
struct KeyedStepScalars<Own, true> {
    Own own;
    u64 key;
};

// Words of a record behind the addresses: parameter, first element.
template <bool AT_RANDOM>
struct Origin {
    enum : int { WORDS = AT_RANDOM ? 2 : 0 };
};

__device__ __forceinline__ u64 mix64(u64 x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

__device__ __forceinline__ u32 mix32(u32 x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

// The source of random bits for the elements of one tensor.
struct Draws {
    u64 key;
    // Index in its tensor of the chunk's first element.
    u64 element;

    // 32 bits for element `at` of the chunk; list l, counted from the parameter without the
    // gradient, takes half l % 2 of word l / 2. What depends on the upper half of the element's
    // index is formed once, and a carry into it adds to it: nothing here is of 64 bits.
    __device__ __forceinline__ u32 word(u32 at, u32 index) const {
        const u32 low = u32(element) + at;
        u32 b = u32(key >> 32) + u32(element >> 32) * HIGH;
        b += low < at ? u32(HIGH) : 0;
        return mix32(mix32(low + u32(key)) ^ (b + index * WORD));
    }

    enum : u32 { HIGH = 0x9e3779b9, WORD = 0x85ebca6b };
};

template <int LISTS, int WORDS, class Own>
__device__ __forceinline__ Draws draws_of(const multi_tensor::Record<WORDS>& record, const KeyedStepScalars<Own, true>& step_scalars, const multi_tensor::Chunk& chunk) {
    const u64 golden = 0x9e3779b97f4a7c15ull;
    return {mix64(step_scalars.key + (record.address[LISTS] + 1) * golden), record.address[LISTS + 1] + chunk.first_element};
}

template <int LISTS, int WORDS, class Own>
__device__ __forceinline__ Draws draws_of(const multi_tensor::Record<WORDS>&, const KeyedStepScalars<Own, false>&, const multi_tensor::Chunk&) {
    return {0, 0};
}

}  // namespace storage
