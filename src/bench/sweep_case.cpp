#include "bench/sweep_case.h"

#include <algorithm>
#include <new>
#include <nlohmann/json.hpp>

#include "support/abi.h"
#include "support/exit_codes.h"
#include "support/format.h"

namespace tileloss::tools {
namespace {

std::string plain(const Json& value) { return value.is_string() ? value.get<std::string>() : value.dump(); }

Json timed(const Json& sweep_case) {
  Bench bench(bench_settings(sweep_case));
  return to_json(bench.time_kernel(parse_pass(sweep_case.at("pass").get<std::string>())));
}

}  // namespace

BenchSettings bench_settings(const Json& sweep_case) {
  BenchSettings settings;
  sweep_case.at("loss").get_to(settings.loss);
  std::vector<std::string> options;
  for (const auto& [name, value] : sweep_case.at("options").items()) options.push_back(name + "=" + plain(value));
  settings.options = parse_overrides(options);
  sweep_case.at("tokens").get_to(settings.tokens);
  sweep_case.at("vocab").get_to(settings.vocab);
  settings.dtype = parse_dtype(sweep_case.at("dtype").get<std::string>());
  sweep_case.at("in_place").get_to(settings.in_place);
  sweep_case.at("isa").get_to(settings.kernel.isa);
  sweep_case.at("threads").get_to(settings.kernel.threads);
  sweep_case.at("schedule").get_to(settings.kernel.schedule);
  sweep_case.at("row_block").get_to(settings.kernel.row_block);
  sweep_case.at("vocab_block").get_to(settings.kernel.vocab_block);
  settings.device = Device(sweep_case.value("device", "cpu"));
  settings.kernel.cuda_kernel = sweep_case.value("cuda_kernel", "auto");
  if (sweep_case.contains("hidden")) {
    sweep_case["hidden"].get_to(settings.head.hidden);
    settings.head.is_transposed = sweep_case.at("head_layout").get<std::string>() == "hv";
    sweep_case.at("workspace").get_to(settings.kernel.workspace_bytes);
  }
  sweep_case.at("iters").get_to(settings.iterations);
  sweep_case.at("warmup").get_to(settings.warmup);
  sweep_case.at("seed").get_to(settings.seed);
  return settings;
}

std::string value_text(const Json& sweep_case, const std::string& parameter) {
  return plain(sweep_case.value(parameter, Json("-")));
}

std::string describe_work(const Json& sweep_case) {
  std::string text = value_text(sweep_case, "loss");
  if (sweep_case.contains("preset")) text += " preset=" + value_text(sweep_case, "preset");
  for (const auto& [name, value] : sweep_case.at("options").items()) text += formatted(" {}={}", name, plain(value));
  text += formatted(" [{}, {}] {} {}", value_text(sweep_case, "tokens"), value_text(sweep_case, "vocab"),
                    value_text(sweep_case, "dtype"), value_text(sweep_case, "pass"));
  if (sweep_case.contains("hidden")) text += " hidden " + value_text(sweep_case, "hidden");
  if (sweep_case.at("in_place").get<bool>()) text += " in place";
  if (sweep_case.contains("device")) text += " on " + value_text(sweep_case, "device");
  return text;
}

std::vector<std::string> varied_axes(const std::vector<Json>& cases) {
  std::vector<std::string> axes;
  for (const char* axis : {"isa", "threads", "schedule", "row_block", "vocab_block", "cuda_kernel", "head_layout", "workspace"}) {
    const auto differs = [&](const Json& other) { return other.value(axis, Json()) != cases.front().value(axis, Json()); };
    if (std::any_of(cases.begin(), cases.end(), differs)) axes.emplace_back(axis);
  }
  return axes;
}

std::string describe_axes(const Json& sweep_case, const std::vector<std::string>& axes) {
  std::string text;
  for (const std::string& axis : axes) text += formatted("{}{}={}", text.empty() ? "" : " ", axis, value_text(sweep_case, axis));
  return text;
}

Json measure(const Json& sweep_case) {
  try {
    Json result = {{"status", "ok"}};
    result.update(timed(sweep_case));
    return result;
  } catch (const OutOfMemory& error) {
    return {{"status", "out_of_memory"}, {"message", error.what()}};
  } catch (const std::bad_alloc&) {
    return {{"status", "out_of_memory"}, {"message", "an allocation failed"}};
  } catch (const std::exception& error) {
    return {{"status", "error"}, {"message", error.what()}};
  }
}

}  // namespace tileloss::tools
