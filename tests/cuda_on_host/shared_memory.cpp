#include "tests/cuda_on_host/shared_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <new>

#include "tests/cuda_on_host/sanitizers.h"

namespace cuda_on_host {
namespace {

std::size_t round_up(std::size_t n, std::size_t to) { return (n + to - 1) / to * to; }

std::size_t page_bytes() {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

// Not memset: thread sanitizer would see a write of whoever comes first.
void fill(std::byte* data, std::size_t bytes) {
  void* to = data;
  asm volatile("rep stosb" : "+D"(to), "+c"(bytes) : "a"(0xff) : "memory");
}

}  // namespace

void SharedMemory::allocate(Piece& piece) {
  if (kHasAddressSanitizer) {
    void* data = nullptr;
    if (posix_memalign(&data, piece.alignment, piece.bytes) != 0) throw std::bad_alloc();
    piece.data = static_cast<std::byte*>(data);
    return;
  }
  const std::size_t size = round_up(piece.bytes, piece.alignment), page = page_bytes();
  piece.page_bytes = round_up(size, page);
  std::vector<std::byte*>& free = free_[piece.page_bytes];
  if (free.empty()) {
    void* const all = mmap(nullptr, piece.page_bytes + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) throw std::bad_alloc();
    free.push_back(static_cast<std::byte*>(all) + page);
    mprotect(free.back(), piece.page_bytes, PROT_READ | PROT_WRITE);
  }
  piece.pages = free.back();
  free.pop_back();
  piece.data = piece.pages + (piece.page_bytes - size);
}

void* SharedMemory::find(unsigned block, const void* key, std::size_t bytes, std::size_t alignment) {
  for (const Piece& piece : pieces_) {
    if (piece.block != block || piece.key != key) continue;
    acquire(piece.data);
    return piece.data;
  }
  if (pieces_.size() == kMostPieces) throw std::bad_alloc();
  if (alignment < sizeof(void*)) alignment = sizeof(void*);
  Piece piece = {block, key, bytes, alignment, nullptr, nullptr, 0, true};
  allocate(piece);
  fill(piece.data, bytes);
  release(piece.data);
  pieces_.push_back(piece);
  return piece.data;
}

void* SharedMemory::peer(unsigned block, const void* mine, unsigned rank) {
  const auto* const at = static_cast<const std::byte*>(mine);
  for (const Piece& piece : pieces_) {
    if (piece.block != block || at < piece.data || at >= piece.data + piece.bytes) continue;
    const std::ptrdiff_t offset = at - piece.data;
    return static_cast<std::byte*>(find(rank, piece.key, piece.bytes, piece.alignment)) + offset;
  }
  return nullptr;
}

bool SharedMemory::has(unsigned block, const void* data, std::size_t bytes) const {
  const auto* const at = static_cast<const std::byte*>(data);
  for (const Piece& piece : pieces_) {
    if (piece.block == block && at >= piece.data && at + bytes <= piece.data + piece.bytes) return true;
  }
  return false;
}

void SharedMemory::close(unsigned block) {
  for (Piece& piece : pieces_) {
    if (piece.block != block || !piece.is_open) continue;
    piece.is_open = false;
    if (piece.pages != nullptr) {
      mprotect(piece.pages, piece.page_bytes, PROT_NONE);
    } else {
      std::free(piece.data);
    }
  }
}

void SharedMemory::clear() {
  for (const Piece& piece : pieces_) {
    if (piece.pages == nullptr) {
      if (piece.is_open) std::free(piece.data);
      continue;
    }
    if (has_thread_sanitizer()) {  // or it would take the next block's threads for this one's
      munmap(piece.pages - page_bytes(), piece.page_bytes + 2 * page_bytes());
      continue;
    }
    if (!piece.is_open) mprotect(piece.pages, piece.page_bytes, PROT_READ | PROT_WRITE);
    free_[piece.page_bytes].push_back(piece.pages);
  }
  pieces_.clear();
}

std::size_t SharedMemory::bytes(unsigned block) const {
  std::size_t sum = 0;
  for (const Piece& piece : pieces_) sum += piece.block == block ? piece.bytes : 0;
  return sum;
}

}  // namespace cuda_on_host
