// What the library tells of its functions, against what it does: options by name, tensors, and the row state's arrays.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "tests/api/calls.h"

namespace tileloss::test {
namespace {

std::map<std::string, tileloss_function_info> functions() {
  std::map<std::string, tileloss_function_info> all;
  for (std::int64_t i = 0; i < tileloss_function_count(); ++i) {
    auto info = init<tileloss_function_info>();
    EXPECT_TRUE(succeeds(tileloss_get_function_info(i, &info)));
    all[info.name] = info;
  }
  return all;
}

std::map<std::string, tileloss_tensor> tensors_of(const tileloss_function_info& info) {
  std::map<std::string, tileloss_tensor> all;
  for (std::int64_t i = 0; i < info.num_tensors; ++i) all[info.tensors[i].name] = info.tensors[i];
  return all;
}

// ------------------------------------------------------------------------------------------------------- options by name

TEST(OptionsByName, AreTheFieldsOfTheStruct) {
  tileloss_policy_loss_options options;
  const float coefficient = 0.25F;
  EXPECT_TRUE(succeeds(tileloss_options_set("policy_loss", &options, "tau_pos", 3)));
  EXPECT_TRUE(succeeds(tileloss_options_set("policy_loss", &options, "epsilon_low", 0.1)));
  EXPECT_TRUE(succeeds(tileloss_options_set("policy_loss", &options, "ignore_index", -7)));
  EXPECT_TRUE(succeeds(tileloss_options_set("policy_loss", &options, "kl_importance", 1)));
  EXPECT_TRUE(succeeds(tileloss_options_set_choice("policy_loss", &options, "kind", "sapo")));
  EXPECT_TRUE(succeeds(tileloss_options_set_pointer("policy_loss", &options, "entropy_coef", &coefficient)));
  EXPECT_TRUE(succeeds(tileloss_options_set_choice("linear_policy_loss", &options, "compute_dtype", "bfloat16")));
  EXPECT_EQ(options.tau_pos, 3);
  EXPECT_EQ(options.epsilon_low.value, 0.1);
  EXPECT_EQ(options.logit.ignore_index, -7);
  EXPECT_EQ(options.kl_importance, 1);
  EXPECT_EQ(options.kind, TILELOSS_POLICY_SAPO);
  EXPECT_EQ(options.entropy_coef.pointer, &coefficient);
  EXPECT_EQ(options.linear.compute_dtype, TILELOSS_BFLOAT16);
  EXPECT_TRUE(succeeds(tileloss_options_set("policy_loss", &options, "entropy_coef", 0.5)));
  EXPECT_EQ(options.entropy_coef.pointer, nullptr) << "a number replaces a place";
}

TEST(OptionsByName, RefuseWhatTheFieldCannotHold) {
  tileloss_cross_entropy_options options = cross_entropy_options();
  const tileloss_cross_entropy_options before = options;
  const auto wrong = [](tileloss_status status, const std::string& message) {
    return refused(status, TILELOSS_INVALID_ARGUMENT, message);
  };
  EXPECT_TRUE(wrong(tileloss_options_set("nothing", &options, "softcap", 1),
                    "function: expected the name of a registered function, got nothing"));
  EXPECT_TRUE(wrong(tileloss_options_set("cross_entropy", nullptr, "softcap", 1),
                    "options: expected a struct from tileloss_options_init, got null"));
  EXPECT_TRUE(wrong(tileloss_options_set("logprobs", &options, "z_loss", 1),
                    "name: expected an option of logprobs: logit_scale, softcap, temperature, temperature_on, valid_vocab, "
                    "ignore_index, vocab_start, vocab_total, got z_loss"));
  EXPECT_TRUE(wrong(tileloss_options_set_choice("cross_entropy", &options, "compute_dtype", "float32"),
                    "name: expected an option of cross_entropy: logit_scale, softcap, temperature, temperature_on, valid_vocab, "
                    "ignore_index, vocab_start, vocab_total, label_smoothing, z_loss, num_items, reduction, got compute_dtype"));
  EXPECT_TRUE(wrong(tileloss_options_set_choice("cross_entropy", &options, "reduction", "su"),
                    "reduction: expected one of none|sum|mean, got su"));
  EXPECT_TRUE(
      wrong(tileloss_options_set_choice("cross_entropy", &options, "z_loss", "sum"), "z_loss: expected a number, got sum"));
  EXPECT_TRUE(wrong(tileloss_options_set("cross_entropy", &options, "reduction", 3),
                    "reduction: expected one of none|sum|mean (0 to 2), got 3"));
  EXPECT_NE(tileloss_options_set("cross_entropy", &options, "ignore_index", 0.5), TILELOSS_OK);
  EXPECT_TRUE(wrong(tileloss_options_set_pointer("cross_entropy", &options, "z_loss", nullptr),
                    "z_loss: expected an option that may lie behind a pointer, got another"));
  options.struct_size = 40;
  EXPECT_NE(tileloss_options_set("cross_entropy", &options, "z_loss", 1), TILELOSS_OK) << "beyond the caller's struct";
  options.struct_size = before.struct_size;
  EXPECT_EQ(std::memcmp(&options, &before, sizeof options), 0);
}

// --------------------------------------------------------------------------------------------------------------- tensors

TEST(Introspection, ALossIsThereTwiceAndSaysSo) {
  const auto all = functions();
  for (const auto& [name, info] : all) {
    EXPECT_EQ(info.is_linear != 0, name != info.loss) << name;
    ASSERT_EQ(all.count(info.loss), 1U) << name;
    EXPECT_EQ(all.at(info.loss).is_loss, info.is_loss) << name;
    EXPECT_EQ(info.args_size, sizeof(tileloss_args)) << name;
    EXPECT_EQ(info.row_state_offset, offsetof(tileloss_args, row_state));
    EXPECT_EQ(info.labels_per_row_offset, offsetof(tileloss_args, labels_per_row));
    EXPECT_EQ(info.sequence_length_offset, offsetof(tileloss_args, sequence_length));
    EXPECT_EQ(info.row_groups_offset, offsetof(tileloss_args, row_groups));
    EXPECT_EQ(info.pair_state_offset, offsetof(tileloss_args, pair_state));
  }
}

// Together the functions' tensors and the members that are none fill tileloss_args, without a gap.
TEST(Introspection, TensorsAreTheMembersOfTheArguments) {
  std::map<std::size_t, std::size_t> members = {{0, sizeof(std::size_t)},
                                                {offsetof(tileloss_args, row_state), sizeof(tileloss_row_state*)},
                                                {offsetof(tileloss_args, sequence_length), sizeof(std::int64_t)},
                                                {offsetof(tileloss_args, row_groups), sizeof(tileloss_row_groups)},
                                                {offsetof(tileloss_args, pair_state), sizeof(tileloss_pair_state*)},
                                                {offsetof(tileloss_args, labels_per_row), sizeof(std::int64_t)}};
  for (const auto& [name, info] : functions()) {
    for (const auto& [tensor, t] : tensors_of(info)) {
      members[t.offset] = t.rank == 2 ? sizeof(tileloss_matrix) : sizeof(tileloss_vector);
    }
  }
  std::size_t end = 0;
  for (const auto& [offset, size] : members) {
    EXPECT_EQ(offset, end);
    end = offset + size;
  }
  EXPECT_EQ(end, sizeof(tileloss_args));
  const auto linear = tensors_of(functions().at("linear_cross_entropy"));
  EXPECT_EQ(linear.at("dhead").offset, offsetof(tileloss_args, dhead));
  EXPECT_EQ(linear.at("dhead").role, TILELOSS_ROLE_GRADIENT);
  EXPECT_STREQ(linear.at("dhead").shape, "V,H");
  EXPECT_EQ(linear.count("logits"), 0U);
  EXPECT_EQ(linear.count("advantages"), 0U);
}

// From a row state with the arrays that the table names, and no others, a row output is what it is with all of them; with one
// fewer the call is refused.
TEST(Introspection, StateArraysAreThoseThatARowOutputNeeds) {
  constexpr std::int64_t kRows = 3;
  const std::pair<std::uint32_t, float * tileloss_row_state::*> floats[] = {
      {TILELOSS_STATE_MAX, &tileloss_row_state::max},
      {TILELOSS_STATE_SUM, &tileloss_row_state::sum},
      {TILELOSS_STATE_LABEL_LOGIT, &tileloss_row_state::label_logit},
      {TILELOSS_STATE_ENTROPY_SUM, &tileloss_row_state::entropy_sum},
      {TILELOSS_STATE_COLLISION_SUM, &tileloss_row_state::collision_sum},
      {TILELOSS_STATE_SMOOTHING_SUM, &tileloss_row_state::smoothing_sum}};
  std::vector<std::int64_t> labels(kRows, 1), memory(kRows);
  const tileloss_logprobs_options options{.logit = {.vocab_total = 10}};
  int outputs = 0;
  for (const auto& [name, tensor] : tensors_of(functions().at("logprobs"))) {
    if (tensor.role != TILELOSS_ROLE_ROW_OUTPUT) continue;
    ++outputs;
    const auto call_with = [&, &t = tensor](std::uint32_t arrays) {
      RowStateArrays state(kRows);
      const float values[] = {1.5F, 2.0F, 1.0F, -0.7F, 1.3F, -4.0F};  // no sum is what an absent one counts as
      for (std::size_t a = 0; a < std::size(values); ++a) {
        for (std::int64_t i = 0; i < kRows; ++i) (state.get().*floats[a].second)[i] = values[a];
      }
      std::fill_n(state.get().argmax, kRows, 1);
      for (const auto& [bit, member] : floats) {
        if ((arrays & bit) == 0) state.get().*member = nullptr;
      }
      if ((arrays & TILELOSS_STATE_ARGMAX) == 0) state.get().argmax = nullptr;
      auto args = init<tileloss_args>();
      args.labels = tileloss_make_vector(labels.data(), TILELOSS_INT64, kRows);
      args.row_state = &state.get();
      tileloss_dtype dtype = TILELOSS_FLOAT32;
      while ((t.dtypes & (1U << dtype)) == 0) ++dtype;
      const tileloss_vector output = tileloss_make_vector(memory.data(), dtype, kRows);
      std::memcpy(reinterpret_cast<char*>(&args) + t.offset, &output, sizeof output);
      return tileloss_logprobs_from_row_state(&args, &options, nullptr, nullptr);
    };
    memory.assign(kRows, 0);
    EXPECT_TRUE(succeeds(call_with(2 * TILELOSS_STATE_ARGMAX - 1))) << name;
    const std::vector<std::int64_t> with_all = std::exchange(memory, std::vector<std::int64_t>(kRows));
    EXPECT_TRUE(succeeds(call_with(tensor.state_arrays))) << name;
    EXPECT_EQ(memory, with_all) << name;
    for (std::uint32_t bit = 1; bit <= TILELOSS_STATE_ARGMAX; bit *= 2) {
      if ((tensor.state_arrays & bit) != 0) {
        EXPECT_EQ(call_with(tensor.state_arrays & ~bit), TILELOSS_INVALID_ARGUMENT) << name << " without " << bit;
      }
    }
  }
  EXPECT_EQ(outputs, 7);
}

// An option whose backward needs more of the row state says so.
TEST(Introspection, OptionsNameTheArraysThatTheirBackwardNeeds) {
  std::set<std::string> names;
  const tileloss_function_info info = functions().at("policy_loss");
  for (std::int64_t i = 0; i < info.num_fields; ++i) {
    if (info.fields[i].state_arrays == 0) continue;
    EXPECT_EQ(info.fields[i].state_arrays, static_cast<std::uint32_t>(TILELOSS_STATE_ENTROPY_SUM));
    names.insert(info.fields[i].name);
  }
  EXPECT_EQ(names, (std::set<std::string>{"entropy_coef", "entropy_quantile", "entropy_threshold"}));
}

}  // namespace
}  // namespace tileloss::test
