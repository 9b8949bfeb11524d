// The backends there are: the one file that names them.
#include <vector>

#include "backends/backend.h"
#include "backends/cpu/cpu_backend.h"
#include "backends/cuda/library.h"

namespace tileloss::impl {
namespace {

std::vector<const Backend*>& registry() {
  static std::vector<const Backend*> all = {
      &cpu::cpu_backend(),
  };
  return all;
}

// Built at load: a fork during the initialisation of a local static would leave its guard locked in the child.
[[maybe_unused]] const bool is_built = !registry().empty();

}  // namespace

std::span<const Backend* const> backends() { return registry(); }

const Backend* find_backend(tileloss_device_type device_type) {
  for (const Backend* backend : registry()) {
    if (backend->device_type() == device_type) return backend;
  }
  return device_type == TILELOSS_CUDA ? cuda::library().backend : nullptr;
}

std::string why_no_backend(tileloss_device_type device_type) {
  return device_type == TILELOSS_CUDA ? ", not cuda (" + cuda::library().missing + ")" : "";
}

void add_backend(const Backend* backend) {
  for (const Backend*& other : registry()) {
    if (other->device_type() == backend->device_type()) {
      other = backend;
      return;
    }
  }
  registry().push_back(backend);
}

}  // namespace tileloss::impl
