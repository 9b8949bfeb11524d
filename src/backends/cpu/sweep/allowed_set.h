// The columns that a row's softmax may run over (tileloss_args.allowed), and what lies in columns put side by side and back.
#ifndef TILELOSS_BACKENDS_CPU_SWEEP_ALLOWED_SET_H_
#define TILELOSS_BACKENDS_CPU_SWEEP_ALLOWED_SET_H_

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "core/row_stats.h"

namespace tileloss::impl::cpu {

// Of columns [0, columns): bit j % 32 of word j / 32. Bits further on are not looked at.
class AllowedSet {
 public:
  AllowedSet(const std::uint32_t* words, std::int64_t columns) : words_(words), columns_(columns) {}

  bool has(std::int64_t j) const { return (words_[j / 32] >> (j % 32) & 1) != 0; }
  bool is_full() const {
    const std::int64_t whole = columns_ / 32, rest = columns_ % 32;
    for (std::int64_t w = 0; w < whole; w += kStep) {
      std::uint32_t all = kFull;
      for (std::int64_t k = w; k < std::min(whole, w + kStep); ++k) all &= words_[k];
      if (all != kFull) return false;
    }
    return rest == 0 || word(whole) == mask(rest);
  }
  bool has_any() const {
    for (std::int64_t w = 0; w * 32 < columns_; ++w) {
      if (word(w) != 0) return true;
    }
    return false;
  }
  std::int64_t count() const { return rank(columns_); }
  // How many of the columns before j are in it.
  std::int64_t rank(std::int64_t j) const {
    std::int64_t n = 0;
    for (std::int64_t w = 0; w < j / 32; ++w) n += count_of(words_[w]);
    return j % 32 == 0 ? n : n + count_of(words_[j / 32] & mask(j % 32));
  }
  // The column before which there are `rank` of them.
  std::int64_t select(std::int64_t rank) const {
    std::int64_t w = 0;
    for (; rank >= count_of(words_[w]); ++w) rank -= count_of(words_[w]);
    std::uint32_t bits = words_[w];
    for (; rank > 0; --rank) bits &= bits - 1;
    return w * 32 + std::countr_zero(bits);
  }
  // visit(j) of the columns that are in it, or of those that are not.
  template <class Visit>
  void for_each(bool is_in, Visit&& visit) const {
    for (std::int64_t w = 0; w * 32 < columns_; ++w) {
      std::uint32_t bits = is_in ? word(w) : ~word(w) & mask(columns_ - w * 32);
      for (; bits != 0; bits &= bits - 1) visit(w * 32 + std::countr_zero(bits));
    }
  }
  // Its number of columns, and the sum of their class weights; null: 1 each.
  RowClasses classes(const float* class_weights) const {
    RowClasses c;
    c.count = c.weight = static_cast<double>(count());
    if (class_weights == nullptr) return c;
    c.weight = 0;
    for_each(true, [&](std::int64_t j) { c.weight += static_cast<double>(class_weights[j]); });
    return c;
  }

  // What lies in its columns of `from`, elements of so many bytes, side by side; returns how many.
  std::int64_t gather(std::int64_t bytes, const void* from, void* to) const {
    return bytes == 2 ? gather(static_cast<const std::uint16_t*>(from), static_cast<std::uint16_t*>(to))
                      : gather(static_cast<const std::uint32_t*>(from), static_cast<std::uint32_t*>(to));
  }
  // Back into its columns of `to`, apart from `from`; others become 0.
  void scatter(std::int64_t bytes, const void* from, void* to) const {
    bytes == 2 ? scatter(static_cast<const std::uint16_t*>(from), static_cast<std::uint16_t*>(to))
               : scatter(static_cast<const std::uint32_t*>(from), static_cast<std::uint32_t*>(to));
  }

 private:
  static constexpr std::uint32_t kFull = ~std::uint32_t{0};
  static constexpr std::int64_t kStep = 64;  // words between two looks

  static std::uint32_t mask(std::int64_t columns) { return columns >= 32 ? kFull : (std::uint32_t{1} << columns) - 1; }
  static std::int64_t count_of(std::uint32_t bits) { return bits == 0 ? 0 : bits == kFull ? 32 : std::popcount(bits); }
  std::uint32_t word(std::int64_t w) const { return words_[w] & mask(columns_ - w * 32); }

  template <class T>
  std::int64_t gather(const T* from, T* to) const {
    T* const begin = to;
    for (std::int64_t w = 0; w * 32 < columns_; ++w, from += 32) {
      std::uint32_t bits = word(w);
      if (bits == kFull) {
        std::memcpy(to, from, 32 * sizeof(T));
        to += 32;
        continue;
      }
      for (; bits != 0; bits &= bits - 1) *to++ = from[std::countr_zero(bits)];
    }
    return to - begin;
  }
  template <class T>
  void scatter(const T* from, T* to) const {
    for (std::int64_t w = 0; w * 32 < columns_; ++w, to += 32) {
      std::uint32_t bits = word(w);
      if (bits == kFull) {
        std::memcpy(to, from, 32 * sizeof(T));
        from += 32;
        continue;
      }
      std::memset(to, 0, static_cast<std::size_t>(std::min<std::int64_t>(32, columns_ - w * 32)) * sizeof(T));
      for (; bits != 0; bits &= bits - 1) to[std::countr_zero(bits)] = *from++;
    }
  }

  const std::uint32_t* words_;
  std::int64_t columns_;
};

// Every row's set.
struct AllowedSets {
  const std::uint32_t* words = nullptr;  // null: all columns of every row
  std::int64_t row_stride = 0;
  bool has_labels = false;             // labels are given: one that is nowhere is not allowed
  const std::int64_t* rows = nullptr;  // those that belong to the job's; null: the same

  explicit operator bool() const { return words != nullptr; }
  // A row's columns from `begin`, a multiple of 32, on.
  AllowedSet operator()(std::int64_t i, std::int64_t begin, std::int64_t columns) const {
    return {words + (rows == nullptr ? i : rows[i]) * row_stride + begin / 32, columns};
  }
};

}  // namespace tileloss::impl::cpu

#endif  // TILELOSS_BACKENDS_CPU_SWEEP_ALLOWED_SET_H_
