// What a Simd is made of where GCC's portable vectors say it all, for any width: the base of the baseline's and of AVX2's. Self,
// the Simd itself, can hide any of it; what is hidden is also what the rest here uses.
#pragma once

#include <cstdint>
#include <utility>

#include "core/number_formats.h"

namespace tileloss::impl::cpu {

// Vectors: F, I, U and H, of one width, of float, std::int32_t, std::uint32_t and std::int16_t, and W, of half that width, of
// std::uint16_t.
template <class Self, class Vectors>
struct PortableLanes {
  using F = typename Vectors::F;
  using I = typename Vectors::I;
  using U = typename Vectors::U;
  using H = typename Vectors::H;
  using W = typename Vectors::W;
  static constexpr int kLanes = sizeof(F) / sizeof(float);
  static constexpr int kPair = 2 * kLanes;
  static constexpr bool kFmaOverwritesSummand = false;  // see exp2.h
  struct Pair {
    F a, b;
  };

  static F set(float x) { return x - F{}; }  // x + F{} would lose the sign of -0
  static F load(const float* p) {
    F v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  }
  static void store(float* p, F x) { __builtin_memcpy(p, &x, sizeof x); }
  // Numbers from 0 to 65535 as words; what is stored is cut to whole ones.
  static void store_words(std::uint16_t* p, F x) {
    const W words = __builtin_convertvector(__builtin_convertvector(x, I), W);
    __builtin_memcpy(p, &words, sizeof words);
  }
  static F load_words(const std::uint16_t* p) {
    W words;
    __builtin_memcpy(&words, p, sizeof words);
    return __builtin_convertvector(__builtin_convertvector(words, I), F);
  }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F multiply_where_nonzero(F a, F b) { return as_float(as_bits(a * b) & reinterpret(a != F{})); }
  static F abs(F a) { return as_float(as_bits(a) & splat(0x7fffffffu)); }
  static F negate(F a) { return as_float(as_bits(a) ^ splat(0x80000000u)); }
  static F flip_sign(F a, F sign) { return as_float(as_bits(a) ^ (as_bits(sign) & splat(0x80000000u))); }
  static F max(F a, F b) { return a > b ? a : b; }
  static F min(F a, F b) { return a < b ? a : b; }
  static F reciprocal(F a) { return set(1) / a; }
  static float first(F a) { return a[0]; }
  // Fixed trees: the halves' lanes, their halves', and so on.
  static float reduce_max(F a) {
    float x[kLanes];
    __builtin_memcpy(x, &a, sizeof x);
    for (int n = kLanes / 2; n > 0; n /= 2) {
      for (int i = 0; i < n; ++i) x[i] = x[i] > x[n + i] ? x[i] : x[n + i];
    }
    return x[0];
  }
  static float reduce_add(F a) {
    float x[kLanes];
    __builtin_memcpy(x, &a, sizeof x);
    for (int n = kLanes / 2; n > 0; n /= 2) {
      for (int i = 0; i < n; ++i) x[i] += x[n + i];
    }
    return x[0];
  }

  static F select_less(F x, F y, F yes, F no) { return x < y ? yes : no; }
  static F select_abs_at_most(F x, float limit, F small, F other) { return Self::abs(x) <= set(limit) ? small : other; }
  static bool all_abs_at_most(Pair x, float limit) {
    const I both = (Self::abs(x.a) <= set(limit)) & (Self::abs(x.b) <= set(limit));
    std::int32_t all = -1;
    for (int i = 0; i < kLanes; ++i) all &= both[i];
    return all != 0;
  }

  // ------------------------------------------------------------------------------------------------------ storage, in pairs
  // A pair as it lies in memory.
  static Pair load_raw(const float* p) { return {load(p), load(p + kLanes)}; }
  template <class T>
  static H load_raw(const T* p) {
    H words;
    __builtin_memcpy(&words, p, sizeof words);
    return words;
  }
  template <class T>
  static auto load_raw_partial(const T* p, int n, float fill) {
    T all[kPair];
    for (int i = 0; i < kPair; ++i) all[i] = fill == 0 ? T{} : minus_infinity(T{});
    // Element by element it would be made of vmaskmovps, which emulators load whole, beyond the row's end.
    __builtin_memcpy(all, p, static_cast<unsigned>(n) * sizeof(T));
    return load_raw(static_cast<const T*>(all));
  }
  static Pair unpack(Pair raw, const float*) { return raw; }
  static Pair unpack(H raw, const Bfloat16*) {
    const U words = reinterpret_cast<U>(raw);
    return {as_float(words << 16), as_float(words & splat(0xffff0000u))};
  }

  static F max_start(const float*) { return set(-__builtin_inff()); }
  template <class T>
  static H max_start(const T*) {
    return H{} + static_cast<std::int16_t>(INT16_MIN);
  }
  static F max_raw(F best, Pair raw) { return Self::max(raw.b, Self::max(raw.a, best)); }
  static H max_raw(H best, H raw) { return raw > best ? raw : best; }
  static F abs_max_start(const float*) { return set(0); }
  template <class T>
  static H abs_max_start(const T*) {
    return H{};
  }
  static F abs_max_raw(F best, Pair raw) { return Self::max(Self::abs(raw.b), Self::max(Self::abs(raw.a), best)); }
  static H abs_max_raw(H best, H raw) { return max_raw(best, raw & static_cast<std::int16_t>(0x7fff)); }
  static float max_value(F best, const float*) { return reduce_max(best); }
  template <class T>
  static float max_value(H best, const T*) {
    std::int16_t top = best[0];
    for (int i = 1; i < kPair; ++i) top = best[i] > top ? best[i] : top;
    return Self::to_float(T{static_cast<std::uint16_t>(top)});
  }

  static void store_pair(float* p, Pair v) {
    store(p, v.a);
    store(p + kLanes, v.b);
  }
  template <class T>
  static void store_pair(T* p, Pair v) {
    const auto words = Self::pack(v, p);
    __builtin_memcpy(p, &words, sizeof words);
  }
  template <class T>
  static void store_pair_partial(T* p, Pair v, int n) {
    T all[kPair];
    store_pair(static_cast<T*>(all), v);
    __builtin_memcpy(p, all, static_cast<unsigned>(n) * sizeof(T));
  }
  template <class T>
  static void stream_pair(T* p, Pair v) {
    store_pair(p, v);
  }
  static U pack(Pair v, const Bfloat16*) { return (round16(v.b) & splat(0xffff0000u)) | (round16(v.a) >> 16); }

  template <class T>
  static Pair load_weights(const float* p, int n, const T*) {
    return to_order_of(n < kPair ? load_raw_partial(p, n, 0) : load_raw(p), static_cast<const T*>(nullptr));
  }
  template <class T>
  static Pair keep(Pair v, int n, int excluded, const T*) {
    const Pair index = to_order_of(counting(std::make_integer_sequence<int, kLanes>{}), static_cast<const T*>(nullptr));
    const F limit = set(static_cast<float>(n)), out = set(static_cast<float>(excluded));
    const auto kept = [&](F i) { return reinterpret(i < limit) & reinterpret(i != out); };
    return {as_float(as_bits(v.a) & kept(index.a)), as_float(as_bits(v.b) & kept(index.b))};
  }

  static float to_float(float x) { return x; }
  static float to_float(Bfloat16 x) { return as_float(splat(static_cast<std::uint32_t>(x.bits) << 16))[0]; }
  static float minus_infinity(float) { return -__builtin_inff(); }
  static Bfloat16 minus_infinity(Bfloat16) { return {0xff80}; }
  static Float16 minus_infinity(Float16) { return {0xfc00}; }

  // Inlined by force: GCC takes a function that only prefetches for one without effect and drops the call.
  [[gnu::always_inline]] static void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }
  static void fence() {}

  // ------------------------------------------------------------------------------------------------------------- for Self
  static U splat(std::uint32_t x) { return U{} + x; }
  static U as_bits(F x) { return reinterpret_cast<U>(x); }
  static F as_float(U x) { return reinterpret_cast<F>(x); }
  static U reinterpret(I x) { return reinterpret_cast<U>(x); }
  // The upper 16 bits are x as bfloat16: half a unit added, ties to even. A NaN that comes here has nothing in its lower bits,
  // and stays one.
  static U round16(F x) {
    const U bits = as_bits(x);
    return bits + splat(0x7fff) + ((bits >> 16) & splat(1));
  }

 private:
  template <int... k>
  static Pair counting(std::integer_sequence<int, k...>) {
    return {F{k...}, F{(kLanes + k)...}};
  }
  template <int... k>
  static Pair deinterleaved(Pair v, std::integer_sequence<int, k...>) {
    return {__builtin_shufflevector(v.a, v.b, (2 * k)...), __builtin_shufflevector(v.a, v.b, (2 * k + 1)...)};
  }
  static Pair to_order_of(Pair v, const float*) { return v; }
  static Pair to_order_of(Pair v, const Float16*) { return v; }
  static Pair to_order_of(Pair v, const Bfloat16*) {  // even elements, odd elements
    return deinterleaved(v, std::make_integer_sequence<int, kLanes>{});
  }
};

}  // namespace tileloss::impl::cpu
