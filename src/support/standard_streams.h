// The descriptors 0, 1 and 2, and text on standard error.
#ifndef TILELOSS_SUPPORT_STANDARD_STREAMS_H_
#define TILELOSS_SUPPORT_STANDARD_STREAMS_H_

#include <string_view>

namespace tileloss::tools {

// First of all: whoever opens a file while one of the three is closed gets its number, and the file what is printed there. A
// closed one becomes a /dev/null that is open for reading: input ends at once, and output fails as it would on the closed one.
void occupy_standard_descriptors();

// Never throws: a program whose standard error takes nothing keeps its work and its exit code. fmt::print(stderr, ...) throws.
void write_stderr(std::string_view text) noexcept;

}  // namespace tileloss::tools

#endif  // TILELOSS_SUPPORT_STANDARD_STREAMS_H_
