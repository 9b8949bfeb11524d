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
  using H = std::int16_t __attribute__((vector_size(16)));
  struct Pair {
    F a, b;
  };

  // What turns a logit into an exponent, and its inverse: its upper 12 bits, and the rest.
  struct Scale {
    F scale, inverse_high, inverse_low;
    Scale(float rounded, double exact) : scale(set(rounded)) {
      const float high = upper_bits(set(static_cast<float>(1 / exact)))[0];
      inverse_high = set(high);
      inverse_low = set(static_cast<float>(1 / exact - high));
    }
  };

  // A factor: rounded, its upper 12 bits, and what those lack.
  struct Factor {
    F value, high, low;
    explicit Factor(double exact) : value(set(static_cast<float>(exact))) {
      high = upper_bits(value);
      low = set(static_cast<float>(exact - high[0]));
    }
  };
  // What rounding lost in product = x * factor (Dekker: products of two halves are exact).
  static F product_error(F x, const Factor& f, F product) {
    const F x_high = upper_bits(x);
    return ((x_high * f.high - product) + x_high * f.low) + (x - x_high) * f.value;
  }

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
  static F negative_fma(F a, F b, F c) { return c - a * b; }
  static F abs(F a) { return as_float(as_bits(a) & splat(0x7fffffffu)); }
  static F negate(F a) { return as_float(as_bits(a) ^ splat(0x80000000u)); }
  static F flip_sign(F a, F sign) { return as_float(as_bits(a) ^ (as_bits(sign) & splat(0x80000000u))); }
  static F max(F a, F b) { return a > b ? a : b; }
  static F reciprocal(F a) { return set(1) / a; }
  static float first(F a) { return a[0]; }
  static float reduce_max(F a) {
    const float x = a[0] > a[2] ? a[0] : a[2], y = a[1] > a[3] ? a[1] : a[3];
    return x > y ? x : y;
  }
  static float reduce_add(F a) { return (a[0] + a[2]) + (a[1] + a[3]); }

  static F select_abs_at_most(F x, float limit, F small, F other) { return abs(x) <= set(limit) ? small : other; }
  static bool all_abs_at_most(Pair x, float limit) {
    const I both = (abs(x.a) <= set(limit)) & (abs(x.b) <= set(limit));
    return (both[0] & both[1] & both[2] & both[3]) != 0;
  }

  // Without a fused multiply-add: (x - offset) * scale, so that a common offset of the logits costs nothing.
  static F scale_minus(F x, const Scale& s, F offset) { return (x - offset) * s.scale; }
  static float offset_for(double wanted, float scale) { return static_cast<float>(wanted / scale); }
  static double effective_offset(float offset, float scale) { return static_cast<double>(offset) * scale; }

  // Nearest integer by adding 1.5 * 2^23. Beyond +-2^22, also for -inf, scale_by_power_of_two gives 0 all the same.
  static F round(F t) { return (max(set(-1000), t) + set(0x1.8p23f)) - set(0x1.8p23f); }
  // Cody and Waite: n * inverse_high is exact, so only the subtraction of the offset is rounded at the exponent's size.
  static F fine_remainder(F x, const Scale& s, F offset, F, F n) {
    const F d = max(set(-1000) * s.inverse_high, x - offset);
    return ((d - n * s.inverse_high) - n * s.inverse_low) * s.scale;
  }
  static F scale_by_power_of_two(F x, F n) {
    const I is_tiny = n < set(-126);
    const U e = as_bits(x * power_of_two(max(set(-126), n)));
    return as_float(e & ~reinterpret(is_tiny));
  }

  // 2^r on [-1/2, 1/2]: minimax with constant 1. Degree 5: relative error 9.1e-8 (0.8 ULP), enough under 16-bit storage; degree
  // 6, kFine: 2e-9.
  template <bool kFine>
  [[gnu::always_inline]] static Pair exp2_polynomial(Pair r) {
    constexpr float kDegree5[] = {0x1.5bba14p-10f, 0x1.3cea88p-7f, 0x1.c6b752p-5f, 0x1.ebf9bcp-3f, 0x1.62e42ap-1f, 1};
    constexpr float kDegree6[] = {
        0x1.41fbbcp-13f, 0x1.5f3e54p-10f, 0x1.3b2d4cp-7f, 0x1.c6aee8p-5f, 0x1.ebfbdcp-3f, 0x1.62e43p-1f, 1};
    const float* c = kFine ? kDegree6 : kDegree5;
    Pair p = {set(c[0]), set(c[0])};
    for (int j = 1; j <= (kFine ? 6 : 5); ++j) p = {fma(p.a, r.a, set(c[j])), fma(p.b, r.b, set(c[j]))};
    return p;
  }
  // 2^(x scale) for x <= 0, to 1 ULP.
  static F exp2_fine(F x, const Scale& scale) {
    const F t = scale_minus(x, scale, set(0)), n = round(t);
    const F r = fine_remainder(x, scale, set(0), t, n);
    return scale_by_power_of_two(exp2_polynomial<true>(Pair{r, r}).a, n);
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
    for (int i = 0; i < kPair; ++i) all[i] = i < n ? p[i] : (fill == 0 ? T{} : minus_infinity(T{}));
    return load_raw(static_cast<const T*>(all));
  }
  static Pair unpack(Pair raw, const float*) { return raw; }
  static Pair unpack(H raw, const Bfloat16*) {
    const U words = reinterpret_cast<U>(raw);
    return {as_float(words << 16), as_float(words & splat(0xffff0000u))};
  }
  static Pair unpack(H raw, const Float16*) {
    const auto half = [&](int i) { return static_cast<std::uint32_t>(static_cast<std::uint16_t>(raw[i])); };
    return {from_half(U{half(0), half(1), half(2), half(3)}), from_half(U{half(4), half(5), half(6), half(7)})};
  }

  static F max_start(const float*) { return set(-__builtin_inff()); }
  template <class T>
  static H max_start(const T*) {
    return H{} + static_cast<std::int16_t>(INT16_MIN);
  }
  static F max_raw(F best, Pair raw) { return max(raw.b, max(raw.a, best)); }
  static H max_raw(H best, H raw) { return raw > best ? raw : best; }
  static F abs_max_start(const float*) { return set(0); }
  template <class T>
  static H abs_max_start(const T*) {
    return H{};
  }
  static F abs_max_raw(F best, Pair raw) { return max(abs(raw.b), max(abs(raw.a), best)); }
  static H abs_max_raw(H best, H raw) { return max_raw(best, raw & static_cast<std::int16_t>(0x7fff)); }
  static float max_value(F best, const float*) { return reduce_max(best); }
  template <class T>
  static float max_value(H best, const T*) {
    std::int16_t top = best[0];
    for (int i = 1; i < kPair; ++i) top = best[i] > top ? best[i] : top;
    return to_float(T{static_cast<std::uint16_t>(top)});
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
    return to_order_of(load_raw_partial(p, n, 0), static_cast<const T*>(nullptr));
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

  // Inlined by force: GCC takes a function that only prefetches for one without effect and drops the call.
  [[gnu::always_inline]] static void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }
  static void fence() {}

 private:
  static F upper_bits(F x) { return as_float(as_bits(x) & splat(0xfffff000u)); }
  static U splat(std::uint32_t x) { return U{x, x, x, x}; }
  static U as_bits(F x) { return reinterpret_cast<U>(x); }
  static F as_float(U x) { return reinterpret_cast<F>(x); }
  static U reinterpret(I x) { return reinterpret_cast<U>(x); }

  static F power_of_two(F n) {
    const I i = __builtin_convertvector(n, I);
    return as_float(reinterpret(i + 127) << 23);
  }
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
