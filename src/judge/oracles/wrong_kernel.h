// Kernels of one function that get a row wrong as a plausible bug would. Most are right for another call, of other options or
// tensors: the oracle of that call says what they compute.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "judge/oracles/oracle.h"

namespace tileloss::tools {

struct WrongCall {
  Function function;
  OracleTensors tensors;
  // Makes another target of the row's; `target` has its memory.
  void (*change_target)(GivenRow& given, std::vector<double>& target) = nullptr;
  // Other labels in the row's slots.
  void (*change_labels)(std::span<std::int64_t> labels) = nullptr;
  // Another set of the row's.
  std::vector<std::uint8_t> (*change_allowed)(const WrongCall& call, const GivenRow& given) = nullptr;
  double times_low_rank = 0;  // so many more of the low-rank part in the logits
  bool is_by_row = false;     // the kernel is right for no call: OracleRow::set_wrong
};

struct WrongKernel {
  const char* name;
  const char* description;
  bool has_value;  // a row's loss or an output shows it too
  // Makes of the right call the one that the kernel is right for. False: the options cannot tell it from the right one.
  bool (*change)(WrongCall& call);
};

std::span<const WrongKernel> wrong_allowed_sets();    // of every function
std::span<const WrongKernel> wrong_low_rank_parts();  // of every function with the LM head, where there is one
std::span<const WrongKernel> wrong_logprobs();
std::span<const WrongKernel> wrong_policy_losses();
std::span<const WrongKernel> wrong_distillations();
std::span<const WrongKernel> wrong_sparse_distillations();
std::span<const WrongKernel> wrong_soft_cross_entropies();

class WrongOracle {
 public:
  WrongOracle(const WrongKernel& kernel, MakeOracle make, WrongCall call);

  const WrongKernel& kernel() const { return kernel_; }
  // What it has over the right one, whose row is computed; 0 where that is not finite.
  WrongRow compare(const OracleRow& right) const;

 private:
  WrongKernel kernel_;
  WrongCall call_;
  std::unique_ptr<Oracle> oracle_;
};

// Of those that the options can tell.
std::vector<WrongOracle> wrong_oracles(std::span<const WrongKernel> kernels, MakeOracle make, const Function& function,
                                       const OracleTensors& tensors);

}  // namespace tileloss::tools
