// Scratch for one call, on huge pages when it is large: the stash of a row is 600 KB, and walking it on 4 KB pages costs TLB
// misses.
#pragma once

#include <cstddef>

namespace tileloss::impl::cpu {

class ScratchMemory {
 public:
  ScratchMemory() = default;
  explicit ScratchMemory(std::size_t bytes);  // check ok()
  ~ScratchMemory();
  ScratchMemory(const ScratchMemory&) = delete;
  ScratchMemory& operator=(const ScratchMemory&) = delete;

  bool ok() const { return data_ != nullptr; }
  std::byte* data() const { return data_; }  // aligned to 64 bytes

 private:
  void* base_ = nullptr;
  std::size_t mapped_ = 0;  // 0: from the heap
  std::byte* data_ = nullptr;
};

}  // namespace tileloss::impl::cpu
