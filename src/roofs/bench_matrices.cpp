#include "roofs/bench_matrices.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "backends/cpu/isa/isa.h"
#include "roofs/device_run.h"
#include "support/abi.h"
#include "support/synthetic.h"

namespace tileloss::tools {
namespace {

using oracle::NumberFormat;

// Rows made at random; the matrix of logits repeats them. 64 rows of 151936 in bfloat16 are 19 MB, more than L2 and little enough
// that the logits an in-place call has overwritten are put back in 0.1 s, without a second matrix in memory.
constexpr int64_t kPatternRows = 64;
constexpr int kRepetitions = 7;
constexpr uint64_t kTeacherSeed = 0x7465616368ULL;  // keeps its draws apart from the student's
constexpr uint64_t kLowRankSeed = 0x6c6f776cULL;

void touch(const HugeBuffer& buffer, ThreadTeam& team) {
  constexpr int64_t kPart = int64_t{1} << 20;
  team.for_each((buffer.bytes() + kPart - 1) / kPart, [&](int64_t part, int) {
    std::memset(buffer.data() + part * kPart, 0xFF, static_cast<size_t>(std::min(kPart, buffer.bytes() - part * kPart)));
  });
}

int64_t row_bytes(int64_t columns, NumberFormat format) {
  return columns * static_cast<int64_t>(oracle::format_info(format).bytes);
}

}  // namespace

std::vector<BenchMatrices::Matrix> BenchMatrices::list(const MatricesSpec& spec) {
  std::vector<Matrix> list;
  const auto add = [&](const char* name, tileloss_matrix tileloss_args::*slot, bool is_gradient, int64_t columns) {
    list.push_back({name, slot, is_gradient, false, spec.rows, columns, spec.format, {}});
  };
  const auto add_head = [&](const char* name, tileloss_matrix tileloss_args::*slot, bool is_gradient, NumberFormat format,
                            int64_t columns) {
    list.push_back({name, slot, is_gradient, true, spec.columns, columns, format, {}});
  };
  if (spec.is_linear) {
    add("hidden", &tileloss_args::hidden, false, spec.head.hidden);
    add_head("head", &tileloss_args::head, false, spec.format, spec.head.hidden);
    add("dhidden", &tileloss_args::dhidden, true, spec.head.hidden);
    if (!spec.head.is_frozen) add_head("dhead", &tileloss_args::dhead, true, spec.head.dhead_dtype, spec.head.hidden);
    if (spec.head.rank > 0) {
      add("hidden_r", &tileloss_args::hidden_r, false, spec.head.rank);
      add_head("head_r", &tileloss_args::head_r, false, spec.format, spec.head.rank);
      add("dhidden_r", &tileloss_args::dhidden_r, true, spec.head.rank);
      add_head("dhead_r", &tileloss_args::dhead_r, true, spec.head.dhead_dtype, spec.head.rank);
    }
    if (spec.has_teacher) {
      add("teacher_hidden", &tileloss_args::teacher_hidden, false, spec.head.hidden);
      add_head("teacher_head", &tileloss_args::teacher_head, false, spec.format, spec.head.hidden);
    }
  } else {
    add("logits", &tileloss_args::logits, false, spec.columns);
    if (!spec.in_place) add("dlogits", &tileloss_args::dlogits, true, spec.columns);
    if (spec.has_teacher) add("teacher_logits", &tileloss_args::teacher_logits, false, spec.columns);
  }
  return list;
}

std::vector<MemoryNeed> MatricesSpec::needs() const {
  std::vector<MemoryNeed> needs;
  const auto add = [&](const char* purpose, int64_t count, int64_t bytes) {
    needs.push_back({purpose, static_cast<double>(count) * static_cast<double>(bytes)});
  };
  for (const auto& matrix : BenchMatrices::list(*this)) add(matrix.name, matrix.rows, row_bytes(matrix.columns, matrix.format));
  if (!is_linear) add("the pattern of the logits", std::min(rows, kPatternRows), row_bytes(columns, format));
  return needs;
}

BenchMatrices::BenchMatrices(const MatricesSpec& spec, ThreadTeam& team) : spec_(spec), team_(team), matrices_(list(spec)) {
  for (Matrix& m : matrices_) m.memory = HugeBuffer(m.rows * row_bytes(m.columns, m.format), m.name);
  if (spec.is_linear) {
    fill_random(find("hidden")->data(), spec.rows, spec.head.hidden, 1, spec.seed, 0);
    if (spec.head.rank > 0) {
      fill_random(find("hidden_r")->data(), spec.rows, spec.head.rank, 1, spec.seed ^ kLowRankSeed, 0);
      fill_head("head_r", spec.head.rank, spec.seed ^ kLowRankSeed);
    }
    if (spec.has_teacher) {
      fill_random(find("teacher_hidden")->data(), spec.rows, spec.head.hidden, 1, spec.seed ^ kTeacherSeed, 0);
      fill_head("teacher_head", spec.head.hidden, spec.seed ^ kTeacherSeed);
    }
  } else {
    if (spec.has_teacher) {
      draw_pattern(spec.seed ^ kTeacherSeed);
      repeat_pattern("teacher_logits");
    }
    draw_pattern(spec.seed);
  }
  restore();
  for (const Matrix& matrix : matrices_) {
    if (matrix.is_gradient) touch(matrix.memory, team);
  }
}

const HugeBuffer* BenchMatrices::find(const std::string& name) const {
  for (const Matrix& matrix : matrices_) {
    if (name == matrix.name) return &matrix.memory;
  }
  return nullptr;
}

// Row `first_draw` + i of the random numbers becomes row i.
void BenchMatrices::fill_random(char* data, int64_t rows, int64_t columns, double std, uint64_t seed, int64_t first_draw) {
  LogitsSpec numbers;
  numbers.std = std;
  const int64_t stride = row_bytes(columns, spec_.format);
  team_.for_each(rows, [&](int64_t row, int) {
    fill_logits_row(numbers, seed, first_draw + row, -1, spec_.format, data + row * stride, columns);
  });
}

// Logits of variance 1, and of a low-rank part as much again. The numbers are independent, so that it does not matter which way
// the head lies.
void BenchMatrices::fill_head(const char* name, int64_t columns, uint64_t seed) {
  const double std = 1 / std::sqrt(static_cast<double>(columns));
  fill_random(find(name)->data(), spec_.columns, columns, std, seed, spec_.rows);
}

void BenchMatrices::draw_pattern(uint64_t seed) {
  const int64_t rows = std::min(spec_.rows, kPatternRows);
  pattern_.resize(static_cast<size_t>(rows * row_bytes(spec_.columns, spec_.format)));
  fill_random(pattern_.data(), rows, spec_.columns, 1, seed, 0);
}

void BenchMatrices::repeat_pattern(const char* name) {
  const int64_t stride = row_bytes(spec_.columns, spec_.format);
  const int64_t pattern_rows = std::min(spec_.rows, kPatternRows);
  char* const data = find(name)->data();
  team_.for_each(spec_.rows, [&](int64_t row, int) {
    std::memcpy(data + row * stride, pattern_.data() + row % pattern_rows * stride, static_cast<size_t>(stride));
  });
}

void BenchMatrices::restore() {
  if (spec_.is_linear) {
    fill_head("head", spec_.head.hidden, spec_.seed);
  } else {
    repeat_pattern("logits");
  }
}

void BenchMatrices::add_to(tileloss_args& args, bool gradients) const {
  for (const Matrix& matrix : matrices_) {
    if (matrix.is_gradient && !gradients) continue;
    tileloss_matrix& view = args.*matrix.slot;
    view = tileloss_make_matrix(matrix.memory.data(), abi_dtype(matrix.format), matrix.rows, matrix.columns, matrix.columns);
    if (spec_.head.is_transposed && matrix.is_head) {
      view.row_stride = 1;
      view.col_stride = matrix.rows;
    }
  }
  if (gradients && spec_.in_place) args.dlogits = args.logits;
}

double BenchMatrices::traffic_bytes(bool gradients) const {
  int64_t bytes = gradients && spec_.in_place ? find("logits")->bytes() : 0;
  for (const Matrix& matrix : matrices_) bytes += gradients || !matrix.is_gradient ? matrix.memory.bytes() : 0;
  return static_cast<double>(bytes);
}

double BenchMatrices::flops(bool gradients) const {
  const double logits = 2.0 * static_cast<double>(spec_.rows) * static_cast<double>(spec_.columns);
  const int products = sides() + (!gradients ? 0 : spec_.head.is_frozen ? 1 : 2), of_low_rank = gradients ? 3 : 1;
  return logits * static_cast<double>(spec_.head.hidden * products + spec_.head.rank * of_low_rank);
}

// On the largest matrix. Without a gradient of its size the copy goes from one half of it to the other.
Roofs BenchMatrices::measure_roofs(RoofMeter& meter, tileloss_isa isa) {
  const HugeBuffer& from = *find(spec_.is_linear ? "head" : "logits");
  const HugeBuffer* to = find(spec_.is_linear ? "dhead" : "dlogits");
  if (to != nullptr && to->bytes() < from.bytes()) to = nullptr;
  char* const target = to == nullptr ? nullptr : to->data();
  Roofs roofs = meter.measure(from.data(), target, from.bytes(), spec_.rows * spec_.columns, kRepetitions);
  if (to == nullptr) restore();
  if (!spec_.is_linear) return roofs;
  if (!matmul_roof_) {
    const auto compute = spec_.format == NumberFormat::kBfloat16 ? impl::cpu::Compute::kBfloat16 : impl::cpu::Compute::kFloat32;
    matmul_roof_.emplace(impl::cpu::kernels(isa).matmul, compute);
  }
  roofs.tflops = matmul_roof_->tflops(team_, kRepetitions);
  return roofs;
}

Roofs BenchMatrices::measure_roofs(const Device& device) const {
  return DeviceRun::measure_roofs(device, find(spec_.is_linear ? "head" : "logits")->bytes(), kRepetitions);
}

double BenchMatrices::roof_ms(const Roofs& roofs, bool gradients) const {
  const double exp_ms = sides() * roofs.exp_ms;
  if (!spec_.is_linear) {
    const double memory = !gradients ? roofs.read_ms : spec_.in_place ? roofs.in_place_ms : roofs.copy_ms;
    return std::max(memory + (sides() - 1) * roofs.read_ms, exp_ms);
  }
  const bool writes = gradients && !spec_.head.is_frozen;
  const double bytes_per_ms = static_cast<double>(find("head")->bytes()) * (writes ? 2 / roofs.copy_ms : 1 / roofs.read_ms);
  const double products_ms = roofs.tflops > 0 ? flops(gradients) / (roofs.tflops * 1e9) : 0;
  return std::max({products_ms, traffic_bytes(gradients) / bytes_per_ms, exp_ms});
}

}  // namespace tileloss::tools
