// Wrong gradients with the LM head, made of right ones.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>

#include "judge/gates/judge.h"
#include "judge/inputs/checked_function.h"

namespace tileloss::tools {
namespace {

using oracle::StoredMatrix;

struct LinearMutant {
  const char* name;
  double (*apply)(int64_t row, int64_t rows, double value);
};

// Rows of dhidden are tokens, rows of dhead and dbias classes: what is dropped are tiles of either.
constexpr int64_t kDroppedRows = 16;

constexpr std::array kLinearMutants{
    LinearMutant{"halved", [](int64_t, int64_t, double value) { return 0.5 * value; }},
    LinearMutant{"negated", [](int64_t, int64_t, double value) { return -value; }},
    LinearMutant{"first_tile_dropped", [](int64_t row, int64_t, double value) { return row < kDroppedRows ? 0 : value; }},
    LinearMutant{"last_tile_dropped",
                 [](int64_t row, int64_t rows, double value) { return row >= rows - kDroppedRows ? 0 : value; }},
};

// `rows`: those that may hold a gradient. True if a bit of one that is not NaN changed.
bool plant(const LinearMutant& mutant, const StoredMatrix& from, int64_t rows, int threads, char* to) {
  std::atomic<bool> changed = false;
  oracle::split_work(threads, rows, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = 0; j < from.cols; ++j) {
        const double value = from.at(i, j), altered = mutant.apply(i, rows, value);
        if (altered == value) continue;
        oracle::encode_at(from.format, to, i * from.row_stride + j * from.col_stride, altered);
        changed = true;
      }
    }
  });
  return changed;
}

// As far as there are columns in both, the other's in place of its own.
bool plant(const StoredMatrix& other, const StoredMatrix& from, int64_t rows, char* to) {
  bool changed = false;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < std::min(from.cols, other.cols); ++j) {
      const double value = other.at(i, j);
      oracle::encode_at(from.format, to, i * from.row_stride + j * from.col_stride, value);
      changed |= value != from.at(i, j);
    }
  }
  return changed;
}

double sum_of_squares(std::span<const double> values) {
  double sum = 0;
  for (const double value : values) sum += value * value;
  return sum;
}

constexpr LinearOutput other_part(LinearOutput which) {
  switch (which) {
    case LinearOutput::kDhidden: return LinearOutput::kDhiddenR;
    case LinearOutput::kDhiddenR: return LinearOutput::kDhidden;
    case LinearOutput::kDhead: return LinearOutput::kDheadR;
    default: return LinearOutput::kDhead;
  }
}

// What the dlogits of a row have over the right ones, if those of the last classes count nowhere.
std::vector<double> without_last_block(const OracleRow& row) {
  std::vector<double> difference = row.values().gradient.gradient;
  const auto last = std::min(std::ssize(difference), kMutantTile);
  std::fill(difference.begin(), difference.end() - last, 0);
  for (double& value : difference) value = -value;
  return difference;
}

// A wrong kernel's: the right one and what the oracle has of the difference. True if that is more than the gates allow.
bool plant(std::span<const double> difference, std::span<const double> right, const StoredMatrix& from, char* to) {
  for (int64_t i = 0; i < std::ssize(difference); ++i) {
    const int64_t row = i / from.cols, col = i % from.cols;
    oracle::encode_at(from.format, to, row * from.row_stride + col * from.col_stride,
                      from.at(row, col) + difference[static_cast<size_t>(i)]);
  }
  constexpr double kVisible = 0x1p-6;
  return sum_of_squares(difference) > kVisible * kVisible * sum_of_squares(right);
}

}  // namespace

std::vector<MutantVerdict> judge_linear_mutants(const GradcheckConfig& config, const CheckInputs& inputs,
                                                const KernelResults& results, const Verdict& verdict, ThreadTeam& team) {
  std::vector<MutantVerdict> verdicts;
  const std::vector<LinearGradient>& all = results.gradients.front().linear;
  const auto judge_one = [&](const LinearGradient& stored, const char* mutant, const auto& plant_in) {
    HugeBuffer copy(stored.data.bytes(), "a mutant's copy");
    std::memcpy(copy.data(), stored.data.data(), static_cast<size_t>(stored.data.bytes()));
    StoredMatrix altered = stored.view;
    altered.data = copy.data();
    MutantVerdict& result = verdicts.emplace_back();
    result.name = name_of(stored.which) + std::string("_") + mutant;
    result.planted = plant_in(copy.data());
    for (const Gate& gate : verdict.linear->judge(stored.which, altered, stored.before_view())) {
      if (!gate.pass) result.caught_by.push_back(gate.name);
    }
  };
  const int threads = inputs.linear->operands->threads;
  for (const LinearGradient& stored : all) {
    const int64_t rows = is_by_token(stored.which) ? inputs.rows : inputs.valid;
    for (const LinearMutant& mutant : kLinearMutants) {
      judge_one(stored, mutant.name, [&](char* to) { return plant(mutant, stored.view, rows, threads, to); });
    }
  }
  for (const LinearGradient& stored : all) {
    const auto other = std::ranges::find(all, other_part(stored.which), &LinearGradient::which);
    if (stored.which == LinearOutput::kDbias || other == all.end()) continue;
    const int64_t rows = is_by_token(stored.which) ? inputs.rows : inputs.valid;
    judge_one(stored, "of_other_part", [&](char* to) { return plant(other->view, stored.view, rows, to); });
  }
  // Of the function's own wrong kernels, and of sums over classes without the last of them, in the first rows.
  const std::unique_ptr<Oracle> oracle = make_oracle(config, inputs);
  const std::vector<int64_t> rows = first_used_rows(inputs);
  const auto judge_wrong = [&](const char* name, const auto& set_wrong, const auto& is_wrong) {
    oracle::LinearGradients difference(*inputs.linear->operands, gradients_of(results));
    const std::unique_ptr<OracleRow> row = oracle->new_row();
    bool differs = false;
    for_each_row(inputs, rows, team, [&](const GivenRow& given, int) {
      row->compute(given);
      const std::vector<double> gradient = set_wrong(*row);
      differs = differs || sum_of_squares(gradient) > 0;
      difference.add(std::span(&given.logits.row, 1), gradient);
    });
    for (const LinearGradient& stored : all) {
      if (!differs || !is_wrong(stored.which)) continue;
      judge_one(stored, name, [&](char* to) {
        return plant(difference.gradient(stored.which), verdict.linear->gradient(stored.which), stored.view, to);
      });
    }
  };
  if (inputs.linear->low_rank != nullptr) {
    judge_wrong("block_left_out", without_last_block, [](LinearOutput which) { return is_by_token(which); });
  }
  for (const WrongOracle& wrong : wrong_oracles(config, inputs)) {
    judge_wrong(
        wrong.kernel().name, [&](const OracleRow& row) { return wrong.compare(row).gradient; },
        [](LinearOutput) { return true; });
  }
  return verdicts;
}

}  // namespace tileloss::tools
