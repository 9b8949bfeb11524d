#include "bench/bench_matrices.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "backends/cpu/isa/isa.h"
#include "support/abi.h"
#include "support/synthetic.h"

namespace tileloss::tools {
namespace {

using reference::NumberFormat;

// Rows made at random; the matrix of logits repeats them. 64 rows of 151936 in bfloat16 are 19 MB, more than L2 and little enough
// that the logits an in-place call has overwritten are put back in 0.1 s, without a second matrix in memory.
constexpr int64_t kPatternRows = 64;
constexpr int kRepetitions = 7;
constexpr uint64_t kTeacherSeed = 0x7465616368ULL;  // keeps its draws apart from the student's

int64_t bytes_of(int64_t rows, int64_t columns, NumberFormat format) {
  return rows * columns * static_cast<int64_t>(reference::format_info(format).bytes);
}

MemoryNeed need_of(const char* purpose, int64_t rows, int64_t columns, NumberFormat format) {
  return {purpose, static_cast<double>(rows) * static_cast<double>(bytes_of(1, columns, format))};
}

void touch(HugeBuffer& buffer, ThreadTeam& team) {
  constexpr int64_t kPart = int64_t{1} << 20;
  team.for_each((buffer.bytes() + kPart - 1) / kPart, [&](int64_t part, int) {
    std::memset(buffer.data() + part * kPart, 0xFF, static_cast<size_t>(std::min(kPart, buffer.bytes() - part * kPart)));
  });
}

// Row `first_draw` + i of the random numbers becomes row i.
void fill_random(HugeBuffer& buffer, int64_t rows, int64_t columns, NumberFormat format, double std, uint64_t seed,
                 int64_t first_draw, ThreadTeam& team) {
  LogitsSpec spec;
  spec.std = std;
  const int64_t stride = bytes_of(1, columns, format);
  team.for_each(rows, [&](int64_t row, int) {
    fill_logits_row(spec, seed, first_draw + row, -1, format, buffer.data() + row * stride, columns);
  });
}

}  // namespace

std::vector<MemoryNeed> LogitsMatrices::needs(int64_t rows, int64_t columns, NumberFormat format, bool in_place,
                                              bool has_teacher) {
  std::vector<MemoryNeed> needs = {need_of("logits", rows, columns, format)};
  if (!in_place) needs.push_back(need_of("dlogits", rows, columns, format));
  if (has_teacher) needs.push_back(need_of("teacher_logits", rows, columns, format));
  needs.push_back(need_of("the pattern of the logits", std::min(rows, kPatternRows), columns, format));
  return needs;
}

LogitsMatrices::LogitsMatrices(int64_t rows, int64_t columns, NumberFormat format, bool in_place, bool has_teacher, uint64_t seed,
                               ThreadTeam& team)
    : rows_(rows),
      columns_(columns),
      format_(format),
      team_(team),
      logits_(bytes_of(rows, columns, format), "logits"),
      dlogits_(in_place ? 0 : logits_.bytes(), "dlogits"),
      teacher_(has_teacher ? logits_.bytes() : 0, "teacher_logits") {
  const int64_t stride = bytes_of(1, columns, format);
  const auto draw_pattern = [&](uint64_t draws) {
    pattern_.resize(static_cast<size_t>(std::min(rows, kPatternRows) * stride));
    team_.for_each(std::min(rows, kPatternRows), [&](int64_t row, int) {
      fill_logits_row(LogitsSpec{}, draws, row, -1, format, pattern_.data() + row * stride, columns);
    });
  };
  if (has_teacher) {
    draw_pattern(seed ^ kTeacherSeed);
    repeat_pattern(teacher_);
  }
  draw_pattern(seed);
  LogitsMatrices::restore();
  touch(dlogits_, team_);
}

void LogitsMatrices::restore() { repeat_pattern(logits_); }

void LogitsMatrices::repeat_pattern(HugeBuffer& matrix) {
  const int64_t stride = bytes_of(1, columns_, format_);
  const int64_t pattern_rows = std::min(rows_, kPatternRows);
  team_.for_each(rows_, [&](int64_t row, int) {
    std::memcpy(matrix.data() + row * stride, pattern_.data() + row % pattern_rows * stride, static_cast<size_t>(stride));
  });
}

void LogitsMatrices::add_to(tileloss_args& args, bool gradients) const {
  args.logits = tileloss_make_matrix(logits(), abi_dtype(format_), rows_, columns_, columns_);
  if (!teacher_.empty()) {
    args.teacher_logits = args.logits;
    args.teacher_logits.data = teacher_.data();
  }
  if (!gradients) return;
  args.dlogits = args.logits;
  args.dlogits.data = dlogits();
}

Roofs LogitsMatrices::measure_roofs(RoofMeter& meter, tileloss_isa /*isa*/) {
  const Roofs roofs = meter.measure(logits(), dlogits_.data(), logits_.bytes(), rows_ * columns_, kRepetitions);
  if (dlogits_.empty()) restore();
  return roofs;
}

double LogitsMatrices::roof_ms(const Roofs& roofs, bool gradients) const {
  const double memory = !gradients ? roofs.read_ms : dlogits_.empty() ? roofs.in_place_ms : roofs.copy_ms;
  if (!teacher_.empty()) return std::max(memory + roofs.read_ms, 2 * roofs.exp_ms);
  return std::max(memory, roofs.exp_ms);
}

std::vector<MemoryNeed> HeadMatrices::needs(int64_t rows, int64_t columns, NumberFormat format, const HeadSettings& settings,
                                            bool has_teacher) {
  std::vector<MemoryNeed> needs = {need_of("hidden", rows, settings.hidden, format),
                                   need_of("head", columns, settings.hidden, format),
                                   need_of("dhidden", rows, settings.hidden, format)};
  if (!settings.is_frozen) needs.push_back(need_of("dhead", columns, settings.hidden, settings.dhead_dtype));
  if (has_teacher) {
    needs.push_back(need_of("teacher_hidden", rows, settings.hidden, format));
    needs.push_back(need_of("teacher_head", columns, settings.hidden, format));
  }
  return needs;
}

HeadMatrices::HeadMatrices(int64_t rows, int64_t columns, NumberFormat format, const HeadSettings& settings, bool has_teacher,
                           uint64_t seed, ThreadTeam& team)
    : rows_(rows),
      columns_(columns),
      format_(format),
      settings_(settings),
      seed_(seed),
      team_(team),
      hidden_(bytes_of(rows, settings.hidden, format), "hidden"),
      head_(bytes_of(columns, settings.hidden, format), "head"),
      dhidden_(hidden_.bytes(), "dhidden"),
      dhead_(settings.is_frozen ? 0 : bytes_of(columns, settings.hidden, settings.dhead_dtype), "dhead"),
      teacher_hidden_(has_teacher ? hidden_.bytes() : 0, "teacher_hidden"),
      teacher_head_(has_teacher ? head_.bytes() : 0, "teacher_head") {
  fill_random(hidden_, rows, settings.hidden, format, 1, seed, 0, team_);
  fill_head(head_, seed);
  if (has_teacher) {
    fill_random(teacher_hidden_, rows, settings.hidden, format, 1, seed ^ kTeacherSeed, 0, team_);
    fill_head(teacher_head_, seed ^ kTeacherSeed);
  }
  touch(dhidden_, team_);
  touch(dhead_, team_);
}

// Logits of variance 1. The numbers are independent, so that it does not matter which way the head lies.
void HeadMatrices::fill_head(HugeBuffer& head, uint64_t seed) {
  const double std = 1 / std::sqrt(static_cast<double>(settings_.hidden));
  fill_random(head, columns_, settings_.hidden, format_, std, seed, rows_, team_);
}

tileloss_matrix HeadMatrices::head_view(const HugeBuffer& buffer, NumberFormat format) const {
  tileloss_matrix view = tileloss_make_matrix(buffer.data(), abi_dtype(format), columns_, settings_.hidden, settings_.hidden);
  if (settings_.is_transposed) {
    view.row_stride = 1;
    view.col_stride = columns_;
  }
  return view;
}

void HeadMatrices::add_to(tileloss_args& args, bool gradients) const {
  args.hidden = tileloss_make_matrix(hidden_.data(), abi_dtype(format_), rows_, settings_.hidden, settings_.hidden);
  args.head = head_view(head_, format_);
  if (!teacher_head_.empty()) {
    args.teacher_hidden = args.hidden;
    args.teacher_hidden.data = teacher_hidden_.data();
    args.teacher_head = head_view(teacher_head_, format_);
  }
  if (!gradients) return;
  args.dhidden = args.hidden;
  args.dhidden.data = dhidden_.data();
  if (!settings_.is_frozen) args.dhead = head_view(dhead_, settings_.dhead_dtype);
}

double HeadMatrices::traffic_bytes(bool gradients) const {
  const int64_t inputs = hidden_.bytes() + head_.bytes() + teacher_hidden_.bytes() + teacher_head_.bytes();
  return static_cast<double>(gradients ? inputs + dhidden_.bytes() + dhead_.bytes() : inputs);
}

double HeadMatrices::flops(bool gradients) const {
  const double product = 2.0 * static_cast<double>(rows_) * static_cast<double>(columns_) * static_cast<double>(settings_.hidden);
  const int logits = teacher_head_.empty() ? 1 : 2;
  return product * (logits + (!gradients ? 0 : settings_.is_frozen ? 1 : 2));
}

// Without a dhead of the head's size the copy goes from one half of the head to the other.
Roofs HeadMatrices::measure_roofs(RoofMeter& meter, tileloss_isa isa) {
  const bool copies = dhead_.bytes() >= head_.bytes();
  Roofs roofs = meter.measure(head_.data(), copies ? dhead_.data() : nullptr, head_.bytes(), rows_ * columns_, kRepetitions);
  if (!copies) fill_head(head_, seed_);
  if (!matmul_roof_) {
    const auto compute = format_ == NumberFormat::kBfloat16 ? impl::cpu::Compute::kBfloat16 : impl::cpu::Compute::kFloat32;
    matmul_roof_.emplace(impl::cpu::kernels(isa).matmul, compute);
  }
  roofs.tflops = matmul_roof_->tflops(team_, kRepetitions);
  return roofs;
}

double HeadMatrices::roof_ms(const Roofs& roofs, bool gradients) const {
  const bool writes = gradients && !settings_.is_frozen;
  const double bytes_per_ms = static_cast<double>(head_.bytes()) * (writes ? 2 / roofs.copy_ms : 1 / roofs.read_ms);
  const double exp_ms = roofs.exp_ms * (teacher_head_.empty() ? 1 : 2);
  return std::max({flops(gradients) / (roofs.tflops * 1e9), traffic_bytes(gradients) / bytes_per_ms, exp_ms});
}

}  // namespace tileloss::tools
