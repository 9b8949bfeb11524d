#include "judge/strict/guard_buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace tileloss::tools {
namespace {

constexpr unsigned char kCanary = 0xa5;
// On each side: more than a row of 262144 bfloat16 logits, so that also a whole row too many faults within the buffer's own
// guard. It is address space only.
constexpr std::size_t kGuardBytes = std::size_t{1} << 20;

}  // namespace

GuardBuffer::GuardBuffer(std::size_t bytes, Flush flush, std::size_t misalignment) : bytes_(bytes) {
  const std::size_t page = page_bytes();
  inner_bytes_ = std::max((bytes + misalignment + page - 1) / page * page, page);
  mapping_bytes_ = inner_bytes_ + 2 * kGuardBytes;
  void* mapping = mmap(nullptr, mapping_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<unsigned char*>(mapping);
  inner_ = mapping_ + kGuardBytes;
  if (mprotect(inner_, inner_bytes_, PROT_READ | PROT_WRITE) != 0) {
    munmap(mapping_, mapping_bytes_);
    throw std::bad_alloc();
  }
  std::memset(inner_, kCanary, inner_bytes_);
  data_ = flush == Flush::kLeft ? inner_ + misalignment : inner_ + inner_bytes_ - bytes - misalignment;
  fill_ones();
}

GuardBuffer::~GuardBuffer() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
}

void GuardBuffer::swap(GuardBuffer& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(mapping_bytes_, other.mapping_bytes_);
  std::swap(inner_, other.inner_);
  std::swap(inner_bytes_, other.inner_bytes_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
}

void GuardBuffer::fill_ones() {
  if (bytes_ > 0) std::memset(data_, 0xff, bytes_);
}

void GuardBuffer::make_read_only() {
  if (mprotect(inner_, inner_bytes_, PROT_READ) != 0) throw std::bad_alloc();
}

void GuardBuffer::make_guard_page(std::size_t offset) {
  if (mprotect(data_ + offset, page_bytes(), PROT_NONE) != 0) throw std::bad_alloc();
}

void GuardBuffer::hide(std::size_t offset, std::size_t bytes) {
  const std::size_t page = page_bytes(), start = static_cast<std::size_t>(data_ - inner_) + offset;
  const std::size_t first = start / page * page, end = (start + bytes + page - 1) / page * page;
  if (mprotect(inner_ + first, end - first, PROT_NONE) != 0) throw std::bad_alloc();
}

bool GuardBuffer::contains(std::uintptr_t address) const {
  return address - reinterpret_cast<std::uintptr_t>(mapping_) < mapping_bytes_;
}

std::size_t GuardBuffer::page_bytes() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

bool GuardBuffer::canary_intact() const {
  const auto is_canary = [](unsigned char byte) { return byte == kCanary; };
  return std::all_of(inner_, data_, is_canary) && std::all_of(data_ + bytes_, inner_ + inner_bytes_, is_canary);
}

}  // namespace tileloss::tools
