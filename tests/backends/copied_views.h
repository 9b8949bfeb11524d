// A device in the CPU's place: calls with views of the host's memory run on it, over copies. So the C API's own suites run on a
// device with memory of its own. Plans stay the CPU's.
#ifndef TILELOSS_TESTS_BACKENDS_COPIED_VIEWS_H_
#define TILELOSS_TESTS_BACKENDS_COPIED_VIEWS_H_

#include <cstddef>
#include <functional>
#include <memory>

#include "backends/backend.h"

namespace tileloss::test {

class EmulatedDevice {
 public:
  EmulatedDevice() = default;
  EmulatedDevice(const EmulatedDevice&) = delete;
  EmulatedDevice& operator=(const EmulatedDevice&) = delete;
  virtual ~EmulatedDevice() = default;

  virtual const impl::Backend& backend() const = 0;
  virtual impl::Status begin(const impl::Problem& problem, std::unique_ptr<impl::Call>* call) = 0;
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void release(void* data) = 0;
  // Done where the device's memory can be read, in order.
  virtual void queue(std::function<void()> task) = 0;
  virtual void synchronise() = 0;
};

// For the rest of the process.
void take_the_cpus_place(EmulatedDevice* device);

}  // namespace tileloss::test

#endif  // TILELOSS_TESTS_BACKENDS_COPIED_VIEWS_H_
