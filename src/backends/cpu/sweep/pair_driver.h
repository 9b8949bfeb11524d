// Pairs of rows to threads, as backends/cpu/sweep/driver.h does rows: a forward over each of the two, their divergence, the
// visitor, the gradient, while all of it is in cache.
#ifndef TILELOSS_BACKENDS_CPU_SWEEP_PAIR_DRIVER_H_
#define TILELOSS_BACKENDS_CPU_SWEEP_PAIR_DRIVER_H_

#include <optional>

#include "backends/cpu/sweep/driver.h"

namespace tileloss::impl::cpu {

// What a thread's memory holds.
struct PairScratchShape {
  std::int64_t columns = 0, vocab_block = 0;
  bool has_softcap = false;
  std::int64_t known_columns = 0;

  std::int64_t bytes() const;  // a multiple of 64
};

// What a sparse teacher knows of a row: columns, some of them perhaps negative, and their log q.
struct KnownColumns {
  const void* ids = nullptr;  // int64 or int32
  bool is_int64 = false;
  std::int64_t ids_row_stride = 0, ids_stride = 0;
  Operand logprobs;  // rows: rows
  std::int64_t count = 0;
  Tail tail = Tail::kLump;
};

// Called once for every row, by any thread, in any order.
class PairVisitor {
 public:
  virtual ~PairVisitor() = default;
  virtual void ignored(std::int64_t row) = 0;
  virtual PairCoefficients coefficients(std::int64_t row) = 0;
  virtual void visit(std::int64_t row, const PairStats& stats) = 0;
  // Of a shard of the vocabulary: the states of all shards together, and for a gradient their sums. Nothing: the row is all here.
  virtual std::optional<PairStats> whole(std::int64_t row) const = 0;
  // Once its gradient is written, while it is in cache.
  virtual void finished(std::int64_t row) { static_cast<void>(row); }
};

// `student` says all but what the teacher has to say. Its schedule and saved states are of no use, its class weights are those of
// class probabilities.
struct PairJob {
  SweepJob student;
  Divergence divergence;
  std::optional<LogitTransform> label_transform;  // of the label's cross-entropy; none: the student's
  Teacher teacher = Teacher::kLogits;
  std::int64_t teacher_stride = 0;  // elements, of teacher_logits or target_probs
  // Of Teacher::kLogits:
  const void* teacher_logits = nullptr;
  LogitTransform teacher_transform;
  // Of Teacher::kProbabilities:
  const void* target_probs = nullptr;
  StorageType probs_storage = kStorageFloat32;
  double label_smoothing = 0;
  std::int64_t classes = 0;  // that it is over
  // Of Teacher::kColumns:
  KnownColumns known;
  const std::int64_t* wanted_rows = nullptr;  // the rows of target_probs or known that go with the student's; null: the same
};

void run_pairs(const PairJob& job, PairVisitor& visitor, const tileloss_executor* executor);

}  // namespace tileloss::impl::cpu

#endif  // TILELOSS_BACKENDS_CPU_SWEEP_PAIR_DRIVER_H_
