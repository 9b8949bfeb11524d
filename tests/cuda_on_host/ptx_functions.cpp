// What PTX's instructions compute (PTX ISA 9.1, chapter 9), each by its whole name.
#include <bit>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "core/number_formats.h"
#include "tests/cuda_on_host/device_code.h"
#include "tests/cuda_on_host/ptx_program.h"

namespace cuda_on_host {
namespace {

using s16 = std::int16_t;
using s32 = std::int32_t;
using s64 = std::int64_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using Table = std::unordered_map<std::string, PtxFunction>;

template <class T>
T from_bits(u64 bits) {
  if constexpr (std::is_same_v<T, float>) return std::bit_cast<float>(static_cast<u32>(bits));
  if constexpr (std::is_same_v<T, double>) return std::bit_cast<double>(bits);
  if constexpr (std::is_same_v<T, bool>) return (bits & 1) != 0;
  if constexpr (std::is_integral_v<T>) return static_cast<T>(bits);
}
template <class T>
u64 to_bits(T value) {
  if constexpr (std::is_same_v<T, float>) return std::bit_cast<u32>(value);
  if constexpr (std::is_same_v<T, double>) return std::bit_cast<u64>(value);
  if constexpr (std::is_same_v<T, bool>) return value ? 1 : 0;
  if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) return static_cast<std::make_unsigned_t<T>>(value);
}

// A lambda of typed numbers, on registers' bits.
template <class Lambda, class Result, class... Arguments>
PtxFunction on_bits(Result (*)(Arguments...)) {
  return [](u64 a, u64 b, u64 c) {
    const u64 all[] = {a, b, c};
    return [&]<std::size_t... kPlace>(std::index_sequence<kPlace...>) {
      return to_bits<Result>(Lambda{}(from_bits<Arguments>(all[kPlace])...));
    }
    (std::index_sequence_for<Arguments...>{});
  };
}
template <class Lambda>
PtxFunction function_of(Lambda lambda) {
  return on_bits<Lambda>(+lambda);
}

template <class T>
void add_moves(Table& table, const std::string& type) {
  table["mov." + type] = function_of([](T a) { return a; });
  table["selp." + type] = function_of([](T a, T b, bool c) { return c ? a : b; });
}
template <class T>
void add_comparisons(Table& table, const std::string& type) {
  table["setp.eq." + type] = function_of([](T a, T b) { return a == b; });
  table["setp.lt." + type] = function_of([](T a, T b) { return a < b; });
  table["setp.le." + type] = function_of([](T a, T b) { return a <= b; });
  table["setp.gt." + type] = function_of([](T a, T b) { return a > b; });
  table["setp.ge." + type] = function_of([](T a, T b) { return a >= b; });
  table["setp.ne." + type] = function_of([](T a, T b) { return a < b || a > b; });
}
template <class T>
void add_words(Table& table, const std::string& type) {
  add_moves<T>(table, type);
  table["and." + type] = function_of([](T a, T b) { return static_cast<T>(a & b); });
  table["or." + type] = function_of([](T a, T b) { return static_cast<T>(a | b); });
  table["xor." + type] = function_of([](T a, T b) { return static_cast<T>(a ^ b); });
  table["not." + type] = function_of([](T a) { return std::is_same_v<T, bool> ? static_cast<T>(!a) : static_cast<T>(~u64{a}); });
  table["shl." + type] = function_of([](T a, u32 n) { return static_cast<T>(n < 8 * sizeof(T) ? u64{a} << n : 0); });
}
template <class T>
void add_integers(Table& table, const std::string& type) {
  using U = std::make_unsigned_t<T>;
  add_moves<T>(table, type);
  add_comparisons<T>(table, type);
  table["add." + type] = function_of([](U a, U b) { return static_cast<U>(a + b); });
  table["sub." + type] = function_of([](U a, U b) { return static_cast<U>(a - b); });
  table["neg." + type] = function_of([](U a) { return static_cast<U>(0 - a); });
  table["mul.lo." + type] = function_of([](U a, U b) { return static_cast<U>(u64{a} * u64{b}); });
  table["mad.lo." + type] = function_of([](U a, U b, U c) { return static_cast<U>(u64{a} * u64{b} + c); });
  table["min." + type] = function_of([](T a, T b) { return a < b ? a : b; });
  table["max." + type] = function_of([](T a, T b) { return a > b ? a : b; });
  table["shr." + type] = function_of([](T a, u32 n) { return static_cast<T>(n < 8 * sizeof(T) ? a >> n : a < T{0} ? -1 : 0); });
  // By 0 anything; by -1 what has no positive number is its own.
  table["div." + type] = function_of([](T a, T b) {
    if (b == 0) return std::numeric_limits<T>::max();
    return b == static_cast<T>(-1) && std::is_signed_v<T> ? static_cast<T>(U{0} - static_cast<U>(a)) : static_cast<T>(a / b);
  });
  table["rem." + type] = function_of(
      [](T a, T b) { return b == 0 || (b == static_cast<T>(-1) && std::is_signed_v<T>) ? T{0} : static_cast<T>(a % b); });
}
template <class T>
void add_reals(Table& table, const std::string& type) {
  add_moves<T>(table, type);
  add_comparisons<T>(table, type);
  table["setp.equ." + type] = function_of([](T a, T b) { return !(a < b || a > b); });
  table["setp.neu." + type] = function_of([](T a, T b) { return !(a == b); });
  table["setp.ltu." + type] = function_of([](T a, T b) { return !(a >= b); });
  table["setp.leu." + type] = function_of([](T a, T b) { return !(a > b); });
  table["setp.gtu." + type] = function_of([](T a, T b) { return !(a <= b); });
  table["setp.geu." + type] = function_of([](T a, T b) { return !(a < b); });
  table["setp.nan." + type] = function_of([](T a, T b) { return std::isunordered(a, b); });
  table["setp.num." + type] = function_of([](T a, T b) { return !std::isunordered(a, b); });
  table["add.rn." + type] = function_of([](T a, T b) { return a + b; });
  table["sub.rn." + type] = function_of([](T a, T b) { return a - b; });
  table["mul.rn." + type] = function_of([](T a, T b) { return a * b; });
  table["div.rn." + type] = function_of([](T a, T b) { return a / b; });
  table["rcp.rn." + type] = function_of([](T a) { return 1 / a; });
  table["fma.rn." + type] = function_of([](T a, T b, T c) { return std::fma(a, b, c); });
  table["min." + type] = function_of([](T a, T b) { return std::fmin(a, b); });
  table["max." + type] = function_of([](T a, T b) { return std::fmax(a, b); });
  table["max.NaN." + type] = function_of([](T a, T b) { return std::isunordered(a, b) ? a + b : std::fmax(a, b); });
  table["neg." + type] = function_of([](T a) { return -a; });
  table["abs." + type] = function_of([](T a) { return std::fabs(a); });
  table["copysign." + type] = function_of([](T sign, T a) { return std::copysign(a, sign); });
  table["cvt.rni." + type + "." + type] = function_of([](T a) { return std::nearbyint(a); });
  table["cvt.rzi." + type + "." + type] = function_of([](T a) { return std::trunc(a); });
}

// Towards 0, the nearest that there is.
template <class To, class From>
To to_integer(From x) {
  constexpr From kMin = static_cast<From>(std::numeric_limits<To>::min());
  constexpr From kEnd = static_cast<From>(std::numeric_limits<To>::max() / 2 + 1) * 2;
  if (std::isnan(x)) return sizeof(From) + sizeof(To) == 8 ? To{0} : static_cast<To>(u64{1} << (8 * sizeof(To) - 1));
  if (x <= kMin) return std::numeric_limits<To>::min();
  return x >= kEnd ? std::numeric_limits<To>::max() : static_cast<To>(x);
}
void add_conversions(Table& table) {
  table["cvt.f32.f16"] = function_of([](u16 a) { return to_float(tileloss::impl::Float16{a}); });
  table["cvt.f64.f32"] = function_of([](float a) { return static_cast<double>(a); });
  table["cvt.rn.f32.f64"] = function_of([](double a) { return static_cast<float>(a); });
  table["cvt.rn.f32.u16"] = function_of([](u16 a) { return static_cast<float>(a); });
  table["cvt.rn.f32.u32"] = function_of([](u32 a) { return static_cast<float>(a); });
  table["cvt.rn.f64.s32"] = function_of([](s32 a) { return static_cast<double>(a); });
  table["cvt.rn.f64.u32"] = function_of([](u32 a) { return static_cast<double>(a); });
  table["cvt.rn.f64.s64"] = function_of([](s64 a) { return static_cast<double>(a); });
  table["cvt.rzi.s32.f32"] = function_of([](float a) { return to_integer<s32>(a); });
  table["cvt.rzi.u32.f32"] = function_of([](float a) { return to_integer<u32>(a); });
  table["cvt.rzi.s64.f64"] = function_of([](double a) { return to_integer<s64>(a); });
  table["cvt.s64.s32"] = function_of([](s32 a) { return s64{a}; });
  table["cvt.u16.u32"] = function_of([](u32 a) { return static_cast<u16>(a); });
  table["cvt.u32.u16"] = function_of([](u16 a) { return u32{a}; });
  table["cvt.u32.u64"] = function_of([](u64 a) { return static_cast<u32>(a); });
  table["cvt.u64.u32"] = function_of([](u32 a) { return u64{a}; });
  table["mul.wide.s32"] = function_of([](s32 a, s32 b) { return s64{a} * b; });
  table["mul.wide.u16"] = function_of([](u16 a, u16 b) { return u32{a} * b; });
  table["mul.wide.u32"] = function_of([](u32 a, u32 b) { return u64{a} * b; });
}

// Two numbers of 16 bits in a word; the first operand is the high one.
template <class T>
void add_pairs(Table& table, const std::string& type) {
  table["cvt.rn." + type + ".f32"] = function_of([](float high, float low) {
    return tileloss::impl::from_float<T>(low).bits | u32{tileloss::impl::from_float<T>(high).bits} << 16;
  });
  table["max.NaN." + type] = function_of([](u32 a, u32 b) {
    u32 word = 0;
    for (int shift = 0; shift < 32; shift += 16) {
      const T x{static_cast<u16>(a >> shift)}, y{static_cast<u16>(b >> shift)};
      const bool is_first = to_float(x) > to_float(y) || (to_float(x) == to_float(y) && x.bits == 0);
      const u16 larger = is_first ? x.bits : y.bits;
      word |= u32{std::isunordered(to_float(x), to_float(y)) ? u16{0x7fff} : larger} << shift;
    }
    return word;
  });
}

double add_towards_zero(double a, double b) {
  const double sum = a + b, part = sum - a, rest = (a - (sum - part)) + (b - part);
  return rest != 0 && (rest < 0) == (sum > 0) ? std::nextafter(sum, 0.0) : sum;
}

Table all_functions() {
  Table table;
  add_words<bool>(table, "pred");
  add_words<u16>(table, "b16");
  add_words<u32>(table, "b32");
  add_words<u64>(table, "b64");
  add_comparisons<u32>(table, "b32");
  add_comparisons<u64>(table, "b64");
  add_integers<s16>(table, "s16");
  add_integers<s32>(table, "s32");
  add_integers<s64>(table, "s64");
  add_integers<u16>(table, "u16");
  add_integers<u32>(table, "u32");
  add_integers<u64>(table, "u64");
  add_reals<float>(table, "f32");
  add_reals<double>(table, "f64");
  add_conversions(table);
  add_pairs<tileloss::impl::Bfloat16>(table, "bf16x2");
  add_pairs<tileloss::impl::Float16>(table, "f16x2");
  table["cvta.to.global.u64"] = table["cvta.local.u64"] = table["mov.u64"];
  table["add.rz.f64"] = function_of([](double a, double b) { return add_towards_zero(a, b); });
  // The same numbers as the host's kernels have: what differs is the compiler's doing.
  table["ex2.approx.ftz.f32"] = function_of([](float a) { return exp2_approx(a); });
  table["ex2.approx.f32"] = function_of([](float a) { return exp2_of_device(a); });
  // The high word alone.
  table["rcp.approx.ftz.f64"] = function_of([](double a) {
    const double y = std::fabs(a) < std::numeric_limits<double>::min() ? std::copysign(HUGE_VAL, a) : 1 / a;
    return std::bit_cast<u64>(std::fabs(y) < std::numeric_limits<double>::min() ? std::copysign(0.0, a) : y) >> 32 << 32;
  });
  table["popc.b32"] = function_of([](u32 a) { return static_cast<u32>(std::popcount(a)); });
  table["popc.b64"] = function_of([](u64 a) { return static_cast<u32>(std::popcount(a)); });
  table["shf.l.wrap.b32"] =
      function_of([](u32 low, u32 high, u32 n) { return static_cast<u32>(((u64{high} << 32 | low) << (n & 31)) >> 32); });
  table["atom.add.u32"] = table["add.u32"];
  table["atom.max.u64"] = table["max.u64"];
  table["atom.or.b32"] = table["or.b32"];
  table["atom.exch.b32"] = function_of([](u32 /*before*/, u32 value) { return value; });
  table["atom.cas.b32"] = function_of([](u32 before, u32 expected, u32 value) { return before == expected ? value : before; });
  return table;
}

}  // namespace

PtxFunction ptx_function(const std::string& name) {
  static const Table table = all_functions();
  const auto found = table.find(name);
  return found == table.end() ? nullptr : found->second;
}

}  // namespace cuda_on_host
