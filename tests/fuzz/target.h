// A reader of files as a fuzz target. Each *_target.cpp defines one; libFuzzer calls it with what it invents
// (libfuzzer_entry.cpp), the suite with the files of tests/fuzz/corpus (replay_main.cpp).
#ifndef TILELOSS_TESTS_FUZZ_TARGET_H_
#define TILELOSS_TESTS_FUZZ_TARGET_H_

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>

namespace tileloss::test {

// True if the reader takes these bytes, false if it refuses them as it should. Everything else ends the process: another
// exception than a usage error, or a result that is not consistent.
bool accepts(const std::uint8_t* data, std::size_t size);

// A file that lives in memory.
class MemoryFile {
 public:
  MemoryFile(const void* data, std::size_t size);
  ~MemoryFile();
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  int file_ = -1;
  std::filesystem::path path_;
};

// Prints `what` and aborts unless `condition` holds: libFuzzer keeps an input that aborts.
void require(bool condition, const char* what);

// Runs `read`; false if it throws a usage error, which must say something.
bool ends_well(const std::function<void()>& read);

}  // namespace tileloss::test

#endif  // TILELOSS_TESTS_FUZZ_TARGET_H_
