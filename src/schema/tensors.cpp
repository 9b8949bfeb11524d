#include "schema/tensors.h"

#include <cstddef>

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

constexpr std::uint32_t kMaxSumTarget = TILELOSS_STATE_MAX | TILELOSS_STATE_SUM | TILELOSS_STATE_TARGET;

using A = tileloss_args;

constexpr TensorSlot input(const char* name, tileloss_vector A::*member, std::uint32_t dtypes, Shape shape, std::uint32_t groups,
                           bool is_required = false) {
  return {name, member, nullptr, TILELOSS_ROLE_INPUT, dtypes, shape, groups, kAll, is_required};
}
constexpr TensorSlot upstream(const char* name, tileloss_vector A::*member, Shape shape, std::uint32_t groups) {
  return {name, member, nullptr, TILELOSS_ROLE_UPSTREAM, kFloat, shape, groups, kAll};
}
constexpr TensorSlot matrix(const char* name, tileloss_matrix A::*member, Shape shape, std::uint32_t group,
                            std::uint32_t dtypes = kAnyFloat) {
  return {name, nullptr, member, TILELOSS_ROLE_INPUT, dtypes, shape, group, kWithVocabulary, true};
}
constexpr TensorSlot gradient(const char* name, tileloss_matrix A::*member, Shape shape, std::uint32_t group, bool is_required) {
  return {name, nullptr, member, TILELOSS_ROLE_GRADIENT, kAnyFloat, shape, group, kWithGradient, is_required};
}
// A number of each row, made of these arrays of the row state besides max, sum and target.
constexpr TensorSlot row_output(const char* name, tileloss_vector A::*member, tileloss_dtype dtype, std::uint32_t arrays,
                                std::uint32_t groups = 0) {
  return {name,
          member,
          nullptr,
          TILELOSS_ROLE_ROW_OUTPUT,
          dtype_bit(dtype),
          Shape::kRows,
          groups,
          kWithValue | kBackward,
          false,
          kMaxSumTarget | arrays};
}

constexpr TensorSlot kSlots[] = {
    matrix("logits", &A::logits, Shape::kLogits, kFromLogits),
    gradient("dlogits", &A::dlogits, Shape::kLogits, kFromLogits, true),
    matrix("hidden", &A::hidden, Shape::kHidden, kFromHidden),
    matrix("head", &A::head, Shape::kHead, kFromHidden),
    gradient("dhidden", &A::dhidden, Shape::kHidden, kFromHidden, false),
    gradient("dhead", &A::dhead, Shape::kHead, kFromHidden, false),
    input("labels", &A::labels, kInteger, Shape::kRows, 0, true),
    input("token_weights", &A::token_weights, kFloat, Shape::kRows, kTokenWeights),
    input("class_weights", &A::class_weights, kFloat, Shape::kClasses, kClassWeights),
    upstream("loss_grad", &A::loss_grad, Shape::kLosses, kLossGrad),
    upstream("logp_grad", &A::logp_grad, Shape::kRows, kRowGrads),
    upstream("lse_grad", &A::lse_grad, Shape::kRows, kRowGrads),
    upstream("entropy_grad", &A::entropy_grad, Shape::kRows, kRowGrads),
    upstream("mean_logit_grad", &A::mean_logit_grad, Shape::kRows, kRowGrads),
    input("mask", &A::mask, kAnyMask, Shape::kRows, kMask),
    input("old_logp", &A::old_logp, kFloat, Shape::kRows, kPolicyLogps),
    input("ref_logp", &A::ref_logp, kFloat, Shape::kRows, kPolicyLogps),
    input("sampler_logp", &A::sampler_logp, kFloat, Shape::kRows, kPolicyLogps),
    input("advantages", &A::advantages, kFloat, Shape::kAdvantages, kAdvantages, true),
    input("sequence_offsets", &A::sequence_offsets, kInteger, Shape::kSequenceOffsets, kSequences),
    {"bias", &A::bias, nullptr, TILELOSS_ROLE_INPUT, kAnyFloat, Shape::kColumns, kFromHidden, kWithVocabulary},
    {"dbias", &A::dbias, nullptr, TILELOSS_ROLE_GRADIENT, kAnyFloat, Shape::kColumns, kFromHidden, kWithGradient},
    {"loss", &A::loss, nullptr, TILELOSS_ROLE_OUTPUT, kFloat, Shape::kLosses, kLosses, kAll},
    row_output("logp", &A::logp, TILELOSS_FLOAT32, 0),
    row_output("lse", &A::lse, TILELOSS_FLOAT32, 0),
    row_output("entropy", &A::entropy, TILELOSS_FLOAT32, TILELOSS_STATE_ENTROPY_SUM),
    row_output("argmax", &A::argmax, TILELOSS_INT64, TILELOSS_STATE_ARGMAX),
    row_output("correct", &A::correct, TILELOSS_UINT8, TILELOSS_STATE_ARGMAX),
    row_output("log_sum_sq_probs", &A::log_sum_sq_probs, TILELOSS_FLOAT32, TILELOSS_STATE_COLLISION_SUM),
    row_output("mean_logit", &A::mean_logit, TILELOSS_FLOAT32, TILELOSS_STATE_SMOOTHING_SUM),
    matrix("teacher_logits", &A::teacher_logits, Shape::kLogits, kTeacherLogits),
    matrix("teacher_hidden", &A::teacher_hidden, Shape::kTeacherHidden, kTeacherHead),
    matrix("teacher_head", &A::teacher_head, Shape::kTeacherHead, kTeacherHead),
    matrix("target_probs", &A::target_probs, Shape::kLogits, kTargetProbs),
    matrix("teacher_ids", &A::teacher_ids, Shape::kTeacherColumns, kTeacherColumns, kInteger),
    matrix("teacher_logprobs", &A::teacher_logprobs, Shape::kTeacherColumns, kTeacherColumns),
    {"teacher_bias", &A::teacher_bias, nullptr, TILELOSS_ROLE_INPUT, kAnyFloat, Shape::kColumns, kTeacherHead, kWithVocabulary},
    row_output("divergence", &A::divergence, TILELOSS_FLOAT32, 0, kDivergence),
    row_output("teacher_entropy", &A::teacher_entropy, TILELOSS_FLOAT32, TILELOSS_STATE_ENTROPY_SUM, kDivergence),
    row_output("agreement", &A::agreement, TILELOSS_UINT8, TILELOSS_STATE_ARGMAX, kDivergence),
    {"metrics", &A::metrics, nullptr, TILELOSS_ROLE_OUTPUT, kFloat, Shape::kMetrics, kStepMetrics, kAll},
};

constexpr StateArray kStateArrays[] = {
    {"row_state.max", TILELOSS_STATE_MAX, &tileloss_row_state::max},
    {"row_state.sum", TILELOSS_STATE_SUM, &tileloss_row_state::sum},
    {"row_state.target", TILELOSS_STATE_TARGET, &tileloss_row_state::target},
    {"row_state.entropy_sum", TILELOSS_STATE_ENTROPY_SUM, &tileloss_row_state::entropy_sum},
    {"row_state.collision_sum", TILELOSS_STATE_COLLISION_SUM, &tileloss_row_state::collision_sum},
    {"row_state.smoothing_sum", TILELOSS_STATE_SMOOTHING_SUM, &tileloss_row_state::smoothing_sum},
    {"row_state.argmax", TILELOSS_STATE_ARGMAX, nullptr},
};

const char* letters(Shape shape) {
  switch (shape) {
    case Shape::kRows: return "N";
    case Shape::kClasses: return "C";
    case Shape::kColumns: return "V";
    case Shape::kLosses: return "L";
    case Shape::kSequenceOffsets: return "B+1";
    case Shape::kAdvantages: return "B|N";
    case Shape::kMetrics: return "M";
    case Shape::kLogits: return "N,V";
    case Shape::kHidden: return "N,H";
    case Shape::kHead: return "V,H";
    case Shape::kTeacherHidden: return "N,G";
    case Shape::kTeacherHead: return "V,G";
    case Shape::kTeacherColumns: return "N,K";
  }
  return "";
}

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
  return slot.is_required && !(slot.vector == &A::labels && (groups & kTeacher) != 0);
}

std::vector<tileloss_tensor> tensors_of(std::uint32_t groups) {
  std::vector<tileloss_tensor> tensors;
  for (const TensorSlot& slot : kSlots) {
    if (slot.groups != 0 && (slot.groups & groups) == 0) continue;
    tensors.push_back({slot.name, offset_of(slot), slot.vector != nullptr ? 1 : 2, slot.role, slot.dtypes, slot.passes,
                       letters(slot.shape), slot.state_arrays, is_required(slot, groups) ? 1 : 0});
  }
  return tensors;
}

std::int64_t element_bytes(tileloss_dtype t) {
  switch (t) {
    case TILELOSS_INT64: return 8;
    case TILELOSS_FLOAT32:
    case TILELOSS_INT32: return 4;
    case TILELOSS_UINT8: return 1;
    default: return 2;
  }
}

const char* dtype_name(tileloss_dtype t) {
  switch (t) {
    case TILELOSS_NONE: return "none";
    case TILELOSS_FLOAT32: return "float32";
    case TILELOSS_BFLOAT16: return "bfloat16";
    case TILELOSS_FLOAT16: return "float16";
    case TILELOSS_INT32: return "int32";
    case TILELOSS_INT64: return "int64";
    case TILELOSS_UINT8: return "uint8";
    default: return "an unknown dtype";
  }
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
