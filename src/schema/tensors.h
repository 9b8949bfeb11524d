// The one table of the tensors of tileloss_args: validation, overlap checks, the plan's fingerprint, introspection, and through
// it the tools and the front ends go over it.
#pragma once

#include <tileloss/tileloss.h>

#include <cstdint>
#include <span>
#include <vector>

namespace tileloss::impl {

// What a function takes tensors for. A loss names the groups of its own (LossInfo::tensors); the others follow from the function.
enum TensorGroups : std::uint32_t {
  kTokenWeights = 1,
  kClassWeights = 2,
  kLossGrad = 4,
  kRowGrads = 8,       // logp_grad, lse_grad, entropy_grad, mean_logit_grad
  kMask = 16,          // mask
  kSequences = 32,     // sequence_offsets, sequence_length
  kPolicyLogps = 64,   // old_logp, ref_logp, sampler_logp
  kAdvantages = 128,   // advantages
  kStepMetrics = 256,  // metrics
  kLosses = 512,       // loss: of functions that have one
  kFromLogits = 1024,
  kFromHidden = 2048,      // with the LM head
  kOptionalLabels = 4096,  // the target is not labels: labels may be left out
  kTeacherLogits = 8192,
  kTeacherHead = 16384,     // with the LM heads of both
  kTeacherColumns = 32768,  // teacher_ids, teacher_logprobs
  kTargetProbs = 65536,     // target_probs
  kDivergence = 131072,     // what is reported of a student and a teacher
  kCoefficients = 262144,   // target_coef, prob_plus_target_coef, prob_logp_coef, uniform_coef
};

// The arrays that every saved row state holds.
inline constexpr std::uint32_t kMaxSumLabelLogit = TILELOSS_STATE_MAX | TILELOSS_STATE_SUM | TILELOSS_STATE_LABEL_LOGIT;

// The rule for a tensor's size.
enum class Shape {
  kRows,
  kClasses,
  kColumns,
  kLosses,
  kSequenceOffsets,
  kAdvantages,
  kMetrics,
  kLogits,
  kHidden,
  kHead,
  kTeacherHidden,
  kTeacherHead,
  kTeacherColumns,
  kWords,
  kHiddenR,  // of a head's low-rank part
  kHeadR
};

struct TensorSlot {
  const char* name;
  tileloss_vector tileloss_args::*vector;  // one of the two is null
  tileloss_matrix tileloss_args::*matrix;
  tileloss_tensor_role role;
  std::uint32_t dtypes;  // bits 1 << tileloss_dtype
  Shape shape;
  const char* letters;   // tileloss_tensor.shape
  std::uint32_t groups;  // the function takes it if it has one of them; 0: every function does
  std::uint32_t passes;  // bits 1 << tileloss_pass
  bool is_required = false;
  std::uint32_t state_arrays = 0;  // TILELOSS_STATE_*: of a row output

  bool is_output() const { return role >= TILELOSS_ROLE_OUTPUT; }
};

constexpr std::uint32_t dtype_bit(tileloss_dtype t) { return 1u << t; }
constexpr std::uint32_t pass_bit(tileloss_pass p) { return 1u << p; }

std::span<const TensorSlot> tensor_slots();
// Whether a function of these groups cannot do without it.
bool is_required(const TensorSlot& slot, std::uint32_t groups);
// Those that a function of these groups takes, as introspection tells of them.
std::vector<tileloss_tensor> tensors_of(std::uint32_t groups);

inline bool present(const tileloss_matrix& m) { return m.dtype != TILELOSS_NONE; }
inline bool present(const tileloss_vector& v) { return v.dtype != TILELOSS_NONE; }
inline bool present(const tileloss_args& a, const TensorSlot& slot) {
  return slot.vector != nullptr ? present(a.*slot.vector) : present(a.*slot.matrix);
}

const char* dtype_name(tileloss_dtype t);
const char* pass_name(tileloss_pass pass);
std::int64_t element_bytes(tileloss_dtype t);

// ------------------------------------------------------------------------------------------------------------- row state

// The arrays of tileloss_row_state with their bits; argmax has a type of its own, and so no member here.
struct StateArray {
  const char* name;  // "row_state.max", ...
  std::uint32_t bit;
  float* tileloss_row_state::*member;  // null: argmax

  std::int64_t per_row(const tileloss_row_state& state) const {
    return bit == TILELOSS_STATE_LABEL_LOGITS && state.label_logits != nullptr ? state.labels_per_row : 1;
  }
};
std::span<const StateArray> state_arrays();
// The bits of the arrays that are there.
std::uint32_t present_arrays(const tileloss_row_state& state);

}  // namespace tileloss::impl
