#include "support/flags.h"

#include <algorithm>
#include <charconv>

#include "support/format.h"
#include "support/printable.h"

namespace tileloss::tools {

CLI::Validator integer_in(int64_t minimum, int64_t maximum) {
  const auto check = [minimum, maximum](std::string& text) {
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value < minimum || value > maximum) {
      return formatted("expected an integer from {} to {}, got '{}'", minimum, maximum, shown(text));
    }
    text = fmt::to_string(value);
    return std::string();
  };
  return {check, formatted("{} to {}", minimum, maximum)};
}

CLI::Validator one_of(const std::vector<std::string>& names) {
  const auto check = [names](std::string& text) {
    if (std::find(names.begin(), names.end(), text) != names.end()) return std::string();
    return formatted("expected one of {}, got '{}'", fmt::join(names, ", "), shown(text));
  };
  return {check, formatted("{{{}}}", fmt::join(names, ","))};
}

}  // namespace tileloss::tools
