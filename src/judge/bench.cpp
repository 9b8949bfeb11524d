// The request that times a loss's passes.
#include <nlohmann/json.hpp>
#include <string>

#include "bench/bench_report.h"
#include "judge/requests.h"
#include "support/exit_codes.h"

namespace tileloss::tools {
namespace {

Json buffers_json(const Timing& timing) {
  Json list = Json::array();
  for (const tileloss_plan_buffer& buffer : timing.buffers()) list.push_back({{"name", buffer.name}, {"bytes", buffer.bytes}});
  return list;
}

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
  for (const tileloss_pass pass : asked.passes) bench.check_pass(pass, asked.reference);
  BenchReport report;
  time_passes(bench, asked.passes, asked.kernel, asked.reference, report);
  for (const Timing& timing : report.timings) {
    Json line = {{"tool", "bench"}, {"version", tileloss_version()}};
    line.update(to_json(asked.settings, bench, report, timing));
    request.tell({{"event", "result"},
                  {"line", line},
                  {"roofs", report.roofs_description},
                  {"buffers", bench.function().is_linear() ? buffers_json(timing) : Json::array()}});
  }
  return kExitPass;
}

}  // namespace tileloss::tools
