#include "support/result_writer.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>

#include "support/exit_codes.h"
#include "tests/shared/resource_limit.h"
#include "tests/shared/temporary_folder.h"

namespace tileloss::tools {
namespace {

using test::FileSizeLimit;
using test::read_text;
using test::TemporaryFolder;

TEST(ResultWriter, AppendsOneObjectPerLine) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "r.jsonl";
  ResultWriter(path).write({{"a", 1}});
  ResultWriter(path).write({{"b", "two\nlines"}});
  EXPECT_EQ(read_text(path), "{\"a\":1}\n{\"b\":\"two\\nlines\"}\n");
  const ResultFile file = read_results(path);
  ASSERT_EQ(file.lines.size(), 2U);
  EXPECT_EQ(file.lines[1]["b"], "two\nlines");
  EXPECT_EQ(file.torn_bytes, 0);
}

// Who called the program reads along; who has gone away changes nothing.
TEST(ResultWriter, CopiesLinesToADescriptor) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "r.jsonl";
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  copy_results_to(ends[1]);
  ResultWriter(path).write({{"a", 1}});
  ResultWriter(std::nullopt).write({{"b", 2}});
  char text[64] = {};
  EXPECT_EQ(read(ends[0], text, sizeof text), 16);
  EXPECT_STREQ(text, "{\"a\":1}\n{\"b\":2}\n");
  close(ends[0]);
  ResultWriter(path).write({{"c", 3}});
  EXPECT_EQ(read_text(path), "{\"a\":1}\n{\"c\":3}\n");
  close(ends[1]);
}

TEST(ResultWriter, DropsATornLastLineAndKeepsTheRest) {
  const TemporaryFolder folder;
  for (const std::string torn : {"{", "{\"to", "{\"tool\":\"", "{\"tool\":\"sweep\",\"case\":{\"a\":1}"}) {
    const auto path = folder.write("r.jsonl", "{\"a\":1}\n{\"b\":2}\n" + torn);
    EXPECT_EQ(read_results(path).torn_bytes, std::ssize(torn));
    testing::internal::CaptureStderr();
    ResultWriter(path).write({{"d", 4}});
    const std::string warning = testing::internal::GetCapturedStderr();
    EXPECT_NE(warning.find("torn last line of " + std::to_string(torn.size()) + " bytes"), std::string::npos) << warning;
    EXPECT_EQ(read_text(path), "{\"a\":1}\n{\"b\":2}\n{\"d\":4}\n");
  }
}

// The writer was killed between the line and its newline, or an editor left it out.
TEST(ResultWriter, KeepsACompleteLastLineWithoutItsNewline) {
  const TemporaryFolder folder;
  const auto path = folder.write("r.jsonl", "{\"a\":1}\n{\"b\":2}");
  EXPECT_EQ(read_results(path).lines.size(), 2U);
  EXPECT_EQ(read_results(path).torn_bytes, 0);
  testing::internal::CaptureStderr();
  ResultWriter(path).write({{"d", 4}});
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(read_text(path), "{\"a\":1}\n{\"b\":2}\n{\"d\":4}\n");
}

TEST(ResultWriter, RefusesALastLineThatIsNotTheStartOfAResultAndLeavesTheFileAlone) {
  for (const std::string text : {"precious data without newline", "{\"a\":1}\nnotes", "{\"my\":\"settings\"",
                                 "{\"tools\":", "[1]", " ", "{\"a\":1} {", "{\"a\":1}\n{}x"}) {
    const TemporaryFolder folder;
    const auto path = folder.write("r.jsonl", text);
    try {
      const ResultWriter writer(path);
      ADD_FAILURE() << "opened: " << text;
    } catch (const ToolError& error) {
      EXPECT_EQ(error.code(), kExitUsage) << text;
      const std::string line = "r.jsonl:" + std::to_string(1 + std::count(text.begin(), text.end(), '\n')) + ": ";
      EXPECT_NE(std::string(error.what()).find(line), std::string::npos) << error.what();
    }
    EXPECT_EQ(read_text(path), text);
  }
}

TEST(ResultWriter, ASecondWriterIsRefused) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "r.jsonl";
  ResultWriter first(path);
  try {
    const ResultWriter second(path);
    FAIL() << "opened";
  } catch (const ToolError& error) {
    EXPECT_EQ(error.code(), kExitEnvironment);
    EXPECT_NE(std::string(error.what()).find("r.jsonl: another process writes to it"), std::string::npos) << error.what();
  }
  first.write({{"a", 1}});
  EXPECT_EQ(read_text(path), "{\"a\":1}\n");
}

TEST(ResultWriter, RefusesAnyOtherBadLineAndLeavesTheFileAlone) {
  for (const char* text : {"{\"a\":1}\n{\"b\":\n{\"c\":3}\n", "{\"a\":1}\nnonsense\n", "[1]\n", "\n", "{}\n{\"a\":1} x\n"}) {
    const TemporaryFolder folder;
    const auto path = folder.write("r.jsonl", text);
    EXPECT_THROW(ResultWriter{path}, ToolError) << text;
    EXPECT_EQ(read_text(path), text);
  }
}

TEST(ResultWriter, AFullDiskIsAnEnvironmentError) {
  ResultWriter writer("/dev/full");
  try {
    writer.write({{"a", 1}});
    FAIL() << "/dev/full took the line";
  } catch (const ToolError& error) {
    EXPECT_EQ(error.code(), kExitEnvironment);
    EXPECT_NE(std::string(error.what()).find("No space left"), std::string::npos) << error.what();
  }
}

TEST(ResultWriter, ALineThatDoesNotFitIsTakenBack) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "r.jsonl";
  ResultWriter writer(path);
  writer.write({{"a", 1}});
  {
    const FileSizeLimit limit(20);
    EXPECT_THROW(writer.write({{"long", std::string(100, 'x')}}), ToolError);
  }
  EXPECT_EQ(read_text(path), "{\"a\":1}\n");
  writer.write({{"b", 2}});
  EXPECT_EQ(read_text(path), "{\"a\":1}\n{\"b\":2}\n");
}

TEST(ResultWriter, AFolderThatDoesNotExistIsAnEnvironmentError) {
  try {
    const ResultWriter writer("/nonexistent/r.jsonl");
    FAIL() << "opened";
  } catch (const ToolError& error) {
    EXPECT_EQ(error.code(), kExitEnvironment);
  }
}

TEST(ResultWriter, NonFiniteNumbersBecomeNull) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "r.jsonl";
  ResultWriter(path).write({{"x", std::numeric_limits<double>::quiet_NaN()}});
  EXPECT_EQ(read_text(path), "{\"x\":null}\n");
}

}  // namespace
}  // namespace tileloss::tools
