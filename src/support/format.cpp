#include "support/format.h"

namespace tileloss::tools {

std::string format_arguments(fmt::string_view text, fmt::format_args arguments) { return fmt::vformat(text, arguments); }

}  // namespace tileloss::tools
