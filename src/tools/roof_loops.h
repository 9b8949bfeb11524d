// The loops behind roofs.cpp, written once over a vector policy and compiled per instruction set by the roof_<isa>.cpp files.
// Only <cstdint> is included: code compiled with -mavx512f must not emit inline functions that other files share.
#ifndef TILELOSS_TOOLS_ROOF_LOOPS_H_
#define TILELOSS_TOOLS_ROOF_LOOPS_H_

#include <cstdint>

namespace tileloss::tools {

// A pass over `bytes` (a multiple of kRoofGranule) bytes. `distance`: how far ahead lines are prefetched, in bytes. The result
// depends on every byte read, so that no read can be left out.
using RoofPass = uint64_t (*)(char* from, char* to, int64_t bytes, int64_t distance);
// Sums exp(x) over `count` (a multiple of 128) floats, `repeats` times.
using RoofExp = float (*)(const float* x, int64_t count, int64_t repeats);

constexpr int64_t kRoofGranule = 4096;

struct RoofVariant {
  const char* name;
  RoofPass in_place;  // read and write back the same bytes
  RoofPass copy;      // read, and write with non-temporal stores
  RoofPass read;
  bool prefetches;
};

struct RoofExpVariant {
  const char* name;
  RoofExp sum;
};

struct RoofLoops {
  const char* isa;
  const RoofVariant* variants;
  int num_variants;
  const RoofExpVariant* exps;
  int num_exps;
};

RoofLoops roof_loops_baseline();
RoofLoops roof_loops_avx2();
RoofLoops roof_loops_avx512();

// V: Bytes (one vector), load, store, stream, zero, mix (any operation that uses both), fold.
// kStreams: the range is cut into that many pieces that are walked side by side, a cache line of each at a time.
template <class V, int kStreams, bool kPrefetch>
struct RoofLoop {
  static constexpr int64_t kLine = 64;

  template <class Line>
  static void walk(char* from, int64_t bytes, int64_t distance, Line line) {
    const int64_t piece = bytes / kStreams;
    for (int64_t offset = 0; offset < piece; offset += kLine) {
      for (int s = 0; s < kStreams; ++s) {
        const int64_t at = s * piece + offset;
        if constexpr (kPrefetch) __builtin_prefetch(from + at + distance, 0, 2);
        line(at, s);
      }
    }
  }

  static uint64_t in_place(char* from, char*, int64_t bytes, int64_t distance) {
    walk(
        from, bytes, distance, [&](int64_t at, int) __attribute__((always_inline)) {
          for (int64_t b = 0; b < kLine; b += V::kBytes) V::store(from + at + b, V::keep(V::load(from + at + b)));
        });
    return 0;
  }

  static uint64_t copy(char* from, char* to, int64_t bytes, int64_t distance) {
    walk(
        from, bytes, distance, [&](int64_t at, int) __attribute__((always_inline)) {
          for (int64_t b = 0; b < kLine; b += V::kBytes) V::stream(to + at + b, V::load(from + at + b));
        });
    V::fence();
    return 0;
  }

  static uint64_t read(char* from, char*, int64_t bytes, int64_t distance) {
    typename V::Vec sum[kStreams];
    for (auto& s : sum) s = V::zero();
    walk(
        from, bytes, distance, [&](int64_t at, int s) __attribute__((always_inline)) {
          for (int64_t b = 0; b < kLine; b += V::kBytes) sum[s] = V::mix(sum[s], V::load(from + at + b));
        });
    for (int s = 1; s < kStreams; ++s) sum[0] = V::mix(sum[0], sum[s]);
    return V::fold(sum[0]);
  }

  static constexpr RoofVariant variant(const char* name) { return {name, in_place, copy, read, kPrefetch}; }
};

// kVariants of a policy, to be used as a static array.
template <class V>
inline constexpr RoofVariant kRoofVariants[] = {
    RoofLoop<V, 1, false>::variant("1 stream"),           RoofLoop<V, 2, false>::variant("2 streams"),
    RoofLoop<V, 4, false>::variant("4 streams"),          RoofLoop<V, 1, true>::variant("1 stream, prefetch"),
    RoofLoop<V, 2, true>::variant("2 streams, prefetch"), RoofLoop<V, 4, true>::variant("4 streams, prefetch"),
};

// Eight vectors in flight cover the latency of the chain (about 40 cycles) at one FMA a cycle.
template <class V, typename V::Floats (*kExp)(typename V::Floats)>
float sum_exp(const float* x, int64_t count, int64_t repeats) {
  constexpr int kWays = 8;
  typename V::Floats sum[kWays];
  for (auto& s : sum) s = V::zero_floats();
  for (int64_t r = 0; r < repeats; ++r) {
    for (int64_t i = 0; i < count; i += kWays * V::kFloats) {
      for (int w = 0; w < kWays; ++w) sum[w] = V::add(sum[w], kExp(V::load_floats(x + i + w * V::kFloats)));
    }
  }
  for (int w = 1; w < kWays; ++w) sum[0] = V::add(sum[0], sum[w]);
  return V::fold_floats(sum[0]);
}

// 2^r on [-0.5, 0.5] to 1.1e-7 relative: interpolated at the Chebyshev nodes.
inline constexpr float kExp2[] = {1.00000008F, 0.693147188F, 0.240221075F, 0.0555035711F, 0.00967603192F, 0.00133908634F};
inline constexpr float kLog2E = 1.442695041F;
// Adding 1.5 * 2^23 rounds to an integer, which then sits in the low bits.
inline constexpr float kRoundMagic = 12582912.0F;

// exp by magic-number rounding: 2 additions and 1 FMA of reduction, 5 FMA, the exponent added as an integer.
template <class V>
typename V::Floats exp_shift(typename V::Floats x) {
  const auto shifted = V::fma(x, V::set(kLog2E), V::set(kRoundMagic));
  const auto r = V::fma(x, V::set(kLog2E), V::sub(V::set(kRoundMagic), shifted));
  auto p = V::set(kExp2[5]);
  for (int i = 4; i >= 0; --i) p = V::fma(p, r, V::set(kExp2[i]));
  return V::add_exponent(p, shifted);
}

}  // namespace tileloss::tools

#endif  // TILELOSS_TOOLS_ROOF_LOOPS_H_
