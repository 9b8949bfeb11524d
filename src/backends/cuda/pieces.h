// Pieces of the workspace.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tileloss::impl::cuda {

// Gives out pieces of the workspace, or counts what they take.
class Pieces {
 public:
  static constexpr std::int64_t kAlignment = 64;

  explicit Pieces(std::byte* data = nullptr) : data_(data) {}
  template <class T>
  T* allocate(std::int64_t count) {
    T* const at = reinterpret_cast<T*>(data_ + bytes_);
    bytes_ += (count * static_cast<std::int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::byte* data_;
  std::int64_t bytes_ = 0;
};

}  // namespace tileloss::impl::cuda
