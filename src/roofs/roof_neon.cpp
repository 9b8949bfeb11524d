#include <arm_neon.h>

#include "roofs/roof_loops.h"

namespace tileloss::tools {
namespace {

struct Neon {
  using Vec = uint64x2_t;
  static constexpr int64_t kBytes = 16;
  static Vec load(const char* p) { return vld1q_u64(reinterpret_cast<const uint64_t*>(p)); }
  static void store(char* p, Vec v) { vst1q_u64(reinterpret_cast<uint64_t*>(p), v); }
  // These cores see by themselves that lines are written whole, and do not read them first.
  static void stream(char* p, Vec v) { store(p, v); }
  static void fence() {}
  static Vec zero() { return vdupq_n_u64(0); }
  static Vec mix(Vec a, Vec b) { return veorq_u64(a, b); }
  static uint64_t fold(Vec v) { return vgetq_lane_u64(v, 0) ^ vgetq_lane_u64(v, 1); }
  // Hides from the compiler that what is stored is what was loaded.
  static Vec keep(Vec v) {
    asm volatile("" : "+w"(v));
    return v;
  }
};

}  // namespace

RoofLoops roof_loops_neon() { return {"neon", kRoofVariants<Neon>, 6}; }

}  // namespace tileloss::tools
