// The reduction across ranks: element by element, in rank order, whatever the ranks, the lengths
// and the device.
//
//     sum      ((x0 + x1) + x2) + ...              prod     ((x0 * x1) * x2) * ...
//     average  sum / ranks                  max, min NaN if any is NaN; of equals the lowest rank's
//
// In the element's own type; f16 and bf16 in f32, rounded once at the end. Integers wrap around.
// The host's version is crates/collective/src/rank_order.rs, operation for operation. A rank's own
// elements are read where they lie, those of the others at a fixed distance from rank to rank; the
// result may lie upon the own elements or another rank's, since an element is read before it is
// written.
#include "storage.cuh"

namespace rank_order {

using multi_tensor::u32;
using multi_tensor::u64;

typedef unsigned char u8;
typedef unsigned short u16;
typedef long long i64;

struct U16 {
    u16 bits;
};

enum Op : u32 { SUM, AVERAGE, PROD, MAX, MIN };

// Ranks whose accesses a thread starts before it waits for the first: 64 bytes, or 32 where a pack
// has many elements, which take a register each once they are apart.
template <class T>
struct InFlight {
    enum : u32 { RANKS = sizeof(T) < 4 ? 2 : 4 };
};

// crates/collective-nccl/src/kernel.rs: Arguments.
struct Arguments {
    u64 own;
    u64 received;
    u64 stride_bytes;
    u64 result;
    u64 numel;
    u32 ranks;
    u32 own_rank;
    u32 op;
    u32 reserved;
};

static_assert(sizeof(Arguments) == 56, "crates/collective-nccl: Arguments");

using storage::widen;
__device__ __forceinline__ int widen(int value) { return value; }
__device__ __forceinline__ i64 widen(i64 value) { return value; }
__device__ __forceinline__ u16 widen(U16 value) { return value.bits; }
__device__ __forceinline__ u8 widen(u8 value) { return value; }

template <class T>
__device__ __forceinline__ void narrow(T& to, T value) {
    to = value;
}
__device__ __forceinline__ void narrow(storage::F16& to, float value) { storage::narrow<false>(to, value, 0); }
__device__ __forceinline__ void narrow(storage::HeldBF16& to, float value) { storage::narrow<false>(to, value, 0); }
__device__ __forceinline__ void narrow(U16& to, u16 value) { to.bits = value; }

// Bytes travel by four: there is no access of sixteen of them.
template <int WIDTH, class T>
__device__ __forceinline__ multi_tensor::Lanes<WIDTH, T> load(const T* address) {
    if constexpr (sizeof(T) > 1 || WIDTH == 1) {
        return multi_tensor::load_lanes<WIDTH>(address);
    } else {
        const auto pack = dialect::load_lanes<WIDTH / 4>(reinterpret_cast<const u32*>(address));
        multi_tensor::Lanes<WIDTH, T> lanes;
        for (int i = 0; i < WIDTH; i++) {
            lanes.lane[i] = T(pack.lane[i / 4] >> 8 * (i % 4));
        }
        return lanes;
    }
}

template <int WIDTH, class T>
__device__ __forceinline__ void store(T* address, const multi_tensor::Lanes<WIDTH, T>& lanes) {
    if constexpr (sizeof(T) > 1 || WIDTH == 1) {
        multi_tensor::store_lanes(address, lanes);
    } else {
        dialect::Pack<u32, WIDTH / 4> pack = {};
        for (int i = 0; i < WIDTH; i++) {
            pack.lane[i / 4] |= u32(lanes.lane[i]) << 8 * (i % 4);
        }
        dialect::store_lanes<WIDTH / 4>(reinterpret_cast<u32*>(address), pack);
    }
}

// Arithmetic without signs, where wrapping around is what it does.
template <class T>
struct Unsigned {
    typedef T Type;
};
template <>
struct Unsigned<int> {
    typedef u32 Type;
};
template <>
struct Unsigned<i64> {
    typedef u64 Type;
};
// In their promoted type, 65,535 times itself is beyond an int.
template <>
struct Unsigned<u16> {
    typedef u32 Type;
};

template <u32 OP, class Wide>
__device__ __forceinline__ Wide combined(Wide x, Wide y) {
    typedef typename Unsigned<Wide>::Type Plain;
    if constexpr (OP == SUM || OP == AVERAGE) {
        return Wide(Plain(x) + Plain(y));
    } else if constexpr (OP == PROD) {
        return Wide(Plain(x) * Plain(y));
    } else if constexpr (OP == MAX) {
        return y > x || y != y ? y : x;
    } else {
        return x > y || y != y ? y : x;
    }
}

template <class T>
__device__ __forceinline__ const T* input(const Arguments& arguments, u32 rank) {
    const u64 other = arguments.received + rank * arguments.stride_bytes;
    return reinterpret_cast<const T*>(rank == arguments.own_rank ? arguments.own : other);
}

// `WIDTH` consecutive elements from `at` on.
template <u32 OP, int WIDTH, class T>
__device__ __forceinline__ void visit(const Arguments& arguments, u64 at) {
    typedef decltype(widen(T())) Wide;
    multi_tensor::Lanes<WIDTH, T> lanes = load<WIDTH>(input<T>(arguments, 0) + at);
    Wide result[WIDTH];
    for (int i = 0; i < WIDTH; i++) {
        result[i] = widen(lanes.lane[i]);
    }
    constexpr u32 RANKS = InFlight<T>::RANKS;
#pragma unroll 1
    for (u32 first = 1; first < arguments.ranks; first += RANKS) {
        multi_tensor::Lanes<WIDTH, T> next[RANKS];
        for (u32 ahead = 0; ahead < RANKS; ahead++) {
            if (first + ahead < arguments.ranks) {
                next[ahead] = load<WIDTH>(input<T>(arguments, first + ahead) + at);
            }
        }
        for (u32 ahead = 0; ahead < RANKS; ahead++) {
            if (first + ahead < arguments.ranks) {
                for (int i = 0; i < WIDTH; i++) {
                    result[i] = combined<OP>(result[i], widen(next[ahead].lane[i]));
                }
            }
        }
    }
    for (int i = 0; i < WIDTH; i++) {
        if constexpr (OP == AVERAGE) {
            result[i] = result[i] / Wide(arguments.ranks);
        }
        narrow(lanes.lane[i], result[i]);
    }
    store(reinterpret_cast<T*>(arguments.result) + at, lanes);
}

// What the whole grid does, of any size: packs of 16 bytes where all parts are aligned to that, and
// the rest by elements.
template <u32 OP, class T>
__device__ __forceinline__ void reduce_by(const Arguments& arguments) {
    constexpr int WIDTH = 16 / sizeof(T);
    const u64 thread = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    const u64 threads = u64(gridDim.x) * blockDim.x;
    const u64 all = arguments.own | arguments.received | arguments.stride_bytes | arguments.result;
    const u64 packed = all % 16 == 0 ? arguments.numel / WIDTH * WIDTH : 0;
    for (u64 at = thread * WIDTH; at < packed; at += threads * WIDTH) {
        visit<OP, WIDTH, T>(arguments, at);
    }
    for (u64 at = packed + thread; at < arguments.numel; at += threads) {
        visit<OP, 1, T>(arguments, at);
    }
}

template <class T>
__device__ __forceinline__ void reduce(const Arguments& arguments) {
    switch (arguments.op) {
        case SUM: return reduce_by<SUM, T>(arguments);
        case PROD: return reduce_by<PROD, T>(arguments);
        case MAX: return reduce_by<MAX, T>(arguments);
        case MIN: return reduce_by<MIN, T>(arguments);
    }
}

// Of floating-point types, which have an average.
template <class T>
__device__ __forceinline__ void reduce_floats(const Arguments& arguments) {
    if (arguments.op == AVERAGE) {
        return reduce_by<AVERAGE, T>(arguments);
    }
    reduce<T>(arguments);
}

}  // namespace rank_order

ENTRY(rank_order_f32, (512, 1), rank_order::Arguments, rank_order::reduce_floats<float>(arguments))
ENTRY(rank_order_f64, (512, 1), rank_order::Arguments, rank_order::reduce_floats<double>(arguments))
ENTRY(rank_order_f16, (512, 1), rank_order::Arguments, rank_order::reduce_floats<storage::F16>(arguments))
ENTRY(rank_order_bf16, (512, 1), rank_order::Arguments, rank_order::reduce_floats<storage::BF16>(arguments))
ENTRY(rank_order_i32, (512, 1), rank_order::Arguments, rank_order::reduce<int>(arguments))
ENTRY(rank_order_i64, (512, 1), rank_order::Arguments, rank_order::reduce<rank_order::i64>(arguments))
ENTRY(rank_order_u16, (512, 1), rank_order::Arguments, rank_order::reduce<rank_order::U16>(arguments))
ENTRY(rank_order_u8, (512, 1), rank_order::Arguments, rank_order::reduce<rank_order::u8>(arguments))
