// TileLoss: losses over a language model's vocabulary, computed in tiles. The C ABI.
//
// Conventions
//   * Every function returns a tileloss_status; tileloss_last_error() holds this thread's message. No exception, abort or print
//     leaves the library. Calls from several threads at once are fine.
//   * Structs that can grow start with `struct_size`; obtain them from their *_init function, which sets it and the defaults.
//     The views (tileloss_matrix, tileloss_vector, tileloss_scalar) are frozen: they will never grow.
//   * Views do not own memory. Strides count elements. A zeroed view (dtype TILELOSS_NONE) means "absent".
//   * Notation, per row i: logits x_i, transformed logits z_i = softcap(logit_scale * x_i) / temperature,
//     lse_i = log sum_j exp(z_ij), logp_i = z_i,label - lse_i. All arithmetic and row outputs are float32 or better.
//   * Determinism: for a given instruction set, schedule and vocab_block, results are bitwise the same run to run and for any
//     number of threads; a row's outputs do not depend on the other rows; logp is bitwise the same in every schedule.
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

// ---------------------------------------------------------------------------------------------------------------- status

typedef int32_t tileloss_status;
enum {
  TILELOSS_OK = 0,
  TILELOSS_INVALID_ARGUMENT = 1,     // a shape, dtype, stride, pointer or option is wrong; the message names it
  TILELOSS_LABEL_OUT_OF_RANGE = 2,   // a used label is < 0 or >= the vocabulary; nothing has been written
  TILELOSS_OUT_OF_MEMORY = 3,        // the workspace could not be allocated
  TILELOSS_WORKSPACE_TOO_SMALL = 4,  // the caller's workspace or budget is below what the plan needs
  TILELOSS_UNSUPPORTED = 5,          // this machine or this build cannot do it (instruction set, device)
  TILELOSS_PLAN_MISMATCH = 6,        // the arguments are not those that were planned
  TILELOSS_INTERNAL = 7              // a bug in TileLoss
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
// not null, else `value`.
typedef struct tileloss_scalar {
  double value;
  const float* pointer;
} tileloss_scalar;

TILELOSS_API tileloss_matrix tileloss_make_matrix(const void* data, tileloss_dtype dtype, int64_t rows, int64_t cols,
                                                  int64_t row_stride);
TILELOSS_API tileloss_vector tileloss_make_vector(const void* data, tileloss_dtype dtype, int64_t size);

// ------------------------------------------------------------------------------------------------------------- row state

// What a forward sweep learns of each row, and all that a backward needs besides the logits. float32 [rows] arrays, contiguous;
// a null array is not wanted (output) or not there (input). It is a monoid: states of column shards merge into the state of the
// whole row. The label's column is left out of `sum`, and a shard that does not hold the label has target = -inf.
//   max            m = max_j z_j, the label's column included
//   sum            R = sum over j != label of exp(z_j - m)
//   target         z at the label
//   entropy_sum    sum_j (z_j - m) exp(z_j - m)
//   collision_sum  sum_j exp(2 (z_j - m))
//   smoothing_sum  sum_j c_j (z_j - m), c = class weights, 1 if there are none
//   argmax         the lowest index of the row's maximum, counted from vocab_start; -1 while empty or if a NaN was seen
typedef struct tileloss_row_state {
  size_t struct_size;
  int64_t rows;
  float* max;
  float* sum;
  float* target;
  float* entropy_sum;
  float* collision_sum;
  float* smoothing_sum;
  int64_t* argmax;
  // The sum of c_j over the columns this state has seen (their number, without class weights). The caller's to set; only the
  // merge of smoothing_sum reads it.
  double smoothing_weight;
  tileloss_device_type device_type;
  int32_t device_index;
} tileloss_row_state;

TILELOSS_API void tileloss_row_state_init(tileloss_row_state* state);
// Fills every array present with the identity: max = target = -inf, sums 0, argmax -1; smoothing_weight = 0.
TILELOSS_API tileloss_status tileloss_row_state_set_identity(tileloss_row_state* state);
// into = into + from, row by row, for every array present in both. max, sum and target are required. NaN survives.
TILELOSS_API tileloss_status tileloss_row_state_merge(tileloss_row_state* into, const tileloss_row_state* from);

// --------------------------------------------------------------------------------------------------------------- options

typedef int32_t tileloss_reduction;
enum { TILELOSS_REDUCTION_NONE = 0, TILELOSS_REDUCTION_SUM = 1, TILELOSS_REDUCTION_MEAN = 2 };

typedef int32_t tileloss_temperature_on;
enum { TILELOSS_TEMPERATURE_ON_LOGITS = 0, TILELOSS_TEMPERATURE_ON_LOGPROB = 1 };

// What every function on logits shares. Frozen, as it is embedded in the options below.
typedef struct tileloss_logit_options {
  double logit_scale;                      // multiplies the logits, > 0; default 1
  double softcap;                          // c * tanh(x / c); 0 (default) is off
  tileloss_scalar temperature;             // T > 0; default 1
  tileloss_temperature_on temperature_on;  // logits (default), or the older rule: logp' = logp / T of the softmax at T = 1
  int32_t reserved0;                       // 0
  int64_t valid_vocab;   // columns from here on are padding: not in the softmax, gradient 0; -1 (default): all columns are valid
  int64_t ignore_index;  // rows with this label are neither read nor counted; default -100
  int64_t vocab_start;   // the class of column 0, for a shard of the vocabulary; default 0
  int64_t vocab_total;   // classes in all shards; -1 (default): this matrix holds the whole vocabulary
  int64_t reserved[4];   // 0
} tileloss_logit_options;

typedef struct tileloss_logprobs_options {
  size_t struct_size;
  tileloss_logit_options logit;
} tileloss_logprobs_options;

typedef struct tileloss_cross_entropy_options {
  size_t struct_size;
  tileloss_logit_options logit;
  double label_smoothing;        // s in [0, 1]; default 0
  double z_loss;                 // zeta >= 0: adds zeta * lse^2; default 0
  tileloss_scalar num_items;     // mean's denominator when given; NaN (default): not given
  tileloss_reduction reduction;  // default mean
  int32_t reserved;              // 0
} tileloss_cross_entropy_options;

TILELOSS_API void tileloss_logprobs_options_init(tileloss_logprobs_options* options);
TILELOSS_API void tileloss_cross_entropy_options_init(tileloss_cross_entropy_options* options);

// ------------------------------------------------------------------------------------------------------------- arguments

// The tensors of a call. N rows (tokens), V columns (vocabulary). Leave out (zeroed) what you do not have or want. A tensor that
// the function or the pass has no use for is an error (dlogits in a forward, logits with from_row_state), so that nothing is left
// unwritten in silence; only a backward takes the forward's row outputs along and leaves them alone.
typedef struct tileloss_args {
  size_t struct_size;

  // Inputs.
  tileloss_matrix logits;         // [N,V] float32, bfloat16, float16; any row stride >= V, column stride 1
  tileloss_vector labels;         // [N] int32, int64
  tileloss_vector token_weights;  // [N] float32 w_i; default 1
  tileloss_vector class_weights;  // [classes] float32 c_j, stride 1; default 1

  // Upstream gradients, float32; absent: 1 for a loss, 0 for row outputs.
  tileloss_vector loss_grad;  // [1], or [N] with reduction none
  tileloss_vector logp_grad;  // [N] (logprobs)
  tileloss_vector lse_grad;
  tileloss_vector entropy_grad;

  // Outputs. Rows that are ignored give 0 (argmax -1).
  tileloss_vector loss;              // [1], or [N] with reduction none, float32
  tileloss_vector logp;              // [N] float32; log softmax at the label
  tileloss_vector lse;               // [N] float32
  tileloss_vector entropy;           // [N] float32, nats
  tileloss_vector argmax;            // [N] int64, lowest index on ties; -1 if the row holds a NaN
  tileloss_vector correct;           // [N] uint8, argmax == label
  tileloss_vector log_sum_sq_probs;  // [N] float32, log sum_j p_j^2
  tileloss_vector mean_logit;        // [N] float32, mean of z over the valid columns; not together with class_weights
  tileloss_matrix dlogits;           // [N,V], the logits' dtype; may be the logits themselves, otherwise must not overlap them

  // Output of a forward, input of a backward (required: max, sum, target; logprobs with entropy_grad: entropy_sum).
  // A backward without it sweeps the logits twice. Absent: struct_size 0, as tileloss_args_init leaves it.
  tileloss_row_state row_state;
} tileloss_args;

TILELOSS_API void tileloss_args_init(tileloss_args* args);

// ---------------------------------------------------------------------------------------------------------- plan and run

typedef int32_t tileloss_isa;
enum {
  TILELOSS_ISA_AUTO = 0,
  TILELOSS_ISA_BASELINE = 1,
  TILELOSS_ISA_AVX2 = 2,
  TILELOSS_ISA_AVX512 = 3,      // F, BW, DQ, VL
  TILELOSS_ISA_AVX512_BF16 = 4  // and BF16
};

typedef int32_t tileloss_schedule;
enum {
  TILELOSS_SCHEDULE_AUTO = 0,
  TILELOSS_SCHEDULE_STASH = 1,      // value and gradient, one exp an element: exp(z - m) of a row waits in cache for its backward
  TILELOSS_SCHEDULE_RECOMPUTE = 2,  // value and gradient, two exps an element: for rows whose stash would leave the cache
  TILELOSS_SCHEDULE_SWEEPS = 3      // a forward sweep over all rows and/or a backward sweep over all rows
};

typedef int32_t tileloss_pass;
enum {
  TILELOSS_FORWARD = 0,
  TILELOSS_BACKWARD = 1,
  TILELOSS_VALUE_AND_GRAD = 2,
  TILELOSS_FROM_ROW_STATE = 3  // the forward's outputs from args.row_state alone: what follows the merge of vocabulary shards
};

// Wishes for the planner. 0 everywhere: its own choice.
typedef struct tileloss_plan_options {
  size_t struct_size;
  tileloss_isa isa;  // the environment variable TILELOSS_ISA (baseline, avx512, ...) applies when this is auto
  tileloss_schedule schedule;
  int32_t threads;          // at most this many; default: the executor's, or the built-in pool's
  int32_t reserved;         // 0
  int64_t row_block;        // rows a thread takes at a time; does not change any result
  int64_t vocab_block;      // columns between two looks at the running maximum; a multiple of 64
  int64_t workspace_bytes;  // a cap on scratch memory
} tileloss_plan_options;

// What will be done. Plain data: copy, store or print it as you like.
typedef struct tileloss_plan {
  size_t struct_size;
  char function[32];
  tileloss_pass pass;
  tileloss_isa isa;
  tileloss_schedule schedule;
  int32_t threads;
  int64_t row_block;
  int64_t vocab_block;
  int64_t workspace_bytes;  // scratch the call needs, whatever the labels are; alignment 64
  double predicted_ms;      // from this machine's bandwidth and exp rate, both rough defaults unless measured: an orientation
  uint64_t fingerprint;     // of shapes, dtypes, strides and options: the call must match it
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
  void* stream;                       // GPUs: the stream to enqueue on; null on the CPU
} tileloss_run;

TILELOSS_API void tileloss_plan_options_init(tileloss_plan_options* options);
TILELOSS_API void tileloss_plan_init(tileloss_plan* plan);
TILELOSS_API void tileloss_executor_init(tileloss_executor* executor);
TILELOSS_API void tileloss_run_init(tileloss_run* run);

// Any function by name ("logprobs", "cross_entropy", ...), with the options struct that belongs to it (null: defaults). Front
// ends and tools use these two; the named functions below are the same with types.
//   tileloss_make_plan  validates shapes and options, fills `plan`; touches no data. plan_options and executor may be null.
//   tileloss_call       runs. plan null: plan first, by default options. run null: own workspace, built-in pool.
TILELOSS_API tileloss_status tileloss_make_plan(const char* function, tileloss_pass pass, const tileloss_args* args,
                                                const void* options, const tileloss_plan_options* plan_options,
                                                const tileloss_executor* executor, tileloss_plan* plan);
TILELOSS_API tileloss_status tileloss_call(const char* function, tileloss_pass pass, const tileloss_args* args,
                                           const void* options, const tileloss_plan* plan, const tileloss_run* run);

// logp, lse and the other row outputs; its backward takes logp_grad, lse_grad and entropy_grad, so that any loss written on top
// of them differentiates exactly: dL/dz_j = g_logp [j = y] + p_j (-g_logp + g_lse - g_H (H + log p_j)).
TILELOSS_API tileloss_status tileloss_logprobs(const tileloss_args* args, const tileloss_logprobs_options* options,
                                               const tileloss_plan* plan, const tileloss_run* run);
TILELOSS_API tileloss_status tileloss_logprobs_backward(const tileloss_args* args, const tileloss_logprobs_options* options,
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

// ----------------------------------------------------------------------------------------------------------- introspection

typedef int32_t tileloss_field_type;
enum {
  TILELOSS_FIELD_DOUBLE = 0,
  TILELOSS_FIELD_INT64 = 1,
  TILELOSS_FIELD_SCALAR = 2,  // a tileloss_scalar
  TILELOSS_FIELD_CHOICE = 3   // int32_t, an index into `choices`
};

// One option of a function: what a front end needs to accept it by name.
typedef struct tileloss_field {
  const char* name;
  tileloss_field_type type;
  int32_t reserved;
  size_t offset;         // in the function's options struct
  double default_value;  // NaN: not given
  double minimum;        // inclusive, unless exclusive_minimum
  double maximum;        // inclusive
  int32_t exclusive_minimum;
  int32_t has_absent;   // 1: default_value stands for "not given" and is itself accepted, in the range or not
  const char* choices;  // "none|sum|mean"; null unless a choice
} tileloss_field;

typedef struct tileloss_function_info {
  size_t struct_size;
  const char* name;
  size_t options_size;
  const tileloss_field* fields;
  int64_t num_fields;
  int32_t is_loss;  // 1: has a loss and value_and_grad; 0: row outputs only
  int32_t reserved;
} tileloss_function_info;

TILELOSS_API int64_t tileloss_function_count(void);
// Fills `info` (set info->struct_size first) with function `index`, in order of registration.
TILELOSS_API tileloss_status tileloss_get_function_info(int64_t index, tileloss_function_info* info);
// Fills `options` (info->options_size bytes) with a function's defaults.
TILELOSS_API tileloss_status tileloss_options_init(const char* function, void* options);

TILELOSS_API const char* tileloss_isa_name(tileloss_isa isa);
TILELOSS_API int32_t tileloss_isa_supported(tileloss_isa isa);  // 1 if compiled in and this machine has it
TILELOSS_API const char* tileloss_schedule_name(tileloss_schedule schedule);
TILELOSS_API int32_t tileloss_default_threads(void);  // from affinity and cgroup quota, or TILELOSS_NUM_THREADS

#ifdef __cplusplus
}
#endif

#endif  // TILELOSS_TILELOSS_H_
