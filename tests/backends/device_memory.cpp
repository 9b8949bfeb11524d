#include "tests/backends/device_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <new>

namespace tileloss::test {
namespace {

constexpr std::size_t kArena = std::size_t{1} << 36;  // of addresses
constexpr std::size_t kAlignment = 64;

std::size_t round_up(std::size_t n, std::size_t to) { return (n + to - 1) / to * to; }

}  // namespace

DeviceMemory::DeviceMemory()
    : arena_(static_cast<std::byte*>(mmap(nullptr, kArena, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))) {
  if (arena_ == MAP_FAILED) throw std::bad_alloc();
}

DeviceMemory::~DeviceMemory() { munmap(arena_, kArena); }

void* DeviceMemory::allocate(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t size = round_up(bytes, kAlignment), pages = round_up(size, page);
  if (used_ + pages + page > kArena) throw std::bad_alloc();
  std::byte* const at = arena_ + used_;
  used_ += pages + page;
  void* const data = at + (pages - size);
  pieces_[data] = {at, pages};
  mprotect(at, pages, PROT_READ | PROT_WRITE);
  std::memset(at, 0xff, pages);
  if (!is_running_) mprotect(at, pages, PROT_NONE);
  return data;
}

void DeviceMemory::release(void* data) {
  const auto piece = pieces_.find(data);
  madvise(piece->second.pages, piece->second.bytes, MADV_DONTNEED);
  mprotect(piece->second.pages, piece->second.bytes, PROT_NONE);
  pieces_.erase(piece);
  if (pieces_.empty()) used_ = 0;
}

void DeviceMemory::protect(int access) const {
  for (const auto& [data, piece] : pieces_) mprotect(piece.pages, piece.bytes, access);
}

void DeviceMemory::synchronise() {
  protect(PROT_READ | PROT_WRITE);
  is_running_ = true;
  const std::vector<std::function<void()>> tasks = std::move(tasks_);
  tasks_.clear();
  for (const auto& task : tasks) task();
  is_running_ = false;
  protect(PROT_NONE);
}

}  // namespace tileloss::test
