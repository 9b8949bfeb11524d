// The XLA FFI handlers: one custom call that is a call of the C ABI, a handler for each platform. They translate XLA's buffers
// into views and know no function and no option by name: those come as attributes, from Python's tables of what the library tells
// about itself. Of CUDA they know a stream's address, and are built without it.
//
//   function   "linear_logprobs", ...; pass: a tileloss_pass
//   operands   what each operand is, in order, with spaces between: a tensor of tileloss_args ("labels"), "T:head" for a matrix
//   results    that lies transposed, "state:max" for an array of the row state ("state:argmax" is int32 [N,2], the halves of its
//              int64), "option:beta" for the place of a scalar option; labels [N,K] are several a row
//   options    "name=number ..."
//   first, columns   the columns of logits and head that are meant, of a forward; columns -1: all
//   sequence_length  that of tileloss_args
//
// A label out of range, at which the library writes nothing on the CPU, makes all results NaN: a compiled program cannot raise.
// On CUDA the library itself makes NaN of the rows concerned.
#include <tileloss/tileloss.h>
#include <xla/ffi/api/ffi.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

namespace ffi = xla::ffi;

tileloss_dtype dtype_of(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32: return TILELOSS_FLOAT32;
    case ffi::DataType::BF16: return TILELOSS_BFLOAT16;
    case ffi::DataType::F16: return TILELOSS_FLOAT16;
    case ffi::DataType::S32: return TILELOSS_INT32;
    case ffi::DataType::S64: return TILELOSS_INT64;
    case ffi::DataType::U8:
    case ffi::DataType::PRED: return TILELOSS_UINT8;
    default: return TILELOSS_NONE;
  }
}

// XLA promises no more, and refuses who asks for more. What it gives is aligned to 256; the library looks for the 64 that it
// needs.
constexpr size_t kScratchAlignment = 16;

int64_t bytes_of(tileloss_dtype dtype) {
  switch (dtype) {
    case TILELOSS_FLOAT32:
    case TILELOSS_INT32: return 4;
    case TILELOSS_INT64: return 8;
    case TILELOSS_UINT8: return 1;
    default: return 2;
  }
}

ffi::Error failed(tileloss_status status) {
  return {status == TILELOSS_INVALID_ARGUMENT ? ffi::ErrorCode::kInvalidArgument : ffi::ErrorCode::kInternal,
          std::string("tileloss: ") + tileloss_last_error()};
}

const tileloss_function_info* info_of(std::string_view function) {
  static const std::vector<tileloss_function_info> infos = [] {
    std::vector<tileloss_function_info> all(static_cast<size_t>(tileloss_function_count()));
    for (size_t i = 0; i < all.size(); ++i) {
      tileloss_function_info_init(&all[i]);
      (void)tileloss_get_function_info(static_cast<int64_t>(i), &all[i]);
    }
    return all;
  }();
  for (const tileloss_function_info& info : infos) {
    if (info.name == function) return &info;
  }
  return nullptr;
}

// Cuts the next word off `words`.
std::string_view next_word(std::string_view& words) {
  const size_t begin = std::min(words.find_first_not_of(' '), words.size());
  const size_t end = std::min(words.find(' ', begin), words.size());
  const std::string_view word = words.substr(begin, end - begin);
  words.remove_prefix(end);
  return word;
}

struct Output {
  tileloss_dtype dtype;
  int64_t size;
  void* data;

  void fill_with_nan() const {
    const auto fill = [this](auto nan) { std::fill_n(static_cast<decltype(nan)*>(data), size, nan); };
    if (dtype == TILELOSS_FLOAT32) fill(std::numeric_limits<float>::quiet_NaN());
    if (dtype == TILELOSS_BFLOAT16) fill(uint16_t{0x7FC0});
    if (dtype == TILELOSS_FLOAT16) fill(uint16_t{0x7E00});
  }
};

struct Attributes {
  std::string_view function;
  int32_t pass;
  std::string_view operands, results, options;
  int64_t first, columns, sequence_length;
};

struct Device {
  tileloss_device_type type;
  int32_t index;
};
template <class View>
View on_device(View view, Device device) {
  view.device_type = device.type;
  view.device_index = device.index;
  return view;
}

// A call of the ABI while it is put together. `problem` is empty as long as all is well.
class Call {
 public:
  Call(const Attributes& attributes, Device device)
      : function_(attributes.function),
        info_(info_of(attributes.function)),
        pass_(attributes.pass),
        first_(attributes.first),
        columns_(attributes.columns),
        device_(device) {
    tileloss_args_init(&args_);
    args_.sequence_length = attributes.sequence_length;
    tileloss_row_state_init(&state_);
    state_ = on_device(state_, device);
    tileloss_plan_init(&plan_);
    if (!info_) {
      problem_ = "no function " + function_;
      return;
    }
    options_.resize(info_->options_size / sizeof(double) + 1);
    keep(tileloss_options_init(function_.c_str(), options_.data(), info_->options_size));
    set_options(attributes.options);
  }

  // All of them, by their words in the attributes.
  ffi::Error set_buffers(const ffi::RemainingArgs& operands, const ffi::RemainingRets& results, Attributes attributes) {
    for (size_t i = 0; i < operands.size(); ++i) {
      auto buffer = operands.get<ffi::AnyBuffer>(i);
      if (buffer.has_error()) return buffer.error();
      set(next_word(attributes.operands), *buffer);
    }
    for (size_t i = 0; i < results.size(); ++i) {
      auto buffer = results.get<ffi::AnyBuffer>(i);
      if (buffer.has_error()) return buffer.error();
      set_result(next_word(attributes.results), **buffer);
    }
    return ffi::Error::Success();
  }

  // `scratch`: of XLA, for the workspace; null: the library's own. `run` says the rest.
  ffi::Error run(tileloss_run run, ffi::ScratchAllocator* scratch) {
    if (!problem_.empty()) return {ffi::ErrorCode::kInvalidArgument, "tileloss: " + problem_};
    if (state_.max) args_.row_state = &state_;
    keep(status_ != TILELOSS_OK
             ? status_
             : tileloss_make_plan(function_.c_str(), pass_, &args_, options_.data(), nullptr, run.executor, &plan_));
    if (status_ == TILELOSS_OK && scratch != nullptr && plan_.workspace_bytes > 0) {
      run.workspace_bytes = static_cast<size_t>(plan_.workspace_bytes);
      run.workspace = scratch->Allocate(run.workspace_bytes, kScratchAlignment).value_or(nullptr);
      if (run.workspace == nullptr)
        return {ffi::ErrorCode::kResourceExhausted, "tileloss: " + function_ + ": expected " +
                                                        std::to_string(run.workspace_bytes) +
                                                        " bytes of XLA's memory for the workspace, got none"};
    }
    if (status_ == TILELOSS_OK) keep(tileloss_call(function_.c_str(), pass_, &args_, options_.data(), &plan_, &run));
    if (status_ == TILELOSS_LABEL_OUT_OF_RANGE) {
      for (const Output& output : outputs_) output.fill_with_nan();
      return ffi::Error::Success();
    }
    return status_ == TILELOSS_OK ? ffi::Error::Success() : failed(status_);
  }

 private:
  void set_options(std::string_view options) {
    for (std::string_view word = next_word(options); !word.empty() && ok(); word = next_word(options)) {
      const size_t equals = word.find('=');
      const std::string name(word.substr(0, equals)), number(word.substr(equals + 1));
      keep(tileloss_options_set(function_.c_str(), options_.data(), name.c_str(), std::strtod(number.c_str(), nullptr)));
    }
  }

  void set(std::string_view word, const ffi::AnyBuffer& buffer) {
    if (!ok()) return;
    const ffi::Span<const int64_t> shape = buffer.dimensions();
    void* const data = buffer.untyped_data();
    const size_t colon = word.find(':');
    const std::string_view kind = colon == word.npos ? "" : word.substr(0, colon);
    const std::string name(colon == word.npos ? word : word.substr(colon + 1));
    if (kind == "state") {
      set_state(name, shape, data);
    } else if (kind == "option") {
      keep(tileloss_options_set_pointer(function_.c_str(), options_.data(), name.c_str(), static_cast<const float*>(data)));
    } else {
      set_tensor(name, kind == "T", dtype_of(buffer.element_type()), shape, data);
    }
  }

  void set_result(std::string_view word, const ffi::AnyBuffer& buffer) {
    set(word, buffer);
    outputs_.push_back({dtype_of(buffer.element_type()), static_cast<int64_t>(buffer.element_count()), buffer.untyped_data()});
  }

  bool ok() const { return problem_.empty() && status_ == TILELOSS_OK; }
  void keep(tileloss_status status) {
    if (status_ == TILELOSS_OK) status_ = status;
  }

  void set_state(const std::string& name, ffi::Span<const int64_t> shape, void* data) {
    state_.rows = shape.size() ? shape[0] : 1;
    float* const array = static_cast<float*>(data);
    if (name == "argmax")  // JAX has no 64-bit integers unless it is told to
      state_.argmax = static_cast<int64_t*>(data);
    else if (name == "max")
      state_.max = array;
    else if (name == "sum")
      state_.sum = array;
    else if (name == "label_logit")
      state_.label_logit = array;
    else if (name == "entropy_sum")
      state_.entropy_sum = array;
    else if (name == "collision_sum")
      state_.collision_sum = array;
    else if (name == "smoothing_sum")
      state_.smoothing_sum = array;
    else
      problem_ = "no array " + name + " of a row state";
  }

  void set_tensor(const std::string& name, bool is_transposed, tileloss_dtype dtype, ffi::Span<const int64_t> shape, void* data) {
    for (int64_t i = 0; i < info_->num_tensors; ++i) {
      const tileloss_tensor& tensor = info_->tensors[i];
      if (name != tensor.name) continue;
      char* const place = reinterpret_cast<char*>(&args_) + tensor.offset;
      if (tensor.rank == 2) {
        const tileloss_matrix view = matrix(tensor, is_transposed, dtype, shape, data);
        std::memcpy(place, &view, sizeof view);
      } else {
        int64_t size = 1;
        for (const int64_t extent : shape) size *= extent;
        if (name == "labels" && shape.size() == 2) args_.labels_per_row = shape[1];
        char* begin = static_cast<char*>(data);
        if (columns_ >= 0 && std::strchr(tensor.shape, 'V')) begin += first_ * bytes_of(dtype), size = columns_;
        const tileloss_vector view = on_device(tileloss_make_vector(begin, dtype, size), device_);
        std::memcpy(place, &view, sizeof view);
      }
      return;
    }
    problem_ = "no tensor " + name + " of " + function_;
  }

  tileloss_matrix matrix(const tileloss_tensor& tensor, bool is_transposed, tileloss_dtype dtype, ffi::Span<const int64_t> shape,
                         void* data) {
    if (shape.size() != 2) {
      problem_ = std::string(tensor.name) + ": expected two dimensions";
      return {};
    }
    tileloss_matrix view = on_device(tileloss_make_matrix(data, dtype, shape[0], shape[1], shape[1]), device_);
    if (is_transposed) {
      std::swap(view.rows, view.cols);
      view.row_stride = 1, view.col_stride = shape[1];
    }
    if (std::strcmp(tensor.shape, "N,W") == 0) {  // sets of columns, a word for 32; one row is the set of all
      if (view.rows == 1) view.rows = args_.labels.size / std::max<int64_t>(args_.labels_per_row, 1), view.row_stride = 0;
      if (columns_ >= 0) view.cols = (columns_ + 31) / 32, view.data = static_cast<char*>(data) + first_ / 32 * bytes_of(dtype);
    } else if (columns_ >= 0) {
      // The vocabulary is a matrix's columns ("N,V") or its rows ("V,H").
      const char* const vocabulary = std::strchr(tensor.shape, 'V');
      const bool in_rows = vocabulary == tensor.shape;
      if (vocabulary) {
        (in_rows ? view.rows : view.cols) = columns_;
        const int64_t offset = first_ * (in_rows ? view.row_stride : view.col_stride);
        view.data = static_cast<char*>(data) + offset * bytes_of(dtype);
      }
    }
    return view;
  }

  std::string function_;
  const tileloss_function_info* info_;
  const tileloss_pass pass_;
  const int64_t first_, columns_;
  const Device device_;
  tileloss_args args_;
  tileloss_row_state state_;
  std::vector<Output> outputs_;
  std::vector<double> options_;  // aligned for any options struct
  tileloss_plan plan_;
  std::string problem_;
  tileloss_status status_ = TILELOSS_OK;
};

ffi::Error call_on_cpu(ffi::ThreadPool pool, ffi::RemainingArgs operands, ffi::RemainingRets results, Attributes attributes) {
  Call call(attributes, {TILELOSS_CPU, 0});
  if (ffi::Error error = call.set_buffers(operands, results, attributes); error.failure()) return error;
  tileloss_executor executor;
  tileloss_executor_init(&executor);
  executor.context = &pool;
  executor.threads = static_cast<int32_t>(std::max<int64_t>(1, pool.num_threads()));
  executor.schedule = [](void* context, tileloss_task task, void* data, int64_t index) {
    static_cast<ffi::ThreadPool*>(context)->Schedule([=] { task(data, index); });
  };
  tileloss_run run;
  tileloss_run_init(&run);
  run.executor = &executor;
  return call.run(run, nullptr);
}

ffi::Error call_on_cuda(void* stream, int32_t device, ffi::ScratchAllocator scratch, ffi::RemainingArgs operands,
                        ffi::RemainingRets results, Attributes attributes) {
  Call call(attributes, {TILELOSS_CUDA, device});
  if (ffi::Error error = call.set_buffers(operands, results, attributes); error.failure()) return error;
  tileloss_run run;
  tileloss_run_init(&run);
  run.stream = stream;
  return call.run(run, &scratch);
}

}  // namespace

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(Attributes, ffi::StructMember<std::string_view>("function"),
                                      ffi::StructMember<int32_t>("call_pass"), ffi::StructMember<std::string_view>("operands"),
                                      ffi::StructMember<std::string_view>("results"),
                                      ffi::StructMember<std::string_view>("options"), ffi::StructMember<int64_t>("first"),
                                      ffi::StructMember<int64_t>("columns"), ffi::StructMember<int64_t>("sequence_length"));

// Declared with default visibility before XLA's macro defines it.
extern "C" TILELOSS_API XLA_FFI_Error* tileloss_xla_call_on_cpu(XLA_FFI_CallFrame*);
extern "C" TILELOSS_API XLA_FFI_Error* tileloss_xla_call_on_cuda(XLA_FFI_CallFrame*);

XLA_FFI_DEFINE_HANDLER_SYMBOL(tileloss_xla_call_on_cpu, call_on_cpu,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs<Attributes>());
// Not kCmdBufferCompatible: a graph that XLA captures is replayed while the operands' addresses are the same, but its scratch
// memory, which is freed when the handler returns, may belong to another array by then.
XLA_FFI_DEFINE_HANDLER_SYMBOL(tileloss_xla_call_on_cuda, call_on_cuda,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::ScratchAllocator>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<Attributes>());
