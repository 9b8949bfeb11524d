#include "support/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <limits>
#include <string>
#include <utility>

#include "support/exit_codes.h"
#include "support/format.h"

namespace tileloss::tools {
namespace {

constexpr int64_t kUnknown = std::numeric_limits<int64_t>::max();

// The value in bytes of a "Name:   123 kB" line, -1 if the file has none.
int64_t read_kib_line(const char* file, const std::string& name) {
  std::ifstream in(file);
  std::string word;
  while (in >> word) {
    if (word == name) {
      int64_t kib = 0;
      in >> kib;
      return kib * 1024;
    }
  }
  return -1;
}

int64_t read_number(const char* file) {
  std::ifstream in(file);
  int64_t value = kUnknown;  // cgroup files say "max" for no limit
  return in >> value ? value : kUnknown;
}

}  // namespace

int64_t resident_bytes() { return read_kib_line("/proc/self/status", "VmRSS:"); }

int64_t resident_file_bytes() { return read_kib_line("/proc/self/status", "RssFile:"); }

int64_t peak_resident_bytes() { return read_kib_line("/proc/self/status", "VmHWM:"); }

void reset_peak() { std::ofstream("/proc/self/clear_refs") << "5"; }

int64_t available_bytes() {
  int64_t available = read_kib_line("/proc/meminfo", "MemAvailable:");
  if (available < 0) available = kUnknown;
  const int64_t limit = read_number("/sys/fs/cgroup/memory.max");
  const int64_t used = read_number("/sys/fs/cgroup/memory.current");
  if (limit != kUnknown && used != kUnknown) available = std::min(available, std::max<int64_t>(0, limit - used));
  return available;
}

std::optional<int64_t> parse_bytes(std::string_view text) {
  constexpr std::pair<std::string_view, int64_t> kUnits[] = {
      {"", 1}, {"KiB", int64_t{1} << 10}, {"MiB", int64_t{1} << 20}, {"GiB", int64_t{1} << 30}};
  int64_t count = 0;
  const auto [unit, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  for (const auto& [name, bytes] : kUnits) {
    if (error != std::errc() || count < 0 || std::string_view(unit) != name) continue;
    if (count <= std::numeric_limits<int64_t>::max() / bytes) return count * bytes;
  }
  return std::nullopt;
}

void check_memory(std::span<const MemoryNeed> needs, int64_t available) {
  auto left = static_cast<double>(available);
  std::string before;
  for (const MemoryNeed& need : needs) {
    if (need.bytes > left) {
      throw OutOfMemory(formatted("{}: needs {:.1f} MB, but only {:.1f} MB of memory are available{}", need.purpose,
                                  need.bytes / 1e6, left / 1e6, before));
    }
    left -= need.bytes;
    before += (before.empty() ? " beside " : ", ") + std::string(need.purpose);
  }
}

HugeBuffer::HugeBuffer(int64_t bytes, const char* purpose) : bytes_(bytes) {
  if (bytes <= 0) return;
  const MemoryNeed need = {purpose, static_cast<double>(bytes)};
  check_memory({&need, 1});
  void* data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    throw OutOfMemory(formatted("{}: cannot allocate {:.1f} MB", purpose, static_cast<double>(bytes) / 1e6));
  }
  data_ = data;
  madvise(data_, static_cast<size_t>(bytes), MADV_HUGEPAGE);
}

HugeBuffer::~HugeBuffer() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(bytes_));
}

HugeBuffer::HugeBuffer(HugeBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

HugeBuffer& HugeBuffer::operator=(HugeBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace tileloss::tools
