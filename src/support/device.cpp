#include "support/device.h"

#include <algorithm>
#include <charconv>

#include "backends/backend.h"
#include "backends/device/copied_views.h"
#include "support/exit_codes.h"
#include "support/format.h"
#include "support/printable.h"

namespace tileloss::tools {

Device::Device(std::string_view name) : name_(name) {
  if (name == "cpu") return;
  const std::string_view kind = name.substr(0, name.find(':'));
  const char *const begin = name.data() + std::min(kind.size() + 1, name.size()), *const end = name.data() + name.size();
  bool is_right = kind == "cuda";
  if (kind.size() < name.size()) {
    const auto [stop, error] = std::from_chars(begin, end, index_);
    is_right &= error == std::errc() && stop == end && index_ >= 0;
  }
  if (!is_right) throw ToolError(kExitUsage, formatted("expected cpu, cuda or cuda:N, got {}", shown(name)));
  type_ = TILELOSS_CUDA;
}

const impl::Backend& Device::backend() const {
  const impl::Backend* const backend = impl::find_backend(type_);
  if (backend == nullptr)
    throw ToolError(kExitEnvironment,
                    formatted("device: expected one of this machine{}, got {}", impl::why_no_backend(type_), name_));
  if (index_ >= backend->device_count())
    throw ToolError(kExitEnvironment,
                    formatted("device: expected cuda:0 to cuda:{}, got {}", backend->device_count() - 1, name_));
  return *backend;
}

void Device::check_hints(const KernelHints& hints, bool is_linear) const {
  const auto refuse = [&](const char* hint, const std::string& default_value, const std::string& given) {
    if (given == default_value) return;
    throw ToolError(kExitUsage, formatted("{}: expected {} on {}{}, got {}", hint, default_value, name_,
                                          is_linear ? " with the LM head" : " from logits", given));
  };
  if (!has_kernels(is_linear)) refuse("cuda_kernel", "auto", hints.cuda_kernel);
  if (is_cpu()) return;
  refuse("isa", "auto", hints.isa);
  refuse("threads", "0", std::to_string(hints.threads));
  if (is_linear) return;
  refuse("schedule", "auto", hints.schedule);
  refuse("row_block", "0", std::to_string(hints.row_block));
  refuse("vocab_block", "0", std::to_string(hints.vocab_block));
}

void Device::use() const {
  if (!is_cpu()) impl::device::take_the_cpus_place(backend(), index_, backend());
}

Device read_device(ConfigReader& config) {
  try {
    return Device(config.text("device", "cpu"));
  } catch (const ToolError& error) {
    config.fail("device", error.what());
  }
}

void Device::check(const impl::Status& status) const {
  if (status.ok()) return;
  const std::string message = formatted("device {}: {}", name_, status.message);
  if (status.code == TILELOSS_OUT_OF_MEMORY) throw OutOfMemory(message);
  throw ToolError(kExitEnvironment, message);
}

}  // namespace tileloss::tools
