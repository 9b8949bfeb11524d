// What the values of flags may be. The messages say what was expected and what was given.
#ifndef TILELOSS_SUPPORT_FLAGS_H_
#define TILELOSS_SUPPORT_FLAGS_H_

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

namespace tileloss::tools {

// Decimal, as in a config: for transform(), which then hands "10" on for "010". CLI11 by itself would read that as octal.
CLI::Validator integer_in(int64_t minimum, int64_t maximum);

CLI::Validator one_of(const std::vector<std::string>& names);

}  // namespace tileloss::tools

#endif  // TILELOSS_SUPPORT_FLAGS_H_
