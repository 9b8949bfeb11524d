#include "bench/sweep_config.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "bench/sweep_case.h"
#include "support/abi.h"
#include "support/config.h"
#include "support/exit_codes.h"
#include "support/format.h"
#include "support/memory.h"
#include "support/output_file.h"
#include "support/printable.h"

namespace tileloss::tools {
namespace {

// Keeps rows * columns * 8 bytes far from overflow.
constexpr int64_t kMaxCount = int64_t{1} << 31;
// Weeks of measuring: a config with more has a mistake in it.
constexpr size_t kMaxCases = 100'000;

// The values of one axis, each the part of a case that it decides.
using Axis = std::vector<Json>;

// `read` makes that part from the value under `key`.
template <class Read>
Axis read_axis(ConfigReader& reader, const std::string& key, const Json& fallback, Read read) {
  Axis axis;
  for (const ConfigNode& item : reader.each(key)) {
    ConfigReader item_reader(item);
    Json part = read(item_reader);
    if (std::find(axis.begin(), axis.end(), part) != axis.end()) {
      item_reader.fail(key, formatted("{} stands there twice", part.dump()));
    }
    axis.push_back(std::move(part));
  }
  if (axis.empty() && fallback.is_null()) reader.fail(key, "required, but missing");
  if (axis.empty()) axis.push_back(Json::object({{key, fallback}}));
  return axis;
}

Axis choice_axis(ConfigReader& reader, const std::string& key, const Json& fallback, const std::vector<std::string>& choices) {
  return read_axis(reader, key, fallback, [&](ConfigReader& item) {
    return Json::object({{key, item.choice(key, std::nullopt, choices)}});
  });
}

Axis integer_axis(ConfigReader& reader, const std::string& key, int64_t maximum) {
  return read_axis(reader, key, 0, [&](ConfigReader& item) {
    return Json::object({{key, item.integer(key, std::nullopt, 0, maximum)}});
  });
}

// "cross_entropy", or {name: cross_entropy, label_smoothing: 0.1}.
Json read_loss(ConfigReader& item) {
  const bool has_options = item.is_section("loss");
  ConfigReader reader = has_options ? item.section("loss") : item;
  Function function(reader.choice(has_options ? "name" : "loss", std::nullopt, timed_functions()));
  if (has_options) {
    function.read_options(reader);
    reader.finish();
  }
  Json part = {{"loss", function.name()}};
  // For the reader: the options are all there.
  if (!function.preset().empty()) part["preset"] = function.preset();
  part["options"] = function.to_json();
  return part;
}

// "512x151936"
Json read_shape(ConfigReader& item) {
  const std::string text = item.text("shape");
  int64_t sizes[2] = {0, 0};
  const char* at = text.data();
  const char* const end = at + text.size();
  for (int64_t& size : sizes) {
    const auto [after, error] = std::from_chars(at, end, size);
    const bool ends_well = &size == &sizes[0] ? after != end && *after == 'x' : after == end;
    if (error != std::errc() || !ends_well || size < 1 || size > kMaxCount) {
      item.fail("shape", formatted("expected TOKENSxVOCAB, each 1 to {}, got '{}'", kMaxCount, shown(text)));
    }
    at = after + 1;
  }
  return {{"tokens", sizes[0]}, {"vocab", sizes[1]}};
}

Json read_dtype(ConfigReader& item) {
  const reference::NumberFormat format = parse_dtype(item.choice("dtype", std::nullopt, dtype_names()));
  return {{"dtype", reference::format_info(format).name}};
}

// "64MiB", or bytes.
Json read_workspace(ConfigReader& item) {
  const std::string text = item.text("workspace");
  const std::optional<int64_t> bytes = parse_bytes(text);
  if (!bytes) item.fail("workspace", formatted("expected {}, got '{}'", kBytesExpected, shown(text)));
  return {{"workspace", *bytes}};
}

// The axes that only the functions linear_* have.
constexpr const char* kHeadAxes[] = {"hidden", "head_layout", "workspace"};

// In the order of a case's members; the last axis runs fastest.
std::vector<Axis> read_axes(ConfigReader& reader) {
  return {read_axis(reader, "loss", nullptr, read_loss),
          read_axis(reader, "shape", nullptr, read_shape),
          read_axis(reader, "dtype", nullptr, read_dtype),
          choice_axis(reader, "pass", pass_name(TILELOSS_VALUE_AND_GRAD), pass_names()),
          choice_axis(reader, "isa", "auto", isa_names()),
          integer_axis(reader, "threads", kMaxThreads),
          choice_axis(reader, "schedule", "auto", schedule_names()),
          integer_axis(reader, "row_block", kMaxCount),
          integer_axis(reader, "vocab_block", kMaxCount),
          choice_axis(reader, "cuda_kernel", "auto", cuda_kernel_names()),
          integer_axis(reader, "hidden", int64_t{1} << 20),
          choice_axis(reader, "head_layout", "vh", {"vh", "hv"}),
          read_axis(reader, "workspace", 0, read_workspace)};
}

// Takes from a case what its function has no use for.
void finish_case(Json& sweep_case, const ConfigReader& reader) {
  const Function function(sweep_case["loss"].get<std::string>());
  try {
    const BenchSettings settings = bench_settings(sweep_case);
    settings.device.check_hints(settings.kernel, function.is_linear());
  } catch (const ToolError& error) {
    reader.fail("device", error.what());
  }
  if (sweep_case["device"] == "cpu") {
    sweep_case.erase("device");
    sweep_case.erase("cuda_kernel");
  }
  // A function without a loss has its gradient from a backward.
  if (!function.is_loss() && sweep_case["pass"] == pass_name(TILELOSS_VALUE_AND_GRAD))
    sweep_case["pass"] = pass_name(TILELOSS_BACKWARD);
  if (function.is_linear()) {
    if (sweep_case["hidden"] == 0) reader.fail("hidden", function.name() + " needs the hidden size, got none");
    if (sweep_case["in_place"] == true) reader.fail("in_place", function.name() + " has no logits");
    return;
  }
  for (const char* axis : kHeadAxes) {
    if (reader.has(axis)) reader.fail(axis, function.name() + " takes logits; this is for the functions linear_*");
    sweep_case.erase(axis);
  }
}

std::vector<Json> combine(const std::vector<Axis>& axes, const Json& common, const ConfigReader& reader) {
  size_t count = 1;
  for (const Axis& axis : axes) {
    count *= axis.size();
    if (count > kMaxCases) reader.fail("shape", formatted("all lists together make more than {} cases", kMaxCases));
  }
  std::vector<Json> cases = {Json::object()};
  cases.reserve(count);
  for (const Axis& axis : axes) {
    std::vector<Json> longer;
    for (const Json& start : cases) {
      for (const Json& part : axis) {
        longer.push_back(start);
        longer.back().update(part);
      }
    }
    cases = std::move(longer);
  }
  std::vector<Json> distinct;
  std::set<std::string> known;
  for (Json& sweep_case : cases) {
    sweep_case.update(common);
    finish_case(sweep_case, reader);
    // Of a function without a loss value_and_grad and backward are the same case.
    if (known.insert(sweep_case.dump()).second) distinct.push_back(std::move(sweep_case));
  }
  return distinct;
}

}  // namespace

SweepConfig read_sweep_config(const std::filesystem::path& file, const std::vector<std::string>& overrides,
                              const std::vector<std::string>& skipped) {
  const ConfigNode root = load_config(file, overrides, skipped);
  ConfigReader reader(root);
  SweepConfig config;
  config.file = file.string();
  const std::vector<Axis> axes = read_axes(reader);
  const Json common = {{"device", read_device(reader).name()},
                       {"in_place", reader.boolean("in_place", false)},
                       {"iters", reader.integer("iters", 20, 1, 1'000'000)},
                       {"warmup", reader.integer("warmup", 3, 0, 1'000'000)},
                       {"seed", reader.integer("seed", 0, 0, std::numeric_limits<int64_t>::max())}};
  config.limits.seconds = reader.number("time_limit_s", 300, {0, 1e6, true, std::nullopt});
  config.limits.memory_mb = reader.integer("memory_limit_mb", 0, 0, kMaxCount);
  if (config.limits.memory_mb > 0 && common["device"] != "cpu")
    reader.fail("memory_limit_mb", "expected none on a GPU, whose driver takes more address space than there is memory");
  config.output = reader.path("output", file.stem().string() + ".jsonl");
  check_output(reader.origin("output") + ": output", config.output, {{{"--config", file}}});
  reader.finish();
  config.cases = combine(axes, common, reader);
  return config;
}

}  // namespace tileloss::tools
