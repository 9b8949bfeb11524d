// Gives a target every file of FOLDER/accepted and FOLDER/refused: it must take the ones and refuse the others.
#include <cstdio>
#include <string>

#include "tests/fuzz/target.h"
#include "tests/shared/temporary_folder.h"

namespace {

// The number of files for which `expected` is not what happens; `count` grows by the number of files.
int replay(const std::filesystem::path& folder, bool expected, int& count) {
  int wrong = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string bytes = tileloss::test::read_text(entry.path());
    std::printf("%s\n", entry.path().c_str());
    std::fflush(stdout);  // the name of the one that aborts
    if (tileloss::test::accepts(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()) != expected) {
      std::printf("FAILED: was %s\n", expected ? "refused" : "accepted");
      ++wrong;
    }
    ++count;
  }
  return wrong;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
    return 2;
  }
  const std::filesystem::path folder = argv[1];
  int accepted = 0, refused = 0;
  const int wrong = replay(folder / "accepted", true, accepted) + replay(folder / "refused", false, refused);
  std::printf("%d to be accepted, %d to be refused, %d wrong\n", accepted, refused, wrong);
  return wrong == 0 && accepted > 0 && refused > 0 ? 0 : 1;
}
