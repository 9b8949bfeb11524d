// A device that does not exist, to show what a new one has to bring: sweeps in plain loops, and a queue. Its memory is out of the
// host's reach but while it runs, and it runs when somebody synchronises (tests/backends/device_memory.h).
#pragma once

#include <chrono>
#include <cstring>
#include <functional>
#include <utility>

#include "backends/backend.h"
#include "tests/backends/device_memory.h"

namespace tileloss::test {

inline constexpr tileloss_device_type kToyDevice = 77;

// Its own part of a plan.
struct ToyPlan {
  std::int64_t rows;
  std::int64_t columns;
};

class ToyBackend final : public impl::Backend {
 public:
  DeviceMemory& pages() const { return memory_.pages; }

  tileloss_device_type device_type() const override { return kToyDevice; }
  const char* name() const override { return "toy"; }
  std::int32_t device_count() const override { return kDevices; }
  impl::Status plan(const impl::Problem& problem, const tileloss_plan_options& hints, const tileloss_executor* executor,
                    tileloss_plan* plan) const override;
  impl::Status check_plan(const tileloss_plan& plan) const override;
  impl::Status begin(const impl::Problem& problem, const tileloss_plan& plan, const tileloss_run& run,
                     std::unique_ptr<impl::Call>* call) const override;
  impl::Status set_identity(const tileloss_row_state& state) const override;
  impl::Status merge(tileloss_row_state* into, const tileloss_row_state& from) const override;
  impl::Status scale_gradient(const tileloss_matrix& gradient, const float* factor, const tileloss_run& run) const override;
  impl::Status check_errors(std::int32_t device_index, void* /*stream*/) const override {
    return std::exchange(errors_[device_index], {});
  }
  impl::DeviceMemory* memory() const override { return &memory_; }
  std::vector<impl::PlanFact> describe(const tileloss_plan& plan) const override;

 private:
  struct Memory final : impl::DeviceMemory {
    impl::Status allocate(std::int32_t /*device_index*/, std::size_t bytes, void** data) override {
      *data = pages.allocate(bytes);
      return {};
    }
    void release(std::int32_t /*device_index*/, void* data) override { pages.release(data); }
    impl::Status copy(std::int32_t /*device_index*/, void* to, const void* from, std::size_t bytes) override {
      pages.queue([=] { std::memcpy(to, from, bytes); });
      return {};
    }
    impl::Status synchronise(std::int32_t /*device_index*/) override {
      pages.synchronise();
      return {};
    }
    impl::Status time(std::int32_t /*device_index*/, const std::function<void()>& queue, double* milliseconds) override {
      pages.synchronise();
      const auto begin = std::chrono::steady_clock::now();
      queue();
      pages.synchronise();
      *milliseconds = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
      return {};
    }

    test::DeviceMemory pages;
  };
  static constexpr std::int32_t kDevices = 2;
  mutable Memory memory_;
  mutable impl::Status errors_[kDevices];
};

}  // namespace tileloss::test
