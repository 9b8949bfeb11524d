#include "roofs/bench_run.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>
#include <span>

#include "roofs/device_run.h"
#include "support/exit_codes.h"
#include "support/format.h"
#include "support/printable.h"
#include "support/synthetic.h"
#include "support/timer.h"

namespace tileloss::tools {
namespace {

constexpr int64_t kSequenceLength = 256;
constexpr double kPolicyNoise = 0.1;
constexpr int64_t kRunColumns = 1024;  // of a set
// On a device: of a measurement, whose ends the device's clock tells to half a microsecond; and no more than a queue holds.
constexpr double kMeasuredMs = 20, kMostCalls = 50;
// The reference takes seconds a call at full size.
constexpr int kMaxReferenceIterations = 5;

void check_preset(const std::string& preset, const Function& function) {
  const std::vector<std::string> presets = function.presets();
  if (std::find(presets.begin(), presets.end(), preset) != presets.end()) return;
  const std::string wanted = presets.empty() ? formatted("none, as {} has no presets", function.name())
                                             : formatted("one of {}", fmt::join(presets, ", "));
  throw ToolError(kExitUsage, formatted("--preset: expected {}, got '{}'", wanted, shown(preset)));
}

// Options stand in --set as in a config file.
Function make_function(const BenchSettings& settings) {
  Function function(settings.loss);
  ConfigNode options = settings.options;
  if (!settings.preset.empty()) {
    check_preset(settings.preset, function);
    // Neither flag is before the other.
    for (const ConfigNode& option : options.children) {
      if (option.key == "preset")
        throw ToolError(kExitUsage, formatted("expected one preset, got --preset {} and --set preset={}", settings.preset,
                                              shown(option.text)));
    }
    ConfigNode preset;
    preset.kind = ConfigNode::Kind::kScalar;
    preset.key = "preset";
    preset.text = settings.preset;
    options.children.push_back(preset);
  }
  ConfigReader reader(options);
  function.read_options(reader);
  reader.finish();
  // What this aggregation divides by, as a preset chooses it without the length.
  if (function.get_choice("aggregation", "") == "seq_mean_token_sum_norm" && function.get_integer("max_length", 0) < 0) {
    function.set_integer("max_length", std::min(settings.tokens, kSequenceLength));
  }
  return function;
}

void check(const BenchSettings& settings, const Function& function) {
  settings.device.check_hints(settings.kernel, function.is_linear());
  const auto refuse = [](const std::string& message) { throw ToolError(kExitUsage, message); };
  if (function.is_linear()) {
    if (settings.head.hidden == 0) refuse("--hidden: " + function.name() + " needs the hidden size, got none");
    if (settings.in_place) refuse("--in-place: " + function.name() + " has no logits to write its gradient over");
  } else if (settings.head.is_given()) {
    refuse("--hidden, --head-layout, --dhead-dtype, --frozen-head and --rank are for the functions linear_*, got " +
           function.name());
  }
}

MatricesSpec matrices_spec(const BenchSettings& settings, const Function& function) {
  return {.rows = settings.tokens,
          .columns = settings.vocab,
          .format = settings.dtype,
          .is_linear = function.is_linear(),
          .in_place = settings.in_place,
          .has_teacher = function.has_teacher(),
          .head = settings.head,
          .seed = settings.seed};
}

int64_t words_of(int64_t columns) { return (columns + 31) / 32; }

int thread_count(const BenchSettings& settings) {
  return settings.kernel.threads > 0 ? static_cast<int>(settings.kernel.threads) : tileloss_default_threads();
}

void set_times(const std::vector<double>& times, Timing& timing) {
  timing.median_ms = median(times);
  timing.min_ms = *std::min_element(times.begin(), times.end());
  timing.mean_ms = std::accumulate(times.begin(), times.end(), 0.0) / static_cast<double>(times.size());
}

tileloss_vector vector_of(std::vector<float>& values) {
  return tileloss_make_vector(values.data(), TILELOSS_FLOAT32, static_cast<int64_t>(values.size()));
}

// Sequences of 256 tokens, the last one shorter; advantages of both signs; the other policies' logp near the kernel's own, so
// that some ratios are clipped and none overflows.
PolicyDraw policy_draw(const BenchSettings& settings, const Function& function) {
  PolicyDraw draw;
  draw.seed = settings.seed;
  draw.rows = settings.tokens;
  draw.sequences = (settings.tokens + kSequenceLength - 1) / kSequenceLength;
  draw.token_advantages = function.get_choice("advantage_level", "") == "token";
  draw.old_scale = kPolicyNoise;
  if (function.get("beta", 0) != 0) draw.ref_scale = kPolicyNoise;
  if (function.get_choice("sampler_correction", "off") != "off") draw.sampler_scale = kPolicyNoise;
  return draw;
}

}  // namespace

Function checked_settings(const BenchSettings& settings) {
  Function function = make_function(settings);
  check(settings, function);
  return function;
}

std::vector<std::string> timed_functions() {
  std::vector<std::string> names = Function::names();
  std::erase_if(names, [](const std::string& name) {
    const Function function(name);
    return function.takes("target_probs") || function.takes("teacher_ids") || function.takes("target_coef");
  });
  return names;
}

std::vector<MemoryNeed> memory_needs(const BenchSettings& settings, const Function& function) {
  std::vector<MemoryNeed> needs = matrices_spec(settings, function).needs();
  const auto rows = static_cast<double>(settings.tokens);
  const auto labels = rows * static_cast<double>(settings.labels_per_row);
  needs.push_back({"labels", labels * sizeof(int64_t)});
  if (settings.allowed > 0) needs.push_back({"allowed", rows * static_cast<double>(words_of(settings.vocab)) * sizeof(int32_t)});
  const int row_arrays = 5 + (function.per_row_loss() ? 1 : 0) + (function.is_policy() ? 1 : 0);
  needs.push_back({"row outputs and row state", sizeof(float) * (rows * row_arrays + labels)});
  if (function.is_policy()) {
    const PolicyDraw draw = policy_draw(settings, function);
    const int row_tensors = (draw.token_advantages ? 1 : 0) + 1 + (draw.ref_scale ? 1 : 0) + (draw.sampler_scale ? 1 : 0);
    const auto sequences = static_cast<double>(draw.sequences);
    needs.push_back({"policy inputs", rows * sizeof(float) * row_tensors + sequences * (sizeof(int64_t) + sizeof(float))});
  }
  return needs;
}

double tflops(const Timing& timing) { return timing.flops / timing.median_ms / 1e9; }

Json to_json(const Timing& timing) {
  const Json facts = timing.plan ? plan_facts(*timing.plan) : Json::object();  // none of a reference
  Json json = {{"pass", timing.pass},
               {"isa", facts.value("isa", "-")},
               {"threads", timing.threads},
               {"schedule", facts.value("schedule", "-")},
               {"row_block", facts.value("row_block", int64_t{0})},
               {"vocab_block", facts.value("vocab_block", int64_t{0})},
               {"workspace_bytes", timing.plan ? timing.plan->workspace_bytes : 0},
               {"iters", timing.iterations},
               {"first_call_s", timing.first_call_s},
               {"median_ms", timing.median_ms},
               {"min_ms", timing.min_ms},
               {"mean_ms", timing.mean_ms},
               {"mem_after_alloc", timing.mem_after_alloc},
               {"mem_peak", timing.mem_peak},
               {"mem_scratch", timing.mem_scratch},
               {"gb_per_s", timing.traffic_bytes / timing.median_ms / 1e6}};
  if (timing.host_ns > 0) json.update({{"calls", timing.calls}, {"host_ns", timing.host_ns}});
  if (facts.contains("kernel")) json["cuda_kernel"] = facts["kernel"];
  if (timing.plan) {
    json["predicted_ms"] = timing.plan->predicted_ms;
    json["buffers"] = Json::object();
    const std::span buffers(timing.plan->buffers, static_cast<size_t>(timing.plan->buffer_count));
    for (const tileloss_plan_buffer& buffer : buffers) json["buffers"][buffer.name] = buffer.bytes;
  }
  if (timing.flops > 0) {
    json["tflops"] = tflops(timing);
    json["kept_columns"] = facts.value("kept_columns", int64_t{0});
    json["kept_rows"] = facts.value("kept_rows", int64_t{0});
  }
  return json;
}

Bench::Bench(const BenchSettings& settings)
    : settings_(settings),
      function_(checked_settings(settings)),
      threads_(thread_count(settings)),
      team_(threads_),
      roofs_(threads_) {
  check_memory(memory_needs(settings, function_));
  matrices_ = std::make_unique<BenchMatrices>(matrices_spec(settings, function_), team_);
  const auto rows = static_cast<size_t>(settings.tokens);
  LabelsSpec labels;
  labels.vocab = settings.vocab;
  const int64_t valid = function_.get_integer("valid_vocab", -1);
  if (valid > 0) labels.vocab = std::min(valid, settings.vocab);
  labels_ = make_labels(labels, settings.seed, settings.tokens * settings.labels_per_row);
  if (settings.allowed > 0) make_allowed();
  loss_.resize(function_.per_row_loss() ? rows : 1);
  for (std::vector<float>* values : {&lse_, &entropy_, &state_max_, &state_sum_, &state_label_logit_}) values->resize(rows);
  logp_.resize(labels_.size());
  upstream_.assign(1, 1.0F);
  if (function_.is_policy()) {
    state_entropy_.resize(rows);
    make_policy_inputs();
  }
}

// The same runs of columns for all rows, evenly spread, as a grammar or an environment's actions have them; a row has words of
// its own. The labels are among them.
void Bench::make_allowed() {
  const int64_t words = words_of(settings_.vocab), vocab = settings_.vocab;
  const auto count = std::max<int64_t>(std::llround(settings_.allowed * static_cast<double>(vocab)), 1);
  const int64_t runs = (count + kRunColumns - 1) / kRunColumns;
  std::vector<int64_t> columns;
  for (int64_t run = 0; run < runs; ++run) {
    const int64_t size = (run + 1) * count / runs - run * count / runs;
    for (int64_t j = 0; j < size; ++j) columns.push_back(run * vocab / runs + j);
  }
  std::vector<int32_t> row(static_cast<size_t>(words));
  for (const int64_t j : columns) {
    auto& word = row[static_cast<size_t>(j / 32)];
    word = static_cast<int32_t>(static_cast<uint32_t>(word) | uint32_t{1} << (j % 32));
  }
  for (int64_t i = 0; i < settings_.tokens; ++i) allowed_.insert(allowed_.end(), row.begin(), row.end());
  for (int64_t& label : labels_) label = columns[static_cast<size_t>(label % count)];
}

void Bench::make_policy_inputs() {
  const PolicyDraw draw = policy_draw(settings_, function_);
  policy_ = draw_policy_layout(draw);
  policy_.sequence_length = 0;
  for (int64_t b = 0; b <= draw.sequences; ++b) {
    policy_.offsets[static_cast<size_t>(b)] = std::min(b * kSequenceLength, settings_.tokens);
  }
  tileloss_args args = make_args(TILELOSS_FORWARD);
  args.logp = vector_of(logp_);
  call(function_, TILELOSS_FORWARD, args, make_plan(function_, TILELOSS_FORWARD, args, hints(TILELOSS_FORWARD)));
  int64_t stream = 0;
  for (std::vector<float>* values : {&policy_.old_logp, &policy_.ref_logp, &policy_.sampler_logp}) {
    Random random(settings_.seed, Stream::kPolicyLogp, stream++);
    for (size_t i = 0; i < values->size(); ++i) (*values)[i] = logp_[i] + static_cast<float>(kPolicyNoise * random.next_normal());
  }
}

tileloss_args Bench::make_args(tileloss_pass pass) {
  tileloss_args args;
  tileloss_args_init(&args);
  matrices_->add_to(args, pass != TILELOSS_FORWARD);
  args.labels = tileloss_make_vector(labels_.data(), TILELOSS_INT64, std::ssize(labels_));
  args.labels_per_row = settings_.labels_per_row;
  if (const int64_t words = words_of(settings_.vocab); !allowed_.empty())
    args.allowed = tileloss_make_matrix(allowed_.data(), TILELOSS_INT32, settings_.tokens, words, words);
  if (!policy_.offsets.empty()) policy_.add_to(args);
  if (pass != TILELOSS_BACKWARD) {
    if (function_.is_loss()) args.loss = vector_of(loss_);
    if (!function_.is_loss()) {
      args.logp = vector_of(logp_);
      args.lse = vector_of(lse_);
    }
    if (settings_.entropy) args.entropy = vector_of(entropy_);
  }
  const bool has_state = pass == TILELOSS_BACKWARD || (pass == TILELOSS_FORWARD && !function_.is_loss());
  if (has_state && function_.has_row_state()) set_row_state(args);
  if (pass == TILELOSS_BACKWARD && !function_.is_loss()) {
    args.logp_grad = tileloss_make_vector(upstream_.data(), TILELOSS_FLOAT32, std::ssize(labels_));
    args.logp_grad.stride = 0;
  }
  return args;
}

void Bench::set_row_state(tileloss_args& args) {
  tileloss_row_state_init(&row_state_);
  row_state_.rows = settings_.tokens;
  row_state_.max = state_max_.data();
  row_state_.sum = state_sum_.data();
  row_state_.label_logit = state_label_logit_.data();
  if (!state_entropy_.empty()) row_state_.entropy_sum = state_entropy_.data();  // an entropy bonus needs it
  args.row_state = &row_state_;
}

void Bench::save_row_state() {
  tileloss_args args = make_args(TILELOSS_FORWARD);
  set_row_state(args);
  call(function_, TILELOSS_FORWARD, args, make_plan(function_, TILELOSS_FORWARD, args, hints(TILELOSS_FORWARD)));
}

// The stash and recompute schedules exist for value_and_grad only.
KernelHints Bench::hints(tileloss_pass pass) const {
  KernelHints hints = settings_.kernel;
  if (pass != TILELOSS_VALUE_AND_GRAD) hints.schedule = "auto";
  return hints;
}

Timing Bench::new_timing(tileloss_pass pass, int iterations) const {
  Timing timing;
  timing.pass = pass_name(pass);
  timing.gradients = pass != TILELOSS_FORWARD;
  timing.traffic_bytes = matrices_->traffic_bytes(timing.gradients);
  timing.flops = matrices_->flops(timing.gradients);
  timing.iterations = iterations;
  return timing;
}

Timing Bench::time(const std::function<void()>& run, const std::function<void()>& restore, tileloss_pass pass, int iterations) {
  Timing timing = new_timing(pass, iterations);
  const bool is_overwritten = timing.gradients && settings_.in_place;
  timing.mem_after_alloc = resident_bytes();
  reset_peak();
  const Timer first;
  run();
  timing.first_call_s = first.seconds();
  timing.mem_peak = peak_resident_bytes();
  timing.mem_peak_data = timing.mem_peak - resident_file_bytes();

  std::vector<double> times;
  for (int i = -settings_.warmup; i < iterations; ++i) {
    if (is_overwritten) restore();
    const Timer timer;
    run();
    if (i >= 0) times.push_back(timer.milliseconds());
  }
  if (is_overwritten) restore();
  set_times(times, timing);
  return timing;
}

Timing Bench::time_kernel(tileloss_pass pass) {
  if (pass == TILELOSS_BACKWARD && function_.has_row_state()) save_row_state();
  if (!settings_.device.is_cpu()) return time_on_device(pass);
  const tileloss_args args = make_args(pass);
  const tileloss_plan plan = make_plan(function_, pass, args, hints(pass));
  const int64_t mem_before = resident_bytes() - resident_file_bytes();
  HugeBuffer workspace(plan.workspace_bytes, "workspace");
  if (!workspace.empty()) std::memset(workspace.data(), 0xFF, static_cast<size_t>(workspace.bytes()));
  tileloss_run run;
  tileloss_run_init(&run);
  run.workspace = workspace.data();
  run.workspace_bytes = static_cast<size_t>(workspace.bytes());

  Timing timing =
      time([&] { call(function_, pass, args, plan, &run); }, [&] { matrices_->restore(); }, pass, settings_.iterations);
  timing.mem_scratch = timing.mem_peak_data - mem_before;
  timing.implementation = "kernel";
  timing.plan = plan;
  timing.threads = plan.cpu.threads;
  return timing;
}

// By the device's clock, many calls at a time, so that it does not wait for the host between them. Their tensors are several
// sets' in turn: a call finds nothing of its own in the device's caches. Only the first of them in place has logits to read, the
// others gradients, at which they have as much to do.
Timing Bench::time_on_device(tileloss_pass pass) {
  DeviceRuns runs(settings_.device, make_args(pass), pass);
  const tileloss_plan plan = make_plan(function_, pass, runs.first().args(), hints(pass));
  const tileloss_run run = runs.first().make_run(plan);
  Timing timing = new_timing(pass, settings_.iterations);
  timing.mem_after_alloc = resident_bytes();
  reset_peak();
  const auto call_next = [&] { call(function_, pass, runs.next().args(), plan, &run); };
  const Timer first;
  call_next();
  runs.first().synchronise();
  timing.first_call_s = first.seconds();
  timing.mem_peak = peak_resident_bytes();
  const auto measure = [&](int calls) {
    runs.restore();
    return runs.first().time([&] {
      const Timer host;
      for (int i = 0; i < calls; ++i) call_next();
      timing.host_ns = host.seconds() * 1e9 / calls;
    }) / calls;
  };
  double one_ms = measure(1);
  for (int i = 1; i < settings_.warmup; ++i) one_ms = std::min(one_ms, measure(1));
  timing.calls = static_cast<int>(std::clamp(kMeasuredMs / one_ms, 1.0, kMostCalls));
  std::vector<double> times, host_ns;
  for (int i = 0; i < settings_.iterations; ++i) {
    times.push_back(measure(timing.calls));
    host_ns.push_back(timing.host_ns);
  }
  set_times(times, timing);
  timing.host_ns = median(host_ns);
  check_status(tileloss_check_errors(settings_.device.type(), settings_.device.index(), nullptr),
               formatted("{} on {}", function_.name(), settings_.device.name()));
  timing.mem_scratch = plan.workspace_bytes;
  timing.implementation = "kernel";
  timing.plan = plan;
  return timing;
}

void Bench::make_reference() {
  if (!UnfusedBaseline::knows(function_)) {
    throw ToolError(kExitUsage, "--impl: there is no reference for " + function_.name() + "; use --impl kernel");
  }
  check_memory(UnfusedBaseline::needs(settings_.tokens, settings_.vocab));
  baseline_ = std::make_unique<UnfusedBaseline>(function_, settings_.dtype, settings_.tokens, settings_.vocab, threads_);
}

Timing Bench::time_reference(tileloss_pass pass) {
  const auto run = [&] {
    if (pass != TILELOSS_FORWARD) {
      baseline_->value_and_grad(matrices_->logits(), labels_.data(), matrices_->dlogits());
    } else {
      baseline_->forward(matrices_->logits(), labels_.data());
    }
  };
  Timing timing = time(
      run, [&] { matrices_->restore(); }, pass, std::min(settings_.iterations, kMaxReferenceIterations));
  timing.implementation = "reference";
  timing.threads = threads_;
  return timing;
}

Roofs Bench::measure_roofs() {
  if (!settings_.device.is_cpu()) return matrices_->measure_roofs(settings_.device);
  const tileloss_isa isa = make_plan(function_, TILELOSS_FORWARD, make_args(TILELOSS_FORWARD), hints(TILELOSS_FORWARD)).cpu.isa;
  return matrices_->measure_roofs(roofs_, isa);
}

}  // namespace tileloss::tools
