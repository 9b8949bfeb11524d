#include <immintrin.h>

#include "roofs/roof_loops.h"

namespace tileloss::tools {
namespace {

struct Avx2 {
  using Vec = __m256i;
  static void stream(char* p, Vec v) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), v); }
  static void fence() { _mm_sfence(); }
};

}  // namespace

RoofLoops roof_loops_avx2() { return {"avx2", kRoofVariants<Avx2>, 6}; }

}  // namespace tileloss::tools
