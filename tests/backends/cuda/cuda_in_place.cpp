// TILELOSS_TEST_DEVICE=cuda: the CUDA backend, on the host (tests/cuda_on_host), in the CPU's place.
#include <cuda_runtime.h>

#include <cstdlib>
#include <cstring>

#include "backends/cuda/cuda_backend.h"
#include "tests/backends/copied_views.h"

namespace tileloss::test {
namespace {

class CudaOnHost final : public EmulatedDevice {
 public:
  const impl::Backend& backend() const override { return impl::cuda::cuda_backend(); }
  impl::Status begin(const impl::Problem& problem, std::unique_ptr<impl::Call>* call) override {
    tileloss_plan plan = {};
    if (impl::Status s = backend().plan(problem, wishes_for(problem), nullptr, &plan); !s.ok()) return s;
    return backend().begin(problem, plan, {}, call);
  }
  void* allocate(std::size_t bytes) override {
    void* data = nullptr;
    cudaMalloc(&data, bytes);
    return data;
  }
  void release(void* data) override { cudaFree(data); }
  void queue(std::function<void()> task) override {
    cudaLaunchConfig_t config = {};
    cuda_on_host::queue_kernel(config, nullptr, std::move(task));
  }
  void synchronise() override { cudaDeviceSynchronize(); }

 private:
  // An LM head is cut into parts that are small beside the tests' own, differently for different sizes; blocks of the vocabulary
  // whatever the rows are, as logp has the same bits for any number of them.
  static tileloss_plan_options wishes_for(const impl::Problem& p) {
    const std::int64_t number = p.rows + p.columns, block = p.columns % 4;
    tileloss_plan_options wishes = {};
    wishes.cuda.schedule = number % 2 == 0 ? TILELOSS_SCHEDULE_STASH : TILELOSS_SCHEDULE_RECOMPUTE;
    wishes.cuda.vocab_block = 64 * (1 + block);
    wishes.cuda.chunk_columns = 64 * (1 + number / 2 % 2);
    wishes.cuda.row_block = number % 3 == 0 ? 0 : 7 * (number % 3);
    return wishes;
  }
};

[[maybe_unused]] const bool is_on = [] {
  const char* const device = std::getenv("TILELOSS_TEST_DEVICE");
  if (device == nullptr || std::strcmp(device, "cuda") != 0) return false;
  static CudaOnHost cuda;
  take_the_cpus_place(&cuda);
  return true;
}();

}  // namespace
}  // namespace tileloss::test
