// The loops behind roofs.cpp, written once over a vector policy and compiled per instruction set by the roof_<isa>.cpp files.
// Only <cstdint> is included: code compiled with -mavx512f must not emit inline functions that other files share.
#pragma once

#include <cstdint>

namespace tileloss::tools {

// A pass over `bytes` (a multiple of kRoofGranule) bytes. `distance`: how far ahead lines are prefetched, in bytes. The result
// depends on every byte read, so that no read can be left out.
using RoofPass = uint64_t (*)(char* from, char* to, int64_t bytes, int64_t distance);

constexpr int64_t kRoofGranule = 4096;

struct RoofVariant {
  const char* name;
  RoofPass in_place;  // read and write back the same bytes
  RoofPass copy;      // read, and write with non-temporal stores
  RoofPass read;
  bool prefetches;
};

struct RoofLoops {
  const char* isa;
  const RoofVariant* variants;
  int num_variants;
};

RoofLoops roof_loops_baseline();
RoofLoops roof_loops_avx2();
RoofLoops roof_loops_avx512();
RoofLoops roof_loops_neon();

// Machine, a type of the including file's own: its widest Vec, stream (a store past the caches) and fence. The rest is GCC's.
template <class Machine>
struct RoofVector : Machine {
  using Vec = typename Machine::Vec;
  static constexpr int64_t kBytes = sizeof(Vec);

  static Vec load(const char* p) {
    Vec v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  }
  static void store(char* p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }
  static uint64_t fold(Vec v) {
    uint64_t folded = 0;
    for (int lane = 0; lane < static_cast<int>(sizeof v) / 8; ++lane) folded ^= static_cast<uint64_t>(v[lane]);
    return folded;
  }
  // Hides from the compiler that what is stored is what was loaded.
  static Vec keep(Vec v) {
#if defined(__x86_64__)
    asm volatile("" : "+x"(v));
#else
    asm volatile("" : "+w"(v));
#endif
    return v;
  }
};

// V: a RoofVector. kStreams: the range is cut into that many pieces that are walked side by side, a cache line of each at a time.
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
    for (auto& s : sum) s = typename V::Vec{};
    walk(
        from, bytes, distance, [&](int64_t at, int s) __attribute__((always_inline)) {
          for (int64_t b = 0; b < kLine; b += V::kBytes) sum[s] ^= V::load(from + at + b);
        });
    for (int s = 1; s < kStreams; ++s) sum[0] ^= sum[s];
    return V::fold(sum[0]);
  }

  static constexpr RoofVariant variant(const char* name) { return {name, in_place, copy, read, kPrefetch}; }
};

// Of a machine, to be used as a static array.
template <class Machine, class V = RoofVector<Machine>>
inline constexpr RoofVariant kRoofVariants[] = {
    RoofLoop<V, 1, false>::variant("1 stream"),           RoofLoop<V, 2, false>::variant("2 streams"),
    RoofLoop<V, 4, false>::variant("4 streams"),          RoofLoop<V, 1, true>::variant("1 stream, prefetch"),
    RoofLoop<V, 2, true>::variant("2 streams, prefetch"), RoofLoop<V, 4, true>::variant("4 streams, prefetch"),
};

}  // namespace tileloss::tools
