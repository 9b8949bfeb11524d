// One benchmark: buffers, and the timing of each pass on them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "roofs/bench_matrices.h"
#include "roofs/roofs.h"
#include "roofs/unfused_baseline.h"
#include "support/abi.h"
#include "support/device.h"
#include "support/json.h"
#include "support/policy_inputs.h"

namespace tileloss::tools {

struct BenchSettings {
  std::string loss = "cross_entropy";
  int64_t tokens = 2048;
  int64_t vocab = 151936;
  oracle::NumberFormat dtype = oracle::NumberFormat::kBfloat16;
  bool in_place = false;
  bool entropy = false;
  double allowed = 0;          // the share of the columns that each row's softmax runs over, 0: no sets are given
  int64_t labels_per_row = 1;  // of logprobs
  int iterations = 20;
  int warmup = 3;
  uint64_t seed = 0;
  HeadSettings head;  // of the functions linear_*
  KernelHints kernel;
  Device device{"cpu"};
  std::string preset;  // "": none
  ConfigNode options;  // of the loss, by name
};

// The functions whose inputs a Bench makes: not those that take soft labels, some columns of a teacher, or coefficients.
std::vector<std::string> timed_functions();

// A bench's settings and passes, as a request or an axis of a sweep has them. Throws ToolError (usage) naming the key.
struct BenchRequest {
  BenchSettings settings;
  std::vector<tileloss_pass> passes;
  bool kernel = true;
  bool reference = false;
};
// The function with its options. Throws ToolError (usage) for settings that do not go together.
Function checked_settings(const BenchSettings& settings);
BenchRequest read_bench_request(const ConfigNode& root);
// What of a request decides a time, by name: the identity of a sweep's case.
Json case_of(const BenchRequest& request);

// What a Bench holds from beginning to end: the matrices, and 32 bytes a row and more, which count where the rows are short.
std::vector<MemoryNeed> memory_needs(const BenchSettings& settings, const Function& function);

// Times of one pass of one implementation.
struct Timing {
  std::string implementation;  // kernel, reference
  std::string pass;
  bool gradients = false;
  double traffic_bytes = 0;  // that have to be read or written
  double flops = 0;          // of useful products, 0 if there are none
  double first_call_s = 0;
  double median_ms = 0;
  double min_ms = 0;
  double mean_ms = 0;
  int iterations = 0;
  int64_t mem_after_alloc = 0;
  int64_t mem_peak = 0;
  int64_t mem_peak_data = 0;  // without the code that the call brought in
  int calls = 1;              // of a measurement, whose time is the mean of theirs
  double host_ns = 0;         // of a device: until the host has queued a call
  int64_t mem_scratch = 0;    // mem_peak_data above inputs and outputs: the workspace, and the pages of the threads' stacks
  std::optional<tileloss_plan> plan;  // the kernel's
  int threads = 0;
};

double tflops(const Timing& timing);
Json to_json(const Timing& timing);

class Bench {
 public:
  // Allocates and fills the buffers. Throws ToolError (usage) for settings that do not go together, and OutOfMemory, before
  // anything is allocated, for more than the machine has left.
  explicit Bench(const BenchSettings& settings);

  // A backward starts from the row state that a forward, which is not timed, has saved for it.
  Timing time_kernel(tileloss_pass pass);
  // Between make_reference and drop_reference, which hold its two float32 matrices.
  Timing time_reference(tileloss_pass pass);
  // Throws ToolError (usage) for a loss that the reference does not know.
  void make_reference();
  void drop_reference() { baseline_.reset(); }

  // On these buffers, with as many threads as the kernel has.
  Roofs measure_roofs();
  double roof_ms(const Roofs& roofs, const Timing& timing) const { return matrices_->roof_ms(roofs, timing.gradients); }
  std::string roofs_description() const {
    return settings_.device.is_cpu() ? roofs_.description()
                                     : "by the device's own copies and clock; a read counts as half of one";
  }

  const Function& function() const { return function_; }

 private:
  void make_allowed();
  void make_policy_inputs();
  tileloss_args make_args(tileloss_pass pass);
  void set_row_state(tileloss_args& args);
  void save_row_state();
  KernelHints hints(tileloss_pass pass) const;
  Timing time(const std::function<void()>& run, const std::function<void()>& restore, tileloss_pass pass, int iterations);
  Timing new_timing(tileloss_pass pass, int iterations) const;
  Timing time_on_device(tileloss_pass pass);

  BenchSettings settings_;
  Function function_;
  int threads_;
  ThreadTeam team_;
  RoofMeter roofs_;
  std::unique_ptr<BenchMatrices> matrices_;
  std::vector<int64_t> labels_;
  std::vector<int32_t> allowed_;  // [N, ceil(V / 32)]
  PolicyTensors policy_;
  std::vector<float> loss_, logp_, lse_, entropy_, upstream_;
  std::vector<float> state_max_, state_sum_, state_label_logit_, state_entropy_;
  tileloss_row_state row_state_{};
  std::unique_ptr<UnfusedBaseline> baseline_;
};

}  // namespace tileloss::tools
