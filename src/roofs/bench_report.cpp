#include "roofs/bench_report.h"

#include <nlohmann/json.hpp>

namespace tileloss::tools {
namespace {

constexpr double kMaxRoofDifference = 0.15;

// Whether the machine was quiet enough for figures to be compared with others.
bool is_steady(const BenchReport& report) { return report.roofs_difference && *report.roofs_difference <= kMaxRoofDifference; }

// The reference's time over the kernel's for the same pass, if both were run.
std::optional<double> speedup(const BenchReport& report, const Timing& timing) {
  if (timing.implementation != "kernel") return std::nullopt;
  for (const Timing& other : report.timings) {
    if (other.implementation == "reference" && other.pass == timing.pass) return other.median_ms / timing.median_ms;
  }
  return std::nullopt;
}

}  // namespace

// The reference first, so that its matrices are gone when the kernel's memory is read; each ends with its gradient.
void time_passes(Bench& bench, const std::vector<tileloss_pass>& passes, bool kernel, bool reference, BenchReport& report) {
  report.roofs = bench.measure_roofs();
  report.roofs_description = bench.roofs_description();
  if (reference) {
    bench.make_reference();
    for (const tileloss_pass pass : passes) {
      report.timings.push_back(bench.time_reference(pass));
      report.measured();
    }
    bench.drop_reference();
  }
  if (kernel) {
    for (const tileloss_pass pass : passes) {
      report.timings.push_back(bench.time_kernel(pass));
      report.measured();
    }
  }
  const Roofs at_end = bench.measure_roofs();
  report.roofs_difference = largest_difference(report.roofs, at_end);
  report.roofs = faster_of(report.roofs, at_end);
}

Json to_json(const BenchSettings& settings, const Bench& bench, const BenchReport& report, const Timing& timing) {
  const double roof = bench.roof_ms(report.roofs, timing);
  const bool is_linear = bench.function().is_linear();
  Json json = {{"impl", timing.implementation},
               {"loss", settings.loss},
               {"tokens", settings.tokens},
               {"vocab", settings.vocab},
               {"hidden", is_linear ? Json(settings.head.hidden) : Json()},
               {"dtype", oracle::format_info(settings.dtype).name},
               {"device", settings.device.name()},
               {"in_place", settings.in_place},
               {"entropy", settings.entropy},
               {"options", bench.function().to_json()},
               {"preset", bench.function().preset().empty() ? Json() : Json(bench.function().preset())},
               {"workspace", settings.kernel.workspace_bytes > 0 ? Json(settings.kernel.workspace_bytes) : Json()},
               {"warmup", settings.warmup},
               {"seed", settings.seed}};
  if (is_linear) {
    json.update({{"head_layout", settings.head.is_transposed ? "hv" : "vh"},
                 {"dhead_dtype", settings.head.is_frozen ? Json() : Json(oracle::format_info(settings.head.dhead_dtype).name)},
                 {"roof_tflops", report.roofs.tflops > 0 ? Json(report.roofs.tflops) : Json()},
                 {"roof_share", report.roofs.tflops > 0 ? Json(tflops(timing) / report.roofs.tflops) : Json()}});
  }
  json.update(to_json(timing));
  json.update({{"in_place_ms", report.roofs.in_place_ms},
               {"copy_ms", report.roofs.copy_ms},
               {"read_ms", report.roofs.read_ms},
               {"exp_ms", report.roofs.exp_ms},
               {"roof_ms", roof},
               {"ratio_to_roof", timing.median_ms / roof},
               {"roofs_difference", report.roofs_difference ? Json(*report.roofs_difference) : Json()},
               {"roofs_steady", report.roofs_difference ? Json(is_steady(report)) : Json()}});
  if (const auto ratio = speedup(report, timing)) json["speedup_over_reference"] = *ratio;
  return json;
}

}  // namespace tileloss::tools
