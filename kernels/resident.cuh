// Resident tables: the argument table of multi_tensor.cuh in global memory, built once, whose sets
// the device derives itself.
//
// Step counts, learning rate and hyper-parameters live beside the table. Before the updates of a
// step, an entry `*_sets_*` counts the step of every class of tensors and derives its set
// in f64 by the operations of the host's `write_set`, so that the bits are the same. A step that
// the control block skips changes nothing. The host launches with fixed arguments and waits for
// none.
#pragma once

#include "storage.cuh"

namespace resident {

using multi_tensor::u32;
using multi_tensor::u64;

// The learning rate and what else the rule's sets are made of, in the rule's own order.
struct Hyper {
    double value[8];
};

// The hyper-parameters of one class of tensors, and its step.
struct Class {
    double lr_scale;
    double weight_decay;
    // Steps taken.
    u64 step;
    // Whether `weight_decay` stands in for the rule's.
    u32 own_decay;
    // 0: left to the rule, 1: scaled by the ratio, 2: plain.
    u32 trust;
};

// Before the classes.
struct Steps {
    Hyper hyper;
    // Start of the random numbers of stochastic rounding.
    u64 seed;
    u32 class_count;
    // Bytes from set to set; beyond the set itself, the key of the step.
    u32 set_bytes;
};

static_assert(sizeof(Steps) == 80 && sizeof(Class) == 32, "crates/launch/src/resident.rs: STEPS_BYTES, CLASS_BYTES");

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

// crates/elementwise/src/power.rs, operation for operation.
__device__ __forceinline__ double integer_power(double x, u64 n) {
    Pair base = {x, 0.0};
    Pair product = {1.0, 0.0};
    for (u64 exponent = n; exponent > 0; exponent >>= 1) {
        if (exponent & 1) {
            product = multiply(product, base);
        }
        base = multiply(base, base);
    }
    return product.high + product.low;
}

__device__ __forceinline__ double decay_of(const Class& own, double of_rule) {
    return own.own_decay != 0 ? own.weight_decay : of_rule;
}

// 1 if the rate is scaled by the trust ratio, 0 if not; crates/launch/src/normed.rs: Excluded.
__device__ __forceinline__ double trust_of(const Class& own, double excluded_is_plain) {
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

// A thread per class: counts its step and writes its set.
template <class Sets>
__device__ __forceinline__ void derive_sets(const multi_tensor::Resident& resident) {
    typedef typename Sets::Set Set;
    const multi_tensor::Header header = dialect::load(reinterpret_cast<const multi_tensor::Header*>(resident.table));
    if (multi_tensor::is_skipped(header)) {
        return;
    }
    const Steps* const steps = reinterpret_cast<const Steps*>(resident.steps);
    const u32 index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= dialect::load(&steps->class_count)) {
        return;
    }
    Class* const place = reinterpret_cast<Class*>(resident.steps + sizeof(Steps)) + index;
    Class own = dialect::load(static_cast<const Class*>(place));
    own.step = own.step + 1;
    dialect::store(&place->step, own.step);
    const u32 set_bytes = dialect::load(&steps->set_bytes);
    const u64 sets_at = resident.table + u64(multi_tensor::Table<typename Sets::Scalars, Set, 1>::SETS_AT);
    const u64 at = sets_at + u64(index) * set_bytes;
    dialect::store(reinterpret_cast<Set*>(at), Sets::derive(dialect::load(&steps->hyper), own));
    if (set_bytes > sizeof(Set)) {
        dialect::store(reinterpret_cast<u64*>(at + sizeof(Set)), step_key(dialect::load(&steps->seed), own.step));
    }
}

}  // namespace resident
