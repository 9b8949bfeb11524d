// The tensors of tileloss_args as a row stage reads them: with their strides, their defaults, and whether they are there (known
// while planning, when there is no data yet).
#pragma once

#include <tileloss/tileloss.h>

#include <cstdint>

#include "core/enumerators.h"
#include "core/host_device.h"
#include "core/number_formats.h"

namespace tileloss::impl {

// A float input; `otherwise` where it is absent.
class RowInput {
 public:
  RowInput() = default;
  RowInput(const tileloss_vector& v, double otherwise)
      : data_(static_cast<const float*>(v.data)),
        size_(v.size),
        stride_(v.size == 1 ? 0 : v.stride),
        is_present_(v.dtype != TILELOSS_NONE),
        otherwise_(otherwise) {}
  TILELOSS_HOST_DEVICE double operator[](std::int64_t i) const {
    return is_present_ ? static_cast<double>(data_[i * stride_]) : otherwise_;
  }
  TILELOSS_HOST_DEVICE explicit operator bool() const { return is_present_; }
  TILELOSS_HOST_DEVICE std::int64_t size() const { return size_; }

 private:
  const float* data_ = nullptr;
  std::int64_t size_ = 0;
  std::int64_t stride_ = 0;
  bool is_present_ = false;
  double otherwise_ = 0;
};

// An integer input, int32 or int64.
class IntegerInput {
 public:
  IntegerInput() = default;
  explicit IntegerInput(const tileloss_vector& v)
      : data_(v.data), size_(v.size), stride_(v.stride), is_wide_(v.dtype == TILELOSS_INT64) {}
  TILELOSS_HOST_DEVICE std::int64_t operator[](std::int64_t i) const {
    return is_wide_ ? static_cast<const std::int64_t*>(data_)[i * stride_] : static_cast<const std::int32_t*>(data_)[i * stride_];
  }
  TILELOSS_HOST_DEVICE std::int64_t size() const { return size_; }

 private:
  const void* data_ = nullptr;
  std::int64_t size_ = 0;
  std::int64_t stride_ = 0;
  bool is_wide_ = false;
};

// The labels, and which rows count: those that neither have the label ignore_index nor the mask 0.
class Labels {
 public:
  Labels() = default;
  Labels(const tileloss_vector& labels, std::int64_t ignore_index, const tileloss_vector& mask = {}, std::int64_t per_row = 1)
      : labels_(labels),
        are_given_(labels.dtype != TILELOSS_NONE),
        ignore_index_(ignore_index),
        mask_(mask),
        per_row_(per_row < 1 ? 1 : per_row) {}
  TILELOSS_HOST_DEVICE bool are_given() const { return are_given_; }
  // Of rows with one label; -1 where none are given.
  TILELOSS_HOST_DEVICE std::int64_t operator[](std::int64_t i) const { return are_given_ ? labels_[i] : -1; }
  TILELOSS_HOST_DEVICE bool is_used(std::int64_t i) const {
    if (!is_unmasked(i)) return false;
    bool has_label = !are_given_;
    for (std::int64_t k = 0; k < per_row_ && !has_label; ++k) has_label = has_label_at(i, k);
    return has_label;
  }
  // Of rows with several labels, which are given then: their slots.
  TILELOSS_HOST_DEVICE std::int64_t per_row() const { return per_row_; }
  TILELOSS_HOST_DEVICE std::int64_t at(std::int64_t i, std::int64_t k) const { return labels_[i * per_row_ + k]; }
  TILELOSS_HOST_DEVICE bool has_label_at(std::int64_t i, std::int64_t k) const { return at(i, k) != ignore_index_; }

 private:
  TILELOSS_HOST_DEVICE bool is_unmasked(std::int64_t i) const {
    const std::int64_t at = i * mask_.stride;
    switch (as_enum<TILELOSS_NONE>(mask_.dtype)) {
      case TILELOSS_UINT8: return static_cast<const std::uint8_t*>(mask_.data)[at] != 0;
      case TILELOSS_INT32: return static_cast<const std::int32_t*>(mask_.data)[at] != 0;
      case TILELOSS_INT64: return static_cast<const std::int64_t*>(mask_.data)[at] != 0;
      case TILELOSS_FLOAT32: return static_cast<const float*>(mask_.data)[at] != 0;
      case TILELOSS_NONE:
      case TILELOSS_BFLOAT16:
      case TILELOSS_FLOAT16: break;
    }
    return true;
  }

  IntegerInput labels_;
  bool are_given_ = false;
  std::int64_t ignore_index_ = 0;
  tileloss_vector mask_{};
  std::int64_t per_row_ = 1;
};

// Of a matrix of int32 or int64.
TILELOSS_HOST_DEVICE inline std::int64_t integer_at(const tileloss_matrix& m, std::int64_t i, std::int64_t k) {
  const std::int64_t at = i * m.row_stride + k * m.col_stride;
  return m.dtype == TILELOSS_INT32 ? static_cast<const std::int32_t*>(m.data)[at] : static_cast<const std::int64_t*>(m.data)[at];
}
// visit(T{}) with the type that stores a float dtype: the table of number formats. A further one, of 8 bits say, is a row here
// and has to_float and from_float in core/number_formats.h.
template <class Visit>
TILELOSS_HOST_DEVICE decltype(auto) visit_format(tileloss_dtype dtype, Visit&& visit) {
  switch (as_enum<TILELOSS_NONE>(dtype)) {
    case TILELOSS_BFLOAT16: return visit(Bfloat16{});
    case TILELOSS_FLOAT16: return visit(Float16{});
    case TILELOSS_FLOAT32:
    case TILELOSS_NONE:  // this and what follows: of nothing that has floats
    case TILELOSS_INT32:
    case TILELOSS_INT64:
    case TILELOSS_UINT8: break;
  }
  return visit(float{});
}
TILELOSS_HOST_DEVICE inline float load_number(const void* data, tileloss_dtype dtype, std::int64_t at) {
  return visit_format(dtype, [&](auto format) { return to_float(static_cast<const decltype(format)*>(data)[at]); });
}
TILELOSS_HOST_DEVICE inline void store_number(void* data, tileloss_dtype dtype, std::int64_t at, float value) {
  visit_format(dtype, [&](auto format) {
    using T = decltype(format);
    static_cast<T*>(data)[at] = from_float<T>(value);
  });
}
TILELOSS_HOST_DEVICE inline float number_at(const tileloss_matrix& m, std::int64_t i, std::int64_t k) {
  return load_number(m.data, m.dtype, i * m.row_stride + k * m.col_stride);
}
TILELOSS_HOST_DEVICE inline void set_number(const tileloss_matrix& m, std::int64_t i, std::int64_t k, double value) {
  store_number(m.data, m.dtype, i * m.row_stride + k * m.col_stride, static_cast<float>(value));
}

// How the rows fall into sequences: by offsets, as [B,T], or, without either, all in one.
class Sequences {
 public:
  Sequences() = default;
  Sequences(const tileloss_vector& offsets, std::int64_t length, std::int64_t rows)
      : offsets_(offsets), has_offsets_(offsets.dtype != TILELOSS_NONE), length_(length), rows_(rows) {}
  TILELOSS_HOST_DEVICE bool is_given() const { return has_offsets_ || length_ > 0; }
  TILELOSS_HOST_DEVICE bool has_offsets() const { return has_offsets_; }
  TILELOSS_HOST_DEVICE std::int64_t length() const { return length_; }  // T; 0 unless [B,T]
  TILELOSS_HOST_DEVICE std::int64_t count() const {
    return has_offsets_ ? offsets_.size() - 1 : length_ > 0 ? rows_ / length_ : 1;
  }
  TILELOSS_HOST_DEVICE std::int64_t begin(std::int64_t b) const { return has_offsets_ ? offset(b) : b * length_; }
  TILELOSS_HOST_DEVICE std::int64_t end(std::int64_t b) const {
    return has_offsets_ ? offset(b + 1) : length_ > 0 ? (b + 1) * length_ : rows_;
  }
  // The sequence of row i: the last one that begins there or before.
  TILELOSS_HOST_DEVICE std::int64_t of(std::int64_t i) const {
    std::int64_t first = 0;
    for (std::int64_t last = count(); last - first > 1;) {
      const std::int64_t middle = first + (last - first) / 2;
      (begin(middle) <= i ? first : last) = middle;
    }
    return first;
  }

 private:
  // Within the rows, also where a device finds out later that they are wrong.
  TILELOSS_HOST_DEVICE std::int64_t offset(std::int64_t b) const {
    const std::int64_t at = offsets_[b];
    return at < 0 ? 0 : at > rows_ ? rows_ : at;
  }

  IntegerInput offsets_;
  bool has_offsets_ = false;
  std::int64_t length_ = 0;
  std::int64_t rows_ = 0;
};

}  // namespace tileloss::impl
