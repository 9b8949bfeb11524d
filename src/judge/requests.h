// What may be asked. Each request is an object with the member "do"; `config` is a tree as support/config.h reads it, with the
// place of each value for errors; `name` is the config's own, in results.
//
//   read       config, name, [strict]: nothing, but for what is wrong with the config of the next four
//   gradcheck  config, name, [mutants], [strict]: the kernels against the oracle
//   trace      config, name, row, [column]: one row of that, stage by stage
//   draw       config, name: a case's inputs, each by the answer's tensor(), then "case" in words of tileloss.h
//   judge      config, name, [mutants]: tensors without a file are the outputs of somebody else, and judged
//   bench      config, [only_read], [roofs]: a loss's passes between two measurements of the roofs, or without
//   info       what was built, what this machine is, what it can do
//
// Events, in this order:
//
//   progress   work, done, total
//   case       what is about to be checked; of draw what a caller has to know of the call
//   strict     text, report: before the kernels run unguarded
//   result     line: of the results file; metrics, failures, mutants_judged; of bench one a pass, the last counts; of info all
//   error      message, [out_of_memory]
#pragma once

#include <functional>
#include <vector>

#include "support/json.h"
#include "support/tensor_file.h"

namespace tileloss::tools {

struct Request {
  const Json& json;
  std::vector<TensorFile> files;
  TensorFile outputs;
  std::function<void(const Json& event)> tell;
  std::function<void(const StoredTensor& tensor)> hand_over;
};

// Each returns the exit code, and throws ToolError.
int request_read(Request& request);
int request_gradcheck(Request& request);
int request_trace(Request& request);
int request_draw(Request& request);
int request_judge(Request& request);
int request_bench(Request& request);
int request_info(Request& request);

}  // namespace tileloss::tools
