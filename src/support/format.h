// fmt::format with fmt's own part compiled once, in format.cpp: as a header alone, which is all that every system
// has of it, it took two seconds in each file.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>

namespace tileloss::tools {

std::string format_arguments(fmt::string_view text, fmt::format_args arguments);

template <class... Arguments>
std::string formatted(fmt::format_string<Arguments...> text, Arguments&&... arguments) {
  return format_arguments(text, fmt::make_format_args(arguments...));
}

}  // namespace tileloss::tools
