#include "tests/cuda_on_host/streams.h"

#include <cstdlib>

namespace cuda_on_host {

Devices::Devices() : random(1) {
  const char* const seed = std::getenv("TILELOSS_CUDA_SEED");
  if (seed != nullptr) random = Random(std::strtoull(seed, nullptr, 10));
}

Devices& devices() {
  static Devices all;
  return all;
}

Device& Devices::device(int index) {
  std::unique_ptr<Device>& device = devices_[index];
  if (device == nullptr) {
    device = std::make_unique<Device>();
    device->default_queue = std::make_shared<Queue>();
    device->default_queue->device = index;
    device->default_queue->is_default = true;
  }
  return *device;
}

std::shared_ptr<Queue> Devices::add_queue(int index, bool waits_for_default) {
  auto queue = std::make_shared<Queue>();
  queue->device = index;
  queue->waits_for_default = waits_for_default;
  device(index).queues.push_back(queue);
  return queue;
}

Graph* Devices::captured_beside(const Queue& queue) {
  if (!queue.is_default) return nullptr;
  for (const auto& other : device(queue.device).queues) {
    if (other->graph != nullptr && other->waits_for_default) return other->graph.get();
  }
  return nullptr;
}

cudaError_t Devices::give(const std::shared_ptr<Queue>& queue, Step step) {
  if (Graph* const graph = captured_beside(*queue)) {
    graph->is_valid = false;
    return cudaErrorStreamCaptureImplicit;
  }
  if (queue->graph != nullptr) {
    if (!queue->graph->is_valid) return cudaErrorStreamCaptureInvalidated;
    queue->graph->steps.push_back(std::move(step));
    return cudaSuccess;
  }
  step.number = ++calls_;
  queue->steps.push_back(std::move(step));
  return cudaSuccess;
}

bool Devices::forbidden_by_capture() {
  bool found = false;
  if (is_apart_from_captures()) return found;
  for (const auto& device : devices_) {
    if (device == nullptr) continue;
    for (const auto& queue : device->queues) {
      if (queue->graph == nullptr || queue->graph->mode == cudaStreamCaptureModeRelaxed) continue;
      queue->graph->is_valid = false;
      found = true;
    }
  }
  return found;
}

void Devices::with_memory(unsigned which, const std::function<void()>& work) {
  for (int i = 0; i < kMost; ++i) {
    if ((which >> i & 1) == 0 || device(i).is_open) continue;
    device(i).is_open = true;
    device(i).memory.queue([this, which, &work] { with_memory(which, work); });
    device(i).memory.synchronise();
    device(i).is_open = false;
    return;
  }
  work();
}

// What a step waits for is done before it: of the default queue and the others of its device, all that was given earlier.
void Devices::finish_first(Queue& queue) {
  const Step step = std::move(queue.steps.front());
  queue.steps.pop_front();
  Device& own = device(queue.device);
  if (queue.is_default) {
    for (const auto& other : std::list(own.queues)) {
      if (other->waits_for_default) finish(*other, step.number);
    }
  } else if (queue.waits_for_default) {
    finish(*own.default_queue, step.number);
  }
  if (step.work != nullptr) with_memory(step.devices, step.work);
}

void Devices::finish(Queue& queue, std::uint64_t up_to) {
  if (queue.steps.empty() || queue.steps.front().number > up_to) return;
  with_memory(1u << queue.device, [&] {
    while (!queue.steps.empty() && queue.steps.front().number <= up_to) finish_first(queue);
  });
}

void Devices::finish_device(int index) {
  Device& own = device(index);
  with_memory(1u << index, [&] {
    for (;;) {
      std::vector<Queue*> busy;
      if (!own.default_queue->steps.empty()) busy.push_back(own.default_queue.get());
      for (const auto& queue : own.queues) {
        if (!queue->steps.empty()) busy.push_back(queue.get());
      }
      if (busy.empty()) return;
      finish_first(*busy[random.below(static_cast<unsigned>(busy.size()))]);
    }
  });
  own.queues.remove_if([](const auto& queue) { return queue.use_count() == 1; });
}

const std::map<std::uintptr_t, Devices::Piece>::value_type* Devices::find(const void* data) const {
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  auto piece = pieces.upper_bound(at);
  if (piece == pieces.begin()) return nullptr;
  --piece;
  return at < piece->first + piece->second.bytes ? &*piece : nullptr;
}

}  // namespace cuda_on_host
