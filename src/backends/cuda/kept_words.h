// Logits of a row's block in 16 bits, between the LM head's forward and its backward: how far 2^t lies below that of the block's
// maximum, in steps of 2^-9 of t. 2^t then is off by at most 2^-10.5 of itself, and the root mean square of that and of rounding
// the gradient to bfloat16 is 3 % more than the latter alone (2^t in bfloat16 would make that 41 %). 65535 stands for the
// maximum, which is that of all columns but the label's, 0 for what lies 128 or more below it, where 2^t is none of float32's
// normal numbers.
//
// With a NaN or +inf in the row its gradient is NaN, whatever comes back.
#pragma once

#include "backends/cuda/device_api.h"

namespace tileloss::impl::cuda {

inline constexpr float kTopWord = 65535, kStepsOfExponent = 512;

// `steps`: kStepsOfExponent times what makes a logit an exponent. The label may lie above the maximum: its word is never used.
__device__ __forceinline__ std::uint32_t word_of(float logit, float max, float steps) {
  const float below = (max - logit) * steps;
  if (!(below < kTopWord)) return 0;
  return 65535 - static_cast<std::uint32_t>(std::rint(below > 0 ? below : 0));
}

// t of a word, relative to what its block's maximum is to exceed by `excess`, in exponents.
__device__ __forceinline__ float base_of_words(float excess) { return excess - kTopWord / kStepsOfExponent; }
__device__ __forceinline__ float exponent_of(float word, float base) { return std::fma(word, 1 / kStepsOfExponent, base); }

}  // namespace tileloss::impl::cuda
