// State in codes of 8 bits: 32 consecutive elements of a tensor, counted from its first, are a
// group and share an f32, their unit.
//
//     signed      value = +-D 2^-19 unit   unit = M (2^19 / 252)   k = min(252 / M, largest f32)
//                 t = |value| k            c = round(min(t, t / 2 + 32, t / 4 + 64))
//     root        value = (code unit)^2    and sqrt(value) is coded as positive values are
//     positive    value = code unit        unit = M (1 / 255)      k = min(255 / M, largest f32)
//                 code = round(hold(value k + dither, 1, 255))
//
// D(c) = max(c, 2 c - 64, 4 c - 256) of the lower 7 bits c, which are a float of two and five bits;
// M is the group's largest magnitude, compared as an integer, so that a NaN is largest; of a NaN k
// is 0. Every operation is rounded once: the bits are those of crates/simd/src/codec.rs and
// crates/elementwise/src/coded.
//
// A group belongs to neighbouring threads of one warp, each of which has as many of its elements,
// and all 32 threads take part in the largest. The first alone touches the unit.
#pragma once

#include "storage.cuh"

namespace codes {

using multi_tensor::u32;
using multi_tensor::u64;

enum Shape : u32 { GROUP = 32, WARP = 32 };

// crates/elementwise/src/coded/coding.rs.
enum Coding : u32 { SIGNED, ROOT, POSITIVE };

// The codings of a rule's lists of state, in their order.
template <u32 FIRST, u32 SECOND = SIGNED, u32 THIRD = SIGNED>
struct Codings {
    enum : u32 { VALUE = FIRST | SECOND << 2 | THIRD << 4 };
};

__device__ __forceinline__ u32 coding_of(u32 codings, int list) {
    return codings >> (2 * list) & 3;
}

// The value of code `index` of a word.
__device__ __forceinline__ float decode(u32 coding, u32 word, int index, float unit) {
    if (coding == SIGNED) {
        // The sign, and seven bits that are the end of the exponent and the beginning of the
        // mantissa: an f32 of exponent EE - 127, scaled exactly.
        const u32 bits = u32(int(word << (24 - 8 * index)) >> 6) & 0x81fc0000;
        return dialect::float_of(bits) * 5.192296858534828e33f * unit;
    }
    // 2^23 and the code in its last places.
    const float integer = dialect::float_of(dialect::byte_below(word, index, 0x4b000000)) - 8388608.0f;
    const float value = integer * unit;
    return coding == ROOT ? value * value : value;
}

// The code of a value in a group with this factor, in the lowest byte; the others mean nothing.
__device__ __forceinline__ u32 encode(u32 coding, float value, float factor, float dither) {
    if (coding == SIGNED) {
        const float t = dialect::float_of(dialect::bits_of(value) & 0x7fffffff) * factor;
        const float least = dialect::smaller(t, dialect::smaller(t * 0.5f + 32.0f, t * 0.25f + 64.0f));
        const u32 magnitude = dialect::bits_of(least + 8388608.0f);
        // Bit 7 of magnitude + 127 is there for all magnitudes but 0, which has no sign.
        const u32 sign = dialect::bits_of(value) >> 24 & (magnitude + 0x7f) & 0x80;
        return t != t ? 0x80 : magnitude | sign;
    }
    const float held = dialect::smaller(dialect::larger(value * factor + dither, 1.0f), 255.0f);
    return dialect::bits_of(held + 8388608.0f);
}

// What values of a group are multiplied with before they are rounded.
__device__ __forceinline__ float factor_of(u32 coding, float largest) {
    const float factor = dialect::smaller((coding == SIGNED ? 252.0f : 255.0f) / largest, 3.40282347e38f);
    return largest != largest ? 0.0f : factor;
}

__device__ __forceinline__ float unit_of(u32 coding, float largest) {
    return largest * (coding == SIGNED ? float(524288.0 / 252.0) : float(1.0 / 255.0));
}

// What is added to the value of a place before it is rounded; `Dither` of
// crates/elementwise/src/coded/coding.rs.
__device__ __forceinline__ float dither_of(u32 step, u32 place) {
    const u32 h = step * 0x9e3779b9u + place * 0x85ebca6bu;
    // (2 (h >> 17) + 1) 2^-16 - 1/2, exactly: as the mantissa of a value below 2.
    return dialect::float_of(0x3f800080 | (h >> 9 & 0x7fff00)) - 1.5f;
}

// Where codes and units of an element 0 lie, which begins a group.
template <int STATES>
struct Lists {
    u64 codes[STATES];
    u64 units[STATES];
};

// `WIDTH` neighbouring elements of a group in all lists of state: a thread's share of it.
template <int WIDTH, int STATES, u32 CODINGS>
struct Share {
    enum : int { THREADS = int(GROUP) / WIDTH, WORDS = WIDTH < 4 ? 1 : WIDTH / 4 };

    u32 word[STATES][WORDS];
    float unit[STATES];
    // What is to be coded: values, or their roots.
    float value[STATES][WIDTH];

    __device__ __forceinline__ static bool is_first() {
        return threadIdx.x % THREADS == 0;
    }

    // Of a thread that has elements.
    template <class Index>
    __device__ __forceinline__ void load(const Lists<STATES>& lists, Index at) {
        for (int list = 0; list < STATES; list++) {
            const u64 codes = lists.codes[list] + at;
            if constexpr (WIDTH == 1) {
                word[list][0] = dialect::load(reinterpret_cast<const unsigned char*>(codes));
            } else {
                const dialect::Pack<u32, WORDS> pack = dialect::load_lanes<WORDS>(reinterpret_cast<const u32*>(codes));
                for (int i = 0; i < WORDS; i++) {
                    word[list][i] = pack.lane[i];
                }
            }
        }
        if (is_first()) {
            for (int list = 0; list < STATES; list++) {
                unit[list] = dialect::load(reinterpret_cast<const float*>(lists.units[list]) + at / GROUP);
            }
        }
    }

    // All threads of the warp get the units of their groups.
    __device__ __forceinline__ void share_units() {
        for (int list = 0; list < STATES; list++) {
            unit[list] = dialect::shuffle_first<THREADS>(unit[list]);
        }
    }

    __device__ __forceinline__ void widen(int lane, float* state) const {
        for (int list = 0; list < STATES; list++) {
            state[list] = decode(coding_of(CODINGS, list), word[list][lane / 4], lane % 4, unit[list]);
        }
    }

    __device__ __forceinline__ void hold(int lane, const float* state) {
        for (int list = 0; list < STATES; list++) {
            value[list][lane] = coding_of(CODINGS, list) == ROOT ? dialect::square_root(state[list]) : state[list];
        }
    }

    // New units and codes of what is held. All threads of the warp take part; those without
    // elements have zeros.
    __device__ __forceinline__ void narrow(bool is_live, u32 step) {
        const u32 place = threadIdx.x % THREADS * WIDTH;
        for (int list = 0; list < STATES; list++) {
            const u32 coding = coding_of(CODINGS, list);
            u32 largest = 0;
            for (int lane = 0; lane < WIDTH; lane++) {
                const u32 magnitude = dialect::bits_of(value[list][lane]) & 0x7fffffff;
                largest = is_live && magnitude > largest ? magnitude : largest;
            }
            for (int half = THREADS / 2; half > 0; half /= 2) {
                const u32 other = dialect::shuffle_xor(largest, half);
                largest = other > largest ? other : largest;
            }
            unit[list] = unit_of(coding, dialect::float_of(largest));
            const float factor = factor_of(coding, dialect::float_of(largest));
            u32 code[WIDTH];
            for (int lane = 0; lane < WIDTH; lane++) {
                const float dither = coding == SIGNED ? 0.0f : dither_of(step, place + lane);
                code[lane] = encode(coding, value[list][lane], factor, dither);
            }
            for (int i = 0; i < WORDS; i++) {
                if constexpr (WIDTH == 1) {
                    word[list][0] = code[0];
                } else {
                    word[list][i] = dialect::bytes_of<0>(code[4 * i], code[4 * i + 1], code[4 * i + 2], code[4 * i + 3]);
                }
            }
        }
    }

    // Of a thread that has elements.
    template <class Index>
    __device__ __forceinline__ void store(const Lists<STATES>& lists, Index at) const {
        for (int list = 0; list < STATES; list++) {
            const u64 codes = lists.codes[list] + at;
            if constexpr (WIDTH == 1) {
                dialect::store(reinterpret_cast<unsigned char*>(codes), static_cast<unsigned char>(word[list][0]));
            } else {
                dialect::Pack<u32, WORDS> pack;
                for (int i = 0; i < WORDS; i++) {
                    pack.lane[i] = word[list][i];
                }
                dialect::store_lanes<WORDS>(reinterpret_cast<u32*>(codes), pack);
            }
        }
        if (is_first()) {
            for (int list = 0; list < STATES; list++) {
                dialect::store(reinterpret_cast<float*>(lists.units[list]) + at / GROUP, unit[list]);
            }
        }
    }
};

}  // namespace codes
