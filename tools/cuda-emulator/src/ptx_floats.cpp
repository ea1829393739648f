// Floating-point arithmetic, rounded as the opcode says.
//
// The approximate forms (`.approx`, `.full`) are missing on purpose: the ISA bounds their error and
// leaves their bits to the device, so no kernel of a promise of the same bits may hold them.

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

template <int MODE, class T>
void define_rounded(Table* table, const std::string& suffix) {
    (*table)["add" + suffix] = Compute<&Rounded<MODE, &add<T>>::run>::form();
    (*table)["sub" + suffix] = Compute<&Rounded<MODE, &sub<T>>::run>::form();
    (*table)["mul" + suffix] = Compute<&Rounded<MODE, &mul<T>>::run>::form();
    (*table)["div" + suffix] = Compute<&Rounded<MODE, &div<T>>::run>::form();
    (*table)["rcp" + suffix] = Compute<&Rounded<MODE, &rcp<T>>::run>::form();
    (*table)["sqrt" + suffix] = Compute<&Rounded<MODE, &sqrt<T>>::run>::form();
    (*table)["fma" + suffix] = Compute<&Rounded<MODE, &fma<T>>::run>::form();
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
}

}  // namespace

void define_floats(Table* table) {
    define_type<float>(table, ".f32");
    define_type<double>(table, ".f64");
    (*table)["neg.f32"] = Compute<&neg32>::form();
    (*table)["abs.f32"] = Compute<&abs32>::form();
    (*table)["neg.f64"] = Compute<&neg64>::form();
    (*table)["abs.f64"] = Compute<&abs64>::form();
}

}  // namespace ptx
}  // namespace emulator
