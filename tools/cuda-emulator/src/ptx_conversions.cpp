// Conversions between types.

#include "ptx_arithmetic.hpp"

namespace emulator {
namespace ptx {
namespace {

// Bits of the format, so that it is no integer to the templates below.
struct F16 {
    std::uint16_t bits;
};

template <class To, class From> To convert(From value) { return To(value); }

// Without what is behind the point, then into the range of the type. NaN becomes 0, or the highest
// bit alone where one of the types has 64 bits.
template <class To, class From>
To to_integer(From value) {
    if (value != value) return sizeof(From) == 8 || sizeof(To) == 8 ? To(std::uint64_t(1) << (8 * sizeof(To) - 1)) : To(0);
    const From whole = std::trunc(value);
    // 2^bits is a float; the largest integer may be none.
    const From end = std::ldexp(From(1), std::numeric_limits<To>::digits);
    if (whole >= end) return std::numeric_limits<To>::max();
    if (whole < From(std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
    return To(whole);
}

// Exact: a value of 11 bits.
float widen_f16(F16 half) {
    const std::uint32_t sign = std::uint32_t(half.bits & 0x8000u) << 16;
    const std::uint32_t exponent = half.bits >> 10 & 31, mantissa = half.bits & 1023;
    if (exponent == 31) return get<float>(sign | 0x7f800000u | mantissa << 13);
    if (exponent != 0) return get<float>(sign | (exponent + 112) << 23 | mantissa << 13);
    const float magnitude = float(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
}

// Drops the low bits of a magnitude, to nearest, ties to even; a carry runs into the exponent, as
// it should.
std::uint32_t without_low_bits(std::uint64_t bits, unsigned count) {
    const std::uint64_t kept = bits >> count, rest = bits & ((std::uint64_t(1) << count) - 1);
    const std::uint64_t half = std::uint64_t(1) << (count - 1);
    const bool up = rest > half || (rest == half && (kept & 1));
    return std::uint32_t(kept + up);
}

F16 narrow_f16(float value) {
    const std::uint32_t bits = std::uint32_t(put(value));
    const std::uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return {0x7fff};
    if (magnitude == 0x7f800000u) return {std::uint16_t(sign | 0x7c00u)};
    std::uint32_t result;
    if (magnitude >= 0x38800000u) {
        result = without_low_bits(magnitude - 0x38000000u, 13);
    } else {
        // A subnormal: the mantissa with its leading one, in units of 2^-24.
        const int exponent = int(magnitude >> 23);
        const std::uint64_t mantissa = (magnitude & 0x7fffffu) | (exponent != 0 ? 0x800000u : 0u);
        const int drop = 126 - (exponent != 0 ? exponent : 1);
        result = drop > 40 ? 0 : without_low_bits(mantissa, unsigned(drop));
    }
    return {std::uint16_t(sign | (result > 0x7c00u ? 0x7c00u : result))};
}

// Bytes too, which are converted and no more.
template <class Define>
void each_integer_and_byte(Define define) {
    define(std::uint8_t(), ".u8");
    define(std::int8_t(), ".s8");
    each_integer(define);
}

void define_between_integers(Table* table) {
    each_integer_and_byte([&](auto to, const std::string& to_suffix) {
        each_integer_and_byte([&](auto from, const char* suffix) {
            (*table)["cvt" + to_suffix + suffix] = Compute<&convert<decltype(to), decltype(from)>>::form();
        });
    });
}

template <class Float, class Whole>
void define_between(Table* table, const std::string& floating, const std::string& whole) {
    (*table)["cvt.rn" + floating + whole] = Compute<&convert<Float, Whole>>::form();
    (*table)["cvt.rzi" + whole + floating] = Compute<&to_integer<Whole, Float>>::form();
}

template <class Float>
void define_float(Table* table, const std::string& type) {
    each_integer([&](auto whole, const char* suffix) { define_between<Float, decltype(whole)>(table, type, suffix); });
}

}  // namespace

void define_conversions(Table* table) {
    define_between_integers(table);
    define_float<float>(table, ".f32");
    define_float<double>(table, ".f64");
    (*table)["cvt.f64.f32"] = Compute<&convert<double, float>>::form();
    (*table)["cvt.rn.f32.f64"] = Compute<&convert<float, double>>::form();
    (*table)["cvt.rz.f32.f64"] = Compute<&Rounded<FE_TOWARDZERO, &convert<float, double>>::run>::form();
    (*table)["cvt.rm.f32.f64"] = Compute<&Rounded<FE_DOWNWARD, &convert<float, double>>::run>::form();
    (*table)["cvt.rp.f32.f64"] = Compute<&Rounded<FE_UPWARD, &convert<float, double>>::run>::form();
    (*table)["cvt.f32.f16"] = Compute<&widen_f16>::form();
    (*table)["cvt.rn.f16.f32"] = Compute<&narrow_f16>::form();
}

const Form* find_form(const std::string& opcode) {
    static const Table table = [] {
        Table all;
        define_integers(&all);
        define_floats(&all);
        define_conversions(&all);
        return all;
    }();
    const auto found = table.find(opcode);
    return found == table.end() ? nullptr : &found->second;
}

}  // namespace ptx
}  // namespace emulator
