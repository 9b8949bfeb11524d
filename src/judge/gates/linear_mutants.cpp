// Wrong gradients with the LM head, made of right ones.
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

double sum_of_squares(std::span<const double> values) {
  double sum = 0;
  for (const double value : values) sum += value * value;
  return sum;
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
    const int64_t rows = stored.which == LinearOutput::kDhidden ? inputs.rows : inputs.valid;
    for (const LinearMutant& mutant : kLinearMutants) {
      judge_one(stored, mutant.name, [&](char* to) { return plant(mutant, stored.view, rows, threads, to); });
    }
  }
  // Of the function's own wrong kernels, in the first rows.
  const std::unique_ptr<Oracle> oracle = make_oracle(config, inputs);
  const std::vector<int64_t> rows = first_used_rows(inputs);
  for (const WrongOracle& wrong : wrong_oracles(config, inputs)) {
    oracle::LinearGradients difference(*inputs.linear->operands, gradients_of(results));
    const std::unique_ptr<OracleRow> row = oracle->new_row();
    bool differs = false;
    for_each_row(inputs, rows, team, [&](const GivenRow& given, int) {
      row->compute(given);
      const WrongRow wrong_row = wrong.compare(*row);
      differs = differs || sum_of_squares(wrong_row.gradient) > 0;
      difference.add(std::span(&given.logits.row, 1), wrong_row.gradient);
    });
    for (const LinearGradient& stored : all) {
      if (!differs) continue;
      judge_one(stored, wrong.kernel().name, [&](char* to) {
        return plant(gradient_of(difference, stored.which), verdict.linear->gradient(stored.which), stored.view, to);
      });
    }
  }
  return verdicts;
}

}  // namespace tileloss::tools
