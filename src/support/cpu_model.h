// What Linux says of the processor.
#pragma once

#include <istream>
#include <string>

namespace tileloss::tools {

struct CpuModel {
  std::string name =
      "unknown";  // "Neoverse V2"; "Cortex-X925, Cortex-A725" where cores differ; "MIDR 0x413fd0c1" of a core not known here
  std::string features;  // 64-bit ARM's that matter to a loss: "NEON, BF16, SVE"; empty for others
};

// From the text of /proc/cpuinfo, which names the processor on x86; on ARM it has numbers, and the features' short names.
CpuModel cpu_model(std::istream& cpuinfo);

}  // namespace tileloss::tools
