// Memory between pages without access: a read or write one element outside faults at once, also from masked vector
// instructions, gathers and other accesses that AddressSanitizer does not see.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace tileloss::tools {

// Which guard page the data touches.
enum class Flush { kRight, kLeft };

class GuardBuffer {
 public:
  GuardBuffer() = default;
  // `bytes` of data, every byte 0xff: NaN in float32, bfloat16 and float16, -1 in integers. `misalignment` bytes keep it off the
  // guard page, to vary its alignment; these hold a canary. Throws std::bad_alloc.
  GuardBuffer(std::size_t bytes, Flush flush, std::size_t misalignment = 0);
  ~GuardBuffer();
  GuardBuffer(GuardBuffer&& other) noexcept { swap(other); }
  GuardBuffer& operator=(GuardBuffer&& other) noexcept {
    swap(other);
    return *this;
  }
  GuardBuffer(const GuardBuffer&) = delete;
  GuardBuffer& operator=(const GuardBuffer&) = delete;

  void* data() const { return data_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data());
  }
  std::size_t bytes() const { return bytes_; }
  explicit operator bool() const { return data_ != nullptr; }

  void fill_ones();            // every byte 0xff again
  void make_read_only();       // from here on a write faults
  bool canary_intact() const;  // nothing was written between the data and the inner pages' ends
  // Takes the access from whole pages within the data: [offset, offset + page_bytes()) from its start.
  void make_guard_page(std::size_t offset);
  // And from every page that holds some of [offset, offset + bytes).
  void hide(std::size_t offset, std::size_t bytes);
  // The data, what keeps it off its pages' ends, or the guards, which are wide enough to tell whose overrun it was.
  bool contains(std::uintptr_t address) const;

  static std::size_t page_bytes();

 private:
  void swap(GuardBuffer& other) noexcept;

  unsigned char* mapping_ = nullptr;
  std::size_t mapping_bytes_ = 0;
  unsigned char* inner_ = nullptr;  // the accessible pages
  std::size_t inner_bytes_ = 0;
  unsigned char* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace tileloss::tools
