#include <emmintrin.h>

#include "roofs/roof_loops.h"

namespace tileloss::tools {
namespace {

struct Sse2 {
  using Vec = __m128i;
  static void stream(char* p, Vec v) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), v); }
  static void fence() { _mm_sfence(); }
};

}  // namespace

RoofLoops roof_loops_baseline() { return {"baseline", kRoofVariants<Sse2>, 6}; }

}  // namespace tileloss::tools
