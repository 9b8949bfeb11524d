#include "roofs/device_run.h"

#include <algorithm>

#include "support/abi.h"
#include "support/arg_slots.h"

namespace tileloss::tools {
namespace {

size_t bytes_of(const TensorView& view) {
  if (view.rows == 0) return 0;
  return static_cast<size_t>((view.rows - 1) * view.stride + view.cols) * view.element;
}

// More than any GPU's caches hold; of small tensors only some.
size_t copies_beyond_caches(size_t bytes) {
  constexpr size_t kCachesBytes = size_t{256} << 20, kMost = 32;
  return std::clamp<size_t>(kCachesBytes / std::max<size_t>(bytes, 1), 1, kMost);
}

double time_on(const Device& device, const std::function<void()>& queue) {
  double milliseconds = 0;
  device.check(device.memory().time(device.index(), queue, &milliseconds));
  return milliseconds;
}

}  // namespace

DeviceRun::DeviceRun(const Device& device, const tileloss_args& host, tileloss_pass pass) : device_(device), args_(host) {
  if (host.row_state != nullptr) {
    row_state_ = *host.row_state;
    row_state_.device_type = device.type();
    row_state_.device_index = device.index();
    args_.row_state = &row_state_;
  }
  for_each_tensor(args_, pass, [&](TensorView& view) {
    void*& copy = copies_[view.data];
    if (copy == nullptr) {
      copy = allocate(bytes_of(view));
      device.check(device.memory().copy(device.index(), copy, view.data, bytes_of(view)));
    }
    view.data = copy;
  });
  for (const impl::TensorSlot& slot : impl::tensor_slots()) {
    const auto place = [&](auto& tensor) {
      tensor.device_type = device.type();
      tensor.device_index = device.index();
    };
    if (slot.matrix != nullptr && impl::present(args_, slot)) place(args_.*slot.matrix);
    if (slot.vector != nullptr && impl::present(args_, slot)) place(args_.*slot.vector);
  }
  if (is_in_place(args_)) {
    logits_bytes_ = static_cast<size_t>(args_.logits.rows * args_.logits.row_stride) * element_bytes(args_.logits.dtype);
    logits_before_ = copies_[nullptr] = allocate(logits_bytes_);
    device.check(device.memory().copy(device.index(), logits_before_, args_.logits.data, logits_bytes_));
  }
  synchronise();
}

DeviceRun::~DeviceRun() {
  for (const auto& [host, copy] : copies_) device_.memory().release(device_.index(), copy);
}

void* DeviceRun::allocate(size_t bytes) {
  void* data = nullptr;
  device_.check(device_.memory().allocate(device_.index(), bytes, &data));
  bytes_ += bytes;
  return data;
}

tileloss_run DeviceRun::make_run(const tileloss_plan& plan) {
  tileloss_run run;
  tileloss_run_init(&run);
  run.workspace_bytes = static_cast<size_t>(plan.workspace_bytes);
  if (plan.workspace_bytes > 0) run.workspace = copies_[&copies_] = allocate(run.workspace_bytes);
  return run;
}

void DeviceRun::synchronise() const { device_.check(device_.memory().synchronise(device_.index())); }

void DeviceRun::restore() const {
  if (logits_before_ == nullptr) return;
  device_.check(device_.memory().copy(device_.index(), args_.logits.data, logits_before_, logits_bytes_));
}

double DeviceRun::time(const std::function<void()>& queue) const { return time_on(device_, queue); }

Roofs DeviceRun::measure_roofs(const Device& device, int64_t bytes, int repetitions) {
  impl::DeviceMemory& memory = device.memory();
  const auto size = static_cast<size_t>(bytes);
  const size_t copies = copies_beyond_caches(size);  // side by side, one after the other
  void* ends[2] = {};
  std::vector<double> times;
  for (void*& end : ends) device.check(memory.allocate(device.index(), copies * size, &end));
  for (int i = -1; i < repetitions; ++i) {
    const double ms = time_on(device, [&] {
      for (size_t copy = 0; copy < copies; ++copy)
        device.check(memory.copy(device.index(), static_cast<char*>(ends[0]) + copy * size,
                                 static_cast<char*>(ends[1]) + copy * size, size));
    });
    if (i >= 0) times.push_back(ms / static_cast<double>(copies));
  }
  for (void* end : ends) memory.release(device.index(), end);
  Roofs roofs;
  roofs.in_place_ms = roofs.copy_ms = median(times);
  roofs.read_ms = roofs.copy_ms / 2;
  return roofs;
}

DeviceRuns::DeviceRuns(const Device& device, const tileloss_args& host, tileloss_pass pass) {
  do runs_.push_back(std::make_unique<DeviceRun>(device, host, pass));
  while (runs_.size() < copies_beyond_caches(first().bytes()));
}

void DeviceRuns::restore() const {
  for (const auto& run : runs_) run->restore();
}

}  // namespace tileloss::tools
