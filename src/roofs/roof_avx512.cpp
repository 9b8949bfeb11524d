#include <immintrin.h>

#include "roofs/roof_loops.h"

namespace tileloss::tools {
namespace {

struct Avx512 {
  using Vec = __m512i;
  static void stream(char* p, Vec v) { _mm512_stream_si512(reinterpret_cast<__m512i*>(p), v); }
  static void fence() { _mm_sfence(); }
};

}  // namespace

RoofLoops roof_loops_avx512() { return {"avx512", kRoofVariants<Avx512>, 6}; }

}  // namespace tileloss::tools
