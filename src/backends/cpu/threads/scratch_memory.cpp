#include "backends/cpu/threads/scratch_memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>

namespace tileloss::impl::cpu {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kAlignment = 64;

std::size_t round_up(std::size_t n, std::size_t to) { return (n + to - 1) / to * to; }

}  // namespace

ScratchMemory::ScratchMemory(std::size_t bytes) {
  if (bytes > SIZE_MAX / 2) return;
  if (bytes < kHugePage / 4) {
    base_ = std::aligned_alloc(kAlignment, round_up(bytes == 0 ? 1 : bytes, kAlignment));
    data_ = static_cast<std::byte*>(base_);
    return;
  }
  const std::size_t rounded = round_up(bytes, kHugePage);
  void* p = mmap(nullptr, rounded + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return;
  base_ = p;
  mapped_ = rounded + kHugePage;
  data_ = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::uintptr_t>(p), kHugePage));
#ifdef MADV_HUGEPAGE
  madvise(data_, rounded, MADV_HUGEPAGE);  // a hint: the plain pages do as well
#endif
}

ScratchMemory::~ScratchMemory() {
  if (mapped_ != 0) {
    munmap(base_, mapped_);
  } else {
    std::free(base_);
  }
}

}  // namespace tileloss::impl::cpu
