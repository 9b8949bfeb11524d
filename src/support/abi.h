// The tools' hold on the library: the C ABI by function name, with options set by field name from the library's own table, so
// that a newly registered loss is known here without a change.
#pragma once

#include <tileloss/tileloss.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "oracle/number_formats.h"
#include "schema/tensors.h"
#include "support/config.h"
#include "support/exit_codes.h"
#include "support/json.h"

namespace tileloss::tools {

// What the library refuses: "vocab_block: expected a multiple of 64 up to 8192, got 63", behind what was being done.
class LibraryError : public ToolError {
 public:
  LibraryError(ExitCode code, const std::string& action, const std::string& refusal);
  // "vocab_block", and what is behind the colon; both empty if it names none.
  const std::string& argument() const { return argument_; }
  const std::string& problem() const { return problem_; }

 private:
  std::string argument_, problem_;
};

// Throws LibraryError with the library's message: usage for what the caller asked wrongly, environment for missing instruction
// sets, and a failed check for what can only be a bug in the library. Throws OutOfMemory.
void check_status(tileloss_status status, const std::string& action);

// A function of the library and a value for each of its options.
class Function {
 public:
  // Throws ToolError (usage) listing the names there are.
  explicit Function(std::string_view name);
  // With the values of its options struct.
  Function(std::string_view name, const void* options);
  static std::vector<std::string> names();
  // The function that computes `loss` from logits, or fused with the LM head; throws as the constructor does.
  static Function of(std::string_view loss, bool is_linear);

  const std::string& name() const { return name_; }
  std::string_view loss() const { return info_.loss; }  // the same from logits and with the LM head
  bool is_loss() const { return info_.is_loss != 0; }
  // Fused with the LM head: takes hidden and head in place of logits.
  bool is_linear() const { return info_.is_linear != 0; }
  bool is_policy() const { return find_field("advantage_level") != nullptr; }
  // Takes a teacher's logits, or with the LM head a teacher's head.
  bool has_teacher() const { return find_field("teacher_temperature") != nullptr; }
  // Saves a row state, and has a backward from it: where a row is compared with its label alone.
  bool has_row_state() const { return !has_teacher() && !takes("target_probs") && !takes("teacher_ids"); }
  bool takes(std::string_view tensor) const;  // by its name in tileloss_args
  // One loss per row, rather than one for all: the option that says so is "none".
  bool per_row_loss() const { return is_loss() && get_choice(per_row_option(), "") == "none"; }
  const char* per_row_option() const { return find_field("aggregation") != nullptr ? "aggregation" : "reduction"; }
  const void* options() const { return options_.data(); }
  std::span<const tileloss_field> fields() const { return {info_.fields, static_cast<size_t>(info_.num_fields)}; }
  const tileloss_field* find_field(std::string_view name) const;

  // Reads every option that `config` has from it, with the field's type and range; the key `preset` before all others.
  void read_options(ConfigReader& config);
  void set_choice(std::string_view field, std::string_view choice);
  void set_integer(std::string_view field, int64_t value);
  void set_number(std::string_view field, double value);
  // The field's default again.
  void reset(std::string_view field);
  const std::string& preset() const { return preset_; }  // "" if none was read
  std::vector<std::string> presets() const;
  std::vector<std::string> metrics() const;
  // The value of a field; a choice's index; `fallback` if there is no such field.
  double get(std::string_view field, double fallback) const;
  int64_t get_integer(std::string_view field, int64_t fallback) const;
  std::string get_choice(std::string_view field, std::string_view fallback) const;
  // The options that differ from their defaults.
  Json to_json() const;

 private:
  const tileloss_field& field_named(std::string_view name) const;  // throws if there is none
  void set_number(const tileloss_field& field, double value);
  void set_integer(const tileloss_field& field, int64_t value);
  const void* at(const tileloss_field& field) const;

  std::string name_;
  std::string preset_;
  tileloss_function_info info_ = {};
  std::vector<std::max_align_t> options_;
};

std::vector<std::string> split(std::string_view text, char separator);

// Names a user may give ("bf16", "bfloat16", ...) and what they stand for.
std::vector<std::string> dtype_names();
oracle::NumberFormat parse_dtype(std::string_view name);
tileloss_dtype abi_dtype(oracle::NumberFormat format);

std::vector<std::string> isa_names();
std::vector<std::string> schedule_names();
std::vector<std::string> cuda_kernel_names();

// More the library refuses.
inline constexpr int64_t kMaxThreads = 1024;
// Of rows, of columns, of a block of them: their product times 8 bytes is far from overflow.
inline constexpr int64_t kMaxCount = (int64_t{1} << 31) - 1;

// What --isa, --threads, ... and the config's kernel section ask of the planner; of a GPU's all but isa and threads.
struct KernelHints {
  std::string isa = "auto";
  std::string schedule = "auto";
  int64_t threads = 0;
  int64_t row_block = 0;
  int64_t vocab_block = 0;
  int64_t workspace_bytes = 0;
  int64_t chunk_columns = 0;
  std::string cuda_kernel = "auto";

  tileloss_plan_options plan_options() const;
};

// The keys isa, schedule, threads, row_block, vocab_block and cuda_kernel, which every tool has under these names.
KernelHints read_hints(ConfigReader& config);

tileloss_plan make_plan(const Function& function, tileloss_pass pass, const tileloss_args& args, const KernelHints& hints);
void call(const Function& function, tileloss_pass pass, const tileloss_args& args, const tileloss_plan& plan,
          const tileloss_run* run = nullptr);

// The plan's facts by name, those of its device among them.
Json plan_facts(const tileloss_plan& plan);

using impl::pass_name;
// forward, backward, value_and_grad: those that take logits or an LM head.
std::vector<std::string> pass_names();
// Throws ToolError (usage) for any other name.
tileloss_pass parse_pass(std::string_view name);

}  // namespace tileloss::tools
