// Arithmetic of single lanes as the PTX ISA defines it, and handlers that run it for a warp.
#pragma once

#include <cfenv>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "ptx_machine.hpp"

namespace emulator {
namespace ptx {

// The low bytes of a slot. Hosts are little-endian.
template <class T>
inline T get(std::uint64_t slot) {
    T value;
    std::memcpy(&value, &slot, sizeof value);
    return value;
}
template <>
inline bool get<bool>(std::uint64_t slot) {
    return slot != 0;
}

// NaN has one form in f32 results; f64 and others keep what the host gives.
template <class T>
inline std::uint64_t put(T value) {
    std::uint64_t slot = 0;
    std::memcpy(&slot, &value, sizeof value);
    if constexpr (std::is_same<T, float>::value)
        if (value != value) return 0x7fffffffu;
    return slot;
}

// Bytes of an operand of the type; predicates have none.
template <class T>
constexpr std::uint8_t OPERAND_BYTES = sizeof(T);
template <>
inline constexpr std::uint8_t OPERAND_BYTES<bool> = 0;

// Handlers from plain functions: result and sources are typed by the function's signature.
template <auto FUNCTION>
struct Compute;

template <class R, class... S, R (*FUNCTION)(S...)>
struct Compute<FUNCTION> {
    template <std::size_t... K>
    static void rows(Warp& warp, const Instruction& instruction, std::uint32_t lanes, std::index_sequence<K...>) {
        std::uint64_t* const to = warp.row(instruction.at[0]);
        const std::uint64_t* const from[] = {warp.row(instruction.at[1 + K])...};
        each_lane(lanes, [&](unsigned lane) { to[lane] = put<R>(FUNCTION(get<S>(from[K][lane])...)); });
    }
    static void run(Warp& warp, const Instruction& instruction, std::uint32_t lanes) {
        rows(warp, instruction, lanes, std::index_sequence_for<S...>{});
    }
    static constexpr Form form() { return {run, unsigned(sizeof...(S)), {OPERAND_BYTES<R>, OPERAND_BYTES<S>...}}; }
};

// A function under another rounding than to nearest. Its values pass through memory that the
// compiler must write and read there, so that nothing moves across the change of mode.
template <int MODE, auto FUNCTION>
struct Rounded;

template <int MODE, class R, class... S, R (*FUNCTION)(S...)>
struct Rounded<MODE, FUNCTION> {
    static R run(volatile S... from) {
        std::fesetround(MODE);
        volatile R to = FUNCTION(from...);
        std::fesetround(FE_TONEAREST);
        return to;
    }
};

using Table = std::map<std::string, Form>;

void define_integers(Table* table);
void define_floats(Table* table);
void define_conversions(Table* table);

// Calls `define` with a value and the suffix of every integer type that arithmetic has.
template <class Define>
void each_integer(Define define) {
    define(std::uint16_t(), ".u16");
    define(std::int16_t(), ".s16");
    define(std::uint32_t(), ".u32");
    define(std::int32_t(), ".s32");
    define(std::uint64_t(), ".u64");
    define(std::int64_t(), ".s64");
}

}  // namespace ptx
}  // namespace emulator
