// Constants of the sweeps that planning must know.
#ifndef TILELOSS_BACKENDS_CPU_SWEEP_SWEEP_LIMITS_H_
#define TILELOSS_BACKENDS_CPU_SWEEP_SWEEP_LIMITS_H_

#include <cstdint>

namespace tileloss::impl::cpu {

// Longer blocks leave the L1 cache between the look for their maximum and the rest.
inline constexpr std::int64_t kMaxVocabBlock = 8192;

}  // namespace tileloss::impl::cpu

#endif  // TILELOSS_BACKENDS_CPU_SWEEP_SWEEP_LIMITS_H_
