// Resident tables: the argument table of multi_tensor.cuh in global memory, built once, whose step
// scalars the device derives itself.
//
// Step counts, learning rate and hyper-parameters live beside the table. Before the updates of a
// step, an entry `*_sets_*` counts the step of every group of tensors and derives its step scalars
// in f64 by the operations of the host's `write_step_scalars`, so that the bits are the same. A
// step that the control block skips changes nothing. The host launches with fixed arguments and
// waits for none.
#pragma once

#include "storage.cuh"

namespace resident {

using multi_tensor::u32;
using multi_tensor::u64;

// The learning rate and what else the rule's step scalars are made of, in the rule's own order.
struct Hyper {
    double value[8];
};

// The hyper-parameters of one group of tensors, and its step.
struct Group {
    double lr_scale;
    double weight_decay;
    // Steps taken.
    u64 step;
    // Whether `weight_decay` stands in for the rule's.
    u32 own_decay;
    // 0: left to the rule, 1: scaled by the ratio, 2: plain.
    u32 trust;
};

// Before the groups.
struct Steps {
    Hyper hyper;
    // Start of the random numbers of stochastic rounding.
    u64 seed;
    u32 group_count;
    // Bytes from group to group; beyond the step scalars themselves, the key of the step or its
    // number.
    u32 step_scalar_bytes;
};

static_assert(sizeof(Steps) == 80 && sizeof(Group) == 32, "crates/launch/src/resident.rs: STEPS_BYTES, GROUP_BYTES");

// An unevaluated sum.
struct Pair {
    double high;
    double low;
};

__device__ __forceinline__ Pair multiply(const Pair& a, const Pair& b) {
    const double high = a.high * b.high;
    const double low = dialect::multiply_add(a.high, b.high, -high) + (a.high * b.low + a.low * b.high);
    const double sum = high + low;
    return {sum, low - (sum - high)};
}

// `Pair::power` of crates/elementwise/src/power.rs, operation for operation.
__device__ __forceinline__ Pair power(Pair base, u64 n) {
    Pair product = {1.0, 0.0};
    for (u64 exponent = n; exponent > 0; exponent >>= 1) {
        if (exponent & 1) {
            product = multiply(product, base);
        }
        base = multiply(base, base);
    }
    return product;
}

// `integer_power` there.
__device__ __forceinline__ double integer_power(double x, u64 n) {
    const Pair product = power({x, 0.0}, n);
    return product.high + product.low;
}

__device__ __forceinline__ double decay_of(const Group& own, double of_rule) {
    return own.own_decay != 0 ? own.weight_decay : of_rule;
}

// 1 if the rate is scaled by the trust ratio, 0 if not; crates/launch/src/normed.rs: Excluded.
__device__ __forceinline__ double trust_of(const Group& own, double excluded_is_plain) {
    if (own.trust != 0) {
        return own.trust == 1 ? 1.0 : 0.0;
    }
    return own.own_decay != 0 && own.weight_decay == 0.0 && excluded_is_plain != 0.0 ? 0.0 : 1.0;
}

// crates/launch/src/random_bits.rs.
__device__ __forceinline__ u64 step_key(u64 seed, u64 step) {
    const u64 golden = 0x9e3779b97f4a7c15ull;
    return storage::mix64(storage::mix64(seed + golden) + step * golden);
}

// A thread per group: counts its step and writes its step scalars.
template <class Deriver>
__device__ __forceinline__ void derive_step_scalars(const multi_tensor::Resident& resident) {
    typedef typename Deriver::StepScalars StepScalars;
    const multi_tensor::Header header = dialect::load(reinterpret_cast<const multi_tensor::Header*>(resident.table));
    if (multi_tensor::is_skipped(header)) {
        return;
    }
    const Steps* const steps = reinterpret_cast<const Steps*>(resident.steps);
    const u32 index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= dialect::load(&steps->group_count)) {
        return;
    }
    Group* const place = reinterpret_cast<Group*>(resident.steps + sizeof(Steps)) + index;
    Group own = dialect::load(static_cast<const Group*>(place));
    own.step = own.step + 1;
    dialect::store(&place->step, own.step);
    const u32 step_scalar_bytes = dialect::load(&steps->step_scalar_bytes);
    const u64 step_scalars_at = resident.table + u64(multi_tensor::Table<typename Deriver::Scalars, StepScalars, 1>::STEP_SCALARS_AT);
    const u64 at = step_scalars_at + u64(index) * step_scalar_bytes;
    if (step_scalar_bytes > sizeof(StepScalars)) {
        // With state in codes, the number of the dither.
        const bool is_stochastic = (header.flags & storage::FLAG_STOCHASTIC) != 0;
        dialect::store(reinterpret_cast<u64*>(at + sizeof(StepScalars)), is_stochastic ? step_key(dialect::load(&steps->seed), own.step) : own.step);
    }
    dialect::store(reinterpret_cast<StepScalars*>(at), Deriver::derive(dialect::load(&steps->hyper), own));
}

}  // namespace resident
