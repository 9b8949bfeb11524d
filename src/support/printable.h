// Text from outside (paths, names in a file, values of a config) as messages show it: it must not fill the screen. Who prints
// them escapes what would move the terminal's cursor: Python's tileloss._core.text.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace tileloss::tools {

// A text of at most `limit` bytes; of a longer one its beginning and its end, and how many bytes are left out.
inline constexpr std::size_t kShownBytes = 240;
std::string shown(std::string_view text, std::size_t limit = kShownBytes);

// "a, b, c", of more than 20 names the first ones and how many more there are.
std::string shown_list(std::span<const std::string> names);

}  // namespace tileloss::tools
