// The entries of update rules, from one table.
//
// An entry is named by its rule, its format and where its arguments are: `lion_bf16_m32` takes them
// by value, `lion_bf16_m32_resident` from a table in global memory, `lion_bf16_m32_measured` as
// well and sums up what it changes. A format has the name that `Format` of
// crates/launch/src/format.rs gives it: the parameter's type, then m32 for a master in f32 or r16
// for a remainder, then s16 for state in bf16.
#pragma once

#include "resident.cuh"
#include "storage.cuh"

namespace formats {

using storage::BF16;
using storage::F16;

typedef storage::Plain<float, float, float> f32;
typedef storage::Plain<double, double, double> f64;
typedef storage::Plain<float, BF16, float> f32_s16;
typedef storage::Plain<F16, float, float> f16;
typedef storage::WithMaster<F16, float> f16_m32;
typedef storage::Plain<BF16, float, float> bf16;
typedef storage::WithMaster<BF16, float> bf16_m32;
typedef storage::WithRemainder<float> bf16_r16;
typedef storage::Plain<BF16, BF16, float> bf16_s16;
typedef storage::WithMaster<BF16, BF16> bf16_m32_s16;
typedef storage::WithRemainder<BF16> bf16_r16_s16;

}  // namespace formats

// `ENTRIES(STEM, format)` for every format.
#define EACH_FORMAT(ENTRIES, STEM) \
    ENTRIES(STEM, f32)             \
    ENTRIES(STEM, f64)             \
    ENTRIES(STEM, f32_s16)         \
    ENTRIES(STEM, f16)             \
    ENTRIES(STEM, f16_m32)         \
    ENTRIES(STEM, bf16)            \
    ENTRIES(STEM, bf16_m32)        \
    ENTRIES(STEM, bf16_r16)        \
    ENTRIES(STEM, bf16_s16)        \
    ENTRIES(STEM, bf16_m32_s16)    \
    ENTRIES(STEM, bf16_r16_s16)

// Bounds of an entry: blocks of 512 threads, two of which share a multiprocessor. Where that leaves
// too few registers, a rule writes `#define ALONE_entry ALONE` above its table.
#define ALONE ~, (512, 1)
#define BOUNDS(NAME) SECOND(ALONE_##NAME, (512), ~)
#define SECOND(...) SECOND_OF(__VA_ARGS__)
#define SECOND_OF(FIRST, SECOND, ...) SECOND

// A function of what an entry's arguments are, wherever they are.
#define PLACES(NAME, VALUE_BOUNDS, RESIDENT_BOUNDS, ...)                                  \
    ENTRY(NAME, VALUE_BOUNDS, multi_tensor::Arguments, __VA_ARGS__(arguments.bytes))      \
    ENTRY(NAME##_resident, RESIDENT_BOUNDS, multi_tensor::Resident,                       \
          __VA_ARGS__(multi_tensor::in_memory(arguments)))                                \
    ENTRY(NAME##_measured, (512, 1), multi_tensor::Resident,                              \
          __VA_ARGS__(multi_tensor::measured(arguments)))

// Of a rule without norms: `STEM::run<Format>`.
#define UPDATE_ENTRIES(STEM, FORMAT)                                                      \
    PLACES(STEM##_##FORMAT, BOUNDS(STEM##_##FORMAT), BOUNDS(STEM##_##FORMAT##_resident),  \
           STEM::run<formats::FORMAT>)

// Of a rule with norms, `STEM::Rule<Format>`, which normed.cuh runs in one launch or in two.
#define NORMED_ENTRIES(STEM, FORMAT)                                                      \
    PLACES(STEM##_##FORMAT, (512, 1), (512, 1), normed::waves<STEM::Rule<formats::FORMAT>>) \
    PLACES(STEM##_sums_##FORMAT, BOUNDS(STEM##_sums_##FORMAT),                            \
           BOUNDS(STEM##_sums_##FORMAT##_resident), normed::sums<STEM::Rule<formats::FORMAT>>) \
    PLACES(STEM##_update_##FORMAT, BOUNDS(STEM##_update_##FORMAT),                        \
           BOUNDS(STEM##_update_##FORMAT##_resident), normed::update<STEM::Rule<formats::FORMAT>>)

// What derives the sets of a resident table: `STEM::Sets<T>`.
#define SETS_ENTRIES(STEM)                                                                \
    ENTRY(STEM##_sets_f32_resident, (512), multi_tensor::Resident,                        \
          resident::derive_sets<STEM::Sets<float>>(arguments))                            \
    ENTRY(STEM##_sets_f64_resident, (512), multi_tensor::Resident,                        \
          resident::derive_sets<STEM::Sets<double>>(arguments))
