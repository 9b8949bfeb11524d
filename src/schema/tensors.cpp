#include "schema/tensors.h"

#include <cstddef>

#include "core/enumerators.h"

namespace tileloss::impl {
namespace {

constexpr std::uint32_t kFloat = dtype_bit(TILELOSS_FLOAT32);
constexpr std::uint32_t kAnyFloat = kFloat | dtype_bit(TILELOSS_BFLOAT16) | dtype_bit(TILELOSS_FLOAT16);
constexpr std::uint32_t kInteger = dtype_bit(TILELOSS_INT32) | dtype_bit(TILELOSS_INT64);
constexpr std::uint32_t kAnyMask = dtype_bit(TILELOSS_UINT8) | kInteger | kFloat;

constexpr std::uint32_t kForward = pass_bit(TILELOSS_FORWARD), kBackward = pass_bit(TILELOSS_BACKWARD),
                        kBoth = pass_bit(TILELOSS_VALUE_AND_GRAD), kFromState = pass_bit(TILELOSS_FROM_ROW_STATE);
constexpr std::uint32_t kAll = kForward | kBackward | kBoth | kFromState;
constexpr std::uint32_t kWithVocabulary = kForward | kBackward | kBoth;  // passes that see logits
constexpr std::uint32_t kWithGradient = kBackward | kBoth;
constexpr std::uint32_t kWithValue = kForward | kBoth | kFromState;

using A = tileloss_args;

constexpr TensorSlot kSlots[] = {
    // clang-format off
    // generated: tensors, by ./dev generate from src/schema/table.toml
    {"logits", nullptr, &A::logits, TILELOSS_ROLE_INPUT, kAnyFloat, Shape::kLogits, "N,V", kFromLogits, kWithVocabulary, true, 0},
    {"dlogits", nullptr, &A::dlogits, TILELOSS_ROLE_GRADIENT, kAnyFloat, Shape::kLogits, "N,V", kFromLogits, kWithGradient, true, 0},
    {"hidden", nullptr, &A::hidden, TILELOSS_ROLE_INPUT, kAnyFloat, Shape::kHidden, "N,H", kFromHidden, kWithVocabulary, true, 0},
    {"head", nullptr, &A::head, TILELOSS_ROLE_INPUT, kAnyFloat, Shape::kHead, "V,H", kFromHidden, kWithVocabulary, true, 0},
    {"dhidden", nullptr, &A::dhidden, TILELOSS_ROLE_GRADIENT, kAnyFloat, Shape::kHidden, "N,H", kFromHidden, kWithGradient, false, 0},
    {"dhead", nullptr, &A::dhead, TILELOSS_ROLE_GRADIENT, kAnyFloat, Shape::kHead, "V,H", kFromHidden, kWithGradient, false, 0},
    {"hidden_r", nullptr, &A::hidden_r, TILELOSS_ROLE_INPUT, kAnyFloat, Shape::kHiddenR, "N,R", kFromHidden, kWithVocabulary, false, 0},
    {"head_r", nullptr, &A::head_r, TILELOSS_ROLE_INPUT, kAnyFloat, Shape::kHeadR, "V,R", kFromHidden, kWithVocabulary, false, 0},
    {"dhidden_r", nullptr, &A::dhidden_r, TILELOSS_ROLE_GRADIENT, kAnyFloat, Shape::kHiddenR, "N,R", kFromHidden, kWithGradient, false, 0},
    {"dhead_r", nullptr, &A::dhead_r, TILELOSS_ROLE_GRADIENT, kAnyFloat, Shape::kHeadR, "V,R", kFromHidden, kWithGradient, false, 0},
    {"labels", &A::labels, nullptr, TILELOSS_ROLE_INPUT, kInteger, Shape::kRows, "N", 0, kAll, true, 0},
    {"token_weights", &A::token_weights, nullptr, TILELOSS_ROLE_INPUT, kFloat, Shape::kRows, "N", kTokenWeights, kAll, false, 0},
    {"class_weights", &A::class_weights, nullptr, TILELOSS_ROLE_INPUT, kFloat, Shape::kClasses, "C", kClassWeights, kAll, false, 0},
    {"loss_grad", &A::loss_grad, nullptr, TILELOSS_ROLE_UPSTREAM, kFloat, Shape::kLosses, "L", kLossGrad, kAll, false, 0},
    {"logp_grad", &A::logp_grad, nullptr, TILELOSS_ROLE_UPSTREAM, kFloat, Shape::kRows, "N", kRowGrads, kAll, false, 0},
    {"lse_grad", &A::lse_grad, nullptr, TILELOSS_ROLE_UPSTREAM, kFloat, Shape::kRows, "N", kRowGrads, kAll, false, 0},
    {"entropy_grad", &A::entropy_grad, nullptr, TILELOSS_ROLE_UPSTREAM, kFloat, Shape::kRows, "N", kRowGrads, kAll, false, 0},
    {"mean_logit_grad", &A::mean_logit_grad, nullptr, TILELOSS_ROLE_UPSTREAM, kFloat, Shape::kRows, "N", kRowGrads, kAll, false, 0},
    {"target_coef", &A::target_coef, nullptr, TILELOSS_ROLE_UPSTREAM, kFloat, Shape::kRows, "N", kCoefficients, kAll, false, 0},
    {"prob_plus_target_coef", &A::prob_plus_target_coef, nullptr, TILELOSS_ROLE_UPSTREAM, kFloat, Shape::kRows, "N", kCoefficients, kAll, false, 0},
    {"prob_logp_coef", &A::prob_logp_coef, nullptr, TILELOSS_ROLE_UPSTREAM, kFloat, Shape::kRows, "N", kCoefficients, kAll, false, 0},
    {"uniform_coef", &A::uniform_coef, nullptr, TILELOSS_ROLE_UPSTREAM, kFloat, Shape::kRows, "N", kCoefficients, kAll, false, 0},
    {"mask", &A::mask, nullptr, TILELOSS_ROLE_INPUT, kAnyMask, Shape::kRows, "N", kMask, kAll, false, 0},
    {"old_logp", &A::old_logp, nullptr, TILELOSS_ROLE_INPUT, kFloat, Shape::kRows, "N", kPolicyLogps, kAll, false, 0},
    {"ref_logp", &A::ref_logp, nullptr, TILELOSS_ROLE_INPUT, kFloat, Shape::kRows, "N", kPolicyLogps, kAll, false, 0},
    {"sampler_logp", &A::sampler_logp, nullptr, TILELOSS_ROLE_INPUT, kFloat, Shape::kRows, "N", kPolicyLogps, kAll, false, 0},
    {"advantages", &A::advantages, nullptr, TILELOSS_ROLE_INPUT, kFloat, Shape::kAdvantages, "B|N", kAdvantages, kAll, true, 0},
    {"sequence_offsets", &A::sequence_offsets, nullptr, TILELOSS_ROLE_INPUT, kInteger, Shape::kSequenceOffsets, "B+1", kSequences, kAll, false, 0},
    {"bias", &A::bias, nullptr, TILELOSS_ROLE_INPUT, kAnyFloat, Shape::kColumns, "V", kFromHidden, kWithVocabulary, false, 0},
    {"dbias", &A::dbias, nullptr, TILELOSS_ROLE_GRADIENT, kAnyFloat, Shape::kColumns, "V", kFromHidden, kWithGradient, false, 0},
    {"loss", &A::loss, nullptr, TILELOSS_ROLE_OUTPUT, kFloat, Shape::kLosses, "L", kLosses, kAll, false, 0},
    {"logp", &A::logp, nullptr, TILELOSS_ROLE_ROW_OUTPUT, kFloat, Shape::kRows, "N", 0, kWithValue | kBackward, false, kMaxSumLabelLogit},
    {"lse", &A::lse, nullptr, TILELOSS_ROLE_ROW_OUTPUT, kFloat, Shape::kRows, "N", 0, kWithValue | kBackward, false, kMaxSumLabelLogit},
    {"entropy", &A::entropy, nullptr, TILELOSS_ROLE_ROW_OUTPUT, kFloat, Shape::kRows, "N", 0, kWithValue | kBackward, false, kMaxSumLabelLogit | TILELOSS_STATE_ENTROPY_SUM},
    {"argmax", &A::argmax, nullptr, TILELOSS_ROLE_ROW_OUTPUT, dtype_bit(TILELOSS_INT64), Shape::kRows, "N", 0, kWithValue | kBackward, false, kMaxSumLabelLogit | TILELOSS_STATE_ARGMAX},
    {"correct", &A::correct, nullptr, TILELOSS_ROLE_ROW_OUTPUT, dtype_bit(TILELOSS_UINT8), Shape::kRows, "N", 0, kWithValue | kBackward, false, kMaxSumLabelLogit | TILELOSS_STATE_ARGMAX},
    {"log_sum_sq_probs", &A::log_sum_sq_probs, nullptr, TILELOSS_ROLE_ROW_OUTPUT, kFloat, Shape::kRows, "N", 0, kWithValue | kBackward, false, kMaxSumLabelLogit | TILELOSS_STATE_COLLISION_SUM},
    {"mean_logit", &A::mean_logit, nullptr, TILELOSS_ROLE_ROW_OUTPUT, kFloat, Shape::kRows, "N", 0, kWithValue | kBackward, false, kMaxSumLabelLogit | TILELOSS_STATE_SMOOTHING_SUM},
    {"allowed", nullptr, &A::allowed, TILELOSS_ROLE_INPUT, dtype_bit(TILELOSS_INT32), Shape::kWords, "N,W", 0, kWithVocabulary, false, 0},
    {"teacher_logits", nullptr, &A::teacher_logits, TILELOSS_ROLE_INPUT, kAnyFloat, Shape::kLogits, "N,V", kTeacherLogits, kWithVocabulary, true, 0},
    {"teacher_hidden", nullptr, &A::teacher_hidden, TILELOSS_ROLE_INPUT, kAnyFloat, Shape::kTeacherHidden, "N,G", kTeacherHead, kWithVocabulary, true, 0},
    {"teacher_head", nullptr, &A::teacher_head, TILELOSS_ROLE_INPUT, kAnyFloat, Shape::kTeacherHead, "V,G", kTeacherHead, kWithVocabulary, true, 0},
    {"target_probs", nullptr, &A::target_probs, TILELOSS_ROLE_INPUT, kAnyFloat, Shape::kLogits, "N,V", kTargetProbs, kWithVocabulary, true, 0},
    {"teacher_ids", nullptr, &A::teacher_ids, TILELOSS_ROLE_INPUT, kInteger, Shape::kTeacherColumns, "N,K", kTeacherColumns, kWithVocabulary, true, 0},
    {"teacher_logprobs", nullptr, &A::teacher_logprobs, TILELOSS_ROLE_INPUT, kAnyFloat, Shape::kTeacherColumns, "N,K", kTeacherColumns, kWithVocabulary, true, 0},
    {"teacher_bias", &A::teacher_bias, nullptr, TILELOSS_ROLE_INPUT, kAnyFloat, Shape::kColumns, "V", kTeacherHead, kWithVocabulary, false, 0},
    {"divergence", &A::divergence, nullptr, TILELOSS_ROLE_ROW_OUTPUT, kFloat, Shape::kRows, "N", kDivergence, kWithValue | kBackward, false, kMaxSumLabelLogit},
    {"teacher_entropy", &A::teacher_entropy, nullptr, TILELOSS_ROLE_ROW_OUTPUT, kFloat, Shape::kRows, "N", kDivergence, kWithValue | kBackward, false, kMaxSumLabelLogit | TILELOSS_STATE_ENTROPY_SUM},
    {"agreement", &A::agreement, nullptr, TILELOSS_ROLE_ROW_OUTPUT, dtype_bit(TILELOSS_UINT8), Shape::kRows, "N", kDivergence, kWithValue | kBackward, false, kMaxSumLabelLogit | TILELOSS_STATE_ARGMAX},
    {"metrics", &A::metrics, nullptr, TILELOSS_ROLE_OUTPUT, kFloat, Shape::kMetrics, "M", kStepMetrics, kAll, false, 0},
    // end of generated
    // clang-format on
};

constexpr StateArray kStateArrays[] = {
    {"row_state.max", TILELOSS_STATE_MAX, &tileloss_row_state::max},
    {"row_state.sum", TILELOSS_STATE_SUM, &tileloss_row_state::sum},
    {"row_state.label_logit", TILELOSS_STATE_LABEL_LOGIT, &tileloss_row_state::label_logit},
    {"row_state.entropy_sum", TILELOSS_STATE_ENTROPY_SUM, &tileloss_row_state::entropy_sum},
    {"row_state.collision_sum", TILELOSS_STATE_COLLISION_SUM, &tileloss_row_state::collision_sum},
    {"row_state.smoothing_sum", TILELOSS_STATE_SMOOTHING_SUM, &tileloss_row_state::smoothing_sum},
    {"row_state.argmax", TILELOSS_STATE_ARGMAX, nullptr},
    {"row_state.allowed_count", TILELOSS_STATE_ALLOWED_COUNT, &tileloss_row_state::allowed_count},
    {"row_state.allowed_weight", TILELOSS_STATE_ALLOWED_WEIGHT, &tileloss_row_state::allowed_weight},
    {"row_state.label_logits", TILELOSS_STATE_LABEL_LOGITS, &tileloss_row_state::label_logits},
};

// Member pointers have no offset in the language, but a struct that they point into has.
std::size_t offset_of(const TensorSlot& slot) {
  static const tileloss_args args{};
  const void* const member =
      slot.vector != nullptr ? static_cast<const void*>(&(args.*slot.vector)) : static_cast<const void*>(&(args.*slot.matrix));
  return static_cast<std::size_t>(static_cast<const char*>(member) - reinterpret_cast<const char*>(&args));
}

}  // namespace

std::span<const TensorSlot> tensor_slots() { return kSlots; }

bool is_required(const TensorSlot& slot, std::uint32_t groups) {
  return slot.is_required && !(slot.vector == &A::labels && (groups & kOptionalLabels) != 0);
}

std::vector<tileloss_tensor> tensors_of(std::uint32_t groups) {
  std::vector<tileloss_tensor> tensors;
  for (const TensorSlot& slot : kSlots) {
    if (slot.groups != 0 && (slot.groups & groups) == 0) continue;
    tensors.push_back({slot.name, offset_of(slot), slot.vector != nullptr ? 1 : 2, slot.role, slot.dtypes, slot.passes,
                       slot.letters, slot.state_arrays, is_required(slot, groups) ? 1 : 0});
  }
  return tensors;
}

std::int64_t element_bytes(tileloss_dtype t) {
  switch (as_enum<TILELOSS_NONE>(t)) {
    case TILELOSS_INT64: return 8;
    case TILELOSS_FLOAT32:
    case TILELOSS_INT32: return 4;
    case TILELOSS_UINT8: return 1;
    case TILELOSS_NONE:
    case TILELOSS_BFLOAT16:
    case TILELOSS_FLOAT16: break;
  }
  return 2;
}

const char* dtype_name(tileloss_dtype t) {
  switch (as_enum<TILELOSS_NONE>(t)) {
    case TILELOSS_NONE: return "none";
    case TILELOSS_FLOAT32: return "float32";
    case TILELOSS_BFLOAT16: return "bfloat16";
    case TILELOSS_FLOAT16: return "float16";
    case TILELOSS_INT32: return "int32";
    case TILELOSS_INT64: return "int64";
    case TILELOSS_UINT8: return "uint8";
  }
  return "an unknown dtype";
}

const char* pass_name(tileloss_pass pass) {
  switch (as_enum<TILELOSS_FORWARD>(pass)) {
    case TILELOSS_FORWARD: return "forward";
    case TILELOSS_BACKWARD: return "backward";
    case TILELOSS_VALUE_AND_GRAD: return "value_and_grad";
    case TILELOSS_FROM_ROW_STATE: return "from_row_state";
  }
  return "unknown";
}

std::span<const StateArray> state_arrays() { return kStateArrays; }

std::uint32_t present_arrays(const tileloss_row_state& state) {
  std::uint32_t bits = 0;
  for (const StateArray& array : kStateArrays) {
    const bool is_there = array.member != nullptr ? state.*array.member != nullptr : state.argmax != nullptr;
    if (is_there) bits |= array.bit;
  }
  return bits;
}

}  // namespace tileloss::impl
