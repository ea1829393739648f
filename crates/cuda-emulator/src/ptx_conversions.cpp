// Conversions between types.

#include <cfenv>

#include "ptx_arithmetic.hpp"

namespace emulator {
namespace ptx {
namespace {

// Bits of the 16-bit formats, so that they are no integers to the templates below.
struct F16 {
    std::uint16_t bits;
};
struct BF16 {
    std::uint16_t bits;
};

template <class To, class From> To convert(From value) { return To(value); }

// Rounded to an integer as MODE says, then into the range of the type. NaN becomes 0, or the
// highest bit alone where one of the types has 64 bits.
template <int MODE, class To, class From>
To to_integer(From value) {
    if (value != value) return sizeof(From) == 8 || sizeof(To) == 8 ? To(std::uint64_t(1) << (8 * sizeof(To) - 1)) : To(0);
    From whole = MODE == FE_TOWARDZERO ? std::trunc(value) : MODE == FE_DOWNWARD ? std::floor(value) : std::ceil(value);
    if (MODE == FE_TONEAREST) whole = std::nearbyint(value);
    // 2^bits is a float; the largest integer may be none.
    const From end = std::ldexp(From(1), std::numeric_limits<To>::digits);
    if (whole >= end) return std::numeric_limits<To>::max();
    if (whole < From(std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
    return To(whole);
}

template <int MODE, class To, class From>
To convert_in(From value) {
    volatile From from = value;
    volatile To to;
    std::fesetround(MODE);
    to = To(From(from));
    std::fesetround(FE_TONEAREST);
    return to;
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

float widen_bf16(BF16 brain) { return get<float>(std::uint32_t(brain.bits) << 16); }

enum class Rounding { Nearest, Zero };

// Drops the low bits of a magnitude; a carry runs into the exponent, as it should.
template <Rounding MODE>
std::uint32_t without_low_bits(std::uint64_t bits, unsigned count) {
    const std::uint64_t kept = bits >> count, rest = bits & ((std::uint64_t(1) << count) - 1);
    const std::uint64_t half = std::uint64_t(1) << (count - 1);
    const bool up = MODE == Rounding::Nearest && (rest > half || (rest == half && (kept & 1)));
    return std::uint32_t(kept + up);
}

template <Rounding MODE>
F16 narrow_f16(float value) {
    const std::uint32_t bits = std::uint32_t(put(value));
    const std::uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return {0x7fff};
    if (magnitude == 0x7f800000u) return {std::uint16_t(sign | 0x7c00u)};
    std::uint32_t result;
    if (magnitude >= 0x38800000u) {
        result = without_low_bits<MODE>(magnitude - 0x38000000u, 13);
    } else {
        // A subnormal: the mantissa with its leading one, in units of 2^-24.
        const int exponent = int(magnitude >> 23);
        const std::uint64_t mantissa = (magnitude & 0x7fffffu) | (exponent != 0 ? 0x800000u : 0u);
        const int drop = 126 - (exponent != 0 ? exponent : 1);
        result = drop > 40 ? 0 : without_low_bits<MODE>(mantissa, unsigned(drop));
    }
    const std::uint32_t most = MODE == Rounding::Nearest ? 0x7c00u : 0x7bffu;
    return {std::uint16_t(sign | (result > most ? most : result))};
}

template <Rounding MODE>
BF16 narrow_bf16(float value) {
    const std::uint32_t bits = std::uint32_t(put(value));
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
    return {std::uint16_t(without_low_bits<MODE>(bits, 16))};
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
    (*table)["cvt.rz" + floating + whole] = Compute<&convert_in<FE_TOWARDZERO, Float, Whole>>::form();
    (*table)["cvt.rni" + whole + floating] = Compute<&to_integer<FE_TONEAREST, Whole, Float>>::form();
    (*table)["cvt.rzi" + whole + floating] = Compute<&to_integer<FE_TOWARDZERO, Whole, Float>>::form();
    (*table)["cvt.rmi" + whole + floating] = Compute<&to_integer<FE_DOWNWARD, Whole, Float>>::form();
    (*table)["cvt.rpi" + whole + floating] = Compute<&to_integer<FE_UPWARD, Whole, Float>>::form();
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
    (*table)["cvt.rz.f32.f64"] = Compute<&convert_in<FE_TOWARDZERO, float, double>>::form();
    (*table)["cvt.rm.f32.f64"] = Compute<&convert_in<FE_DOWNWARD, float, double>>::form();
    (*table)["cvt.rp.f32.f64"] = Compute<&convert_in<FE_UPWARD, float, double>>::form();
    (*table)["cvt.f32.f16"] = Compute<&widen_f16>::form();
    (*table)["cvt.rn.f16.f32"] = Compute<&narrow_f16<Rounding::Nearest>>::form();
    (*table)["cvt.rz.f16.f32"] = Compute<&narrow_f16<Rounding::Zero>>::form();
    (*table)["cvt.f32.bf16"] = Compute<&widen_bf16>::form();
    (*table)["cvt.rn.bf16.f32"] = Compute<&narrow_bf16<Rounding::Nearest>>::form();
    (*table)["cvt.rz.bf16.f32"] = Compute<&narrow_bf16<Rounding::Zero>>::form();
}

const std::map<std::string, Form>& forms() {
    static const Table table = [] {
        Table all;
        define_integers(&all);
        define_floats(&all);
        define_conversions(&all);
        return all;
    }();
    return table;
}

const Form* find_form(const std::string& opcode) {
    const auto found = forms().find(opcode);
    return found == forms().end() ? nullptr : &found->second;
}

Handler copy_handler() { return find_form("mov.b64")->run; }

}  // namespace ptx
}  // namespace emulator
