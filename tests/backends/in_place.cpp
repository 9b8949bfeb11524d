// TILELOSS_TEST_DEVICE puts a device in the CPU's place, for the suites that know the host's memory alone: toy; cuda, the CUDA
// backend on the host (tests/cuda_on_host), and cuda_of_an_h100, whose blocks are a real one's; gpu, the CUDA backend itself.
// Plans stay the CPU's, as tests look at them.
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "backends/cpu/cpu_backend.h"
#include "backends/device/copied_views.h"
#include "tests/backends/toy/toy_backend.h"
#if defined(TILELOSS_CUDA_ON_HOST)
#include <cuda_runtime.h>

#include "backends/cuda/cuda_backend.h"
#endif

namespace tileloss::test {
namespace {

// Some rows are read twice that a cluster could hold. An LM head is cut into parts that are small beside the tests' own,
// differently for different sizes; blocks of the vocabulary whatever the rows are, as logp has the same bits for any number of
// them.
tileloss_plan_options hints_for(const impl::Problem& p) {
  const std::int64_t number = p.rows + p.columns, block = p.columns % 4;
  tileloss_plan_options hints = {};
  hints.cuda.kernel = number % 3 == 0 ? TILELOSS_CUDA_KERNEL_TWO_READS : TILELOSS_CUDA_KERNEL_AUTO;
  hints.cuda.schedule = number % 2 == 0 ? TILELOSS_SCHEDULE_RECOMPUTE : TILELOSS_SCHEDULE_STASH;
  hints.cuda.vocab_block = 64 * (1 + block);
  hints.cuda.chunk_columns = 64 * (1 + number / 2 % 2);
  hints.cuda.row_block = number % 3 == 0 ? 0 : 7 * (number % 3);
  return hints;
}

const impl::Backend* device_named(std::string_view name) {
  if (name == "toy") {
    static const ToyBackend toy;
    return &toy;
  }
#if defined(TILELOSS_CUDA_ON_HOST)
  if (name == "cuda" || name == "cuda_of_an_h100") {
    // With so little shared memory that the suites' rows take a block, a cluster of any size, or do not fit.
    if (name == "cuda") cuda_on_host::properties().shared_bytes_of_multiprocessor = 8 << 10;
    return &impl::cuda::cuda_backend();
  }
#endif
  if (name == "gpu") return impl::find_backend(TILELOSS_CUDA);
  return nullptr;
}

[[maybe_unused]] const bool is_on = [] {
  const char* const name = std::getenv("TILELOSS_TEST_DEVICE");
  if (name == nullptr) return false;
  const impl::Backend* const device = device_named(name);
  if (device == nullptr) {
    std::printf("NOT RUN: there is no %s here%s\n", name, impl::why_no_backend(TILELOSS_CUDA).c_str());
    std::exit(0);
  }
  impl::device::take_the_cpus_place(*device, 0, impl::cpu::cpu_backend(), hints_for);
  return true;
}();

}  // namespace
}  // namespace tileloss::test
