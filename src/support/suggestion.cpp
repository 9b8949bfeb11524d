#include "support/suggestion.h"

#include <algorithm>
#include <cstddef>

namespace tileloss::tools {
namespace {

constexpr size_t kLongestWord = 64;  // of ours; what is longer is none of them

// Letters put in, left out, changed, or two neighbours swapped.
size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) {
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        d[i][j] = i + j;
        continue;
      }
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      const bool is_swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (is_swapped) d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  }
  return d.back().back();
}

}  // namespace

std::string did_you_mean(std::string_view given, const std::vector<std::string>& known) {
  if (given.size() > kLongestWord) return "";
  const std::string* nearest = nullptr;
  size_t least = 0;
  for (const std::string& word : known) {
    const size_t found = distance(given, word);
    if (3 * found > word.size() || (nearest != nullptr && found >= least)) continue;
    nearest = &word;
    least = found;
  }
  return nearest == nullptr ? "" : "; did you mean " + *nearest + "?";
}

}  // namespace tileloss::tools
