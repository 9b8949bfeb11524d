// A benchmark's tensors on a device.
#pragma once

#include <tileloss/tileloss.h>

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "roofs/roofs.h"
#include "support/device.h"

namespace tileloss::tools {

// Throws OutOfMemory or ToolError (environment) where the device refuses.
class DeviceRun {
 public:
  // Copies the tensors of `host`, whose rows lie side by side; of a dlogits in place also what lay there.
  DeviceRun(const Device& device, const tileloss_args& host, tileloss_pass pass);
  ~DeviceRun();
  DeviceRun(const DeviceRun&) = delete;
  DeviceRun& operator=(const DeviceRun&) = delete;

  const tileloss_args& args() const { return args_; }
  size_t bytes() const { return bytes_; }
  tileloss_run make_run(const tileloss_plan& plan);
  void synchronise() const;
  // Queued: puts back what a dlogits in place has overwritten.
  void restore() const;
  // Milliseconds of what `queue` queues, by the device's clock.
  double time(const std::function<void()>& queue) const;

  // Of a matrix of so many bytes: the device's own copy, read and written once; half of it counts as a read. No exp is measured.
  static Roofs measure_roofs(const Device& device, int64_t bytes, int repetitions);

 private:
  void* allocate(size_t bytes);

  const Device& device_;
  tileloss_args args_;
  tileloss_row_state row_state_{};
  std::map<const void*, void*> copies_;  // by where they lie on the host
  void* logits_before_ = nullptr;
  size_t logits_bytes_ = 0, bytes_ = 0;
};

// As many of the same as no cache of a device holds at once.
class DeviceRuns {
 public:
  DeviceRuns(const Device& device, const tileloss_args& host, tileloss_pass pass);

  DeviceRun& first() { return *runs_.front(); }
  const DeviceRun& next() { return *runs_[next_++ % runs_.size()]; }
  void restore() const;

 private:
  std::vector<std::unique_ptr<DeviceRun>> runs_;
  size_t next_ = 0;
};

}  // namespace tileloss::tools
