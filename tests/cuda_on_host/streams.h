// The queues of the devices that do not exist. What a stream is given is done in its order, and only when somebody waits for it.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "tests/backends/device_memory.h"
#include "tests/cuda_on_host/host_calls.h"
#include "tests/cuda_on_host/random.h"

namespace cuda_on_host {

struct Step {
  std::function<void()> work;  // may be empty
  unsigned devices = 0;        // whose memory it may touch, a bit each
  std::uint64_t number = 0;    // in the order of all calls
};

struct Graph {
  std::vector<Step> steps;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  bool is_valid = true;
};

struct Queue {
  int device = 0;
  bool is_default = false, waits_for_default = true;
  std::deque<Step> steps;
  std::shared_ptr<Graph> graph;  // while it is captured
};

struct Device {
  tileloss::test::DeviceMemory memory;
  bool is_open = false;
  std::shared_ptr<Queue> default_queue;
  std::list<std::shared_ptr<Queue>> queues;  // the others, also those destroyed but not done
};

class Devices {
 public:
  // A context of a program's own is one more device here, of the same number to who asks for that.
  static constexpr int kMostDevices = 4, kMost = 2 * kMostDevices;

  std::mutex mutex;
  Properties properties;
  Random random;
  unsigned started = 0;  // those that a context was made on, a bit each

  Devices();
  Device& device(int index);
  std::shared_ptr<Queue> add_queue(int device, bool waits_for_default);
  // The graph of a stream that waits for this queue, a default one, and is captured.
  Graph* captured_beside(const Queue& queue);
  // The captured or the queued; cudaSuccess, or why not.
  cudaError_t give(const std::shared_ptr<Queue>& queue, Step step);
  void finish(Queue& queue, std::uint64_t up_to);
  void finish(Queue& queue) { finish(queue, calls_); }
  void finish_device(int index);
  std::uint64_t calls() const { return calls_; }
  // Anything that a capture under way forbids to a thread whose mode is not relaxed; ends it.
  bool forbidden_by_capture();

  struct Piece {
    std::size_t bytes;
    int device;
    bool is_host, is_write_combined = false;
  };
  const std::map<std::uintptr_t, Piece>::value_type* find(const void* data) const;
  std::map<std::uintptr_t, Piece> pieces;
  // Of kernels that asked for more than 48 KiB: what of a block's they did not ask for, as tests change how much that is.
  std::map<const void*, int> not_dynamic_bytes;

 private:
  void with_memory(unsigned devices, const std::function<void()>& work);
  void finish_first(Queue& queue);

  std::unique_ptr<Device> devices_[kMost];
  std::uint64_t calls_ = 0;
};

Devices& devices();

cudaError_t say(cudaError_t error);  // and keeps it for cudaGetLastError
int current_device();                // of this thread, on which a context is made if there is none
inline int number_of(int device) { return device % Devices::kMostDevices; }
std::shared_ptr<Queue> queue_of(cudaStream_t stream);
bool is_apart_from_captures();  // this thread
void forget_access();           // of memory that is no longer there (access.cpp)

}  // namespace cuda_on_host
