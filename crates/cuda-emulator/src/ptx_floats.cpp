// Floating-point arithmetic, rounded as the opcode says.
//
// The approximate forms (`.approx`, `.full`) are missing on purpose: the ISA bounds their error and
// leaves their bits to the device, so no kernel of a promise of the same bits may hold them.

#include <cfenv>

#include "ptx_arithmetic.hpp"

namespace emulator {
namespace ptx {
namespace {

template <class T> T add(T a, T b) { return a + b; }
template <class T> T sub(T a, T b) { return a - b; }
template <class T> T mul(T a, T b) { return a * b; }
template <class T> T div(T a, T b) { return a / b; }
template <class T> T fma(T a, T b, T c) { return std::fma(a, b, c); }
template <class T> T rcp(T a) { return T(1) / a; }
template <class T> T sqrt(T a) { return std::sqrt(a); }

// Another rounding than to nearest. The values pass through memory that the compiler must write and
// read there, so that nothing moves across the change of mode.
template <int MODE, class T, T (*FUNCTION)(T)>
T unary_in(T a) {
    volatile T from = a, to;
    std::fesetround(MODE);
    to = FUNCTION(from);
    std::fesetround(FE_TONEAREST);
    return to;
}

template <int MODE, class T, T (*FUNCTION)(T, T)>
T binary_in(T a, T b) {
    volatile T first = a, second = b, to;
    std::fesetround(MODE);
    to = FUNCTION(first, second);
    std::fesetround(FE_TONEAREST);
    return to;
}

template <int MODE, class T>
T fma_in(T a, T b, T c) {
    volatile T first = a, second = b, third = c, to;
    std::fesetround(MODE);
    to = std::fma(T(first), T(second), T(third));
    std::fesetround(FE_TONEAREST);
    return to;
}

// Subnormal sources and results become zeros of their sign.
float flushed(float value) { return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value; }
template <float (*FUNCTION)(float)>
float unary_flushed(float a) { return flushed(FUNCTION(flushed(a))); }
template <float (*FUNCTION)(float, float)>
float binary_flushed(float a, float b) { return flushed(FUNCTION(flushed(a), flushed(b))); }
float fma_flushed(float a, float b, float c) { return flushed(std::fma(flushed(a), flushed(b), flushed(c))); }

// Signs are bits, also of NaN.
std::uint32_t neg32(std::uint32_t a) { return a ^ 0x80000000u; }
std::uint32_t abs32(std::uint32_t a) { return a & 0x7fffffffu; }
std::uint64_t neg64(std::uint64_t a) { return a ^ 0x8000000000000000u; }
std::uint64_t abs64(std::uint64_t a) { return a & 0x7fffffffffffffffu; }

// The other one where one is NaN; -0 lies below +0.
template <class T> T smaller(T a, T b) {
    if (a != a) return b;
    if (b != b) return a;
    return a == b ? (std::signbit(a) ? a : b) : (a < b ? a : b);
}
template <class T> T larger(T a, T b) {
    if (a != a) return b;
    if (b != b) return a;
    return a == b ? (std::signbit(a) ? b : a) : (a > b ? a : b);
}
template <class T> T smaller_nan(T a, T b) { return a != a || b != b ? std::numeric_limits<T>::quiet_NaN() : smaller(a, b); }
template <class T> T larger_nan(T a, T b) { return a != a || b != b ? std::numeric_limits<T>::quiet_NaN() : larger(a, b); }

template <int MODE, class T>
void define_rounded(Table* table, const std::string& suffix) {
    (*table)["add" + suffix] = Compute<&binary_in<MODE, T, &add<T>>>::form();
    (*table)["sub" + suffix] = Compute<&binary_in<MODE, T, &sub<T>>>::form();
    (*table)["mul" + suffix] = Compute<&binary_in<MODE, T, &mul<T>>>::form();
    (*table)["div" + suffix] = Compute<&binary_in<MODE, T, &div<T>>>::form();
    (*table)["rcp" + suffix] = Compute<&unary_in<MODE, T, &rcp<T>>>::form();
    (*table)["sqrt" + suffix] = Compute<&unary_in<MODE, T, &sqrt<T>>>::form();
    (*table)["fma" + suffix] = Compute<&fma_in<MODE, T>>::form();
}

template <class T>
void define_type(Table* table, const std::string& type) {
    const std::string nearest = ".rn" + type;
    (*table)["add" + nearest] = Compute<&add<T>>::form();
    (*table)["sub" + nearest] = Compute<&sub<T>>::form();
    (*table)["mul" + nearest] = Compute<&mul<T>>::form();
    (*table)["div" + nearest] = Compute<&div<T>>::form();
    (*table)["rcp" + nearest] = Compute<&rcp<T>>::form();
    (*table)["sqrt" + nearest] = Compute<&sqrt<T>>::form();
    (*table)["fma" + nearest] = Compute<&fma<T>>::form();
    // Without a rounding the assembler may contract a product and a sum: refused, not guessed.
    define_rounded<FE_TOWARDZERO, T>(table, ".rz" + type);
    define_rounded<FE_DOWNWARD, T>(table, ".rm" + type);
    define_rounded<FE_UPWARD, T>(table, ".rp" + type);
    (*table)["min" + type] = Compute<&smaller<T>>::form();
    (*table)["max" + type] = Compute<&larger<T>>::form();
    (*table)["min.NaN" + type] = Compute<&smaller_nan<T>>::form();
    (*table)["max.NaN" + type] = Compute<&larger_nan<T>>::form();
}

}  // namespace

void define_floats(Table* table) {
    define_type<float>(table, ".f32");
    define_type<double>(table, ".f64");
    (*table)["neg.f32"] = Compute<&neg32>::form();
    (*table)["abs.f32"] = Compute<&abs32>::form();
    (*table)["neg.f64"] = Compute<&neg64>::form();
    (*table)["abs.f64"] = Compute<&abs64>::form();
    (*table)["add.rn.ftz.f32"] = Compute<&binary_flushed<&add<float>>>::form();
    (*table)["sub.rn.ftz.f32"] = Compute<&binary_flushed<&sub<float>>>::form();
    (*table)["mul.rn.ftz.f32"] = Compute<&binary_flushed<&mul<float>>>::form();
    (*table)["div.rn.ftz.f32"] = Compute<&binary_flushed<&div<float>>>::form();
    (*table)["sqrt.rn.ftz.f32"] = Compute<&unary_flushed<&sqrt<float>>>::form();
    (*table)["fma.rn.ftz.f32"] = Compute<&fma_flushed>::form();
}

}  // namespace ptx
}  // namespace emulator
