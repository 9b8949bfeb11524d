#include "backends/cpu/isa/processor.h"

namespace tileloss::impl::cpu {

bool has_fast_pair_products(const Processor& processor) {
  constexpr unsigned int kFamily = 6, kCooperLake = 85;
  const bool is_cooper_lake = processor.family == kFamily && processor.model == kCooperLake;
  return processor.vendor != "GenuineIntel" || is_cooper_lake;
}

}  // namespace tileloss::impl::cpu
