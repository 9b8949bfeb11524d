// One case of a sweep: what is measured, and the measurement, which runs in a process of its own.
#ifndef TILELOSS_BENCH_SWEEP_CASE_H_
#define TILELOSS_BENCH_SWEEP_CASE_H_

#include <string>
#include <vector>

#include "bench/bench_run.h"
#include "support/json.h"

namespace tileloss::tools {

// A case is a JSON object of all its parameters: loss, preset (if one was named), options, tokens, vocab, dtype, pass, isa,
// threads, schedule, row_block, vocab_block, in_place, iters, warmup, seed, with an LM head hidden, head_layout, workspace, and
// of a device other than the CPU device, cuda_kernel.
// So it travels to the child and into the results file, and two cases are the same if their text is.

// Throws nlohmann's exceptions or ToolError for anything else.
BenchSettings bench_settings(const Json& sweep_case);

// "cross_entropy label_smoothing=0.1 [512, 151936] bfloat16 forward": cases with the same text compare with each other.
std::string describe_work(const Json& sweep_case);

// Of the parameters that say how the work is done, those that differ among `cases`: isa, threads, ...
std::vector<std::string> varied_axes(const std::vector<Json>& cases);
// "threads=2 vocab_block=8192"
std::string describe_axes(const Json& sweep_case, const std::vector<std::string>& axes);
// The value of one of them as text.
std::string value_text(const Json& sweep_case, const std::string& parameter);

// Measures, and says how it ended: "status" ok with the bench's figures, out_of_memory or error with a "message".
Json measure(const Json& sweep_case);

}  // namespace tileloss::tools

#endif  // TILELOSS_BENCH_SWEEP_CASE_H_
