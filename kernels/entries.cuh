// The entries of update rules, from one table.
//
// An entry is named by its rule and its format, `lion_bf16_m32`, and takes its table by value or
// from global memory. A format has the name that `entry!` of crates/launch/src/precision.rs gives
// it: the parameter's type, then m32 for a master in f32, r16 or r8 for a remainder, then s16 for
// state in bf16 or s8 for state in codes.
#pragma once

#include "resident.cuh"
#include "storage.cuh"

namespace formats {

using storage::BF16;
using storage::Code;
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
typedef storage::Plain<float, Code, float> f32_s8;
typedef storage::Plain<BF16, Code, float> bf16_s8;
typedef storage::WithMaster<BF16, Code> bf16_m32_s8;
typedef storage::WithRemainder<Code> bf16_r16_s8;
typedef storage::WithRemainder8<Code> bf16_r8_s8;

}  // namespace formats

// `ENTRIES(STEM, format)` for every format with state of floating point.
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

// And for every format with state in codes, of a rule whose state has codings.
#define EACH_CODED_FORMAT(ENTRIES, STEM) \
    ENTRIES(STEM, f32_s8)                \
    ENTRIES(STEM, bf16_s8)               \
    ENTRIES(STEM, bf16_m32_s8)           \
    ENTRIES(STEM, bf16_r16_s8)           \
    ENTRIES(STEM, bf16_r8_s8)

// Bounds of an entry: blocks of 512 threads, two of which share a multiprocessor. Where that leaves
// too few registers, a rule writes `#define ALONE_entry ALONE` above its table.
#define ALONE ~, (512, 1)
#define BOUNDS(NAME) SECOND(ALONE_##NAME, (512), ~)
#define SECOND(...) SECOND_OF(__VA_ARGS__)
#define SECOND_OF(FIRST, SECOND, ...) SECOND

// A function of an entry's arguments.
#define TABLE_ENTRY(NAME, ...) ENTRY(NAME, BOUNDS(NAME), multi_tensor::Arguments, __VA_ARGS__(arguments.bytes))

// Of a rule without norms: `STEM::run<Format>`.
#define UPDATE_ENTRIES(STEM, FORMAT) TABLE_ENTRY(STEM##_##FORMAT, STEM::run<formats::FORMAT>)

// Of a rule with norms, `STEM::Rule<Format>`: all sums, then all updates; normed.cuh.
#define NORMED_ENTRIES(STEM, FORMAT)                                                      \
    TABLE_ENTRY(STEM##_sums_##FORMAT, normed::sums<STEM::Rule<formats::FORMAT>>)          \
    TABLE_ENTRY(STEM##_update_##FORMAT, normed::update<STEM::Rule<formats::FORMAT>>)

// What derives the step scalars of a resident table: `STEM::Deriver<T>`.
#define STEP_SCALARS_ENTRIES(STEM)                                                        \
    ENTRY(STEM##_sets_f32, (512), multi_tensor::Resident,                                 \
          resident::derive_step_scalars<STEM::Deriver<float>>(arguments))                 \
    ENTRY(STEM##_sets_f64, (512), multi_tensor::Resident,                                 \
          resident::derive_step_scalars<STEM::Deriver<double>>(arguments))
