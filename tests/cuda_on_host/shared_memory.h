// The shared memory of the blocks of one cluster. Between pages that nobody may touch; with address sanitizer on the
// heap, as it sees single bytes. Holds 0xff when a block begins, and is nobody's any more when all threads of its block have
// left.
#pragma once

#include <cstddef>
#include <map>
#include <vector>

namespace cuda_on_host {

class SharedMemory {
 public:
  static constexpr std::size_t kMostPieces = 512;

  SharedMemory() { pieces_.reserve(kMostPieces); }  // so that no thread of a kernel moves them
  // The piece that `block` of the cluster has under this key.
  void* find(unsigned block, const void* key, std::size_t bytes, std::size_t alignment);
  // What is in block `rank` where `mine` is in `block`; null if that is no piece of it.
  void* peer(unsigned block, const void* mine, unsigned rank);
  bool has(unsigned block, const void* data, std::size_t bytes) const;
  void close(unsigned block);  // when its threads have left
  void clear();                // when the cluster's have
  std::size_t bytes(unsigned block) const;

 private:
  struct Piece {
    unsigned block;
    const void* key;
    std::size_t bytes, alignment;
    std::byte *data, *pages;
    std::size_t page_bytes;
    bool is_open;
  };
  void allocate(Piece& piece);

  std::vector<Piece> pieces_;
  std::map<std::size_t, std::vector<std::byte*>> free_;  // by bytes of their pages
};

}  // namespace cuda_on_host
