// What a gradcheck config says. docs and examples: configs/gradcheck_*.yaml.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "judge/oracles/logits_rows.h"
#include "oracle/number_formats.h"
#include "support/abi.h"
#include "support/config.h"
#include "support/device.h"
#include "support/synthetic.h"
#include "support/tensor_file.h"

namespace tileloss::tools {

struct CheckedFunction;

struct GradcheckConfig {
  enum class Upstream { kOnes, kRandom, kPerRow };

  struct Source {
    bool is_file = false;
    std::string distribution = "normal";
    LogitsSpec logits;
    std::filesystem::path path;  // safetensors
    std::string logits_name = "logits";
    std::string labels_name = "labels";
    // Of policy losses, the mask of every loss that takes one; "": not in the file.
    std::string mask_name, advantages_name, old_logp_name, ref_logp_name, sampler_logp_name;
  };

  // The logits of distillation's teacher: a tensor, or drawn. With the LM head its hidden states and head, drawn for such logits.
  struct Teacher {
    enum class Kind { kNear, kSame, kDrawn, kStored };
    Kind kind = Kind::kNear;
    double noise = 1;            // kNear: the student's logits and so much normal noise
    LogitsSpec logits;           // kDrawn: without a look at the student's; of a sparse one the std of its scores
    int64_t columns = 0;         // of a sparse one: how many are known
    std::filesystem::path path;  // kStored: safetensors, and the tensor's name in it
    std::string name;
    std::vector<std::string> special_rows;  // dealt out in turn (judge/inputs/targets.h)
  };

  // The class probabilities of soft_cross_entropy, drawn.
  struct Probs {
    oracle::NumberFormat format = oracle::NumberFormat::kFloat32;
    double zeros = 0.3;                     // the share of columns whose probability is 0
    std::vector<std::string> special_rows;  // dealt out in turn (judge/inputs/targets.h)
  };

  // The columns that each row's softmax runs over, drawn unless the file has them.
  struct Allowed {
    enum class Kind { kNone, kAll, kSparse, kHalf, kRuns, kShared };
    Kind kind = Kind::kNone;
    std::string name;                       // the tensor in the file; "": not there
    std::vector<std::string> special_rows;  // dealt out in turn (judge/inputs/allowed.h)
  };

  // Inputs of policy losses that are drawn; mask_prob of every loss that takes a mask.
  struct Policy {
    bool use_offsets = false;
    double mask_prob = 0;
    std::optional<double> old_scale, ref_scale, sampler_scale;  // absent: the tensor is not given, unless the file has it
  };

  // level: linear, fused with the LM head.
  struct Linear {
    int64_t hidden_size = 0;          // 0: as in the file
    int64_t teacher_hidden_size = 0;  // of linear_distillation
    tileloss_dtype compute_dtype = TILELOSS_NONE;
    bool transposed_head = false;  // [H,V]
    bool bias = false;
    int64_t rank = 0;                     // of a low-rank part of the head; 0: none
    std::vector<LinearOutput> gradients;  // that are asked for and checked
    bool float32_dhead = true;            // or the head's dtype; dhead_r likewise
    bool accumulate = false;
    std::string hidden_name = "hidden";
    std::string head_name = "lm_head";
    std::string bias_name, hidden_r_name, head_r_name;  // "": none in the file
  };

  struct Tolerances {
    double loss_atol = std::numeric_limits<double>::infinity();
    double logp_max_abs = std::numeric_limits<double>::infinity();
    double dlogits_max_abs = std::numeric_limits<double>::infinity();
    double dlogits_max_rel = std::numeric_limits<double>::infinity();
    double ulp = 1;  // multiples of the error metric's budgets
  };

  GradcheckConfig(Function called, const CheckedFunction& description) : function(std::move(called)), checked(&description) {}

  std::string file;
  Function function;
  const CheckedFunction* checked;
  // 0, or no dtype: as in the safetensors file.
  int64_t batch_size = 0;
  int64_t seq_len = 0;
  int64_t vocab_size = 0;
  std::optional<oracle::NumberFormat> dtype;
  uint64_t seed = 0;
  double ignore_prob = 0;      // of several labels a row the share of rows, and of the other slots, that are empty
  int64_t labels_per_row = 1;  // of logprobs
  Source source;
  Teacher teacher;
  Probs probs;
  Allowed allowed;
  Policy policy;
  Linear linear;
  bool token_weights = false;
  bool class_weights = false;
  Upstream upstream = Upstream::kOnes;
  std::vector<std::string> outputs;  // row outputs that are asked for and checked
  KernelHints kernel;
  Device device{"cpu"};
  bool in_place = false;
  bool row_groups = false;  // the sequences' rows as groups with a row between them: x[:, :-1] of a [B,T+1,V] tensor
  Tolerances tolerances;
  bool mutants = false;
  bool strict = false;
  bool expect_mostly_zero = false;
  std::vector<TensorFile> files;  // those of source.path and source.teacher_path
  // "c.yaml:12: kernel.vocab_block", by the name that the library has for it.
  std::map<std::string, std::string> origins;

  const TensorFile& file_at(const std::filesystem::path& path) const;
  // The same error with the place of the key that it is about, if there is one.
  ToolError located(const LibraryError& error) const;
  bool wants(std::string_view output_name) const;
  bool has_divergence() const { return function.takes("divergence"); }  // among its row outputs
  bool takes_mask() const { return function.takes("mask"); }
  bool is_linear() const { return function.is_linear(); }
  bool per_row_loss() const { return function.per_row_loss(); }
};

// Throws ToolError (usage) naming the key and where it stands. `name`: of the config, in reports.
GradcheckConfig read_gradcheck_config(const ConfigNode& root, const std::string& name);

}  // namespace tileloss::tools
