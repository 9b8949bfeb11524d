// Terminal tables: columns padded to their widest cell, numbers to the right.
#ifndef TILELOSS_SUPPORT_TABLE_H_
#define TILELOSS_SUPPORT_TABLE_H_

#include <string>
#include <vector>

namespace tileloss::tools {

class Table {
 public:
  explicit Table(std::vector<std::string> header) : rows_{std::move(header)} {}
  // As many cells as the header has.
  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  // One line per row and one below the header, each ended by a newline; no trailing spaces.
  std::string text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace tileloss::tools

#endif  // TILELOSS_SUPPORT_TABLE_H_
