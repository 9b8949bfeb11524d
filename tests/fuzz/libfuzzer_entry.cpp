#include "tests/fuzz/target.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  tileloss::test::accepts(data, size);
  return 0;  // keep what is new, accepted or not
}
