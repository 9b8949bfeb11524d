// The order of things.
#pragma once

#include <cstdint>
#include <utility>

namespace cuda_on_host {

class Random {  // xorshift64*
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15 | 1) {}
  unsigned below(unsigned n) {
    state_ ^= state_ >> 12, state_ ^= state_ << 25, state_ ^= state_ >> 27;
    return static_cast<unsigned>((state_ * 0x2545f4914f6cdd1d >> 32) * n >> 32);
  }
  template <class T>
  void shuffle(T* items, unsigned count) {
    for (; count > 1; --count) std::swap(items[count - 1], items[below(count)]);
  }

 private:
  std::uint64_t state_;
};

}  // namespace cuda_on_host
