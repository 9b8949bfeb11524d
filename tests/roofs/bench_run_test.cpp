// What the bench says it will hold, against what it does hold.
#include "roofs/bench_run.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <string>
#include <vector>

#include "support/exit_codes.h"
#include "tests/shared/configs.h"

namespace tileloss::tools {
namespace {

Function function_of(const BenchSettings& settings) {
  Function function(settings.loss);
  ConfigReader reader(settings.options);
  function.read_options(reader);
  return function;
}

double total_bytes(const BenchSettings& settings) {
  double total = 0;
  for (const MemoryNeed& need : memory_needs(settings, function_of(settings))) total += need.bytes;
  return total;
}

BenchSettings short_rows(const std::string& loss, const std::vector<std::string>& options) {
  BenchSettings settings;
  settings.loss = loss;
  settings.options = config_tree("", options);
  settings.tokens = 3'000'000;
  settings.vocab = 1;
  settings.kernel.threads = 1;
  if (function_of(settings).is_linear()) settings.head.hidden = 2;
  return settings;
}

BenchSettings low_rank(BenchSettings settings) {
  settings.head.rank = 3;
  return settings;
}

BenchSettings several_labels(BenchSettings settings) {
  settings.labels_per_row = 4;
  return settings;
}

// With rows of one column nearly all of it lies outside the matrices.
TEST(BenchMemory, IsWhatIsSaidBefore) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitized program keeps memory of its own";
#endif
  mallopt(M_MMAP_THRESHOLD, 1 << 20);  // so that what one case frees does not serve the next
  for (const BenchSettings& settings :
       {short_rows("cross_entropy", {}), short_rows("cross_entropy", {"reduction=none"}), short_rows("linear_cross_entropy", {}),
        short_rows("distillation", {}), short_rows("linear_distillation", {}), short_rows("policy_loss", {}),
        several_labels(short_rows("logprobs", {})), low_rank(short_rows("linear_logprobs", {})),
        short_rows("policy_loss", {"advantage_level=token", "aggregation=none", "beta=0.1", "sampler_correction=truncate"})}) {
    const int64_t before = resident_bytes();
    const Bench bench(settings);
    const auto held = static_cast<double>(resident_bytes() - before);
    const double said = total_bytes(settings);
    EXPECT_GT(said, 36.0 * static_cast<double>(settings.tokens) - 1);
    EXPECT_NEAR(held / said, 1, 0.1) << settings.loss << " said " << said << " held " << held;
  }
}

TEST(BenchMemory, TheFirstThatDoesNotFitIsNamed) {
  BenchSettings settings = short_rows("cross_entropy", {});
  settings.tokens = int64_t{1} << 31;
  const std::vector<MemoryNeed> needs = memory_needs(settings, function_of(settings));
  const auto refusal = [&](int64_t available) {
    try {
      check_memory(needs, available);
    } catch (const OutOfMemory& error) {
      return std::string(error.what());
    }
    return std::string("fits");
  };
  EXPECT_EQ(refusal(int64_t{1} << 30), "logits: needs 4295.0 MB, but only 1073.7 MB of memory are available");
  EXPECT_EQ(refusal(int64_t{20'000'000'000})
                .find("labels: needs 17179.9 MB, but only 11410.1 MB of memory are available beside "
                      "logits, dlogits, "),
            0U)
      << refusal(int64_t{20'000'000'000});
  EXPECT_EQ(refusal(static_cast<int64_t>(total_bytes(settings)) - 1).find("row outputs and row state: needs 51539.6 MB"), 0U);
  EXPECT_EQ(refusal(static_cast<int64_t>(total_bytes(settings))), "fits");
}

}  // namespace
}  // namespace tileloss::tools
