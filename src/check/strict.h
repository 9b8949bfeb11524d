// gradcheck --strict: the shipped kernels where every access outside a tensor faults. Each call is made once for each layout of
// guard-page buffers, in a child process, so that a fault ends only that; the results must have the bits of an ordinary call.
#ifndef TILELOSS_CHECK_STRICT_H_
#define TILELOSS_CHECK_STRICT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "check/gradcheck_config.h"
#include "check/gradcheck_run.h"
#include "check/guarded_args.h"
#include "support/json.h"
#include "support/thread_team.h"

namespace tileloss::tools {

struct StrictReport {
  int64_t rows = 0;  // that were looked at, of all_rows
  int64_t all_rows = 0;
  int64_t columns = 0;  // likewise
  int64_t all_columns = 0;
  int calls = 0;
  int layouts = 0;
  std::vector<std::string> findings;

  std::string text() const;  // a line for each finding, or that there is none
  Json to_json() const;
};

// By `kernel` in every layout; what is found goes to the report. If nothing is, then as usual: an overrun would damage this
// process.
void call_strictly(const Function& function, tileloss_pass pass, const tileloss_args& args, const tileloss_plan& plan,
                   const KernelCall& kernel, StrictReport& report);

// Every call that gradcheck makes, up to the first with findings. Of a large check only so many rows, and of a synthetic LM head
// only so many classes, that the guarded copies stay below kStrictBytes.
constexpr int64_t kStrictBytes = int64_t{256} << 20;
StrictReport check_strict(const GradcheckConfig& config, const CheckInputs& inputs, ThreadTeam& team,
                          const KernelCall& kernel = call);

}  // namespace tileloss::tools

#endif  // TILELOSS_CHECK_STRICT_H_
