// The device that a program's kernels run on.
#pragma once

#include <tileloss/tileloss.h>

#include <string>
#include <string_view>

#include "backends/backend.h"
#include "support/abi.h"

namespace tileloss::tools {

// "cpu", "cuda" (the first one) or "cuda:1". Throws ToolError (usage) for another name.
class Device {
 public:
  explicit Device(std::string_view name);

  const std::string& name() const { return name_; }
  bool is_cpu() const { return type_ == TILELOSS_CPU; }
  tileloss_device_type type() const { return type_; }
  int32_t index() const { return index_; }
  // Throws ToolError (environment) where there is no such device.
  impl::DeviceMemory& memory() const { return *backend().memory(); }
  // Whether its planner has a choice of kernels: KernelHints::cuda_kernel.
  bool has_kernels(bool is_linear) const { return !is_cpu() && !is_linear; }
  // Throws ToolError (usage) naming a hint that the planner of such a function there has no use for.
  void check_hints(const KernelHints& hints, bool is_linear) const;
  // From here on all calls of this process run there, over copies of their tensors; plans are the device's. Throws as memory().
  void use() const;
  // Throws what the device said: OutOfMemory, or ToolError (environment).
  void check(const impl::Status& status) const;

 private:
  const impl::Backend& backend() const;

  std::string name_;
  tileloss_device_type type_ = TILELOSS_CPU;
  int32_t index_ = 0;
};

// The key `device` of a config, "cpu" by default.
Device read_device(ConfigReader& config);

}  // namespace tileloss::tools
