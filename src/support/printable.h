// Text from outside (paths, names in a file, values of a config) as messages and tables show it: it must neither move the
// terminal's cursor nor fill the screen.
#ifndef TILELOSS_SUPPORT_PRINTABLE_H_
#define TILELOSS_SUPPORT_PRINTABLE_H_

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace tileloss::tools {

// Control characters, marks that change the direction of writing, and bytes that are no UTF-8 as \n, \x1b, \u202e; the rest as it
// is, a backslash too: what is escaped already stays as it is.
std::string escaped(std::string_view text);

// The same of a text of at most `limit` bytes; of a longer one its beginning and its end, and how many bytes are left out.
inline constexpr std::size_t kShownBytes = 240;
std::string shown(std::string_view text, std::size_t limit = kShownBytes);

// "a, b, c", of more than 20 names the first ones and how many more there are.
std::string shown_list(std::span<const std::string> names);

}  // namespace tileloss::tools

#endif  // TILELOSS_SUPPORT_PRINTABLE_H_
