// Functions whose last places are the device's own. Each is off from the right result, rounded, by as many units in the last
// place as is documented, up or down by the argument alone. ex2.approx.ftz.f32: PTX ISA 9.1, section 9.7.3.21; the others: CUDA
// C++ Programming Guide, mathematical functions.
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "tests/cuda_on_host/device_code.h"
#include "tests/cuda_on_host/host_calls.h"
#include "tests/cuda_on_host/threads.h"

namespace cuda_on_host {
namespace {

std::uint64_t scrambled(std::uint64_t bits) {
  bits = (bits ^ bits >> 31) * 0x9e3779b97f4a7c15u;
  return bits ^ bits >> 29;
}

// Of f(x) = y. In half of the places, which are sixteenths of a power of two, all arguments are off the same way, as those of a
// table's line may be, so that a sum of many is, too; in the others each goes its own way. f(0) is right, and what is 0, not
// normal or not finite.
template <class Real>
Real off(Real y, Real x, int units) {
  using Bits = std::conditional_t<sizeof(Real) == 4, std::uint32_t, std::uint64_t>;
  if (x == 0 || !std::isfinite(y) || std::fabs(y) < std::numeric_limits<Real>::min()) return y;
  const Bits bits = std::bit_cast<Bits>(x);
  const std::uint64_t place = scrambled(bits >> (std::numeric_limits<Real>::digits - 1 - 4));
  const bool is_up = (((place >> 1 & 1) != 0 ? place : scrambled(bits)) & 1) != 0;
  const Bits moved = is_up ? static_cast<Bits>(units) : static_cast<Bits>(-units);
  return std::bit_cast<Real>(static_cast<Bits>(std::bit_cast<Bits>(y) + moved));
}

// Beside PTX, which has the device's own functions of doubles in it, the right result: so both are nearest to each other.
template <class Real>
Real of_device(long double right, Real x, int units) {
  return off(static_cast<Real>(right), x, sizeof(Real) == 8 && is_beside_ptx() ? 0 : units);
}

}  // namespace
}  // namespace cuda_on_host

// The linker gives all calls of a function to __wrap_function (CMakeLists.txt): the host's go on to the C library.
#define CUDA_ON_HOST_FUNCTION(Real, name, function, units)                                      \
  extern "C" Real __real_##name(Real x);                                                        \
  extern "C" Real __wrap_##name(Real x);                                                        \
  Real __wrap_##name(Real x) {                                                                  \
    if (!cuda_on_host::is_in_kernel()) return __real_##name(x);                                 \
    return cuda_on_host::of_device<Real>(std::function(static_cast<long double>(x)), x, units); \
  }
CUDA_ON_HOST_FUNCTION(double, cosh, cosh, 1)
CUDA_ON_HOST_FUNCTION(double, exp, exp, 1)
CUDA_ON_HOST_FUNCTION(double, exp2, exp2, 1)
CUDA_ON_HOST_FUNCTION(double, expm1, expm1, 1)
CUDA_ON_HOST_FUNCTION(double, log, log, 1)
CUDA_ON_HOST_FUNCTION(double, log1p, log1p, 1)
CUDA_ON_HOST_FUNCTION(double, tanh, tanh, 1)
CUDA_ON_HOST_FUNCTION(float, exp2f, exp2, 2)

float cuda_on_host::exp2_approx(float x) {
  if (std::fabs(x) < FLT_MIN) return 1;
  const float y = off(__real_exp2f(x), x, 2);
  return y < FLT_MIN ? 0 : y;
}
float cuda_on_host::exp2_of_device(float x) { return of_device(std::exp2(static_cast<long double>(x)), x, 2); }
