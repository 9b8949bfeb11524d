#include "support/safetensors.h"

#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/stat.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <ctime>
#include <functional>
#include <iterator>
#include <utility>

#include "support/exit_codes.h"
#include "support/memory.h"
#include "support/signals.h"
#include "tests/shared/child_process.h"
#include "tests/shared/temporary_folder.h"

namespace tileloss::tools {
namespace {

using test::TemporaryFolder;

std::string length_bytes(uint64_t length) {
  std::string bytes(sizeof length, '\0');
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes;
}

std::string file_bytes(const std::string& header, const std::string& data) { return length_bytes(header.size()) + header + data; }

// Opens a file with these bytes; the message of the error it must give.
std::string refusal(const std::string& bytes) {
  const TemporaryFolder folder;
  const auto path = folder.write("x.safetensors", bytes);
  try {
    const SafetensorsFile file(path);
  } catch (const ToolError& error) {
    EXPECT_EQ(error.code(), kExitUsage);
    return error.what();
  }
  return "accepted";
}

std::string entry_refusal(const std::string& entries, size_t data_bytes) {
  return refusal(file_bytes("{" + entries + "}", std::string(data_bytes, '\1')));
}

void expect_contains(const std::string& message, const std::string& text) {
  EXPECT_NE(message.find(text), std::string::npos) << message;
}

TEST(Safetensors, WhatIsWrittenIsReadBack) {
  const TemporaryFolder folder;
  const float x[6] = {1, 2, 3, 4, 5, 6};
  const int64_t labels[2] = {-100, 7};
  const auto path = folder.path() / "x.safetensors";
  write_safetensors(path, {{"x", "F32", {2, 3}, x, sizeof x}, {"labels", "I64", {2}, labels, sizeof labels}},
                    {{"case", "{\"a\": \"text\"}"}});
  const SafetensorsFile file(path);
  ASSERT_EQ(file.tensors().size(), 2U);
  const FileTensor& tensor = file.tensor("x");
  EXPECT_EQ(tensor.dtype, "F32");
  EXPECT_EQ(tensor.shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(tensor.elements(), 6);
  float read[6];
  file.read(tensor, 0, sizeof read, read);
  EXPECT_TRUE(std::equal(std::begin(x), std::end(x), std::begin(read)));
  int64_t second = 0;
  file.read(file.tensor("labels"), sizeof second, sizeof second, &second);
  EXPECT_EQ(second, 7);
}

TEST(Safetensors, UnknownNameListsTheNamesThereAre) {
  const SafetensorsFile file(TILELOSS_SOURCE_DIR "/tests/data/qwen2-tiny-logits-slice.safetensors");
  EXPECT_EQ(file.tensor("logits").shape.back(), 30522);
  try {
    file.tensor("logit");
    FAIL() << "found";
  } catch (const ToolError& error) {
    expect_contains(error.what(), "logits");
    expect_contains(error.what(), "labels");
  }
}

// The JSON parser takes a NUL for the end of its text.
TEST(Safetensors, ANulInTheHeaderIsRefusedAndSpacesAreFine) {
  const std::string header = R"({"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})";
  EXPECT_EQ(refusal(file_bytes(header + "   ", "ab")), "accepted");
  for (const std::string& rest : {std::string("\0garbage{{{", 11), std::string("\0", 1), std::string("  \0  ", 5)}) {
    expect_contains(refusal(file_bytes(header + rest, "ab")), "header: expected JSON, got a NUL");
  }
}

TEST(Safetensors, ScalarsMetadataAndEmptyTensorsAreFine) {
  EXPECT_EQ(entry_refusal(R"("__metadata__":{"a":"b"},"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)"
                          R"("e":{"dtype":"F32","shape":[0,5],"data_offsets":[4,4]})",
                          4),
            "accepted");
}

TEST(Safetensors, HeaderLengthIsCheckedAgainstTheFileAndTheCap) {
  expect_contains(refusal("abc"), "header length");
  expect_contains(refusal(length_bytes(50) + "{}"), "header length: 50 bytes, but the file has only 2");
  expect_contains(refusal(length_bytes(100'000'001) + "{}"), "more than 100 MB");
  expect_contains(refusal(length_bytes(UINT64_MAX) + "{}"), "more than 100 MB");
  expect_contains(refusal(length_bytes(0)), "header: does not start");
}

TEST(Safetensors, HeaderMustBeAnObject) {
  expect_contains(refusal(file_bytes("[]", "")), "header: does not start");
  expect_contains(refusal(file_bytes("{\"a\":", "")), "header: is not a JSON object");
  expect_contains(refusal(file_bytes(R"({"a":3})", "")), "a: is not an object");
}

TEST(Safetensors, DeepNestingIsRefused) {
  const std::string brackets = std::string(1'000'000, '[') + std::string(1'000'000, ']');
  const auto with = [](const std::string& more) {
    return entry_refusal(R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1])" + more + "}", 1);
  };
  expect_contains(with(R"(,"more":)" + brackets), "header: nested too deeply");
  EXPECT_EQ(with(R"(,"more":[{"a":[1,{}],"b":null},2.5,"c",true],"more":{})"), "accepted");
  expect_contains(entry_refusal(R"("a":{"dtype":"U8","shape":)" + brackets + R"(,"data_offsets":[0,1]})", 1),
                  "a: shape: expected counts, got a list");
  expect_contains(entry_refusal(R"("a":)" + std::string(1'000'000, '['), 0), "a: is not an object");
}

TEST(Safetensors, AShapeHasAtMost64Dimensions) {
  const auto with = [](int dimensions) {
    std::string shape = "1";
    for (int i = 1; i < dimensions; ++i) shape += ",1";
    return entry_refusal(R"("a":{"dtype":"U8","shape":[)" + shape + R"(],"data_offsets":[0,1]})", 1);
  };
  EXPECT_EQ(with(64), "accepted");
  expect_contains(with(65), "a: shape: more than 64 dimensions");
}

// In a time that does not grow with the square of their number: 50000 took 5 s when it did. Sanitizers take longer.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::clock_t kLongest = 10 * CLOCKS_PER_SEC;
#else
constexpr std::clock_t kLongest = 3 * CLOCKS_PER_SEC;
#endif

TEST(Safetensors, ManyTensorsAreReadInTheOrderOfTheirData) {
  std::string entries;
  for (int i = 50'000; i-- > 0;) {
    entries += (entries.empty() ? "" : ",") + ("\"t" + std::to_string(i)) + R"(":{"dtype":"U8","shape":[1],"data_offsets":[)" +
               std::to_string(i) + "," + std::to_string(i + 1) + "]}";
  }
  const TemporaryFolder folder;
  const auto path = folder.write("x.safetensors", file_bytes("{" + entries + "}", std::string(50'000, 'x')));
  const std::clock_t start = std::clock();
  const SafetensorsFile file(path);
  EXPECT_LT(std::clock() - start, kLongest);
  ASSERT_EQ(file.tensors().size(), 50'000U);
  EXPECT_EQ(file.tensors().front().name, "t0");
  EXPECT_EQ(file.tensors().back().name, "t49999");
}

TEST(Safetensors, MetadataIsText) {
  expect_contains(refusal(file_bytes(R"({"__metadata__":[]})", "")), "__metadata__: is not an object");
  expect_contains(refusal(file_bytes(R"({"__metadata__":{"a":{"b":"c"}}})", "")), "__metadata__: a: expected text");
  expect_contains(refusal(file_bytes(R"({"__metadata__":{"a":"b","c":"d","a":"e"}})", "")),
                  "__metadata__: a key stands there twice");
  expect_contains(refusal(file_bytes(R"({"__metadata__":{},"__metadata__":{}})", "")), "__metadata__: duplicate entry");
}

TEST(Safetensors, FieldsAreRequiredAndTyped) {
  expect_contains(entry_refusal(R"("a":{"shape":[1],"data_offsets":[0,4]})", 4), "a: dtype is missing");
  expect_contains(entry_refusal(R"("a":{"dtype":"F32","data_offsets":[0,4]})", 4), "a: shape is missing");
  expect_contains(entry_refusal(R"("a":{"dtype":"F32","shape":[1]})", 4), "a: data_offsets is missing");
  expect_contains(entry_refusal(R"("a":{"dtype":7,"shape":[1],"data_offsets":[0,4]})", 4), "a: dtype: expected text");
  expect_contains(entry_refusal(R"("a":{"dtype":"F33","shape":[1],"data_offsets":[0,4]})", 4), "a: dtype: 'F33' is unknown");
  expect_contains(entry_refusal(R"("a":{"dtype":"F32","shape":1,"data_offsets":[0,4]})", 4), "a: shape: expected a list");
  expect_contains(entry_refusal(R"("a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]})", 4), "a: shape: expected counts");
  expect_contains(entry_refusal(R"("a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]})", 4), "a: shape: expected counts");
  expect_contains(entry_refusal(R"("a":{"dtype":"F32","shape":[1],"data_offsets":[0]})", 4), "a: data_offsets: expected two");
  expect_contains(entry_refusal(R"("a":{"dtype":"F32","shape":[1],"data_offsets":["0",4]})", 4), "a: data_offsets: expected two");
}

TEST(Safetensors, ShapeProductMustNotOverflowAndMustFitTheBytes) {
  for (const char* shape :
       {"[4611686018427387904,4]", "[4294967296,4294967296]", "[4611686018427387904,4,0]", "[4611686018427387904]"}) {
    const std::string entry = std::string(R"("a":{"dtype":"F32","shape":)") + shape + R"(,"data_offsets":[0,0]})";
    expect_contains(entry_refusal(entry, 0), "overflows");
  }
  expect_contains(entry_refusal(R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]})", 4),
                  "a: data_offsets: 4 bytes, but the shape and dtype make 8");
}

TEST(Safetensors, OffsetsMustLieInTheFileWithoutGapsOrOverlaps) {
  expect_contains(entry_refusal(R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})", 4), "outside the 4 bytes");
  expect_contains(entry_refusal(R"("a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]})", 4), "outside the 4 bytes");
  expect_contains(entry_refusal(R"("a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]})", 8), "a: data_offsets: a gap");
  const char* overlap =
      R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]})";
  expect_contains(entry_refusal(overlap, 8), "b: data_offsets: overlap");
  expect_contains(entry_refusal(R"("a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]})", 6), "2 trailing bytes");
}

TEST(Safetensors, DuplicateEntriesAreRefused) {
  const char* twice =
      R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  expect_contains(entry_refusal(twice, 1), "a: duplicate entry");
  expect_contains(entry_refusal(R"("a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]})", 1), "dtype: duplicate");
}

TEST(Safetensors, PickleAndZipAreRefusedByContent) {
  expect_contains(refusal(std::string("\x80\x02}q\0(X\x05\0\0\0", 11) + std::string(64, 'x')), "pickle");
  expect_contains(refusal(std::string("PK\x03\x04", 4) + std::string(64, 'x')), "zip");
}

// A header of 0x0280 bytes starts as pickle's protocol 2 does.
TEST(Safetensors, AHeaderLengthThatLooksLikePickleIsRead) {
  const std::string entry = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  EXPECT_EQ(refusal(file_bytes(entry + std::string(0x0280 - entry.size(), ' '), "x")), "accepted");
}

TEST(Safetensors, EveryTruncationIsRefused) {
  const std::string whole = file_bytes(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "12345678");
  EXPECT_EQ(refusal(whole), "accepted");
  for (size_t size = 0; size < whole.size(); ++size) EXPECT_NE(refusal(whole.substr(0, size)), "accepted") << size;
}

std::string environment_error(const std::function<void()>& action) {
  try {
    action();
  } catch (const ToolError& error) {
    EXPECT_EQ(error.code(), kExitEnvironment) << error.what();
    return error.what();
  }
  return "accepted";
}

TEST(Safetensors, WhatIsNoFileIsAnEnvironmentError) {
  const TemporaryFolder folder;
  ASSERT_EQ(mkfifo((folder.path() / "pipe").c_str(), 0600), 0);  // nobody writes into it: an open() would wait for ever
  for (const auto& [path, problem] : std::vector<std::pair<std::string, std::string>>{
           {"/nonexistent/x.safetensors", "cannot be opened: No such file"},
           {"/tmp", "expected a regular file, got a folder"},
           {"/dev/null", "expected a regular file, got a device"},
           {(folder.path() / "pipe").string(), "expected a regular file, got a pipe"}}) {
    expect_contains(environment_error([&] { const SafetensorsFile file(path); }), path + ": " + problem);
  }
}

// Its data was mapped once: a page that is no longer there ended the process.
TEST(Safetensors, AFileThatIsCutWhileItIsReadIsAnEnvironmentError) {
  const TemporaryFolder folder;
  const std::vector<float> x(100'000, 1);
  const auto path = folder.path() / "x.safetensors";
  write_safetensors(path, {{"x", "F32", {std::ssize(x)}, x.data(), std::ssize(x) * 4}});
  const SafetensorsFile file(path);
  std::filesystem::resize_file(path, 5000);
  const std::string error = environment_error([&] { file.read(file.tensor("x")); });
  expect_contains(error, "x.safetensors: x: expected 400000 bytes from byte ");
  expect_contains(error, "the file was cut while it was read");
}

// How much memory a header of `bytes` bytes takes at the most, beside what this process holds; -1 where it cannot be told.
int64_t peak_of_header(const std::function<void(std::string&)>& append, size_t bytes) {
  std::string entries;
  entries.reserve(bytes + 200);
  while (entries.size() < bytes) append(entries);
  const TemporaryFolder folder;
  const auto path = folder.write("x.safetensors", file_bytes("{" + entries + "}", ""));
  entries = {};
  malloc_trim(0);
  const int64_t before = resident_bytes();
  reset_peak();
  if (peak_resident_bytes() > before + (1 << 20)) return -1;
  try {
    const SafetensorsFile file(path);
  } catch (const ToolError& error) {
    EXPECT_EQ(error.code(), kExitUsage);
    EXPECT_LT(std::string(error.what()).size(), 1000U);
  }
  return peak_resident_bytes() - before;
}

// A tree of it took 20 times its size.
TEST(Safetensors, AHeaderTakesASmallMultipleOfItsSize) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitized program keeps memory of its own";
#endif
  constexpr size_t kBytes = 20'000'000;
  int64_t count = 0;
  const auto next = [&](std::string& text) { return (text.empty() ? "\"" : ",\"") + std::to_string(count++) + "\":"; };
  const std::pair<const char*, std::function<void(std::string&)>> headers[] = {
      {"entries", [&](std::string& text) { text += next(text) + R"({"dtype":"U8","shape":[0],"data_offsets":[0,0]})"; }},
      {"metadata", [&](std::string& text) { text += text.empty() ? R"("__metadata__":{"":"")" : next(text) + R"("")"; }},
      {"a shape", [&](std::string& text) { text += text.empty() ? R"("a":{"shape":[0)" : ",0"; }},
      {"unknown fields", [&](std::string& text) { text += text.empty() ? R"("a":{"b":0)" : next(text) + "0"; }},
      {"a long name", [&](std::string& text) { text += text.empty() ? "\"" : "x"; }}};
  for (const auto& [name, append] : headers) {
    const int64_t peak = peak_of_header(append, kBytes);
    if (peak < 0) GTEST_SKIP() << "the peak cannot be reset here";
    EXPECT_LT(peak, 7 * static_cast<int64_t>(kBytes)) << name;
    EXPECT_GT(peak, static_cast<int64_t>(kBytes) / 2) << name;
  }
}

TEST(Safetensors, NoTextOfTheHeaderIsLongerThan8MB) {
  const auto with = [](size_t bytes) {
    return refusal(file_bytes(R"({"__metadata__":{"a":")" + std::string(bytes, 'x') + "\"}}", ""));
  };
  EXPECT_EQ(with(7'000'000), "accepted");
  expect_contains(with(9'000'000), "header: a text or number of more than 8 MB: \"xxx");
  expect_contains(refusal(file_bytes(R"({"a":{"shape":[)" + std::string(9'000'000, '1'), "")),
                  "a text or number of more than 8 MB: 111");
  // Quotes and commas within a text.
  EXPECT_EQ(refusal(file_bytes(R"({"__metadata__":{"a\\":"\",{[:","b":"\\"}})", "")), "accepted");
}

TEST(Safetensors, AStopEndsTheReadingOfAHeader) {
  std::string entries;
  for (int i = 0; i < 1000; ++i) {
    entries += (i == 0 ? "\"" : ",\"") + std::to_string(i) + R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  }
  const std::string header = "{" + entries + "}";
  EXPECT_EQ(parse_safetensors_header("x", header, 0, 0).size(), 1000U);
  EXPECT_EQ(test::exit_code_of_child([&] {
              install_signal_handlers();
              std::raise(SIGTERM);
              try {
                parse_safetensors_header("x", header, 0, 0);
              } catch (const Stopped& stopped) {
                return stopped.signal == SIGTERM;
              }
              return false;
            }),
            0);
}

}  // namespace
}  // namespace tileloss::tools
