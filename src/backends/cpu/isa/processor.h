// What no feature bit says: how fast the instructions are that a processor has.
#pragma once

#include <string>

namespace tileloss::impl::cpu {

// As cpuid names it.
struct Processor {
  std::string vendor;  // "GenuineIntel", ...
  unsigned int family = 0, model = 0;
};

// Of one with AVX-512 BF16: whether VDPBF16PS multiplies faster than float32's multiply-add does on twice the words, which gives
// the same exact products. AMD's (Zen 4 and later) do one where they do one multiply-add, for twice the products, and so does
// Intel's Cooper Lake, as published. Intel's cores from Sapphire Rapids on, which have AMX for that, split it into four steps and
// start one in two cycles, where they start four multiply-adds: half the products.
inline bool has_fast_pair_products(const Processor& processor) {
  constexpr unsigned int kFamily = 6, kCooperLake = 85;
  const bool is_cooper_lake = processor.family == kFamily && processor.model == kCooperLake;
  return processor.vendor != "GenuineIntel" || is_cooper_lake;
}

const Processor& this_processor();

}  // namespace tileloss::impl::cpu
