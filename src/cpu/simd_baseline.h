// Four float lanes in GCC's portable vectors: SSE2 on x86-64, NEON on AArch64, whatever the target's minimum has elsewhere. The
// twin of cpu/simd_avx512.h: same members, same meaning.
#ifndef TILELOSS_CPU_SIMD_BASELINE_H_
#define TILELOSS_CPU_SIMD_BASELINE_H_

#include <cstdint>

#include "core/number_formats.h"

namespace tileloss::cpu::baseline {

struct Simd {
  static constexpr int kLanes = 4;
  static constexpr int kPair = 2 * kLanes;
  using F = float __attribute__((vector_size(16)));
  using I = std::int32_t __attribute__((vector_size(16)));
  using U = std::uint32_t __attribute__((vector_size(16)));
  struct Pair {
    F a, b;
  };

  static F set(float x) { return F{x, x, x, x}; }
  static F load(const float* p) {
    F v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  }
  static void store(float* p, F x) { __builtin_memcpy(p, &x, sizeof x); }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F fma(F a, F b, F c) { return a * b + c; }  // two roundings
  static F fma_sub(F a, F b, F c) { return a * b - c; }
  static F negate(F a) { return -a; }
  static F abs(F a) { return as_float(as_bits(a) & splat(0x7fffffffu)); }
  static F with_sign(F a, F sign) { return as_float(as_bits(a) | (as_bits(sign) & splat(0x80000000u))); }
  static F max(F a, F b) { return a > b ? a : b; }
  static F min(F a, F b) { return a < b ? a : b; }
  static F reciprocal(F a) { return set(1) / a; }
  static float reduce_max(F a) {
    const float x = a[0] > a[2] ? a[0] : a[2], y = a[1] > a[3] ? a[1] : a[3];
    return x > y ? x : y;
  }
  static float reduce_add(F a) { return (a[0] + a[2]) + (a[1] + a[3]); }

  static F exp(F x) {
    const I is_tiny = x < set(-87.3f);
    x = max(set(-88), x);
    const F n = round_exponent(x), r = reduce(x, n);
    const F e = mul(power_of_two(n), fma(exp2_minus_1_over(r), r, set(1)));
    return as_float(as_bits(e) & ~reinterpret(is_tiny));
  }
  static F expm1_negative(F x) {
    x = max(set(-87), x);
    const F n = round_exponent(x), r = reduce(x, n), s = power_of_two(n);
    return fma(s, mul(exp2_minus_1_over(r), r), sub(s, set(1)));
  }

  // ------------------------------------------------------------------------------------------------------ storage, in pairs
  static Pair load_pair(const float* p) { return {load(p), load(p + kLanes)}; }
  static Pair load_pair(const Bfloat16* p) {
    U words;
    __builtin_memcpy(&words, p, sizeof words);
    return {as_float(words << 16), as_float(words & splat(0xffff0000u))};
  }
  static Pair load_pair(const Float16* p) {
    const auto four = [](const Float16* h) { return U{h[0].bits, h[1].bits, h[2].bits, h[3].bits}; };
    return {from_half(four(p)), from_half(four(p + kLanes))};
  }
  template <class T>
  static Pair load_pair_partial(const T* p, int n, float fill) {
    T all[kPair];
    for (int i = 0; i < kPair; ++i) all[i] = i < n ? p[i] : (fill == 0 ? T{} : minus_infinity(T{}));
    return load_pair(static_cast<const T*>(all));
  }
  static void store_pair(float* p, Pair v) {
    store(p, v.a);
    store(p + kLanes, v.b);
  }
  static void store_pair(Bfloat16* p, Pair v) {
    const U words = (round16(v.b) & splat(0xffff0000u)) | (round16(v.a) >> 16);
    __builtin_memcpy(p, &words, sizeof words);
  }
  static void store_pair(Float16* p, Pair v) {
    const U a = to_half(v.a), b = to_half(v.b);
    for (int i = 0; i < kLanes; ++i) {
      p[i].bits = static_cast<std::uint16_t>(a[i]);
      p[kLanes + i].bits = static_cast<std::uint16_t>(b[i]);
    }
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
  template <class T>
  static Pair load_weights(const float* p, int n, const T*) {
    return to_order_of(load_pair_partial(p, n, 0), static_cast<const T*>(nullptr));
  }
  template <class T>
  static Pair keep(Pair v, int n, int hole, const T*) {
    const Pair index = to_order_of(Pair{F{0, 1, 2, 3}, F{4, 5, 6, 7}}, static_cast<const T*>(nullptr));
    const F limit = set(static_cast<float>(n)), out = set(static_cast<float>(hole));
    const auto kept = [&](F i) { return reinterpret(i < limit) & reinterpret(i != out); };
    return {as_float(as_bits(v.a) & kept(index.a)), as_float(as_bits(v.b) & kept(index.b))};
  }

  static float to_float(float x) { return x; }
  static float to_float(Bfloat16 x) { return as_float(splat(static_cast<std::uint32_t>(x.bits) << 16))[0]; }
  static float to_float(Float16 x) { return from_half(splat(x.bits))[0]; }
  static float minus_infinity(float) { return -__builtin_inff(); }
  static Bfloat16 minus_infinity(Bfloat16) { return {0xff80}; }
  static Float16 minus_infinity(Float16) { return {0xfc00}; }

  static void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }
  static void fence() {}

 private:
  static U splat(std::uint32_t x) { return U{x, x, x, x}; }
  static U as_bits(F x) { return reinterpret_cast<U>(x); }
  static F as_float(U x) { return reinterpret_cast<F>(x); }
  static U reinterpret(I x) { return reinterpret_cast<U>(x); }

  // Nearest integer by adding 1.5 * 2^23.
  static F round_exponent(F x) { return (x * set(kLog2E) + set(0x1.8p23f)) - set(0x1.8p23f); }
  // x log2(e) - n, log2(e) in two parts: n has at most 7 bits, so n * kLn2High is exact and the rest is small.
  static F reduce(F x, F n) {
    const F y = (x - n * set(0x1.63p-1f)) - n * set(-0x1.bd0106p-13f);
    return y * set(kLog2E);
  }
  static F power_of_two(F n) {
    const I i = __builtin_convertvector(n, I);
    return as_float(reinterpret(i + 127) << 23);
  }
  // As in cpu/simd_avx512.h.
  static F exp2_minus_1_over(F r) {
    F p = set(0x1.5bba14p-10f);
    p = fma(p, r, set(0x1.3cea88p-7f));
    p = fma(p, r, set(0x1.c6b752p-5f));
    p = fma(p, r, set(0x1.ebf9bcp-3f));
    return fma(p, r, set(0x1.62e42ap-1f));
  }
  static constexpr float kLog2E = 0x1.715476p+0f;

  static U round16(F x) {
    const U bits = as_bits(x);
    return bits + splat(0x7fff) + ((bits >> 16) & splat(1));
  }
  static F from_half(U h) {
    const U magnitude = (h & splat(0x7fff)) << 13;
    const U scaled = as_bits(as_float(magnitude) * set(0x1p112f));
    const U special = reinterpret(magnitude >= splat(0x0f800000u)) & splat(0x7f800000u);
    return as_float(scaled | special | ((h & splat(0x8000)) << 16));
  }
  // See from_float<Float16>: the same three cases, all computed, one chosen.
  static U to_half(F x) {
    const U bits = as_bits(x), sign = (bits >> 16) & splat(0x8000), magnitude = bits & splat(0x7fffffff);
    const U normal = (magnitude - splat(0x38000000) + splat(0xfff) + ((magnitude >> 13) & splat(1))) >> 13;
    const U subnormal = as_bits(as_float(magnitude) + set(0.5f)) - splat(0x3f000000);
    U half = magnitude < splat(0x38800000) ? subnormal : normal;
    half = magnitude >= splat(0x47800000) ? splat(0x7c00) : half;
    half = magnitude > splat(0x7f800000) ? splat(0x7e00) : half;
    return half | sign;
  }

  static Pair to_order_of(Pair v, const float*) { return v; }
  static Pair to_order_of(Pair v, const Float16*) { return v; }
  static Pair to_order_of(Pair v, const Bfloat16*) {
    return {F{v.a[0], v.a[2], v.b[0], v.b[2]}, F{v.a[1], v.a[3], v.b[1], v.b[3]}};
  }
};

}  // namespace tileloss::cpu::baseline

#endif  // TILELOSS_CPU_SIMD_BASELINE_H_
