#include "support/memory.h"

#include <gtest/gtest.h>

namespace tileloss::tools {
namespace {

TEST(ParseBytes, TakesPlainBytesAndBinaryUnits) {
  EXPECT_EQ(parse_bytes("0"), 0);
  EXPECT_EQ(parse_bytes("65536"), 65536);
  EXPECT_EQ(parse_bytes("3KiB"), 3072);
  EXPECT_EQ(parse_bytes("64MiB"), 67'108'864);
  EXPECT_EQ(parse_bytes("2GiB"), 2'147'483'648);
  for (const char* wrong : {"", "MiB", "64MB", "64mib", "1.5GiB", "-1", "64 MiB", "9000000000GiB", "99999999999999999999"})
    EXPECT_FALSE(parse_bytes(wrong)) << wrong;
}

}  // namespace
}  // namespace tileloss::tools
