// A bench as its config has it.
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "roofs/bench_run.h"
#include "support/exit_codes.h"
#include "support/format.h"
#include "support/memory.h"
#include "support/printable.h"

namespace tileloss::tools {
namespace {

constexpr int64_t kMaxCalls = 1'000'000;
constexpr int64_t kMaxLabels = 1024;  // of a row
constexpr int64_t kMaxRank = 512;

oracle::NumberFormat read_dtype(ConfigReader& reader, const char* key, const char* fallback) {
  return parse_dtype(reader.choice(key, fallback, dtype_names()));
}

int64_t read_workspace(ConfigReader& reader) {
  const std::string text = reader.text("workspace", "0");
  const std::optional<int64_t> bytes = parse_bytes(text);
  if (!bytes) reader.fail("workspace", formatted("expected {}, got '{}'", kBytesExpected, shown(text)));
  return *bytes;
}

void read_kernel(ConfigReader& reader, BenchSettings& out) {
  out.device = read_device(reader);
  out.kernel = read_hints(reader);
  out.kernel.workspace_bytes = read_workspace(reader);
}

void read_head(ConfigReader& reader, HeadSettings& out) {
  out.hidden = reader.integer("hidden", 0, 0, int64_t{1} << 20);
  out.is_transposed = reader.choice("head_layout", "vh", {"vh", "hv"}) == "hv";
  out.dhead_dtype = read_dtype(reader, "dhead_dtype", "fp32");
  out.is_frozen = reader.boolean("frozen_head", false);
  out.rank = reader.integer("rank", 0, 0, kMaxRank);
}

void read_passes(ConfigReader& reader, const Function& function, BenchRequest& out) {
  const std::string implementation = reader.choice("impl", "kernel", {"kernel", "reference", "both"});
  out.kernel = implementation != "reference";
  out.reference = implementation != "kernel";
  if (out.reference && out.settings.allowed > 0)
    reader.fail("impl", "expected kernel, as the reference takes no sets of columns");
  if (out.reference && out.settings.labels_per_row > 1)
    reader.fail("impl", "expected kernel, as the reference takes one label a row");
  if (out.reference && !out.settings.device.is_cpu())
    reader.fail("impl", formatted("expected kernel on {}, as the reference runs on the cpu alone", out.settings.device.name()));
  const tileloss_pass gradient = function.is_loss() ? TILELOSS_VALUE_AND_GRAD : TILELOSS_BACKWARD;
  if (!reader.has("pass")) {
    out.passes = {TILELOSS_FORWARD, gradient};
    return;
  }
  const tileloss_pass pass = parse_pass(reader.choice("pass", std::nullopt, pass_names()));
  if (out.reference && pass == TILELOSS_BACKWARD && function.is_loss())
    reader.fail("impl", "the reference has no backward from a row state; use --impl kernel");
  out.passes = {pass == TILELOSS_VALUE_AND_GRAD ? gradient : pass};  // a function without a loss has its gradient from a backward
}

}  // namespace

BenchRequest read_bench_request(const ConfigNode& root) {
  ConfigReader reader(root);
  BenchRequest request;
  BenchSettings& out = request.settings;
  out.loss = reader.choice("loss", out.loss, timed_functions());
  out.preset = reader.text("preset", "");
  out.tokens = reader.integer("tokens", out.tokens, 1, kMaxCount);
  out.vocab = reader.integer("vocab", out.vocab, 1, kMaxCount);
  out.dtype = read_dtype(reader, "dtype", "bf16");
  out.in_place = reader.boolean("in_place", false);
  out.entropy = reader.boolean("entropy", false);
  out.allowed = reader.number("allowed", 0, {0, 1, false, std::nullopt});
  out.labels_per_row = reader.integer("labels_per_row", 1, 1, kMaxLabels);
  out.iterations = static_cast<int>(reader.integer("iters", out.iterations, 1, kMaxCalls));
  out.warmup = static_cast<int>(reader.integer("warmup", out.warmup, 0, kMaxCalls));
  out.seed = static_cast<uint64_t>(reader.integer("seed", 0, 0, std::numeric_limits<int64_t>::max()));
  read_head(reader, out.head);
  read_kernel(reader, out);
  reader.section("options");  // asked for here, read with the loss
  for (const ConfigNode& child : root.children) {
    if (child.key == "options") out.options = child;
  }
  const Function function = checked_settings(out);
  read_passes(reader, function, request);
  reader.finish();
  return request;
}

Json case_of(const BenchRequest& request) {
  const BenchSettings& settings = request.settings;
  const Function function = checked_settings(settings);
  Json json = {{"loss", function.name()}};
  if (!function.preset().empty()) json["preset"] = function.preset();  // for the reader: the options are all there
  json.update({{"options", function.to_json()},
               {"tokens", settings.tokens},
               {"vocab", settings.vocab},
               {"dtype", oracle::format_info(settings.dtype).name},
               {"pass", pass_name(request.passes.back())},
               {"isa", settings.kernel.isa},
               {"threads", settings.kernel.threads},
               {"schedule", settings.kernel.schedule},
               {"row_block", settings.kernel.row_block},
               {"vocab_block", settings.kernel.vocab_block}});
  if (settings.allowed > 0) json["allowed"] = settings.allowed;
  if (settings.labels_per_row > 1) json["labels_per_row"] = settings.labels_per_row;
  if (!settings.device.is_cpu()) json.update({{"cuda_kernel", settings.kernel.cuda_kernel}, {"device", settings.device.name()}});
  if (function.is_linear()) {
    json.update({{"hidden", settings.head.hidden},
                 {"head_layout", settings.head.is_transposed ? "hv" : "vh"},
                 {"workspace", settings.kernel.workspace_bytes}});
    if (settings.head.rank > 0) json["rank"] = settings.head.rank;
  }
  json.update(
      {{"in_place", settings.in_place}, {"iters", settings.iterations}, {"warmup", settings.warmup}, {"seed", settings.seed}});
  return json;
}

}  // namespace tileloss::tools
