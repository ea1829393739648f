// Gradients of micro-steps, added up between updates.
//
//     accumulate_TYPE    FIRST   sums = grads * factor
//                        ADD     sums = sums + grads * factor
//                        MEAN    grads = sums / factor, rounded once
//
// TYPE is that of the gradients. Sums are of the same type, of f16 and bf16 in f32. The host's
// version is crates/planner/src/run/memory/absorb.rs, operation for operation.
#include "storage.cuh"

namespace accumulate {

using multi_tensor::Lanes;
using multi_tensor::u32;
using multi_tensor::u64;

enum Op : u32 { FIRST, ADD, MEAN };

// crates/cuda/src/accumulate.rs: Arguments.
struct Arguments {
    u64 sums;
    u64 grads;
    u64 numel;
    double factor;
    u32 op;
    u32 reserved;
};

static_assert(sizeof(Arguments) == 40, "crates/cuda: Arguments");

// `WIDTH` consecutive elements from `at` on.
template <u32 OP, int WIDTH, class T, class Sum>
__device__ __forceinline__ void visit(const Arguments& arguments, u64 at) {
    T* const grads = reinterpret_cast<T*>(arguments.grads) + at;
    Sum* const sums = reinterpret_cast<Sum*>(arguments.sums) + at;
    const Sum factor = Sum(arguments.factor);
    if constexpr (OP == MEAN) {
        const Lanes<WIDTH, Sum> all = multi_tensor::load_lanes<WIDTH>(static_cast<const Sum*>(sums));
        Lanes<WIDTH, T> means;
        for (int i = 0; i < WIDTH; i++) {
            storage::narrow<false>(means.lane[i], all.lane[i] / factor, 0);
        }
        multi_tensor::store_lanes(grads, means);
    } else {
        const Lanes<WIDTH, T> own = multi_tensor::load_lanes<WIDTH>(static_cast<const T*>(grads));
        Lanes<WIDTH, Sum> all;
        if constexpr (OP == ADD) {
            all = multi_tensor::load_lanes<WIDTH>(static_cast<const Sum*>(sums));
        }
        for (int i = 0; i < WIDTH; i++) {
            const Sum weighed = storage::widen(own.lane[i]) * factor;
            if constexpr (OP == ADD) {
                all.lane[i] = all.lane[i] + weighed;
            } else {
                all.lane[i] = weighed;
            }
        }
        multi_tensor::store_lanes(sums, all);
    }
}

// What the whole grid does, of any size: sums by 16 bytes where both sides are aligned to that, and
// the rest by elements.
template <u32 OP, class T, class Sum>
__device__ __forceinline__ void visit_all(const Arguments& arguments) {
    constexpr int WIDTH = 16 / sizeof(Sum);
    const u64 thread = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    const u64 threads = u64(gridDim.x) * blockDim.x;
    const u64 all = arguments.sums | arguments.grads;
    const u64 packed = all % 16 == 0 ? arguments.numel / WIDTH * WIDTH : 0;
    ROLLED for (u64 at = thread * WIDTH; at < packed; at += threads * WIDTH) {
        visit<OP, WIDTH, T, Sum>(arguments, at);
    }
    ROLLED for (u64 at = packed + thread; at < arguments.numel; at += threads) {
        visit<OP, 1, T, Sum>(arguments, at);
    }
}

template <class T, class Sum>
__device__ __forceinline__ void run(const Arguments& arguments) {
    switch (arguments.op) {
        case FIRST: return visit_all<FIRST, T, Sum>(arguments);
        case ADD: return visit_all<ADD, T, Sum>(arguments);
        case MEAN: return visit_all<MEAN, T, Sum>(arguments);
    }
}

}  // namespace accumulate

ENTRY(accumulate_f32, (256), accumulate::Arguments, accumulate::run<float, float>(arguments))
ENTRY(accumulate_f64, (256), accumulate::Arguments, accumulate::run<double, double>(arguments))
ENTRY(accumulate_f16, (256), accumulate::Arguments, accumulate::run<storage::F16, float>(arguments))
ENTRY(accumulate_bf16, (256), accumulate::Arguments, accumulate::run<storage::BF16, float>(arguments))
