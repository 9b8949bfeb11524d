// The values of TileLoss's C++ face: Status, the views (Vector, Matrix), Scalar and RowState. Included by tileloss.hpp.
#ifndef TILELOSS_VIEWS_HPP_
#define TILELOSS_VIEWS_HPP_

#include <tileloss/tileloss.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <ranges>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace tileloss {
// Versioned, so that two releases, or the library's own types of the same names, can meet in one program.
inline namespace v0 {

// ---------------------------------------------------------------------------------------------------------------- status

enum class StatusCode : std::int32_t {
  kOk = TILELOSS_OK,
  kInvalidArgument = TILELOSS_INVALID_ARGUMENT,
  kLabelOutOfRange = TILELOSS_LABEL_OUT_OF_RANGE,
  kOutOfMemory = TILELOSS_OUT_OF_MEMORY,
  kWorkspaceTooSmall = TILELOSS_WORKSPACE_TOO_SMALL,
  kUnsupported = TILELOSS_UNSUPPORTED,
  kPlanMismatch = TILELOSS_PLAN_MISMATCH,
  kInternal = TILELOSS_INTERNAL
};

// What became of a call: true when it succeeded. Owns its message, so it outlives later calls of the thread.
class [[nodiscard]] Status {
 public:
  Status() noexcept = default;
  // From the C ABI's answer, with this thread's message when it is an error.
  explicit Status(tileloss_status code) noexcept : code_(static_cast<StatusCode>(code)) {
    if (code == TILELOSS_OK) return;
    try {
      message_ = tileloss_last_error();
    } catch (...) {  // no memory for the message: the code still says what happened
      message_.clear();
    }
  }

  [[nodiscard]] StatusCode code() const noexcept { return code_; }
  [[nodiscard]] const std::string& message() const& noexcept { return message_; }
  [[nodiscard]] std::string message() && noexcept { return std::move(message_); }
  [[nodiscard]] const char* name() const noexcept { return tileloss_status_name(static_cast<tileloss_status>(code_)); }
  [[nodiscard]] bool ok() const noexcept { return code_ == StatusCode::kOk; }
  explicit operator bool() const noexcept { return ok(); }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

// ----------------------------------------------------------------------------------------------------------------- views

// Storage only: 16 bits as the hardware and the frameworks lay them out. Arithmetic is the library's affair.
struct BFloat16 {
  std::uint16_t bits = 0;
};
struct Float16 {
  std::uint16_t bits = 0;
};
static_assert(sizeof(BFloat16) == 2 && sizeof(Float16) == 2);

namespace detail {

template <class T>
inline constexpr tileloss_dtype kDtypeOf = TILELOSS_NONE;
template <>
inline constexpr tileloss_dtype kDtypeOf<float> = TILELOSS_FLOAT32;
template <>
inline constexpr tileloss_dtype kDtypeOf<BFloat16> = TILELOSS_BFLOAT16;
template <>
inline constexpr tileloss_dtype kDtypeOf<Float16> = TILELOSS_FLOAT16;
template <>
inline constexpr tileloss_dtype kDtypeOf<std::int32_t> = TILELOSS_INT32;
template <>
inline constexpr tileloss_dtype kDtypeOf<std::int64_t> = TILELOSS_INT64;
template <>
inline constexpr tileloss_dtype kDtypeOf<std::uint8_t> = TILELOSS_UINT8;

template <class Range>
using ElementOf = std::remove_reference_t<std::ranges::range_reference_t<Range>>;

// A contiguous range whose elements stay alive after the expression: an lvalue (a std::vector by name) or a view (std::span).
template <class Range>
concept Storage = std::ranges::contiguous_range<Range> && std::ranges::sized_range<Range> && std::ranges::borrowed_range<Range>;

// Such a range whose elements may be seen as T: the same type, or const added.
template <class From, class To>
inline constexpr bool kViewableAs = std::is_convertible_v<From (*)[], To (*)[]>;
template <class Range, class T>
concept StorageOf = Storage<Range> && kViewableAs<ElementOf<Range>, T>;
template <class From, class T>
concept LessConstThan = kViewableAs<From, T> && !std::is_same_v<From, T>;

template <class T>
concept Number = std::is_arithmetic_v<T>;

template <class T>
inline constexpr bool kIsElement = kDtypeOf<T> != TILELOSS_NONE;
template <class T>
inline constexpr bool kIsLogit = std::is_same_v<T, float> || std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>;
template <class T>
inline constexpr bool kIsLabel = std::is_same_v<T, std::int32_t> || std::is_same_v<T, std::int64_t>;
template <class T>
inline constexpr bool kIsMask = kIsLabel<T> || std::is_same_v<T, std::uint8_t> || std::is_same_v<T, float>;

// Whether a view takes elements of this type; const ones too where the library only reads.
template <class T>
struct AcceptsLogits : std::bool_constant<kIsLogit<std::remove_const_t<T>>> {};
template <class T>
struct AcceptsMutableLogits : std::bool_constant<kIsLogit<T>> {};
template <class T>
struct AcceptsLabels : std::bool_constant<kIsLabel<std::remove_const_t<T>>> {};
template <class T>
struct AcceptsMasks : std::bool_constant<kIsMask<std::remove_const_t<T>>> {};

}  // namespace detail

// What a view may hold, const or not.
template <class T>
concept Element = detail::kIsElement<std::remove_const_t<T>>;

// A [size] vector of T, stride in elements. const T for inputs.
template <Element T>
class Vector {
 public:
  Vector() noexcept = default;  // absent
  Vector(T* data, std::int64_t size, std::int64_t stride = 1) noexcept
      : c_(tileloss_make_vector(data, detail::kDtypeOf<std::remove_const_t<T>>, size)) {
    c_.stride = stride;
  }
  template <detail::StorageOf<T> Range>
  Vector(Range&& storage) noexcept  // NOLINT(bugprone-forwarding-reference-overload): a Vector is no range
      : Vector(std::ranges::data(storage), static_cast<std::int64_t>(std::ranges::size(storage))) {}
  template <detail::LessConstThan<T> From>
  Vector(const Vector<From>& other) noexcept : c_(other.c()) {}

  // One value seen `size` times (stride 0), for inputs.
  static Vector broadcast(T& value, std::int64_t size) noexcept { return Vector(&value, size, 0); }
  static Vector broadcast(const T&& value, std::int64_t size) = delete;

  [[nodiscard]] bool present() const noexcept { return c_.dtype != TILELOSS_NONE; }
  [[nodiscard]] T* data() const noexcept { return static_cast<T*>(c_.data); }
  [[nodiscard]] std::int64_t size() const noexcept { return c_.size; }
  [[nodiscard]] std::int64_t stride() const noexcept { return c_.stride; }
  T& operator[](std::int64_t index) const noexcept { return data()[index * c_.stride]; }
  [[nodiscard]] const tileloss_vector& c() const noexcept { return c_; }

 private:
  tileloss_vector c_{};
};
template <detail::Storage Range>
Vector(Range&&) -> Vector<detail::ElementOf<Range>>;

// A [rows, cols] matrix of T, strides in elements. const T for inputs; a null pointer will do while planning.
template <Element T>
class Matrix {
 public:
  Matrix() noexcept = default;  // absent
  Matrix(T* data, std::int64_t rows, std::int64_t cols) noexcept : Matrix(data, rows, cols, cols) {}
  Matrix(T* data, std::int64_t rows, std::int64_t cols, std::int64_t row_stride, std::int64_t col_stride = 1) noexcept
      : c_(tileloss_make_matrix(data, detail::kDtypeOf<std::remove_const_t<T>>, rows, cols, row_stride)) {
    c_.col_stride = col_stride;
  }
  // Contiguous rows. A range that holds fewer than rows * cols elements gives null data, which every call refuses.
  template <detail::StorageOf<T> Range>
  Matrix(Range&& storage, std::int64_t rows, std::int64_t cols) noexcept
      : Matrix(holds(std::ranges::size(storage), rows, cols) ? std::ranges::data(storage) : nullptr, rows, cols) {}
  template <detail::LessConstThan<T> From>
  Matrix(const Matrix<From>& other) noexcept : c_(other.c()) {}

  [[nodiscard]] bool present() const noexcept { return c_.dtype != TILELOSS_NONE; }
  [[nodiscard]] T* data() const noexcept { return static_cast<T*>(c_.data); }
  [[nodiscard]] std::int64_t rows() const noexcept { return c_.rows; }
  [[nodiscard]] std::int64_t cols() const noexcept { return c_.cols; }
  [[nodiscard]] std::int64_t row_stride() const noexcept { return c_.row_stride; }
  [[nodiscard]] std::int64_t col_stride() const noexcept { return c_.col_stride; }
  T& operator()(std::int64_t row, std::int64_t col) const noexcept { return data()[row * c_.row_stride + col * c_.col_stride]; }
  [[nodiscard]] const tileloss_matrix& c() const noexcept { return c_; }

 private:
  static bool holds(std::size_t size, std::int64_t rows, std::int64_t cols) noexcept {
    if (rows <= 0 || cols <= 0) return true;  // empty, or refused by the call
    return static_cast<std::uint64_t>(rows) <= size / static_cast<std::uint64_t>(cols);
  }
  tileloss_matrix c_{};
};
template <detail::Storage Range>
Matrix(Range&&, std::int64_t, std::int64_t) -> Matrix<detail::ElementOf<Range>>;

// The places where the element type is open: logits and biases to read and to write, ids, labels, masks. Each takes any fitting
// view.
template <template <class> class Accepts>
class AnyMatrix {
 public:
  AnyMatrix() noexcept = default;
  template <Element T>
  requires(Accepts<T>::value) AnyMatrix(const Matrix<T>& matrix)
  noexcept : c_(matrix.c()) {}
  [[nodiscard]] const tileloss_matrix& c() const noexcept { return c_; }

 private:
  tileloss_matrix c_{};
};
using LogitsView = AnyMatrix<detail::AcceptsLogits>;
using MutableLogitsView = AnyMatrix<detail::AcceptsMutableLogits>;
using IdsView = AnyMatrix<detail::AcceptsLabels>;

template <template <class> class Accepts>
class AnyVector {
 public:
  AnyVector() noexcept = default;
  template <Element T>
  requires(Accepts<T>::value) AnyVector(const Vector<T>& vector)
  noexcept : c_(vector.c()) {}
  template <detail::Storage Range>  // an AnyVector is no range: NOLINTNEXTLINE(bugprone-forwarding-reference-overload)
  requires(Accepts<detail::ElementOf<Range>>::value) AnyVector(Range&& storage)
  noexcept : c_(Vector<detail::ElementOf<Range>>(storage).c()) {}
  [[nodiscard]] const tileloss_vector& c() const noexcept { return c_; }

 private:
  tileloss_vector c_{};
};
using LabelsView = AnyVector<detail::AcceptsLabels>;
using MaskView = AnyVector<detail::AcceptsMasks>;
using BiasView = AnyVector<detail::AcceptsLogits>;
using MutableBiasView = AnyVector<detail::AcceptsMutableLogits>;

// A number that may change from step to step: a value, or {0, &place of one float that is read during the call}. NaN: not given.
using Scalar = tileloss_scalar;

// ------------------------------------------------------------------------------------------------------------- row state

// Which of tileloss_row_state's arrays to have besides max, sum and label_logit.
struct RowStateFields {
  bool entropy_sum = false;
  bool collision_sum = false;
  bool smoothing_sum = false;
  bool argmax = false;
  bool allowed_count = false;
  bool allowed_weight = false;
  std::int64_t labels_per_row = 1;  // label_logits, where it is more
};

// A row state that owns its arrays, the identity to begin with: every row is empty.
class RowState {
 public:
  explicit RowState(std::int64_t rows, RowStateFields fields = {}) : rows_(rows) {
    tileloss_row_state_init(&c_);
    const auto size = static_cast<std::size_t>(rows);
    constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
    max_.assign(size, kMinusInfinity);
    sum_.assign(size, 0.0F);
    label_logit_.assign(size, kMinusInfinity);
    entropy_sum_.assign(fields.entropy_sum ? size : 0, 0.0F);
    collision_sum_.assign(fields.collision_sum ? size : 0, 0.0F);
    smoothing_sum_.assign(fields.smoothing_sum ? size : 0, 0.0F);
    argmax_.assign(fields.argmax ? size : 0, -1);
    allowed_count_.assign(fields.allowed_count ? size : 0, 0.0F);
    allowed_weight_.assign(fields.allowed_weight ? size : 0, 0.0F);
    if (fields.labels_per_row <= 1) return;
    c_.labels_per_row = fields.labels_per_row;
    label_logits_.assign(size * static_cast<std::size_t>(fields.labels_per_row), kMinusInfinity);
  }

  // For args.row_state, as long as this object lives, and is neither moved nor assigned to.
  [[nodiscard]] tileloss_row_state* c() & noexcept {
    point_at_arrays();
    return &c_;
  }
  // Every column this state has seen counts here once, with its class weight: the caller sets it, merge adds it up.
  [[nodiscard]] double smoothing_weight() const noexcept { return c_.smoothing_weight; }
  void set_smoothing_weight(double weight) noexcept { c_.smoothing_weight = weight; }

  [[nodiscard]] std::int64_t rows() const noexcept { return rows_; }
  [[nodiscard]] std::span<const float> max() const& noexcept { return max_; }
  std::span<const float> max() const&& = delete;  // of an object that is gone
  [[nodiscard]] std::span<const float> sum() const& noexcept { return sum_; }
  std::span<const float> sum() const&& = delete;
  [[nodiscard]] std::span<const float> label_logit() const& noexcept { return label_logit_; }
  std::span<const float> label_logit() const&& = delete;
  [[nodiscard]] std::span<const float> entropy_sum() const& noexcept { return entropy_sum_; }
  std::span<const float> entropy_sum() const&& = delete;
  [[nodiscard]] std::span<const float> collision_sum() const& noexcept { return collision_sum_; }
  std::span<const float> collision_sum() const&& = delete;
  [[nodiscard]] std::span<const float> smoothing_sum() const& noexcept { return smoothing_sum_; }
  std::span<const float> smoothing_sum() const&& = delete;
  [[nodiscard]] std::span<const std::int64_t> argmax() const& noexcept { return argmax_; }
  std::span<const std::int64_t> argmax() const&& = delete;
  [[nodiscard]] std::span<const float> allowed_count() const& noexcept { return allowed_count_; }
  std::span<const float> allowed_count() const&& = delete;
  [[nodiscard]] std::span<const float> allowed_weight() const& noexcept { return allowed_weight_; }
  std::span<const float> allowed_weight() const&& = delete;
  [[nodiscard]] std::span<const float> label_logits() const& noexcept { return label_logits_; }
  std::span<const float> label_logits() const&& = delete;

  // *this = *this + from, row by row: two shards of the vocabulary become one.
  Status merge(const RowState& from) noexcept {
    // The C struct has no const arrays; merge only reads `from`.
    return Status(tileloss_row_state_merge(c(), const_cast<RowState&>(from).c()));
  }

 private:
  // As late as here, so that copies and moved objects point at their own.
  void point_at_arrays() noexcept {
    const auto pointer = [](auto& array) { return array.empty() ? nullptr : array.data(); };
    const auto needed = [this](auto& array) { return array.empty() ? &no_rows_ : array.data(); };
    c_.rows = rows_;
    c_.max = needed(max_);
    c_.sum = needed(sum_);
    c_.label_logit = needed(label_logit_);
    c_.entropy_sum = pointer(entropy_sum_);
    c_.collision_sum = pointer(collision_sum_);
    c_.smoothing_sum = pointer(smoothing_sum_);
    c_.argmax = pointer(argmax_);
    c_.allowed_count = pointer(allowed_count_);
    c_.allowed_weight = pointer(allowed_weight_);
    c_.label_logits = pointer(label_logits_);
  }

  std::int64_t rows_;
  std::vector<float> max_, sum_, label_logit_, entropy_sum_, collision_sum_, smoothing_sum_, allowed_count_, allowed_weight_,
      label_logits_;
  std::vector<std::int64_t> argmax_;
  tileloss_row_state c_{};
  float no_rows_ = 0;  // where the arrays point that must be there, without rows
};

}  // namespace v0
}  // namespace tileloss

#endif  // TILELOSS_VIEWS_HPP_
