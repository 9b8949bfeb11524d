// The memory and the queue of a device that does not exist: pages of their own, which the host cannot touch but while the device
// runs, and work that is done only when somebody synchronises. Whatever reads or writes such memory too early faults.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <vector>

namespace tileloss::test {

class DeviceMemory {
 public:
  DeviceMemory();
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  // Between pages that nobody may touch, next to the one behind it but for what aligns it to 64. Holds 0xff.
  void* allocate(std::size_t bytes);
  void release(void* data);
  std::size_t allocations() const { return pieces_.size(); }

  void queue(std::function<void()> task) { tasks_.push_back(std::move(task)); }
  void synchronise();

 private:
  struct Piece {
    std::byte* pages;
    std::size_t bytes;
  };
  void protect(int access) const;

  std::byte* arena_;
  std::size_t used_ = 0;
  bool is_running_ = false;
  std::map<void*, Piece> pieces_;
  std::vector<std::function<void()>> tasks_;
};

}  // namespace tileloss::test
