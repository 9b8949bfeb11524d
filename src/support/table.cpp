#include "support/table.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>

namespace tileloss::tools {
namespace {

bool is_number(const std::string& cell) {
  char* end = nullptr;
  std::strtod(cell.c_str(), &end);  // takes "nan" and "inf" as well
  return !cell.empty() && end == cell.c_str() + cell.size();
}

}  // namespace

std::string Table::text() const {
  const size_t columns = rows_.front().size();
  std::vector<size_t> width(columns, 0);
  for (const auto& row : rows_) {
    for (size_t c = 0; c < columns; ++c) width[c] = std::max(width[c], row[c].size());
  }
  std::string text;
  for (size_t r = 0; r < rows_.size(); ++r) {
    std::string line;
    for (size_t c = 0; c < columns; ++c) {
      const std::string& cell = rows_[r][c];
      const std::string padding(width[c] - cell.size(), ' ');
      line += c == 0 ? "" : "  ";
      line += r > 0 && is_number(cell) ? padding + cell : cell + padding;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
    if (r == 0) {
      for (size_t c = 0; c < columns; ++c) text += (c == 0 ? "" : "  ") + std::string(width[c], '-');
      text += "\n";
    }
  }
  return text;
}

}  // namespace tileloss::tools
