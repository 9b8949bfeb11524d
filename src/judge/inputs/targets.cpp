#include "judge/inputs/targets.h"

#include <algorithm>

namespace tileloss::tools {
namespace {

const SpecialRow* special_row(std::span<const SpecialRow> rows, const std::vector<std::string>& names, int64_t row) {
  const size_t turn = static_cast<size_t>(row) % (names.size() + 1);
  if (turn == 0) return nullptr;
  return &*std::find_if(rows.begin(), rows.end(), [&](const SpecialRow& special) { return special.name == names[turn - 1]; });
}

void store(const TargetRow& row, int64_t i, CheckInputs& inputs) {
  TargetTensors& target = inputs.target;
  if (target.argument != nullptr) return oracle::encode_row(target.format, row.target, inputs.target_row(i));
  const auto first = static_cast<std::ptrdiff_t>(i * target.columns);
  std::copy(row.ids.begin(), row.ids.end(), target.ids.begin() + first);
  std::transform(row.target.begin(), row.target.end(), target.log_q.begin() + first,
                 [](double value) { return static_cast<float>(value); });
}

}  // namespace

void read_special_rows(ConfigReader& source, const GradcheckConfig& config, std::span<const SpecialRow> rows,
                       std::vector<std::string>& out) {
  if (config.source.is_file || config.is_linear()) return;
  std::vector<std::string> names;
  for (const SpecialRow& row : rows) names.emplace_back(row.name);
  out = source.list("special_rows", {}, names);
}

void draw_target_rows(std::span<const SpecialRow> rows, const std::vector<std::string>& names, ThreadTeam& team,
                      CheckInputs& inputs, const std::function<void(int64_t row, TargetRow& out)>& draw) {
  team.for_each(inputs.rows, [&](int64_t i, int) {
    if (inputs.is_ignored(i)) return;
    TargetRow row;
    row.label = static_cast<size_t>(inputs.labels[static_cast<size_t>(i)]);
    row.logits.resize(static_cast<size_t>(inputs.valid));
    if (!inputs.linear) oracle::decode_row(inputs.format, inputs.row(i), row.logits);
    draw(i, row);
    if (const SpecialRow* special = special_row(rows, names, i)) {
      special->make(row);
      oracle::encode_row(inputs.format, row.logits, inputs.row(i));
    }
    store(row, i, inputs);
  });
}

}  // namespace tileloss::tools
