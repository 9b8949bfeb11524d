#include <arm_neon.h>

#include "roofs/roof_loops.h"

namespace tileloss::tools {
namespace {

struct Neon {
  using Vec = uint64x2_t;
  // These cores see by themselves that lines are written whole, and do not read them first.
  static void stream(char* p, Vec v) { vst1q_u64(reinterpret_cast<uint64_t*>(p), v); }
  static void fence() {}
};

}  // namespace

RoofLoops roof_loops_neon() { return {"neon", kRoofVariants<Neon>, 6}; }

}  // namespace tileloss::tools
