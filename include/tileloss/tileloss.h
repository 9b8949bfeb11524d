// TileLoss: losses over a language model's vocabulary, computed in tiles. The C ABI.
//
// Conventions
//   * Every function returns a tileloss_status; tileloss_last_error() holds this thread's message. No exception, abort or print
//     leaves the library. Calls from several threads at once are fine.
//   * Structs that can grow start with `struct_size`; obtain them from their *_init function, which sets it and the defaults. Any
//     of them may end before fields that were added later: those count as zero where the library reads the struct (options: as
//     their defaults), and are left out where it fills it.
//     The views (tileloss_matrix, tileloss_vector, tileloss_scalar) are frozen: they will never grow.
//   * Views do not own memory. Strides count elements. A zeroed view (dtype TILELOSS_NONE) means "absent".
//   * An output that shares memory with an input or with another output is an error, but for dlogits over the logits themselves.
//     Columns of one array, with strides that keep them apart, share none.
//   * Notation, per row i: logits x_i, transformed logits z_i = softcap(logit_scale * x_i) / temperature,
//     lse_i = log sum_j exp(z_ij), logp_i = z_i,label - lse_i. All arithmetic and row outputs are float32 or better.
//   * Determinism: for a given instruction set, schedule and vocab_block, results are bitwise the same run to run and for any
//     number of threads; a row's outputs do not depend on the other rows; logp is bitwise the same in every schedule. With the LM
//     head the rows at a time and the columns of a chunk decide in which order gradients are added up: row_block and
//     workspace_bytes may change them in their last bits, the number of threads does not.
#ifndef TILELOSS_TILELOSS_H_
#define TILELOSS_TILELOSS_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define TILELOSS_API
#else
#define TILELOSS_API __attribute__((visibility("default")))
#endif

#define TILELOSS_VERSION_STRING "0.1.0"

// A member's default where C++ can state it: there, a struct as declared already has them, and takes designated initialisers. In
// C they come from the struct's *_init function.
#ifdef __cplusplus
#define TILELOSS_DEFAULT(...) = __VA_ARGS__
#else
#define TILELOSS_DEFAULT(...)
#endif
#define TILELOSS_SIZE(type) TILELOSS_DEFAULT(sizeof(type))
#define TILELOSS_NOT_GIVEN TILELOSS_DEFAULT(__builtin_nan(""))

// ---------------------------------------------------------------------------------------------------------------- status

typedef int32_t tileloss_status;
enum {
  TILELOSS_OK = 0,
  TILELOSS_INVALID_ARGUMENT = 1,  // a shape, dtype, stride, pointer or option is wrong; the message names it
  // A used label is < 0 or >= the vocabulary; nothing has been written. (A device that only queues a call reports this in
  // tileloss_check_errors.)
  TILELOSS_LABEL_OUT_OF_RANGE = 2,
  TILELOSS_OUT_OF_MEMORY = 3,        // the workspace could not be allocated
  TILELOSS_WORKSPACE_TOO_SMALL = 4,  // the caller's workspace or budget is below what the plan needs
  TILELOSS_UNSUPPORTED = 5,          // this machine or this build cannot do it (instruction set, device)
  TILELOSS_PLAN_MISMATCH = 6,        // the arguments are not those that were planned
  TILELOSS_INTERNAL = 7              // a bug in TileLoss, or a device that failed
};

// The message of this thread's last failed call, "" if none failed yet. Valid until this thread's next call.
TILELOSS_API const char* tileloss_last_error(void);
TILELOSS_API const char* tileloss_status_name(tileloss_status status);
TILELOSS_API const char* tileloss_version(void);

// ----------------------------------------------------------------------------------------------------------------- views

typedef int32_t tileloss_dtype;
enum {
  TILELOSS_NONE = 0,  // the view is absent
  TILELOSS_FLOAT32 = 1,
  TILELOSS_BFLOAT16 = 2,
  TILELOSS_FLOAT16 = 3,
  TILELOSS_INT32 = 4,
  TILELOSS_INT64 = 5,
  TILELOSS_UINT8 = 6
};

// Chooses the backend: all views of a call have the same one.
typedef int32_t tileloss_device_type;
enum { TILELOSS_CPU = 0, TILELOSS_CUDA = 1 };

// A [rows, cols] matrix. Inputs are never written. While planning, `data` may be null.
typedef struct tileloss_matrix {
  void* data;
  int64_t rows;
  int64_t cols;
  int64_t row_stride;
  int64_t col_stride;
  tileloss_dtype dtype;
  tileloss_device_type device_type;
  int32_t device_index;
  int32_t reserved;  // 0
} tileloss_matrix;

// A vector. Stride 0 broadcasts one value (inputs only).
typedef struct tileloss_vector {
  void* data;
  int64_t size;
  int64_t stride;
  tileloss_dtype dtype;
  tileloss_device_type device_type;
  int32_t device_index;
  int32_t reserved;  // 0
} tileloss_vector;

// A number that may change from step to step: `*pointer` (in the data's memory space, read during the call) when pointer is
// not null, else `value`. A plan made with a pointer serves all numbers behind it. Where a coefficient of 0 saves work, a `value`
// of 0 and one that is not need a plan each.
typedef struct tileloss_scalar {
  double value;
  const float* pointer;
#ifdef __cplusplus
  constexpr tileloss_scalar(double number = 0, const float* place = nullptr) : value(number), pointer(place) {}
#endif
} tileloss_scalar;

TILELOSS_API tileloss_matrix tileloss_make_matrix(const void* data, tileloss_dtype dtype, int64_t rows, int64_t cols,
                                                  int64_t row_stride);
TILELOSS_API tileloss_vector tileloss_make_vector(const void* data, tileloss_dtype dtype, int64_t size);

// ------------------------------------------------------------------------------------------------------------- row state

// What a forward sweep learns of each row, and all that a backward needs besides the logits. float32 [rows] arrays, contiguous;
// a null array is not wanted (output) or not there (input). It is a monoid: states of column shards merge into the state of the
// whole row. The label's column is left out of `sum`, and a shard that does not hold the label has label_logit = -inf.
//   max            m = max_j z_j, the label's column included
//   sum            R = sum over j != label of exp(z_j - m)
//   label_logit    z at the label
//   entropy_sum    sum_j (z_j - m) exp(z_j - m)
//   collision_sum  sum_j exp(2 (z_j - m))
//   smoothing_sum  sum_j c_j (z_j - m), c = class weights, 1 if there are none
//   argmax         the lowest class of the row's maximum, vocab_start + its column; -1 while empty or if a NaN was seen
// For calls with args.allowed, where the number of columns is each row's own. A state that is read for a shard with `allowed`,
// and by from_row_state after such forwards, has to have them; where they are there, they stand for V and for smoothing_weight:
//   allowed_count   how many of the columns seen are allowed
//   allowed_weight  the sum of their c_j; with class weights only
// For calls with args.labels_per_row = K > 1. label_logit is then the largest of a row's labels, and `sum` leaves out that one
// alone. A shard's state, and that of from_row_state, has to have the array; a backward reads it and looks no label up:
//   label_logits    [rows, K]: z at each label; -inf of an empty slot, and of a label that is not allowed or not in the columns
//   seen
typedef struct tileloss_row_state {
  size_t struct_size;
  int64_t rows;
  float* max;
  float* sum;
  float* label_logit;
  float* entropy_sum;
  float* collision_sum;
  float* smoothing_sum;
  int64_t* argmax;
  // The sum of c_j over the columns this state has seen (their number, without class weights). The caller's to set; only the
  // merge of smoothing_sum reads it.
  double smoothing_weight;
  tileloss_device_type device_type;
  int32_t device_index;
  float* allowed_count;
  float* allowed_weight;
  float* label_logits;
  int64_t labels_per_row;  // K of label_logits
} tileloss_row_state;

// What goes with row_state where a shard of the vocabulary is compared with a teacher's logits or class probabilities. The states
// are logprobs', merged over all shards, as row_state is then. The sums of a shard's columns are what a forward gives; added up
// over all shards from_row_state and backward take them. float64 [rows].
typedef struct tileloss_pair_state {
  size_t struct_size;
  int64_t rows;
  tileloss_row_state* teacher;  // with a teacher's logits; else null
  tileloss_row_state* label;    // the student's at label_temperature; null: that is the student's
  double* divergence;
  double* mean;  // in the gradient
} tileloss_pair_state;

// What the *_init functions are made of. Those are inline, so that they fill the struct that the caller was compiled with: the
// library's may have grown since.
TILELOSS_API void tileloss_struct_init(void* value, size_t struct_size);  // zeros, and struct_size; null: nothing
// A function's defaults; the first member becomes options_size, which may be less than the library knows (or, a newer header's,
// more).
TILELOSS_API tileloss_status tileloss_options_init(const char* function, void* options, size_t options_size);
// The same, and on top of them what a preset sets. policy_loss: grpo, bnpo, dr_grpo, dapo, cispo, sapo, gspo, luspo, vespo,
// reinforce: a kind, a ratio level and an aggregation (docs/users/losses.md).
TILELOSS_API tileloss_status tileloss_options_preset(const char* function, const char* preset, void* options,
                                                     size_t options_size);

static inline void tileloss_row_state_init(tileloss_row_state* state) { tileloss_struct_init(state, sizeof *state); }
static inline void tileloss_pair_state_init(tileloss_pair_state* state) { tileloss_struct_init(state, sizeof *state); }
// On a device these two run on its default stream, which the caller orders with its own.
// Fills every array present with the identity: max, label_logit and label_logits -inf, sums 0, argmax -1; smoothing_weight = 0.
TILELOSS_API tileloss_status tileloss_row_state_set_identity(tileloss_row_state* state);
// into = into + from, row by row, for every array present in both. max, sum and label_logit are required; allowed_count,
// allowed_weight and label_logits are in both or in neither. NaN survives.
TILELOSS_API tileloss_status tileloss_row_state_merge(tileloss_row_state* into, const tileloss_row_state* from);

// --------------------------------------------------------------------------------------------------------------- options

// generated: options, by ./dev generate from src/schema/table.toml
typedef int32_t tileloss_temperature_on;
enum { TILELOSS_TEMPERATURE_ON_LOGITS = 0, TILELOSS_TEMPERATURE_ON_LOGPROB = 1 };

// What every function on logits shares. Frozen, as it is embedded in the options below. A number, and scale, softcap and
// temperature divided by one another, has to lie within float32's range, what has to be > 0 within its normal numbers.
typedef struct tileloss_logit_options {
  double logit_scale TILELOSS_DEFAULT(1);           // multiplies the logits; > 0; default 1
  double softcap TILELOSS_DEFAULT(0);               // c of c * tanh(x / c); 0 is off; >= 0; default 0
  tileloss_scalar temperature TILELOSS_DEFAULT(1);  // T, divides the logits; > 0; default 1
  // what T divides: the logits, or the log-probabilities that the softmax gives at T = 1; default logits
  tileloss_temperature_on temperature_on TILELOSS_DEFAULT(TILELOSS_TEMPERATURE_ON_LOGITS);
  int32_t reserved0 TILELOSS_DEFAULT(0);  // 0
  // columns from here on are padding: not in the softmax, gradient 0; >= 1; default -1: all are valid
  int64_t valid_vocab TILELOSS_DEFAULT(-1);
  int64_t ignore_index TILELOSS_DEFAULT(-100);  // rows with this label are neither read nor counted; default -100
  int64_t vocab_start TILELOSS_DEFAULT(0);      // the class of column 0, for a shard of the vocabulary; >= 0; default 0
  int64_t vocab_total TILELOSS_DEFAULT(-1);     // classes in all shards; >= 1; default -1: this matrix holds the whole vocabulary
  int64_t reserved[4] TILELOSS_DEFAULT({});     // 0
} tileloss_logit_options;

// What the functions fused with the LM head (linear_*) take besides; the others refuse it. Frozen.
typedef struct tileloss_linear_options {
  // what the products see, bfloat16 or float32; auto is bfloat16 if hidden and head are that; default auto
  tileloss_dtype compute_dtype TILELOSS_DEFAULT(TILELOSS_NONE);
  // 1: dhead and dbias are added to what is there (gradient accumulation, tied embeddings); default 0
  int32_t accumulate TILELOSS_DEFAULT(0);
  int64_t reserved[2] TILELOSS_DEFAULT({});  // 0
} tileloss_linear_options;

typedef struct tileloss_logprobs_options {
  size_t struct_size TILELOSS_SIZE(tileloss_logprobs_options);
  tileloss_logit_options logit TILELOSS_DEFAULT({});
  tileloss_linear_options linear TILELOSS_DEFAULT({});
} tileloss_logprobs_options;

typedef int32_t tileloss_reduction;
enum { TILELOSS_REDUCTION_NONE = 0, TILELOSS_REDUCTION_SUM = 1, TILELOSS_REDUCTION_MEAN = 2 };

typedef struct tileloss_cross_entropy_options {
  size_t struct_size TILELOSS_SIZE(tileloss_cross_entropy_options);
  tileloss_logit_options logit TILELOSS_DEFAULT({});
  tileloss_linear_options linear TILELOSS_DEFAULT({});
  double label_smoothing TILELOSS_DEFAULT(0);  // s, spread over all classes; in [0, 1]; default 0
  double z_loss TILELOSS_DEFAULT(0);           // zeta: adds zeta * lse^2; >= 0; default 0
  // mean's denominator; >= 0; not given: the weights are summed; only with reduction mean
  tileloss_scalar num_items TILELOSS_NOT_GIVEN;
  tileloss_reduction reduction TILELOSS_DEFAULT(TILELOSS_REDUCTION_MEAN);  // how the rows' losses become the loss; default mean
  int32_t reserved TILELOSS_DEFAULT(0);                                    // 0
} tileloss_cross_entropy_options;

// The per-token objective of a policy loss; rho is the ratio of the new to the old policy, A the advantage.
typedef int32_t tileloss_policy_kind;
enum {
  TILELOSS_POLICY_CLIP = 0,      // -min(min(rho, delta) A, clip(rho, 1 - epsilon_low, 1 + epsilon_high) A), also with dual_clip
  TILELOSS_POLICY_CISPO = 1,     // -stop(clip(rho, cap_low, cap)) A logp
  TILELOSS_POLICY_SAPO = 2,      // -(4 / tau) sigmoid(tau (rho - 1)) A
  TILELOSS_POLICY_VESPO = 3,     // -stop(phi) A logp, phi a gamma weight of the sequence's ratio
  TILELOSS_POLICY_REINFORCE = 4  // -A logp
};

typedef int32_t tileloss_level;
enum { TILELOSS_LEVEL_TOKEN = 0, TILELOSS_LEVEL_SEQUENCE = 1 };

// How the per-token losses l become the loss. n_b: tokens in use of sequence b, M: in all, B: sequences, empty ones included.
typedef int32_t tileloss_aggregation;
enum {
  TILELOSS_SEQ_MEAN_TOKEN_MEAN = 0,      // mean over the sequences of (sum l / n_b)
  TILELOSS_TOKEN_MEAN = 1,               // sum l / M, or / num_items when given
  TILELOSS_SEQ_MEAN_TOKEN_SUM_NORM = 2,  // sum l / (B max_length)
  TILELOSS_SEQ_MEAN_TOKEN_SUM = 3,       // mean over the sequences of sum l
  TILELOSS_AGGREGATION_SUM = 4,          // sum l / num_items (default 1)
  TILELOSS_AGGREGATION_NONE = 5          // one l a row
};

typedef int32_t tileloss_cispo_cap;
enum { TILELOSS_CISPO_CAP_RAW = 0, TILELOSS_CISPO_CAP_ONE_PLUS = 1 };

typedef int32_t tileloss_sampler_correction;
enum { TILELOSS_SAMPLER_OFF = 0, TILELOSS_SAMPLER_TRUNCATE = 1, TILELOSS_SAMPLER_MASK = 2 };

typedef int32_t tileloss_kl_estimator;
enum { TILELOSS_KL_K1 = 0, TILELOSS_KL_K2 = 1, TILELOSS_KL_K3 = 2 };

typedef int32_t tileloss_entropy_reduction;
enum { TILELOSS_ENTROPY_TOKEN_MEAN = 0, TILELOSS_ENTROPY_AS_LOSS = 1 };

// NaN stands for "not given", behind a pointer as well.
typedef struct tileloss_policy_loss_options {
  size_t struct_size TILELOSS_SIZE(tileloss_policy_loss_options);
  tileloss_logit_options logit TILELOSS_DEFAULT({});
  tileloss_linear_options linear TILELOSS_DEFAULT({});
  tileloss_policy_kind kind TILELOSS_DEFAULT(TILELOSS_POLICY_CLIP);  // the objective l; default clip
  // sequence: rho_b = exp(mean of log rho over the sequence), as GSPO; default token
  tileloss_level ratio_level TILELOSS_DEFAULT(TILELOSS_LEVEL_TOKEN);
  // how tokens become the loss; default seq_mean_token_mean
  tileloss_aggregation aggregation TILELOSS_DEFAULT(TILELOSS_SEQ_MEAN_TOKEN_MEAN);
  // sequence: advantages [B]; token: [N]; default sequence
  tileloss_level advantage_level TILELOSS_DEFAULT(TILELOSS_LEVEL_SEQUENCE);
  // raw: epsilon_high is the cap itself; one_plus: 1 + epsilon_high; default raw; only with kind cispo
  tileloss_cispo_cap cispo_cap TILELOSS_DEFAULT(TILELOSS_CISPO_CAP_RAW);
  int32_t reserved TILELOSS_DEFAULT(0);               // 0
  tileloss_scalar epsilon_low TILELOSS_DEFAULT(0.2);  // rho is clipped at 1 - epsilon_low; >= 0; default 0.2; only with kind clip
  // clip: and at 1 + epsilon_high; cispo: the cap; >= 0; not given: epsilon_low, but cispo requires it; only with kind clip or
  // cispo
  tileloss_scalar epsilon_high TILELOSS_NOT_GIVEN;
  tileloss_scalar delta TILELOSS_NOT_GIVEN;  // upper bound of rho; > 0; not given: off; only with kind clip
  // bounds the loss by -dual_clip A where A < 0; > 1; not given: off; only with kind clip
  tileloss_scalar dual_clip TILELOSS_NOT_GIVEN;
  tileloss_scalar cap_low TILELOSS_NOT_GIVEN;   // lower bound of rho; >= 0; not given: off; only with kind cispo
  double tau_pos TILELOSS_DEFAULT(1);           // tau where A > 0; > 0; default 1; only with kind sapo
  double tau_neg TILELOSS_DEFAULT(1.05);        // tau elsewhere; > 0; default 1.05; only with kind sapo
  double vespo_k_pos TILELOSS_DEFAULT(2);       // k where A >= 0; >= 0; default 2; only with kind vespo
  double vespo_lambda_pos TILELOSS_DEFAULT(3);  // lambda there, floored at 1e-4; >= 0; default 3; only with kind vespo
  double vespo_k_neg TILELOSS_DEFAULT(3);       // k where A < 0; >= 0; default 3; only with kind vespo
  double vespo_lambda_neg TILELOSS_DEFAULT(2);  // lambda there, floored at 1e-4; >= 0; default 2; only with kind vespo
  double log_ratio_clamp TILELOSS_NOT_GIVEN;    // clamps log rho of each token to [-x, x]; > 0; not given: off
  // factor r = exp(old_logp - sampler_logp), detached: clamped to [sampler_min, sampler_max], or 0 outside; default off
  tileloss_sampler_correction sampler_correction TILELOSS_DEFAULT(TILELOSS_SAMPLER_OFF);
  // whether r is one token's or its sequence's; default token; only with sampler_correction truncate or mask
  tileloss_level sampler_level TILELOSS_DEFAULT(TILELOSS_LEVEL_TOKEN);
  // lower bound of r, inclusive; >= 0; not given: no bound; only with sampler_correction truncate or mask
  double sampler_min TILELOSS_NOT_GIVEN;
  // upper bound of r, inclusive; >= 0; not given: no bound; only with sampler_correction truncate or mask
  double sampler_max TILELOSS_NOT_GIVEN;
  // drops tokens with A < 0 of sequences whose mean (sampler or old logp) - logp exceeds it; not given: off
  double off_policy_threshold TILELOSS_NOT_GIVEN;
  // q: keeps tokens whose entropy is at least the (1 - q) quantile; in (0, 1]; not given: off
  double entropy_quantile TILELOSS_NOT_GIVEN;
  // keeps tokens whose entropy is at least this; not together with entropy_quantile; not given: off
  tileloss_scalar entropy_threshold TILELOSS_NOT_GIVEN;
  tileloss_scalar beta TILELOSS_DEFAULT(0);  // coefficient of the KL to ref_logp, which it needs; >= 0; default 0
  // d = ref_logp - logp: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1; default k3
  tileloss_kl_estimator kl_estimator TILELOSS_DEFAULT(TILELOSS_KL_K3);
  int32_t kl_importance TILELOSS_DEFAULT(0);         // 1: multiplies the KL by rho, differentiated; default 0
  double kl_log_ratio_clamp TILELOSS_NOT_GIVEN;      // clamps d to [-x, x]; > 0; not given: off
  double kl_clamp TILELOSS_NOT_GIVEN;                // clamps the KL to [-x, x]; > 0; not given: off
  tileloss_scalar entropy_coef TILELOSS_DEFAULT(0);  // adds -entropy_coef * H; default 0
  // token_mean: the mean H of the tokens that the entropy mask keeps; as_loss: H inside each token's loss; default token_mean
  tileloss_entropy_reduction entropy_reduction TILELOSS_DEFAULT(TILELOSS_ENTROPY_TOKEN_MEAN);
  int32_t reserved2 TILELOSS_DEFAULT(0);  // 0
  // the denominator, not floored; >= 0; not given: the tokens are counted, sum divides by 1; only with aggregation token_mean or
  // sum
  tileloss_scalar num_items TILELOSS_NOT_GIVEN;
  // L_max; >= 1; default -1: sequence_length; only with aggregation seq_mean_token_sum_norm
  int64_t max_length TILELOSS_DEFAULT(-1);
} tileloss_policy_loss_options;

// What policy_loss reports about a step, as indices into args.metrics. M: tokens in use. Means over tokens divide by M; those
// marked * are means over all sequences at ratio_level sequence (of each sequence's token mean). NaN: does not apply (its inputs
// are absent or its kind is another); a mean over nothing is 0.
enum {
  TILELOSS_METRIC_KL = 0,                   // with its importance factor; needs ref_logp
  TILELOSS_METRIC_ENTROPY = 1,              // nats
  TILELOSS_METRIC_CLIP_LOW_FRACTION = 2,    // * kind clip: rho < 1 - epsilon_low and A < 0
  TILELOSS_METRIC_CLIP_HIGH_FRACTION = 3,   // * kind clip: rho > 1 + epsilon_high and A > 0
  TILELOSS_METRIC_CLIP_FRACTION = 4,        // * either
  TILELOSS_METRIC_CISPO_CLIP_FRACTION = 5,  // * kind cispo: rho > cap and A > 0; of an empty sequence 0
  TILELOSS_METRIC_RATIO_MEAN = 6,           // * rho, 1 for an empty sequence
  TILELOSS_METRIC_SAMPLER_RATIO_MEAN = 7,   // of r, truncated or masked; over all sequences at sampler_level sequence
  TILELOSS_METRIC_SAMPLER_RATIO_MIN = 8,    // of r, as above
  TILELOSS_METRIC_SAMPLER_RATIO_MAX = 9,    // of r, as above
  TILELOSS_METRIC_PHI_MEAN = 10,            // kind vespo; over all sequences, 1 for an empty one
  TILELOSS_METRIC_DROPPED_SEQUENCES = 11,   // those of which the off-policy mask dropped a token
  TILELOSS_METRIC_TOKENS = 12,              // M
  TILELOSS_POLICY_METRICS = 13
};

// How far the student's distribution p lies from the teacher's q, in a row. m is a mixture of both.
typedef int32_t tileloss_divergence;
enum {
  TILELOSS_FORWARD_KL = 0,       // sum q (log q - log p)
  TILELOSS_REVERSE_KL = 1,       // sum p (log p - log q)
  TILELOSS_JSD = 2,              // m = beta q + (1-beta) p: beta sum q (log q - log m) + (1-beta) sum p (log p - log m)
  TILELOSS_JEFFREYS = 3,         // forward + reverse
  TILELOSS_SKEW_FORWARD_KL = 4,  // m = beta q + (1-beta) p: sum q (log q - log m)
  TILELOSS_SKEW_REVERSE_KL = 5,  // m = beta p + (1-beta) q: sum p (log p - log m)
  TILELOSS_TOTAL_VARIATION = 6   // sum |p - q| / 2
};

// Of the student's logits and, in the members so called, of the teacher's.
typedef struct tileloss_distillation_options {
  size_t struct_size TILELOSS_SIZE(tileloss_distillation_options);
  tileloss_logit_options logit TILELOSS_DEFAULT({});
  tileloss_linear_options linear TILELOSS_DEFAULT({});
  tileloss_divergence divergence TILELOSS_DEFAULT(TILELOSS_FORWARD_KL);  // which distance of p from q; default forward_kl
  // how the rows' losses become the loss; mean divides by the sum of their weights; default mean
  tileloss_reduction reduction TILELOSS_DEFAULT(TILELOSS_REDUCTION_MEAN);
  // the mixture's weight, which takes 0 < beta < 1; in [0, 1]; default 0.5; only with divergence jsd or skew_forward_kl or
  // skew_reverse_kl
  double beta TILELOSS_DEFAULT(0.5);
  // of the labels' cross-entropy in the loss; other than 0 it needs labels; >= 0; default 0
  tileloss_scalar label_weight TILELOSS_DEFAULT(0);
  tileloss_scalar divergence_weight TILELOSS_DEFAULT(1);  // of the divergence in the loss; >= 0; default 1
  // the temperature of the cross-entropy and logp, such as 1 where the divergence has 4; > 0; not given: temperature
  tileloss_scalar label_temperature TILELOSS_NOT_GIVEN;
  double teacher_logit_scale TILELOSS_NOT_GIVEN;           // as logit_scale, of the teacher; > 0; not given: the student's
  double teacher_softcap TILELOSS_NOT_GIVEN;               // as softcap, of the teacher; 0 is off; >= 0; not given: the student's
  tileloss_scalar teacher_temperature TILELOSS_NOT_GIVEN;  // as temperature, of the teacher; > 0; not given: the student's
  // mean's denominator; >= 0; not given: the weights are summed; only with reduction mean
  tileloss_scalar num_items TILELOSS_NOT_GIVEN;
  // 1: the divergence is multiplied by the temperature squared, as some recipes do; default 0
  int32_t scale_by_temperature_squared TILELOSS_DEFAULT(0);
  int32_t reserved TILELOSS_DEFAULT(0);  // 0
} tileloss_distillation_options;

typedef struct tileloss_soft_cross_entropy_options {
  size_t struct_size TILELOSS_SIZE(tileloss_soft_cross_entropy_options);
  tileloss_logit_options logit TILELOSS_DEFAULT({});
  tileloss_linear_options linear TILELOSS_DEFAULT({});
  double label_smoothing TILELOSS_DEFAULT(0);  // s: the probabilities become (1-s) q + s/V; in [0, 1]; default 0
  // mean's denominator; >= 0; not given: the weights are summed; only with reduction mean
  tileloss_scalar num_items TILELOSS_NOT_GIVEN;
  // how the rows' losses become the loss; mean divides by the sum of their weights; default mean
  tileloss_reduction reduction TILELOSS_DEFAULT(TILELOSS_REDUCTION_MEAN);
  int32_t reserved TILELOSS_DEFAULT(0);  // 0
} tileloss_soft_cross_entropy_options;

// How the columns outside the teacher's K known ones count.
typedef int32_t tileloss_tail;
enum {
  TILELOSS_TAIL_LUMP = 0,        // as one more class: its q is 1 less the known ones', its p the sum of theirs
  TILELOSS_TAIL_IGNORE = 1,      // not at all: the divergence is a sum over the K columns, and may be negative
  TILELOSS_TAIL_RENORMALISE = 2  // not at all, and both distributions are divided by their sums over the K columns
};

typedef struct tileloss_sparse_distillation_options {
  size_t struct_size TILELOSS_SIZE(tileloss_sparse_distillation_options);
  tileloss_logit_options logit TILELOSS_DEFAULT({});
  tileloss_linear_options linear TILELOSS_DEFAULT({});
  tileloss_divergence divergence TILELOSS_DEFAULT(TILELOSS_FORWARD_KL);  // which distance of p from q; default forward_kl
  // how the rows' losses become the loss; mean divides by the sum of their weights; default mean
  tileloss_reduction reduction TILELOSS_DEFAULT(TILELOSS_REDUCTION_MEAN);
  // the mixture's weight, which takes 0 < beta < 1; in [0, 1]; default 0.5; only with divergence jsd or skew_forward_kl or
  // skew_reverse_kl
  double beta TILELOSS_DEFAULT(0.5);
  // of the labels' cross-entropy in the loss; other than 0 it needs labels; >= 0; default 0
  tileloss_scalar label_weight TILELOSS_DEFAULT(0);
  tileloss_scalar divergence_weight TILELOSS_DEFAULT(1);  // of the divergence in the loss; >= 0; default 1
  // the temperature of the cross-entropy and logp, such as 1 where the divergence has 4; > 0; not given: temperature
  tileloss_scalar label_temperature TILELOSS_NOT_GIVEN;
  // mean's denominator; >= 0; not given: the weights are summed; only with reduction mean
  tileloss_scalar num_items TILELOSS_NOT_GIVEN;
  // 1: the divergence is multiplied by the temperature squared, as some recipes do; default 0
  int32_t scale_by_temperature_squared TILELOSS_DEFAULT(0);
  tileloss_tail tail TILELOSS_DEFAULT(TILELOSS_TAIL_LUMP);  // what becomes of the columns that are not known; default lump
} tileloss_sparse_distillation_options;

typedef struct tileloss_sweep_options {
  size_t struct_size TILELOSS_SIZE(tileloss_sweep_options);
  tileloss_logit_options logit TILELOSS_DEFAULT({});
  tileloss_linear_options linear TILELOSS_DEFAULT({});
} tileloss_sweep_options;

static inline void tileloss_logprobs_options_init(tileloss_logprobs_options* options) {
  (void)tileloss_options_init("logprobs", options, sizeof *options);
}
static inline void tileloss_cross_entropy_options_init(tileloss_cross_entropy_options* options) {
  (void)tileloss_options_init("cross_entropy", options, sizeof *options);
}
static inline void tileloss_policy_loss_options_init(tileloss_policy_loss_options* options) {
  (void)tileloss_options_init("policy_loss", options, sizeof *options);
}
static inline void tileloss_distillation_options_init(tileloss_distillation_options* options) {
  (void)tileloss_options_init("distillation", options, sizeof *options);
}
static inline void tileloss_soft_cross_entropy_options_init(tileloss_soft_cross_entropy_options* options) {
  (void)tileloss_options_init("soft_cross_entropy", options, sizeof *options);
}
static inline void tileloss_sparse_distillation_options_init(tileloss_sparse_distillation_options* options) {
  (void)tileloss_options_init("sparse_distillation", options, sizeof *options);
}
static inline void tileloss_sweep_options_init(tileloss_sweep_options* options) {
  (void)tileloss_options_init("sweep", options, sizeof *options);
}
// end of generated

// ------------------------------------------------------------------------------------------------------------- arguments

// Logits that one row stride cannot describe, such as x[:, :-1] of a [B,T,V] tensor: the rows come in groups of `rows`, and a
// group starts logits_stride (dlogits_stride, ...) elements after the one before it.
typedef struct tileloss_row_groups {
  int64_t rows;  // 0 (default): the row stride holds for all rows; else a divisor of N
  int64_t logits_stride;
  int64_t dlogits_stride;
  int64_t teacher_logits_stride TILELOSS_DEFAULT(0);  // of teacher_logits or target_probs
} tileloss_row_groups;

// The tensors of a call. N rows (tokens), V columns (vocabulary). Leave out (zeroed) what you do not have or want. A tensor that
// the function or the pass has no use for is an error (dlogits in a forward, logits with from_row_state), so that nothing is left
// unwritten in silence; only a backward takes the forward's row outputs along and leaves them alone.
typedef struct tileloss_args {
  size_t struct_size;

  // generated: arguments, by ./dev generate from src/schema/table.toml
  // Inputs.
  tileloss_matrix logits;         // [N,V] float32, bfloat16, float16; any row stride >= V, column stride 1
  tileloss_vector labels;         // [N] int32, int64
  tileloss_vector token_weights;  // [N] float32; w_i; default 1
  tileloss_vector class_weights;  // [classes] float32; c_j, stride 1; default 1

  // Upstream gradients.
  tileloss_vector loss_grad;        // [1] or [N] float32; upstream gradient, [N] for a loss a row; absent: 1
  tileloss_vector logp_grad;        // [N] float32; upstream gradient; absent: 0
  tileloss_vector lse_grad;         // [N] float32; upstream gradient; absent: 0
  tileloss_vector entropy_grad;     // [N] float32; upstream gradient; absent: 0
  tileloss_vector mean_logit_grad;  // [N] float32; upstream gradient; absent: 0

  // Outputs. Rows that are ignored give 0 (argmax -1).
  tileloss_vector loss;              // [1] or [N] float32; [N] with reduction or aggregation none
  tileloss_vector logp;              // [N] float32; log softmax at the label
  tileloss_vector lse;               // [N] float32; log sum_j exp(z_j)
  tileloss_vector entropy;           // [N] float32; nats
  tileloss_vector argmax;            // [N] int64; lowest index on ties; -1 if the row holds a NaN
  tileloss_vector correct;           // [N] uint8; argmax == label
  tileloss_vector log_sum_sq_probs;  // [N] float32; log sum_j p_j^2
  tileloss_vector mean_logit;        // [N] float32; mean of z over the valid columns; not together with class_weights
  // [N,V] float32, bfloat16, float16; the logits' dtype; may be the logits themselves, otherwise must not overlap them
  tileloss_matrix dlogits;

  // Output of a forward, input of a backward (required: max, sum, label_logit; logprobs with entropy_grad: entropy_sum); null:
  // none. A backward without it sweeps the logits twice. Distillation and soft labels: of a shard of the vocabulary alone.
  tileloss_row_state* row_state;

  // Policy losses. Rows (tokens) belong to sequences: B of them, back to back.
  tileloss_vector mask;          // [N] uint8, int32, int64, float32; rows with 0 are neither read nor counted; default: all count
  tileloss_vector old_logp;      // [N] float32; absent: the new logp itself, detached (rho = 1, with gradient)
  tileloss_vector ref_logp;      // [N] float32; of the reference model; of NaN here or in old_logp: docs/users/losses.md
  tileloss_vector sampler_logp;  // [N] float32; of the engine that sampled the tokens; NaN: no difference
  tileloss_vector advantages;    // [B] or [N] float32; as options.advantage_level says
  tileloss_vector sequence_offsets;  // [B+1] int32, int64; sequence b is rows offsets[b] to offsets[b+1], 0 first, N last
  tileloss_vector metrics;  // [TILELOSS_POLICY_METRICS] float32; out, indexed by TILELOSS_METRIC_*; a shorter one gets the first
  int64_t sequence_length;  // T > 0: N = B*T rows of a [B,T] batch, instead of sequence_offsets; 0: none

  // Fused with the LM head (the functions linear_*), in place of logits and dlogits: logits = hidden head^T + bias, never stored.
  tileloss_matrix hidden;  // [N,H] float32, bfloat16, float16
  tileloss_matrix head;    // [V,H] float32, bfloat16, float16; any strides: one that lies as [H,V] has row_stride 1, col_stride V
  tileloss_vector bias;    // [V] float32, bfloat16, float16; default none
  tileloss_matrix dhidden;  // [N,H] float32, bfloat16, float16; out: float32 or hidden's dtype; any subset of the gradients
  // [V,H] float32, bfloat16, float16; out: float32 or head's dtype, accumulated in float32; any strides; scratch until it is
  // stored
  tileloss_matrix dhead;
  tileloss_vector dbias;  // [V] float32, bfloat16, float16; out: float32 or bias's dtype, accumulated in float32

  tileloss_row_groups row_groups;  // for logits like x[:, :-1] of a [B,T,V] tensor

  // Distillation. The teacher's logits are never written, and have no gradient.
  tileloss_matrix teacher_logits;   // [N,V] float32, bfloat16, float16; the logits' dtype; any row stride >= V, column stride 1
  tileloss_vector divergence;       // [N] float32; out: the divergence alone, neither weighted nor scaled
  tileloss_vector teacher_entropy;  // [N] float32; out: nats, of the classes that the divergence sees
  tileloss_vector agreement;        // [N] uint8; out: whether both have the same argmax

  // The teacher's LM head, with linear_distillation, in place of its logits. G: its own width.
  tileloss_matrix teacher_hidden;  // [N,G] float32, bfloat16, float16
  tileloss_matrix teacher_head;    // [V,G] float32, bfloat16, float16; any strides, as head
  tileloss_vector teacher_bias;    // [V] float32, bfloat16, float16; default none

  // Soft labels, with soft_cross_entropy.
  tileloss_matrix target_probs;  // [N,V] float32, bfloat16, float16; q_j, need not sum to 1; any row stride >= V, column stride 1

  // A teacher of which K columns are known, with sparse_distillation.
  tileloss_matrix teacher_ids;       // [N,K] int32, int64; distinct columns of each row, in any order; negative: none
  tileloss_matrix teacher_logprobs;  // [N,K] float32, bfloat16, float16; their log q, <= 0 but for rounding, as they are

  // With distillation and soft_cross_entropy on a shard of the vocabulary, together with row_state.
  tileloss_pair_state* pair_state;

  // The sweeps alone: the coefficients of tileloss_backward_sweep, absent: 0. prob is held as its sum with target: at a confident
  // label the sum is all that is left of the two.
  tileloss_vector target_coef;            // [N] float32; target
  tileloss_vector prob_plus_target_coef;  // [N] float32; prob + target
  tileloss_vector prob_logp_coef;         // [N] float32; prob_logp
  tileloss_vector uniform_coef;           // [N] float32; uniform

  // The tokens over which a row's softmax runs, as if the other columns had z = -inf, which nobody looks at: p is 0 there, the
  // gradient exactly 0, and sums over classes (label smoothing, mean_logit) run over the allowed ones, whose number stands for V.
  // A label outside, and a row without any: as of -inf (docs/users/losses.md). Row stride >= W, or 0: one set for all rows. Bits
  // of padding and words of rows not in use are not read. A shard of the vocabulary takes the words of its columns; its
  // vocab_start is a multiple of 32.
  // [N,W] int32; bit j mod 32 of word j div 32 is column j of the logits, W = ceil(V / 32); default: all are allowed
  tileloss_matrix allowed;

  // Several labels a row, with logprobs: labels, logp and logp_grad are [N,K] then, N*K numbers row by row, all else is a row's.
  // A label of ignore_index is an empty slot, whose logp is 0; the row is ignored if all its slots are empty. A label that a row
  // has twice counts twice. The state's label_logit is that of the row's likeliest label.
  int64_t labels_per_row;  // K, up to 1024; 0: 1

  // A low-rank part of the head, as of LoRA: logits = hidden head^T + hidden_r head_r^T + bias, one sum over H + R, without a
  // copy of [V,H]. Both or neither; R up to 512. The products see them as they see hidden and head; options.linear.accumulate is
  // for dhead_r too.
  tileloss_matrix hidden_r;   // [N,R] float32, bfloat16, float16; default none; any strides, as hidden
  tileloss_matrix head_r;     // [V,R] float32, bfloat16, float16; default none; any strides, as head
  tileloss_matrix dhidden_r;  // [N,R] float32, bfloat16, float16; out: float32 or hidden_r's dtype
  // [V,R] float32, bfloat16, float16; out: float32 or head_r's dtype, accumulated in float32; any strides
  tileloss_matrix dhead_r;
  // end of generated
} tileloss_args;

static inline void tileloss_args_init(tileloss_args* args) { tileloss_struct_init(args, sizeof *args); }

// ---------------------------------------------------------------------------------------------------------- plan and run

typedef int32_t tileloss_isa;
enum {
  TILELOSS_ISA_AUTO = 0,
  TILELOSS_ISA_BASELINE = 1,
  TILELOSS_ISA_AVX2 = 2,
  TILELOSS_ISA_AVX512 = 3,       // F, BW, DQ, VL
  TILELOSS_ISA_AVX512_BF16 = 4,  // and BF16
  TILELOSS_ISA_AVX512_AMX = 5,   // and AMX's tile registers, for products in bfloat16
  TILELOSS_ISA_NEON = 6,         // 64-bit ARM
  TILELOSS_ISA_NEON_BF16 = 7     // and BF16
};

typedef int32_t tileloss_schedule;
enum {
  TILELOSS_SCHEDULE_AUTO = 0,
  TILELOSS_SCHEDULE_STASH = 1,  // value and gradient, one exp an element: exp(z - m) of a row waits in cache for its backward;
                                // with the LM head: as many logits as the workspace has room for wait for it
  TILELOSS_SCHEDULE_RECOMPUTE = 2,  // value and gradient, two exps an element: for rows whose stash would leave the cache;
                                    // with the LM head: all logits are made twice
  TILELOSS_SCHEDULE_SWEEPS = 3      // a forward sweep over all rows and/or a backward sweep over all rows
};

typedef int32_t tileloss_pass;
enum {
  TILELOSS_FORWARD = 0,
  TILELOSS_BACKWARD = 1,
  TILELOSS_VALUE_AND_GRAD = 2,
  TILELOSS_FROM_ROW_STATE = 3  // the forward's outputs from args.row_state alone: what follows the merge of vocabulary shards
};

// What the CPU's planner is asked for. 0 everywhere: its own choice.
typedef struct tileloss_cpu_plan_options {
  tileloss_isa isa;  // the environment variable TILELOSS_ISA (baseline, avx512, ...) applies when this is auto
  tileloss_schedule schedule;
  int32_t threads;        // at most this many, and no more than workspace_bytes holds; default: the executor's, or the pool's
  int32_t reserved;       // 0
  int64_t row_block;      // rows a thread takes at a time, which changes no result; with the LM head: rows in one go
  int64_t vocab_block;    // columns between two looks at the running maximum; a multiple of 64, up to 8192
  int64_t chunk_columns;  // LM head: as tileloss_cpu_plan's; down to 2048 (AMX: 1536), 1024, 512, in whole vocab_blocks, or one
} tileloss_cpu_plan_options;

typedef int32_t tileloss_cuda_kernel;
enum {
  TILELOSS_CUDA_KERNEL_AUTO = 0,
  TILELOSS_CUDA_KERNEL_TWO_READS = 1,  // a row is a block's, which reads it once for its sums and once for its gradient
  TILELOSS_CUDA_KERNEL_CLUSTER = 2     // a row is a cluster's, which keeps it in shared memory between the two
};

// What CUDA's planner is asked for. 0 everywhere: its own choice.
typedef struct tileloss_cuda_plan_options {
  tileloss_cuda_kernel kernel;  // from logits
  tileloss_schedule schedule;   // with the LM head: whether logits are kept for the backward (stash), or all made again
  int64_t row_block;            // with the LM head: rows whose logits are made at a time
  int64_t vocab_block;          // with the LM head: columns of them in a forward; a multiple of 64, up to 8192
  int64_t chunk_columns;        // with the LM head: columns of the backward at a time; a multiple of 64 that divides vocab_block
} tileloss_cuda_plan_options;

// Options of the planner: what every device has, and a part for each. A device reads its own part alone.
typedef struct tileloss_plan_options {
  size_t struct_size;
  int64_t workspace_bytes;  // a cap on scratch memory; 0: none from logits; with the LM head docs/users/memory.md's default
  tileloss_cpu_plan_options cpu;
  tileloss_cuda_plan_options cuda;
} tileloss_plan_options;

// A part of the workspace.
typedef struct tileloss_plan_buffer {
  char name[24];
  int64_t bytes;
} tileloss_plan_buffer;

enum { TILELOSS_MAX_PLAN_BUFFERS = 16 };

// What the CPU's backend will do.
typedef struct tileloss_cpu_plan {
  tileloss_isa isa;
  tileloss_schedule schedule;
  int32_t threads;
  int32_t reserved;
  int64_t row_block;
  int64_t vocab_block;
  // With the LM head, schedule stash: logits that are kept for the backward, the others are made again. Of the first kept_rows
  // rows in use all, in dhead's memory until dhead itself is stored there; of the other rows the first kept_columns columns, in
  // the workspace. (0 rows: none in dhead. All of them: kept_columns is V.)
  int64_t kept_columns;
  int64_t kept_rows;
  int64_t chunk_columns;  // with the LM head: columns of the backward between two visits of dhidden; 0 otherwise
  char isa_note[48];      // why the planner's own choice of isa was not a richer one ("AMX: permission refused", ...), else empty
} tileloss_cpu_plan;

// What will be done. Plain data: copy or store it as you like; tileloss_plan_describe prints it.
typedef struct tileloss_plan {
  size_t struct_size;
  char function[32];
  tileloss_pass pass;
  tileloss_device_type device_type;
  int32_t device_index;
  int32_t reserved;
  int64_t workspace_bytes;  // scratch the call needs, whatever the labels are; alignment 64
  double predicted_ms;      // from rough rates of such a device: an orientation
  uint64_t fingerprint;     // of shapes, dtypes, strides and options: the call must match it
  int64_t buffer_count;     // what workspace_bytes is made of, rounded up to 64 bytes each
  tileloss_plan_buffer buffers[TILELOSS_MAX_PLAN_BUFFERS];
  union {  // the backend's own part, as device_type says
    tileloss_cpu_plan cpu;
    uint64_t other[32];
  };
} tileloss_plan;

typedef void (*tileloss_task)(void* task_data, int64_t index);

// The caller's threads. Give one of the two functions.
//   parallel_for  calls task(task_data, i) once for every i in [0, count), in any order, on any threads, and returns when all
//                 are done. No task waits for another.
//   schedule      calls task(task_data, index) once, at some time, on some thread, now or later: XLA's pool, or any work queue.
//                 The calling thread takes part in the work, so that a task that arrives late finds nothing to do.
typedef struct tileloss_executor {
  size_t struct_size;
  void* context;
  int32_t threads;   // how many threads may work on a call, the calling one included
  int32_t reserved;  // 0
  void (*parallel_for)(void* context, int64_t count, tileloss_task task, void* task_data);
  void (*schedule)(void* context, tileloss_task task, void* task_data, int64_t index);
} tileloss_executor;

typedef struct tileloss_run {
  size_t struct_size;
  void* workspace;                    // null: the library allocates what the plan asks for and frees it before it returns
  size_t workspace_bytes;             // of `workspace`
  const tileloss_executor* executor;  // null: the built-in pool
  void* stream;                       // the device's stream to enqueue on; the CPU has none and refuses one
  // For value_and_grad of a shard of the vocabulary, which needs it, and for nothing else: called once, on the calling thread,
  // after the forward. args.row_state then holds the shard's states and has to hold the whole vocabulary's on return
  // (tileloss_row_state_merge); loss, outputs and gradients are made from those. A device that only queues calls has queued the
  // states, and the merge has to be queued after them. A status other than TILELOSS_OK ends the call, and its outputs are not
  // valid then. Another call of the library may run inside: the next shard's, say.
  tileloss_status (*merge)(void* merge_context);
  void* merge_context;
} tileloss_run;

static inline void tileloss_plan_options_init(tileloss_plan_options* options) { tileloss_struct_init(options, sizeof *options); }
static inline void tileloss_plan_init(tileloss_plan* plan) { tileloss_struct_init(plan, sizeof *plan); }
static inline void tileloss_executor_init(tileloss_executor* executor) { tileloss_struct_init(executor, sizeof *executor); }
static inline void tileloss_run_init(tileloss_run* run) { tileloss_struct_init(run, sizeof *run); }

// Any function by name ("logprobs", "cross_entropy", ...), with the options struct that belongs to it (null: defaults). Front
// ends and tools use these two; the named functions below are the same with types.
//   tileloss_make_plan  validates shapes and options, fills `plan`; touches no data. plan_options and executor may be null.
//   tileloss_call       runs. plan null: plan first, by default options. run null: own workspace, built-in pool.
TILELOSS_API tileloss_status tileloss_make_plan(const char* function, tileloss_pass pass, const tileloss_args* args,
                                                const void* options, const tileloss_plan_options* plan_options,
                                                const tileloss_executor* executor, tileloss_plan* plan);
TILELOSS_API tileloss_status tileloss_call(const char* function, tileloss_pass pass, const tileloss_args* args,
                                           const void* options, const tileloss_plan* plan, const tileloss_run* run);

// gradient *= *factor, in place: what a value_and_grad wrote, once the upstream gradient of the loss is known. In float32,
// rounded once more. A factor of 1 leaves the gradient alone: it is neither read nor written. `factor` lies where the gradient
// does, and is read when the work is done, by each replay of a captured call anew. float32, bfloat16 or float16, any row stride
// >= cols, column stride 1. run null: the device's default stream, the built-in pool; it needs no workspace.
TILELOSS_API tileloss_status tileloss_scale_gradient(const tileloss_matrix* gradient, const float* factor,
                                                     const tileloss_run* run);

// What calls on a device found wrong while they ran, since this was last asked. A device that only queues a call looks at labels,
// numbers behind pointers, sequence offsets and a sparse teacher's columns no earlier than that. Where one of them is wrong, the
// outputs and gradients of the rows concerned are NaN, and so are sums over rows, the loss say. Ask once `stream`, the calls' own
// (tileloss_run), has been synchronised: nothing here waits. TILELOSS_OK, or what a call on the CPU would have answered to the
// first error, TILELOSS_LABEL_OUT_OF_RANGE or TILELOSS_INVALID_ARGUMENT, with its message; then nothing is wrong until the next.
// On the CPU calls report all errors themselves: always TILELOSS_OK, and a stream is refused, as there is none.
// TILELOSS_UNSUPPORTED: this build has no such device.
TILELOSS_API tileloss_status tileloss_check_errors(tileloss_device_type device_type, int32_t device_index, void* stream);

typedef int32_t tileloss_text_format;
enum { TILELOSS_TEXT = 0, TILELOSS_JSON = 1 };

// The plan in words: a line a fact, or one JSON object with the same facts. Writes at most `capacity` bytes, the closing 0
// included, to `text` (null with capacity 0), and the number that it takes to `needed` (null: not wanted). A text that does not
// fit is cut short, which is no error.
TILELOSS_API tileloss_status tileloss_plan_describe(const tileloss_plan* plan, tileloss_text_format format, char* text,
                                                    size_t capacity, size_t* needed);

// Of each function: _backward, for losses _value_and_grad (both in one pass), and of those compared with labels _from_row_state
// (the forward's outputs from args.row_state alone, once the states of all vocabulary shards are merged in it). The others' is
// tileloss_call's pass TILELOSS_FROM_ROW_STATE, from logits and with args.pair_state.

// generated: functions, by ./dev generate from src/schema/table.toml
// logp, lse and the other row outputs; its backward takes logp_grad, lse_grad, entropy_grad and mean_logit_grad, so that any loss
// written on top of them differentiates exactly: dL/dz_j = g_logp [j = y] + p_j (-g_logp + g_lse - g_H (H + log p_j)) + g_M / V,
// V the valid columns. Of labels [N,K] (labels_per_row) sum_k g_logp_k [j = y_k] and sum_k g_logp_k stand for the terms of one.
TILELOSS_API tileloss_status tileloss_logprobs(const tileloss_args* args, const tileloss_logprobs_options* options,
                                               const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_logprobs_backward(const tileloss_args* args, const tileloss_logprobs_options* options,
                                                        const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_logprobs_from_row_state(const tileloss_args* args, const tileloss_logprobs_options* options,
                                                              const tileloss_plan* plan, const tileloss_run* run);

// loss_i = w_i [ (1-s) c_y (-logp_i) + (s/V) sum_j c_j (-log p_ij) ] + zeta w_i lse_i^2, reduced. mean divides the first part by
// the sum of w_i c_y (as PyTorch) and the second by the sum of w_i (as Liger) over the rows that are not ignored, both by
// num_items when given; a denominator of 0 gives 0.
TILELOSS_API tileloss_status tileloss_cross_entropy(const tileloss_args* args, const tileloss_cross_entropy_options* options,
                                                    const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_cross_entropy_backward(const tileloss_args* args,
                                                             const tileloss_cross_entropy_options* options,
                                                             const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_cross_entropy_value_and_grad(const tileloss_args* args,
                                                                   const tileloss_cross_entropy_options* options,
                                                                   const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_cross_entropy_from_row_state(const tileloss_args* args,
                                                                   const tileloss_cross_entropy_options* options,
                                                                   const tileloss_plan* plan, const tileloss_run* run);

// The GRPO family. Per token: l * (off-policy mask) * (entropy mask) * (sampler ratio) + beta * KL - entropy bonus, aggregated
// over sequences and tokens; docs/users/losses.md has every formula, and says which losses sweep the logits twice, as the
// coefficients of a row need other rows.
TILELOSS_API tileloss_status tileloss_policy_loss(const tileloss_args* args, const tileloss_policy_loss_options* options,
                                                  const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_policy_loss_backward(const tileloss_args* args, const tileloss_policy_loss_options* options,
                                                           const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_policy_loss_value_and_grad(const tileloss_args* args,
                                                                 const tileloss_policy_loss_options* options,
                                                                 const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_policy_loss_from_row_state(const tileloss_args* args,
                                                                 const tileloss_policy_loss_options* options,
                                                                 const tileloss_plan* plan, const tileloss_run* run);

// Distillation: the divergence of the student's distribution (logits) from the teacher's (teacher_logits), alone or mixed with
// the cross-entropy of the labels:
//   loss_i = w_i [ label_weight (-logp_i) + divergence_weight s D_i ],  s = 1, or T^2 with scale_by_temperature_squared
// where logp, and the row output of that name, is at label_temperature, and all else at temperature. mean divides by the sum of
// the w_i of the rows in use, or by num_items; 0 where that is 0. Rows are in use unless their label is ignore_index or their
// mask is 0; labels may be left out where label_weight is 0. The gradient is the student's. _backward repeats the forward's sums;
// _value_and_grad makes them once. Shards of the vocabulary take four steps. 1: logprobs on each shard gives the row states of
// the student, the teacher and, with label_temperature, the label; the caller merges each over the shards. 2: the forward, with
// row_state and pair_state and no output, gives each shard's sums; the caller adds them up. 3: the pass TILELOSS_FROM_ROW_STATE
// gives loss and outputs. 4: _backward on each shard gives its gradient.
TILELOSS_API tileloss_status tileloss_distillation(const tileloss_args* args, const tileloss_distillation_options* options,
                                                   const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_distillation_backward(const tileloss_args* args,
                                                            const tileloss_distillation_options* options,
                                                            const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_distillation_value_and_grad(const tileloss_args* args,
                                                                  const tileloss_distillation_options* options,
                                                                  const tileloss_plan* plan, const tileloss_run* run);

// Cross-entropy with class probabilities q (target_probs) instead of labels, as PyTorch has it:
//   loss_i = w_i sum_j c_j q'_j (-log p_ij),  q' = (1-s) q + s/V
// with label smoothing s, class weights c, token weights w. mean divides by the sum of the w_i of the rows in use (PyTorch: their
// number), or by num_items; 0 where that is 0. q need not sum to 1; q'_j = 0 has no part in the sum. Labels are of no use but for
// ignore_index and the row outputs logp and correct. Shards of the vocabulary: as distillation's.
TILELOSS_API tileloss_status tileloss_soft_cross_entropy(const tileloss_args* args,
                                                         const tileloss_soft_cross_entropy_options* options,
                                                         const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_soft_cross_entropy_backward(const tileloss_args* args,
                                                                  const tileloss_soft_cross_entropy_options* options,
                                                                  const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_soft_cross_entropy_value_and_grad(const tileloss_args* args,
                                                                        const tileloss_soft_cross_entropy_options* options,
                                                                        const tileloss_plan* plan, const tileloss_run* run);

// Distillation from a teacher of which K columns are known, by teacher_ids and teacher_logprobs: distillation's formula and
// options, without a transform of the teacher's, with options.tail for the other columns. Cross-entropy is of the whole p.
TILELOSS_API tileloss_status tileloss_sparse_distillation(const tileloss_args* args,
                                                          const tileloss_sparse_distillation_options* options,
                                                          const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_sparse_distillation_backward(const tileloss_args* args,
                                                                   const tileloss_sparse_distillation_options* options,
                                                                   const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_sparse_distillation_value_and_grad(const tileloss_args* args,
                                                                         const tileloss_sparse_distillation_options* options,
                                                                         const tileloss_plan* plan, const tileloss_run* run);

// The two sweeps alone, for a loss that is computed elsewhere: forward into row_state, with the arrays that are there, and
// backward from row_state and four coefficients of each row,
//   dL/dz_j = target [j = y] + p_j (prob + prob_logp log p_j) + uniform c_j
// A label that is no class is one of another shard, and no error: the state's label_logit is -inf then. By name: "sweep".
TILELOSS_API tileloss_status tileloss_forward_sweep(const tileloss_args* args, const tileloss_sweep_options* options,
                                                    const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_backward_sweep(const tileloss_args* args, const tileloss_sweep_options* options,
                                                     const tileloss_plan* plan, const tileloss_run* run);

// The same functions fused with the LM head: args.hidden, head and bias stand for the logits, dhidden, dhead and dbias (any
// subset) for dlogits. The logits exist a tile at a time; docs/users/memory.md says what is held instead and how workspace_bytes
// chooses. With options.linear.compute_dtype bfloat16 the products see hidden, head and the logits' gradient rounded to it once,
// and sum in float32 (on AVX-512 with BF16, subnormal operands and sums count as 0). A label's own gradient is exact to float32
// before that rounding.
TILELOSS_API tileloss_status tileloss_linear_logprobs(const tileloss_args* args, const tileloss_logprobs_options* options,
                                                      const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_linear_logprobs_backward(const tileloss_args* args,
                                                               const tileloss_logprobs_options* options,
                                                               const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_linear_logprobs_from_row_state(const tileloss_args* args,
                                                                     const tileloss_logprobs_options* options,
                                                                     const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_linear_cross_entropy(const tileloss_args* args,
                                                           const tileloss_cross_entropy_options* options,
                                                           const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_linear_cross_entropy_backward(const tileloss_args* args,
                                                                    const tileloss_cross_entropy_options* options,
                                                                    const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_linear_cross_entropy_value_and_grad(const tileloss_args* args,
                                                                          const tileloss_cross_entropy_options* options,
                                                                          const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_linear_cross_entropy_from_row_state(const tileloss_args* args,
                                                                          const tileloss_cross_entropy_options* options,
                                                                          const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_linear_policy_loss(const tileloss_args* args, const tileloss_policy_loss_options* options,
                                                         const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_linear_policy_loss_backward(const tileloss_args* args,
                                                                  const tileloss_policy_loss_options* options,
                                                                  const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_linear_policy_loss_value_and_grad(const tileloss_args* args,
                                                                        const tileloss_policy_loss_options* options,
                                                                        const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_linear_policy_loss_from_row_state(const tileloss_args* args,
                                                                        const tileloss_policy_loss_options* options,
                                                                        const tileloss_plan* plan, const tileloss_run* run);

// Two LM heads: args.teacher_hidden, teacher_head and teacher_bias stand for teacher_logits, so that neither side's logits exist
// but for some rows at a time, in float32. compute_dtype is that of both sides' products; by default bfloat16 if all of hidden,
// head, teacher_hidden and teacher_head are.
TILELOSS_API tileloss_status tileloss_linear_distillation(const tileloss_args* args, const tileloss_distillation_options* options,
                                                          const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_linear_distillation_backward(const tileloss_args* args,
                                                                   const tileloss_distillation_options* options,
                                                                   const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_linear_distillation_value_and_grad(const tileloss_args* args,
                                                                         const tileloss_distillation_options* options,
                                                                         const tileloss_plan* plan, const tileloss_run* run);

// With the LM head: the logits of some rows at a time, in float32.
TILELOSS_API tileloss_status tileloss_linear_soft_cross_entropy(const tileloss_args* args,
                                                                const tileloss_soft_cross_entropy_options* options,
                                                                const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_linear_soft_cross_entropy_backward(const tileloss_args* args,
                                                                         const tileloss_soft_cross_entropy_options* options,
                                                                         const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_linear_soft_cross_entropy_value_and_grad(const tileloss_args* args,
                                                                               const tileloss_soft_cross_entropy_options* options,
                                                                               const tileloss_plan* plan,
                                                                               const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_linear_sparse_distillation(const tileloss_args* args,
                                                                 const tileloss_sparse_distillation_options* options,
                                                                 const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_linear_sparse_distillation_backward(const tileloss_args* args,
                                                                          const tileloss_sparse_distillation_options* options,
                                                                          const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status
tileloss_linear_sparse_distillation_value_and_grad(const tileloss_args* args, const tileloss_sparse_distillation_options* options,
                                                   const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_linear_forward_sweep(const tileloss_args* args, const tileloss_sweep_options* options,
                                                           const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_linear_backward_sweep(const tileloss_args* args, const tileloss_sweep_options* options,
                                                            const tileloss_plan* plan, const tileloss_run* run);
// end of generated

// ----------------------------------------------------------------------------------------------------------- introspection

typedef int32_t tileloss_field_type;
enum {
  TILELOSS_FIELD_DOUBLE = 0,
  TILELOSS_FIELD_INT64 = 1,
  TILELOSS_FIELD_SCALAR = 2,  // a tileloss_scalar
  TILELOSS_FIELD_CHOICE = 3   // int32_t, an index into `choices`
};

// The arrays of tileloss_row_state, as bits.
enum {
  TILELOSS_STATE_MAX = 1,
  TILELOSS_STATE_SUM = 2,
  TILELOSS_STATE_LABEL_LOGIT = 4,
  TILELOSS_STATE_ENTROPY_SUM = 8,
  TILELOSS_STATE_COLLISION_SUM = 16,
  TILELOSS_STATE_SMOOTHING_SUM = 32,
  TILELOSS_STATE_ARGMAX = 64,
  TILELOSS_STATE_ALLOWED_COUNT = 128,
  TILELOSS_STATE_ALLOWED_WEIGHT = 256,
  TILELOSS_STATE_LABEL_LOGITS = 512
};

// One option of a function: what a front end needs to accept it by name.
typedef struct tileloss_field {
  const char* name;
  tileloss_field_type type;
  // Bits of the row state that the loss or its backward may need, besides max, sum and label_logit, if this option is given.
  uint32_t state_arrays;
  size_t offset;         // in the function's options struct
  double default_value;  // NaN: not given
  double minimum;        // inclusive, unless exclusive_minimum
  double maximum;        // inclusive
  int32_t exclusive_minimum;
  int32_t has_absent;   // 1: default_value stands for "not given" and is itself accepted, in the range or not
  const char* choices;  // "none|sum|mean"; null unless a choice
  // Another option of the function, and bits 1 << choice of it: with its other choices this one has no effect, and is refused
  // where it is given. Null: it always has.
  const char* only_with;
  uint32_t only_with_choices;
} tileloss_field;

typedef int32_t tileloss_tensor_role;
enum {
  TILELOSS_ROLE_INPUT = 0,
  TILELOSS_ROLE_UPSTREAM = 1,    // an upstream gradient, of a backward
  TILELOSS_ROLE_OUTPUT = 2,      // the loss, metrics
  TILELOSS_ROLE_ROW_OUTPUT = 3,  // one number a row, of any function
  TILELOSS_ROLE_GRADIENT = 4
};

// One tensor of tileloss_args, as a function takes it.
typedef struct tileloss_tensor {
  const char* name;  // the member of tileloss_args
  size_t offset;     // of that member
  int32_t rank;      // 1: a tileloss_vector, 2: a tileloss_matrix
  tileloss_tensor_role role;
  uint32_t dtypes;  // bits 1 << tileloss_dtype that it may have
  uint32_t passes;  // bits 1 << tileloss_pass that read or write it
  // Its sizes: N rows, V columns, H the hidden width, G the teacher's, K a teacher's columns, C classes of the whole vocabulary,
  // B sequences, M metrics (or fewer); L is N for a loss a row, else 1. "N,V", "C", "B+1", "B|N" (either, as the options say),
  // ...
  const char* shape;
  uint32_t state_arrays;  // of a row output: bits of the row state that it is made of
  int32_t is_required;    // 1: a call without it is refused, in the passes that read it
} tileloss_tensor;

typedef struct tileloss_function_info {
  size_t struct_size;
  const char* name;
  const char* loss;   // the name without linear_: what is computed, whatever the logits are made of
  int32_t is_loss;    // 1: has a loss and value_and_grad; 0: row outputs only
  int32_t is_linear;  // 1: fused with the LM head
  size_t options_size;
  const tileloss_field* fields;
  int64_t num_fields;
  const tileloss_tensor* tensors;
  int64_t num_tensors;
  // tileloss_args, and where its members are that are no tensors.
  size_t args_size;
  size_t row_state_offset;
  size_t sequence_length_offset;
  size_t row_groups_offset;
  const char* presets;  // "grpo|gspo|...": names that tileloss_options_preset takes; null if there are none
  const char* metrics;  // "kl|entropy|...": what args.metrics holds, in this order; null if there are none
  size_t pair_state_offset;
  size_t labels_per_row_offset;
} tileloss_function_info;

TILELOSS_API int64_t tileloss_function_count(void);
static inline void tileloss_function_info_init(tileloss_function_info* info) { tileloss_struct_init(info, sizeof *info); }
// Fills `info` (from tileloss_function_info_init) with function `index`, in order of registration.
TILELOSS_API tileloss_status tileloss_get_function_info(int64_t index, tileloss_function_info* info);

// Sets one option by its field's name in a struct that tileloss_options_init filled: a number; a choice by its name; or the place
// of the number of a scalar. The value's range is looked at when the call is.
TILELOSS_API tileloss_status tileloss_options_set(const char* function, void* options, const char* name, double value);
TILELOSS_API tileloss_status tileloss_options_set_choice(const char* function, void* options, const char* name,
                                                         const char* choice);
TILELOSS_API tileloss_status tileloss_options_set_pointer(const char* function, void* options, const char* name,
                                                          const float* pointer);

TILELOSS_API const char* tileloss_isa_name(tileloss_isa isa);
TILELOSS_API int32_t tileloss_isa_supported(tileloss_isa isa);  // 1 if compiled in and this machine has it
TILELOSS_API const char* tileloss_schedule_name(tileloss_schedule schedule);
TILELOSS_API int32_t tileloss_default_threads(void);  // from affinity and cgroup quota, or TILELOSS_NUM_THREADS

#ifdef __cplusplus
}
#endif

#endif  // TILELOSS_TILELOSS_H_
