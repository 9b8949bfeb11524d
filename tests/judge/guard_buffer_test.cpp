#include "judge/strict/guard_buffer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <utility>

#include "oracle/number_formats.h"

namespace tileloss::tools {
namespace {

// The compiler must not drop these accesses.
float read_at(const GuardBuffer& buffer, std::int64_t index) { return static_cast<volatile float*>(buffer.data())[index]; }
void write_at(const GuardBuffer& buffer, std::int64_t index) { static_cast<volatile float*>(buffer.data())[index] = 1.0F; }

class GuardBufferDeathTest : public testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

TEST_F(GuardBufferDeathTest, OneElementPastTheEndFaults) {
  const GuardBuffer buffer(33 * sizeof(float), Flush::kRight);
  EXPECT_TRUE(std::isnan(read_at(buffer, 0)));
  EXPECT_TRUE(std::isnan(read_at(buffer, 32)));
  EXPECT_DEATH(read_at(buffer, 33), "");
  EXPECT_DEATH(write_at(buffer, 33), "");
}

TEST_F(GuardBufferDeathTest, OneElementBeforeTheStartFaults) {
  const GuardBuffer buffer(33 * sizeof(float), Flush::kLeft);
  EXPECT_TRUE(std::isnan(read_at(buffer, 0)));
  EXPECT_DEATH(read_at(buffer, -1), "");
  EXPECT_DEATH(write_at(buffer, -1), "");
}

TEST_F(GuardBufferDeathTest, AReadOnlyBufferCannotBeWritten) {
  GuardBuffer buffer(100, Flush::kRight);
  buffer.as<float>()[0] = 2.0F;
  buffer.make_read_only();
  EXPECT_EQ(read_at(buffer, 0), 2.0F);
  EXPECT_DEATH(write_at(buffer, 0), "");
}

TEST_F(GuardBufferDeathTest, AnEmptyBufferHasNoElementAtAll) {
  EXPECT_DEATH(read_at(GuardBuffer(0, Flush::kRight), 0), "");
  EXPECT_DEATH(read_at(GuardBuffer(0, Flush::kLeft), -1), "");
}

TEST(GuardBuffer, StartsAsNaNInEveryFormat) {
  const GuardBuffer buffer(64, Flush::kRight);
  using oracle::NumberFormat;
  for (const NumberFormat format : {NumberFormat::kFloat32, NumberFormat::kBfloat16, NumberFormat::kFloat16}) {
    EXPECT_TRUE(std::isnan(oracle::decode_at(format, buffer.data(), 5)));
  }
  EXPECT_EQ(buffer.as<std::int64_t>()[0], -1);
}

TEST(GuardBuffer, MisalignmentMovesTheDataAndLeavesACanary) {
  for (const Flush flush : {Flush::kRight, Flush::kLeft}) {
    const GuardBuffer aligned(1024, flush);
    const GuardBuffer moved(1024, flush, 6);
    const auto offset = [](const GuardBuffer& buffer) { return reinterpret_cast<std::uintptr_t>(buffer.data()) % 64; };
    EXPECT_EQ(offset(aligned), 0U);
    EXPECT_EQ(offset(moved), flush == Flush::kLeft ? 6U : 58U);
    EXPECT_TRUE(moved.canary_intact());
    moved.as<unsigned char>()[flush == Flush::kLeft ? -1 : 1024] = 0;
    EXPECT_FALSE(moved.canary_intact());
  }
}

TEST(GuardBuffer, MovesWithoutCopying) {
  GuardBuffer buffer(16, Flush::kLeft);
  const void* data = buffer.data();
  GuardBuffer other = std::move(buffer);
  EXPECT_EQ(other.data(), data);
  EXPECT_EQ(other.bytes(), 16U);
  GuardBuffer third;
  EXPECT_FALSE(third);
  third = std::move(other);
  EXPECT_EQ(third.data(), data);
}

TEST(GuardBuffer, RefillsWithOnes) {
  GuardBuffer buffer(8, Flush::kRight);
  buffer.as<std::uint64_t>()[0] = 0;
  buffer.fill_ones();
  EXPECT_EQ(buffer.as<std::uint64_t>()[0], ~0ULL);
}

}  // namespace
}  // namespace tileloss::tools
