// Memory of this process, and the buffers that benchmarks and checks run on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace tileloss::tools {

int64_t resident_bytes();
// Of them, those that are pages of files: the code of the program and of its libraries, as far as it has run.
int64_t resident_file_bytes();
// The largest resident size since the start or the last reset_peak(). Where /proc/self/clear_refs is not writable the reset does
// nothing and the peak is the whole life's.
int64_t peak_resident_bytes();
void reset_peak();
// Physical memory that could be had now (MemAvailable), and the cgroup's room if that is less.
int64_t available_bytes();

// "65536", "64KiB", "64MiB" or "1GiB" in bytes. Nothing for anything else, which was then expected to be kBytesExpected.
std::optional<int64_t> parse_bytes(std::string_view text);
inline constexpr const char* kBytesExpected = "bytes, as 65536, 512KiB, 64MiB or 1GiB";

// Of one buffer. A double: 2^31 rows of 2^31 numbers have more bytes than an int64_t counts.
struct MemoryNeed {
  const char* purpose;
  double bytes;
};
// Throws OutOfMemory naming the first that does not fit beside those before it. Linux overcommits: allocating would succeed, and
// the process be killed when it touches what it got.
void check_memory(std::span<const MemoryNeed> needs, int64_t available = available_bytes());

// Page-aligned memory that asks for huge pages: with 4 KiB pages the first touch of 622 MB costs up to 0.9 s.
class HugeBuffer {
 public:
  HugeBuffer() = default;
  // Throws OutOfMemory naming `purpose` when it exceeds what the machine has left (check_memory).
  HugeBuffer(int64_t bytes, const char* purpose);
  ~HugeBuffer();
  HugeBuffer(HugeBuffer&& other) noexcept;
  HugeBuffer& operator=(HugeBuffer&& other) noexcept;

  char* data() const { return static_cast<char*>(data_); }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  int64_t bytes() const { return bytes_; }
  bool empty() const { return data_ == nullptr; }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace tileloss::tools
