// The tools' JSON: nlohmann's ordered_json keeps the fields in the order they were written; NaN and infinities become null.
// Declared only: who makes or reads one includes <nlohmann/json.hpp>, which takes seconds to compile.
#pragma once

#include <nlohmann/json_fwd.hpp>

namespace tileloss::tools {

using Json = nlohmann::ordered_json;

}  // namespace tileloss::tools
