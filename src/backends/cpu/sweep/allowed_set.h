// The columns that a row's softmax may run over (tileloss_args.allowed), and what lies in columns put side by side and back.
#pragma once

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
    return run_of(kFull, 0, whole) == whole && (rest == 0 || word(whole) == mask(rest));
  }
  bool has_any() const {
    const std::int64_t whole = columns_ / 32;
    return run_of(0, 0, whole) < whole || (columns_ % 32 != 0 && word(whole) != 0);
  }
  std::int64_t count() const { return rank(columns_); }
  // How many of the columns before j are in it.
  std::int64_t rank(std::int64_t j) const {
    std::int64_t n = 0, w = 0;
    for (; w + 2 <= j / 32; w += 2) {
      std::uint64_t two = 0;
      std::memcpy(&two, words_ + w, sizeof two);
      n += count_of(two);
    }
    if (w < j / 32) n += count_of(words_[w]);
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

  static std::uint32_t mask(std::int64_t columns) { return columns >= 32 ? kFull : (std::uint32_t{1} << columns) - 1; }
  // As std::popcount, which is a call where the baseline has no instruction for it.
  static std::int64_t count_of(std::uint64_t bits) {
    bits -= bits >> 1 & 0x5555555555555555;
    bits = (bits & 0x3333333333333333) + (bits >> 2 & 0x3333333333333333);
    return static_cast<std::int64_t>(((bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F) * 0x0101010101010101 >> 56);
  }
  std::uint32_t word(std::int64_t w) const { return words_[w] & mask(columns_ - w * 32); }

  // The end of the run of `bits` that begins at word w, before word `end`.
  std::int64_t run_of(std::uint32_t bits, std::int64_t w, std::int64_t end) const {
    constexpr std::int64_t kStep = 32;  // words between two looks
    const std::uint64_t two = std::uint64_t{bits} << 32 | bits;
    for (; w + kStep <= end; w += kStep) {
      std::uint64_t other[4] = {};
      for (std::int64_t k = 0; k < kStep; k += 8) {
        std::uint64_t pairs[4];
        std::memcpy(pairs, words_ + w + k, sizeof pairs);
        for (int i = 0; i < 4; ++i) other[i] |= pairs[i] ^ two;
      }
      if ((other[0] | other[1] | other[2] | other[3]) != 0) break;
    }
    while (w < end && words_[w] == bits) ++w;
    return w;
  }
  // Runs of words that are all set and of words that are empty take whole(w, end) and empty(w, end), others one(w, bits).
  template <class Whole, class Empty, class One>
  void walk(Whole&& whole, Empty&& empty, One&& one) const {
    const std::int64_t words = columns_ / 32;
    for (std::int64_t w = 0; w < words;) {
      const std::uint32_t bits = words_[w];
      if (bits != 0 && bits != kFull) {
        one(w++, bits);
        continue;
      }
      const std::int64_t end = run_of(bits, w, words);
      bits == 0 ? empty(w, end) : whole(w, end);
      w = end;
    }
    if (columns_ % 32 != 0) one(words, word(words));
  }
  // More than four columns: then all 32 are moved, those that are not in it to where the next one comes.
  static bool is_dense(std::uint32_t bits) {
    for (int i = 0; i < 4; ++i) bits &= bits - 1;
    return bits != 0;
  }

  template <class T>
  std::int64_t gather(const T* from, T* to) const {
    T* const begin = to;
    walk(
        [&](std::int64_t w, std::int64_t end) {
          std::memcpy(to, from + w * 32, static_cast<std::size_t>(end - w) * 32 * sizeof(T));
          to += (end - w) * 32;
        },
        [](std::int64_t, std::int64_t) {},
        [&](std::int64_t w, std::uint32_t bits) {
          const T* const row = from + w * 32;
          if (w * 32 + 32 <= columns_ && is_dense(bits)) {
            T* next = to;
            for (int j = 0; j < 32; ++j) {
              *next = row[j];
              next += bits >> j & 1;
            }
            to = next;
            return;
          }
          for (; bits != 0; bits &= bits - 1) *to++ = row[std::countr_zero(bits)];
        });
    return to - begin;
  }
  template <class T>
  void scatter(const T* from, T* to) const {
    walk(
        [&](std::int64_t w, std::int64_t end) {
          std::memcpy(to + w * 32, from, static_cast<std::size_t>(end - w) * 32 * sizeof(T));
          from += (end - w) * 32;
        },
        [&](std::int64_t w, std::int64_t end) {
          std::memset(to + w * 32, 0, static_cast<std::size_t>(end - w) * 32 * sizeof(T));
        },
        [&](std::int64_t w, std::uint32_t bits) {
          T* const row = to + w * 32;
          if (w * 32 + 32 <= columns_ && is_dense(bits)) {
            const T* next = from;
            for (int j = 0; j < 32; ++j) {
              row[j] = static_cast<T>(*next & (T{0} - static_cast<T>(bits >> j & 1)));
              next += bits >> j & 1;
            }
            from = next;
            return;
          }
          std::memset(row, 0, static_cast<std::size_t>(std::min<std::int64_t>(32, columns_ - w * 32)) * sizeof(T));
          for (; bits != 0; bits &= bits - 1) row[std::countr_zero(bits)] = *from++;
        });
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
