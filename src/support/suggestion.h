// The word that was meant.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tileloss::tools {

// "; did you mean config?", or nothing where no known word is near: a third of its letters differ at most.
std::string did_you_mean(std::string_view given, const std::vector<std::string>& known);

}  // namespace tileloss::tools
