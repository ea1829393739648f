// Integer arithmetic, bits, predicates, comparisons and selections.

#include "ptx_arithmetic.hpp"

namespace emulator {
namespace ptx {
namespace {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using s16 = std::int16_t;
using s32 = std::int32_t;
using s64 = std::int64_t;
__extension__ typedef unsigned __int128 u128;
__extension__ typedef __int128 s128;

template <class T>
struct Wider;
template <> struct Wider<u16> { using type = u32; };
template <> struct Wider<s16> { using type = s32; };
template <> struct Wider<u32> { using type = u64; };
template <> struct Wider<s32> { using type = s64; };
template <> struct Wider<u64> { using type = u128; };
template <> struct Wider<s64> { using type = s128; };
template <class T>
using Wide = typename Wider<T>::type;
template <class T>
constexpr u32 BITS = 8 * sizeof(T);

// Sums and products wrap: they are formed without sign, in a type that is never promoted to one
// with a sign.
template <class T> T add(T a, T b) { return T(u64(a) + u64(b)); }
template <class T> T sub(T a, T b) { return T(u64(a) - u64(b)); }
template <class T> T mul_lo(T a, T b) { return T(u64(a) * u64(b)); }
template <class T> T mul_hi(T a, T b) { return T(Wide<T>(Wide<T>(a) * Wide<T>(b)) >> BITS<T>); }
template <class T> Wide<T> mul_wide(T a, T b) { return Wide<T>(a) * Wide<T>(b); }
template <class T> T mad_lo(T a, T b, T c) { return T(u64(a) * u64(b) + u64(c)); }
template <class T> Wide<T> mad_wide(T a, T b, Wide<T> c) { return Wide<T>(u64(Wide<T>(a) * Wide<T>(b)) + u64(c)); }
// Division by zero is left open by the ISA; all bits are set, as devices do it.
template <class T> T div(T a, T b) {
    if (b == 0) return T(~T(0));
    return std::is_signed<T>::value && b == T(-1) ? sub<T>(0, a) : T(a / b);
}
template <class T> T rem(T a, T b) {
    if (b == 0) return a;
    return std::is_signed<T>::value && b == T(-1) ? T(0) : T(a % b);
}
template <class T> T smaller(T a, T b) { return a < b ? a : b; }
template <class T> T larger(T a, T b) { return a > b ? a : b; }
template <class T> T neg(T a) { return sub<T>(0, a); }
template <class T> T abs(T a) { return a < 0 ? neg(a) : a; }

template <class T> T bit_and(T a, T b) { return T(a & b); }
template <class T> T bit_or(T a, T b) { return T(a | b); }
template <class T> T bit_xor(T a, T b) { return T(a ^ b); }
template <class T> T bit_not(T a) { return T(~a); }
bool not_pred(bool a) { return !a; }
bool and_pred(bool a, bool b) { return a && b; }
bool or_pred(bool a, bool b) { return a || b; }
bool xor_pred(bool a, bool b) { return a != b; }

// Shifts by more than the width are shifts by the width.
template <class T> T shl(T a, u32 by) { return by >= BITS<T> ? T(0) : T(u64(a) << by); }
template <class T> T shr(T a, u32 by) {
    if (by < BITS<T>) return T(a >> by);
    return std::is_signed<T>::value && a < 0 ? T(-1) : T(0);
}

template <class T> T bfi(T field, T into, u32 position, u32 length) {
    position &= 255, length &= 255;
    T result = into;
    for (u32 bit = 0; bit < length && position + bit < BITS<T>; ++bit) {
        const T one = T(T(1) << (position + bit));
        result = T((result & ~one) | (bit < BITS<T> && (field >> bit & 1) ? one : T(0)));
    }
    return result;
}

// Bits beyond the field, or beyond the value, are 0 or the field's sign.
template <class T> T bfe(T value, u32 position, u32 length) {
    using U = typename std::make_unsigned<T>::type;
    position &= 255, length &= 255;
    const u32 last = position + length - 1 < BITS<T> - 1 ? position + length - 1 : BITS<T> - 1;
    const bool sign = std::is_signed<T>::value && length != 0 && (U(value) >> last & 1);
    U result = 0;
    for (u32 bit = 0; bit < BITS<T>; ++bit) {
        const bool inside = bit < length && position + bit < BITS<T>;
        if (inside ? bool(U(value) >> (position + bit) & 1) : sign) result = U(result | U(1) << bit);
    }
    return T(result);
}

u32 prmt(u32 a, u32 b, u32 selector) {
    const u64 bytes = u64(b) << 32 | a;
    u32 result = 0;
    for (u32 i = 0; i < 4; ++i) {
        const u32 control = selector >> (4 * i) & 15;
        u32 byte = u32(bytes >> (8 * (control & 7))) & 255;
        if (control & 8) byte = byte & 128 ? 255 : 0;
        result |= byte << (8 * i);
    }
    return result;
}

template <class T> T copy(T a) { return a; }
template <class T> T select(T a, T b, bool first) { return first ? a : b; }

template <class T> bool eq(T a, T b) { return a == b; }
template <class T> bool ne(T a, T b) { return a < b || a > b; }
template <class T> bool lt(T a, T b) { return a < b; }
template <class T> bool le(T a, T b) { return a <= b; }
template <class T> bool gt(T a, T b) { return a > b; }
template <class T> bool ge(T a, T b) { return a >= b; }
// True also where one is NaN.
template <class T> bool equ(T a, T b) { return !ne(a, b); }
template <class T> bool neu(T a, T b) { return !(a == b); }
template <class T> bool ltu(T a, T b) { return !(a >= b); }
template <class T> bool leu(T a, T b) { return !(a > b); }
template <class T> bool gtu(T a, T b) { return !(a <= b); }
template <class T> bool geu(T a, T b) { return !(a < b); }
template <class T> bool num(T a, T b) { return a == a && b == b; }
template <class T> bool nan(T a, T b) { return a != a || b != b; }

template <class T>
void define_order(Table* table, const std::string& type) {
    (*table)["setp.eq" + type] = Compute<&eq<T>>::form();
    (*table)["setp.ne" + type] = Compute<&ne<T>>::form();
    (*table)["setp.lt" + type] = Compute<&lt<T>>::form();
    (*table)["setp.le" + type] = Compute<&le<T>>::form();
    (*table)["setp.gt" + type] = Compute<&gt<T>>::form();
    (*table)["setp.ge" + type] = Compute<&ge<T>>::form();
}

template <class T>
void define_float_order(Table* table, const std::string& type) {
    define_order<T>(table, type);
    (*table)["setp.equ" + type] = Compute<&equ<T>>::form();
    (*table)["setp.neu" + type] = Compute<&neu<T>>::form();
    (*table)["setp.ltu" + type] = Compute<&ltu<T>>::form();
    (*table)["setp.leu" + type] = Compute<&leu<T>>::form();
    (*table)["setp.gtu" + type] = Compute<&gtu<T>>::form();
    (*table)["setp.geu" + type] = Compute<&geu<T>>::form();
    (*table)["setp.num" + type] = Compute<&num<T>>::form();
    (*table)["setp.nan" + type] = Compute<&nan<T>>::form();
}

template <class T>
void define_whole(Table* table, const std::string& type) {
    (*table)["add" + type] = Compute<&add<T>>::form();
    (*table)["sub" + type] = Compute<&sub<T>>::form();
    (*table)["mul.lo" + type] = Compute<&mul_lo<T>>::form();
    (*table)["mul.hi" + type] = Compute<&mul_hi<T>>::form();
    (*table)["mad.lo" + type] = Compute<&mad_lo<T>>::form();
    (*table)["div" + type] = Compute<&div<T>>::form();
    (*table)["rem" + type] = Compute<&rem<T>>::form();
    (*table)["min" + type] = Compute<&smaller<T>>::form();
    (*table)["max" + type] = Compute<&larger<T>>::form();
    (*table)["shr" + type] = Compute<&shr<T>>::form();
    define_order<T>(table, type);
}

template <class T>
void define_wide(Table* table, const std::string& type) {
    (*table)["mul.wide" + type] = Compute<&mul_wide<T>>::form();
    (*table)["mad.wide" + type] = Compute<&mad_wide<T>>::form();
}

template <class T>
void define_signed(Table* table, const std::string& type) {
    (*table)["neg" + type] = Compute<&neg<T>>::form();
    (*table)["abs" + type] = Compute<&abs<T>>::form();
}

template <class T>
void define_bits(Table* table, const std::string& type) {
    (*table)["and" + type] = Compute<&bit_and<T>>::form();
    (*table)["or" + type] = Compute<&bit_or<T>>::form();
    (*table)["xor" + type] = Compute<&bit_xor<T>>::form();
    (*table)["not" + type] = Compute<&bit_not<T>>::form();
    (*table)["shl" + type] = Compute<&shl<T>>::form();
    (*table)["shr" + type] = Compute<&shr<T>>::form();
    (*table)["setp.eq" + type] = Compute<&eq<T>>::form();
    (*table)["setp.ne" + type] = Compute<&ne<T>>::form();
}

template <class T>
void define_copies(Table* table, const std::string& type) {
    (*table)["mov" + type] = Compute<&copy<T>>::form();
    (*table)["selp" + type] = Compute<&select<T>>::form();
}

template <class T>
void define_fields(Table* table, const std::string& width) {
    using S = typename std::make_signed<T>::type;
    (*table)["bfi.b" + width] = Compute<&bfi<T>>::form();
    (*table)["bfe.u" + width] = Compute<&bfe<T>>::form();
    (*table)["bfe.s" + width] = Compute<&bfe<S>>::form();
}

void define_predicates(Table* table) {
    (*table)["not.pred"] = Compute<&not_pred>::form();
    (*table)["and.pred"] = Compute<&and_pred>::form();
    (*table)["or.pred"] = Compute<&or_pred>::form();
    (*table)["xor.pred"] = Compute<&xor_pred>::form();
    (*table)["mov.pred"] = Compute<&copy<bool>>::form();
}

// Changes of address space: what a generic address has more than one of its space.
template <u64 WINDOW> u64 enter_window(u64 address) { return address + WINDOW; }
template <u64 WINDOW> u64 leave_window(u64 address) { return address - WINDOW; }

void define_addresses(Table* table) {
    (*table)["cvta.global.u64"] = Compute<&copy<u64>>::form();
    (*table)["cvta.to.global.u64"] = Compute<&copy<u64>>::form();
    (*table)["cvta.shared.u64"] = Compute<&enter_window<SHARED_WINDOW>>::form();
    (*table)["cvta.to.shared.u64"] = Compute<&leave_window<SHARED_WINDOW>>::form();
    (*table)["cvta.param.u64"] = Compute<&enter_window<PARAMETER_WINDOW>>::form();
    (*table)["cvta.to.param.u64"] = Compute<&leave_window<PARAMETER_WINDOW>>::form();
}

}  // namespace

void define_integers(Table* table) {
    each_integer([&](auto whole, const char* suffix) { define_whole<decltype(whole)>(table, suffix); });
    define_wide<u16>(table, ".u16");
    define_wide<s16>(table, ".s16");
    define_wide<u32>(table, ".u32");
    define_wide<s32>(table, ".s32");
    define_signed<s16>(table, ".s16");
    define_signed<s32>(table, ".s32");
    define_signed<s64>(table, ".s64");
    define_bits<u16>(table, ".b16");
    define_bits<u32>(table, ".b32");
    define_bits<u64>(table, ".b64");
    for (const char* type : {".b16", ".u16", ".s16"}) define_copies<u16>(table, type);
    for (const char* type : {".b32", ".u32", ".s32"}) define_copies<u32>(table, type);
    for (const char* type : {".b64", ".u64", ".s64"}) define_copies<u64>(table, type);
    define_fields<u32>(table, "32");
    define_fields<u64>(table, "64");
    (*table)["prmt.b32"] = Compute<&prmt>::form();
    define_predicates(table);
    define_addresses(table);
    // Copies of floats are copies of bits: NaN keeps its payload.
    define_copies<u32>(table, ".f32");
    define_copies<u64>(table, ".f64");
    define_float_order<float>(table, ".f32");
    define_float_order<double>(table, ".f64");
}

}  // namespace ptx
}  // namespace emulator
