// The request that times a loss's passes.
#include <nlohmann/json.hpp>
#include <string>

#include "judge/requests.h"
#include "roofs/bench_report.h"
#include "support/exit_codes.h"

namespace tileloss::tools {
namespace {

// One case of a sweep: no roofs, which all cases share.
int time_alone(const Request& request, const BenchRequest& asked) {
  Bench bench(asked.settings);
  for (const tileloss_pass pass : asked.passes) request.tell({{"event", "result"}, {"line", to_json(bench.time_kernel(pass))}});
  return kExitPass;
}

}  // namespace

int request_bench(Request& request) {
  const BenchRequest asked = read_bench_request(config_node(request.json.at("config")));
  request.tell({{"event", "case"}, {"case", case_of(asked)}});
  if (request.json.value("only_read", false)) return kExitPass;
  if (!request.json.value("roofs", true)) return time_alone(request, asked);
  if (!asked.settings.device.is_cpu()) (void)asked.settings.device.memory();  // before anything is allocated
  Bench bench(asked.settings);
  BenchReport report;
  const auto tell = [&](const Timing& timing) {
    Json line = {{"tool", "bench"}, {"version", tileloss_version()}};
    line.update(to_json(asked.settings, bench, report, timing));
    request.tell({{"event", "result"}, {"line", line}, {"roofs", report.roofs_description}});
  };
  // Each as it is measured, for whoever stops the request, and all again once the roofs are final.
  report.measured = [&] { tell(report.timings.back()); };
  time_passes(bench, asked.passes, asked.kernel, asked.reference, report);
  for (const Timing& timing : report.timings) tell(timing);
  return kExitPass;
}

}  // namespace tileloss::tools
