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

INSTANTIATE_TEST_SUITE_P(Configs, GradcheckOnDevice, testing::ValuesIn(config_names()), [](const auto& config) {
  std::string name = config.param.substr(0, config.param.rfind('.'));
  std::ranges::replace(name, '.', '_');
  return name;
});

// Two blocks of the vocabulary; ranks whose rows need copies; gradients of the low-rank part alone; what has ways of its own to
// z.
TEST(LowRankOnDevice, PassesWithEveryMutantCaught) {
  const std::string base = "level=linear batch_size=3 seq_len=11 hidden_size=48 seed=3 ignore_prob=0.2 source.std=2 bias=random ",
                    all = "gradients=[dhidden, dhead, dbias, dhidden_r, dhead_r] ", of_part = "gradients=[dhidden_r] ",
                    frozen = "gradients=[dhidden, dhead_r] ";
  for (const std::string& variant : {
           all + "loss=cross_entropy dtype=bf16 vocab_size=9001 rank=131 valid_vocab=8990",
           of_part + "loss=cross_entropy dtype=fp32 vocab_size=901 rank=1 allowed=runs",
           frozen + "loss=cross_entropy dtype=bf16 vocab_size=901 rank=8 head_layout=hv accumulate=true",
           all + "loss=cross_entropy dtype=fp16 vocab_size=901 rank=12 softcap=10 dhead_dtype=head",
           all + "loss=logprobs dtype=bf16 vocab_size=901 rank=512 upstream=per_row labels_per_row=4",
           all + "loss=distillation dtype=bf16 vocab_size=901 rank=5 teacher_hidden_size=20",
       }) {
    const GradcheckCall check(base + variant, {"kernel.device=cuda"});
    EXPECT_EQ(check.failures(), Sets()) << variant;
    EXPECT_FALSE(check.mutants().empty());
  }
}

TEST(SecondOnDevice, Passes) {
  const GradcheckCall check("gradcheck_ce_options.yaml", {"kernel.device=cuda:1", "seq_len=5"});
  EXPECT_EQ(check.failures(), Sets());
  EXPECT_GT(cuda_on_host::counters().queued, 0U);
}

TEST(BenchOnDevice, TimesBothPasses) {
  for (const char* loss : {"loss=cross_entropy in_place=true", "loss=linear_cross_entropy hidden=96 rank=5"}) {
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
