// What may not be among the columns that a sparse teacher knows of a row, and what is said of it.
#pragma once

#include <string>

#include "losses/inputs.h"
#include "schema/status.h"

namespace tileloss::impl {

struct KnownEntry {
  std::int64_t row = 0, k = 0, id = 0;
  float log_q = 0;

  TILELOSS_HOST_DEVICE KnownEntry(const tileloss_matrix& ids, const tileloss_matrix& logprobs, std::int64_t i, std::int64_t at)
      : row(i), k(at), id(integer_at(ids, i, at)), log_q(id < 0 ? 0 : number_at(logprobs, i, at)) {}
  KnownEntry() = default;

  TILELOSS_HOST_DEVICE bool is_column_wrong(std::int64_t columns) const { return id >= columns; }
  TILELOSS_HOST_DEVICE bool is_log_wrong() const { return log_q > 0.001F; }  // more than rounding may make of 0
};

// Of an entry that is wrong by itself, or, if `is_twice`, whose column another one has, too.
inline Status bad_entry(const KnownEntry& e, std::int64_t columns, bool is_twice) {
  const std::string row = "[" + std::to_string(e.row), entry = row + "," + std::to_string(e.k) + "]", id = std::to_string(e.id);
  if (is_twice) return expected("teacher_ids" + row + "]", "distinct columns", id + " twice");
  if (e.is_column_wrong(columns))
    return expected("teacher_ids" + entry, "a column < " + std::to_string(columns) + ", or a negative number for none", id);
  return expected("teacher_logprobs" + entry, "the logarithm of a probability, <= 0 but for rounding", std::to_string(e.log_q));
}

}  // namespace tileloss::impl
