// What a plain implementation does: float32 logits, float32 softmax, both [N,V] in memory, one pass over the matrix per step,
// std::exp. The bench's --impl reference; it is neither the oracle nor tuned.
#pragma once

#include <cstdint>
#include <vector>

#include "oracle/number_formats.h"
#include "support/abi.h"
#include "support/memory.h"
#include "support/thread_team.h"

namespace tileloss::tools {

class UnfusedBaseline {
 public:
  static bool knows(const Function& function) { return function.name() == "cross_entropy" || function.name() == "logprobs"; }

  static std::vector<MemoryNeed> needs(int64_t rows, int64_t cols);

  // `function`: cross_entropy or logprobs (the loss is then the sum of logp); its options are taken over.
  UnfusedBaseline(const Function& function, oracle::NumberFormat format, int64_t rows, int64_t cols, int threads);

  double forward(const void* logits, const int64_t* labels);
  // dlogits may be the logits.
  double value_and_grad(const void* logits, const int64_t* labels, void* dlogits);

 private:
  void transform_row(int64_t row, const void* logits);
  void softmax_row(int64_t row, int64_t label);
  double row_loss(int64_t row) const;
  void gradient_row(int64_t row, int64_t label, const void* logits, void* dlogits) const;
  void set_denominator(const int64_t* labels);

  oracle::NumberFormat format_;
  int64_t rows_;
  int64_t cols_;
  int64_t valid_;
  int64_t ignore_index_;
  float scale_, softcap_, temperature_, smoothing_, z_loss_;
  float logp_temperature_ = 1;
  float sign_ = 1;  // of the loss in logp: -1 for logprobs
  bool mean_ = false;
  double num_items_;
  float factor_ = 1;
  ThreadTeam team_;
  HugeBuffer z_;        // [N,V] float32
  HugeBuffer softmax_;  // [N,V] float32
  std::vector<float> logp_, lse_, mean_log_softmax_;
};

}  // namespace tileloss::tools
