// A case's outputs, as its args have them, compared with an oracle of judge/oracles/oracle.h by the gates of gradcheck.
#pragma once

#include <gtest/gtest.h>
#include <tileloss/tileloss.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "judge/gates/error_metric.h"
#include "judge/gates/linear_metric.h"
#include "judge/oracles/oracle.h"

namespace tileloss::test {

class LogitsCase;

// Those absent from the args are not looked at.
struct CheckResult {
  std::vector<tools::Gate> gates;
  bool mistrusted = false;  // most of the reference gradient rounds to zero
};

// Success, or the gates that failed with value and limit.
testing::AssertionResult agrees(const CheckResult& result);

// Calls its argument with each row in use.
using RowWork = std::function<void(const tools::GivenRow& row)>;
using Rows = std::function<void(const RowWork& work)>;
// `linear`: with the LM head, gets every row's gradient.
CheckResult check_rows(const LogitsCase& c, const tools::Oracle& oracle, const Rows& rows,
                       tools::LinearOracleCase* linear = nullptr);

// What a row is compared with besides its label, and its memory.
struct TargetValues {
  std::vector<double> values;  // GivenRow::target
  std::vector<std::int64_t> ids;
};
using TargetOf = std::function<TargetValues(std::int64_t row)>;
// The case's stored rows but those whose label the function ignores.
CheckResult check_stored_rows(const LogitsCase& c, const tools::Function& function, const tools::Oracle& oracle,
                              const TargetOf& target = {});

inline bool present(const tileloss_vector& vector) { return vector.dtype != TILELOSS_NONE; }
inline float float_at(const tileloss_vector& v, std::int64_t i) { return static_cast<const float*>(v.data)[i * v.stride]; }

}  // namespace tileloss::test
