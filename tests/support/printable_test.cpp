#include "support/printable.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/exit_codes.h"
#include "support/suggestion.h"

namespace tileloss::tools {
namespace {

TEST(Printable, WhatMovesTheCursorOrTurnsTheWritingIsEscaped) {
  for (const auto& [text, expected] : std::vector<std::pair<std::string, std::string>>{
           {"logits", "logits"},
           {"a\nb\rc\td", "a\\nb\\rc\\td"},
           {std::string("\0\x1b[2J\x07\x7f", 7), "\\x00\\x1b[2J\\x07\\x7f"},
           {"gr\xc3\xbc\xc3\x9f \xe6\xbc\xa2 \xf0\x9f\x98\x80", "gr\xc3\xbc\xc3\x9f \xe6\xbc\xa2 \xf0\x9f\x98\x80"},
           {"\xc2\x9b"
            "31m",
            "\\u009b31m"},                                                     // C1: an escape sequence in one character
           {"\xe2\x80\xae\xe2\x81\xa6\xe2\x80\xa8", "\\u202e\\u2066\\u2028"},  // override, isolate, line separator
           {"\xc3", "\\xc3"},                                                  // cut short
           {"\xc0\x9b\xed\xa0\x80\xff", "\\xc0\\x9b\\xed\\xa0\\x80\\xff"}}) {  // too long a form, a surrogate, no UTF-8
    EXPECT_EQ(escaped(text), expected);
    EXPECT_EQ(escaped(escaped(text)), expected);
    EXPECT_EQ(shown(text), expected);
  }
}

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
  std::vector<std::string> names(20, "a\n");
  EXPECT_EQ(shown_list(names).size(), 20 * 3 + 19 * 2);
  names.resize(1'000'000, "b");
  EXPECT_NE(shown_list(names).find(", a\\n and 999980 more"), std::string::npos) << shown_list(names);
}

TEST(Printable, ErrorsAreOneLine) { EXPECT_STREQ(ToolError(kExitUsage, "a\nb\x1b").what(), "a\\nb\\x1b"); }

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
