#include "support/printable.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/suggestion.h"

namespace tileloss::tools {
namespace {

TEST(Printable, LongTextIsShownByItsEnds) {
  EXPECT_EQ(shown("0123456789", 10), "0123456789");
  EXPECT_EQ(shown("0123456789x", 9), "012345...[2 bytes]...89x");
  EXPECT_LT(shown(std::string(98'000'000, '\x1b')).size(), 5 * kShownBytes);
  // Neither end cuts a character in two.
  std::string text;
  for (int i = 0; i < 100; ++i) text += "\xe6\xbc\xa2";
  for (size_t limit = 0; limit < 20; ++limit) EXPECT_EQ(shown(text, limit).find('\\'), std::string::npos) << limit;
}

TEST(Printable, ManyNamesAreCounted) {
  std::vector<std::string> names(20, "a");
  EXPECT_EQ(shown_list(names).size(), 20 + 19 * 2);
  names.resize(1'000'000, "b");
  EXPECT_NE(shown_list(names).find(", a and 999980 more"), std::string::npos) << shown_list(names);
}

TEST(Suggestion, IsTheNearestKnownWord) {
  const std::vector<std::string> known = {"seed", "seq_len", "source", "vocab_size"};
  EXPECT_EQ(did_you_mean("sede", known), "; did you mean seed?");
  EXPECT_EQ(did_you_mean("seqlen", known), "; did you mean seq_len?");
  EXPECT_EQ(did_you_mean("vocabsize", known), "; did you mean vocab_size?");
  for (const std::string& none : {std::string(), std::string("steps"), std::string("x"), std::string(1 << 20, 's')}) {
    EXPECT_EQ(did_you_mean(none, known), "") << none.size();
  }
}

}  // namespace
}  // namespace tileloss::tools
