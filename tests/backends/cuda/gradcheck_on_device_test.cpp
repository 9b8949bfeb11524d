// The repository's configs with all mutants, and the bench, on a CUDA device that the host emulates; on a GPU the kit runs them.
#include <fstream>

#include "backends/cuda/cuda_backend.h"
#include "roofs/bench_run.h"
#include "tests/cuda_on_host/device_code.h"
#include "tests/shared/gradcheck_call.h"

namespace tileloss::tools {
namespace {

const bool is_registered = (impl::add_backend(&impl::cuda::cuda_backend()), true);

// The large configs are checked small: as flags of the command, the last of them the LM head's.
Sets small_model() {
  std::ifstream in(TILELOSS_SOURCE_DIR "/tests/backends/cuda/small_model.txt");
  Sets sets;
  for (std::string flag; std::getline(in, flag);) sets.push_back(flag.substr(flag.find('=') + 1));
  return sets;
}

class GradcheckOnDevice : public testing::TestWithParam<std::string> {};

TEST_P(GradcheckOnDevice, PassesWithEveryMutantCaught) {
  const std::string& config = GetParam();
  Sets sets;
  if (config.find("qwen") != std::string::npos) sets = small_model();
  if (!sets.empty() && config.find("linear") == std::string::npos) sets.pop_back();
  const GradcheckCall check(config, joined(sets, {"kernel.device=cuda"}));
  EXPECT_FALSE(check.mutants().empty());
  EXPECT_GT(cuda_on_host::counters().queued, 0U);
}

// CUDA refuses a low-rank part of the head.
Sets device_configs() {
  Sets names = config_names();
  std::erase_if(names, [](const std::string& name) { return config_of(name).linear.rank > 0; });
  return names;
}

INSTANTIATE_TEST_SUITE_P(Configs, GradcheckOnDevice, testing::ValuesIn(device_configs()), [](const auto& config) {
  std::string name = config.param.substr(0, config.param.rfind('.'));
  std::ranges::replace(name, '.', '_');
  return name;
});

TEST(SecondOnDevice, Passes) {
  const GradcheckCall check("gradcheck_ce_options.yaml", {"kernel.device=cuda:1", "seq_len=5"});
  EXPECT_EQ(check.failures(), Sets());
  EXPECT_GT(cuda_on_host::counters().queued, 0U);
}

TEST(BenchOnDevice, TimesBothPasses) {
  for (const char* loss : {"loss=cross_entropy in_place=true", "loss=linear_cross_entropy hidden=96"}) {
    const BenchRequest asked =
        read_bench_request(config_tree(loss, {"device=cuda", "tokens=5", "vocab=1001", "iters=2", "warmup=1"}));
    Bench bench(asked.settings);
    for (const tileloss_pass pass : asked.passes) {
      const Timing timing = bench.time_kernel(pass);
      EXPECT_GT(timing.median_ms, 0);
      EXPECT_GT(timing.host_ns, 0);
    }
    EXPECT_GT(bench.measure_roofs().copy_ms, 0);
  }
}

}  // namespace
}  // namespace tileloss::tools
