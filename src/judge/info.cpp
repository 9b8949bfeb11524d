// What was built, what this machine is, what it can do.
#include <tileloss/tileloss.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "backends/backend.h"
#include "backends/cpu/isa/isa.h"
#include "judge/requests.h"
#include "roofs/matmul_roof.h"
#include "roofs/roofs.h"
#include "support/abi.h"
#include "support/cpu_model.h"
#include "support/exit_codes.h"
#include "support/format.h"
#include "support/memory.h"

namespace tileloss::tools {
namespace {

// Larger than any L3 of today, small enough that all roofs take about 2 s.
constexpr int64_t kRoofBytes = int64_t{256} << 20;

std::string first_line(const std::filesystem::path& file) {
  std::ifstream in(file);
  std::string line;
  std::getline(in, line);
  return line;
}

Json caches() {
  Json caches = Json::array();
  const std::filesystem::path root = "/sys/devices/system/cpu/cpu0/cache";
  for (int index = 0;; ++index) {
    const std::filesystem::path directory = root / formatted("index{}", index);
    const std::string level = first_line(directory / "level");
    if (level.empty()) return caches;
    caches.push_back({{"level", level},
                      {"type", first_line(directory / "type")},
                      {"size", first_line(directory / "size")},
                      {"shared_by_cpus", first_line(directory / "shared_cpu_list")}});
  }
}

// What the planner takes when nothing is asked for: TILELOSS_ISA is heeded, and refused if this machine lacks it.
tileloss_plan chosen_plan() {
  const Function function("cross_entropy");
  tileloss_args args;
  tileloss_args_init(&args);
  args.logits = tileloss_make_matrix(nullptr, TILELOSS_BFLOAT16, 1024, 32768, 32768);
  args.labels = tileloss_make_vector(nullptr, TILELOSS_INT64, 1024);
  args.loss = tileloss_make_vector(nullptr, TILELOSS_FLOAT32, 1);
  return make_plan(function, TILELOSS_FORWARD, args, KernelHints{});
}

// How many there are of each kind; and of a kind that is not there, why.
void add_devices(Json& info) {
  std::string note;
  for (const tileloss_device_type type : {TILELOSS_CPU, TILELOSS_CUDA}) {
    const impl::Backend* const backend = impl::find_backend(type);
    if (backend != nullptr) {
      info["devices"][backend->name()] = backend->device_count();
    } else {
      note += impl::why_no_backend(type);
    }
  }
  info["devices_note"] = note;
}

Json measure_roofs(int threads, std::string& description) {
  const HugeBuffer from(kRoofBytes, "roof buffer");
  const HugeBuffer to(kRoofBytes, "roof buffer");
  // Pages must be there, and not the shared zero page.
  std::memset(from.data(), 0x3C, static_cast<size_t>(kRoofBytes));
  std::memset(to.data(), 0x3C, static_cast<size_t>(kRoofBytes));
  RoofMeter meter(threads);
  const int64_t elements = kRoofBytes / 2;
  const Roofs roofs = meter.measure(from.data(), to.data(), kRoofBytes, elements, 5);
  description = meter.description();
  ThreadTeam team(threads);
  const impl::cpu::MatmulTable& matmul = impl::cpu::kernels(impl::cpu::best_isa()).matmul;
  const auto products = [&](impl::cpu::Compute compute) { return MatmulRoof(matmul, compute).tflops(team, 5); };
  const auto gb_per_s = [](double ms, int passes) { return static_cast<double>(kRoofBytes) * passes / ms / 1e6; };
  return {{"in_place_gb_per_s", gb_per_s(roofs.in_place_ms, 2)},
          {"copy_gb_per_s", gb_per_s(roofs.copy_ms, 2)},
          {"read_gb_per_s", gb_per_s(roofs.read_ms, 1)},
          {"exp_g_per_s", static_cast<double>(elements) / roofs.exp_ms / 1e6},
          {"products_bfloat16_tflops", products(impl::cpu::Compute::kBfloat16)},
          {"products_float32_tflops", products(impl::cpu::Compute::kFloat32)},
          {"loops", description}};
}

Json build_info() {
  return {{"compiler", formatted("g++ {}", __VERSION__)}, {"type", TILELOSS_BUILD_TYPE}, {"flags", TILELOSS_BUILD_FLAGS}};
}

Json collect() {
  Json info;
  info["version"] = tileloss_version();
  info["build"] = build_info();
  info["functions"] = Function::names();
  std::ifstream cpuinfo("/proc/cpuinfo");
  const CpuModel cpu = cpu_model(cpuinfo);
  info["cpu"] = cpu.name;
  info["cpu_features"] = cpu.features;
  Json available = Json::array();
  for (tileloss_isa isa = TILELOSS_ISA_BASELINE; isa < std::ssize(isa_names()); ++isa) {
    if (tileloss_isa_supported(isa) != 0) available.push_back(tileloss_isa_name(isa));
  }
  info["isa_available"] = available;
  info["amx"] = tileloss_isa_supported(TILELOSS_ISA_AVX512_AMX) != 0 ? "AMX: ready" : impl::cpu::why_without_amx();
  add_devices(info);
  const tileloss_plan plan = chosen_plan();
  info["isa_chosen"] = tileloss_isa_name(plan.cpu.isa);
  info["isa_note"] = plan.cpu.isa_note;
  const char* forced = std::getenv("TILELOSS_ISA");
  info["TILELOSS_ISA"] = forced != nullptr ? Json(forced) : Json(nullptr);
  info["threads"] = tileloss_default_threads();
  info["caches"] = caches();
  info["memory_available_bytes"] = available_bytes();
  info["huge_pages"] = first_line("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string description;
  info["roofs"] = measure_roofs(tileloss_default_threads(), description);
  return info;
}

}  // namespace

int request_info(Request& request) {
  request.tell({{"event", "result"}, {"line", collect()}});
  return kExitPass;
}

}  // namespace tileloss::tools
