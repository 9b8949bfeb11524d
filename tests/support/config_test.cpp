#include "support/config.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <functional>
#include <iterator>

#include "check/gradcheck_config.h"
#include "support/exit_codes.h"
#include "tests/shared/temporary_folder.h"

namespace tileloss::tools {
namespace {

using test::TemporaryFolder;

// The message of the usage error that `action` must throw.
std::string usage_error(const std::function<void()>& action) {
  try {
    action();
  } catch (const ToolError& error) {
    EXPECT_EQ(error.code(), kExitUsage) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

// Reads `text` and then does `read` with it.
std::string config_error(const std::string& text, const std::function<void(ConfigReader&)>& read,
                         const std::vector<std::string>& overrides = {}) {
  const TemporaryFolder folder;
  const auto file = folder.write("c.yaml", text);
  return usage_error([&] {
    const ConfigNode root = load_config(file, overrides);
    ConfigReader reader(root);
    read(reader);
    reader.finish();
  });
}

void nothing(ConfigReader&) {}
void read_count(ConfigReader& reader) { reader.integer("count", 1, 0, 100); }
void read_number(ConfigReader& reader) { reader.number("number", 1.0, {0, 10, true, std::nullopt}); }

void expect_names(const std::string& message, const std::string& where, const std::string& key) {
  EXPECT_NE(message.find(where), std::string::npos) << message;
  EXPECT_NE(message.find(key), std::string::npos) << message;
}

TEST(Config, UnknownKeyIsNamedWithItsLine) {
  expect_names(config_error("count: 1\n\ncuont: 2\n", read_count), "c.yaml:3", "cuont: unknown key; did you mean count?");
}

TEST(Config, UnknownKeyInASectionIsNamedWithItsPath) {
  const auto read = [](ConfigReader& reader) { reader.section("kernel").finish(); };
  expect_names(config_error("kernel:\n  isaa: x\n", read), "c.yaml:2", "kernel.isaa: unknown key");
}

TEST(Config, DuplicateKeyIsNamedWithBothLines) {
  const std::string message = config_error("count: 1\nother: 2\ncount: 3\n", nothing);
  expect_names(message, "c.yaml:3", "count: duplicate key");
  expect_names(message, "c.yaml:1", "count");
}

TEST(Config, DuplicateKeyInASectionIsFound) {
  expect_names(config_error("a:\n  b: 1\n  b: 1\n", nothing), "c.yaml:3", "a.b: duplicate key");
}

TEST(Config, WrongTypesAreRefused) {
  for (const char* value : {"many", "1.5", "\"3\"", "1e1", "[1]", "{a: 1}", "true", "0x10", "1 2"}) {
    expect_names(config_error(std::string("x: 1\ncount: ") + value + "\n", read_count), "c.yaml:2", "count: expected an integer");
  }
  for (const char* value : {"much", "\"3\"", "1.5.2", "[1]", "1,5"}) {
    expect_names(config_error(std::string("number: ") + value + "\n", read_number), "c.yaml:1", "number");
  }
  const auto read_flag = [](ConfigReader& reader) { reader.boolean("flag", false); };
  for (const char* value : {"yes", "1", "\"true\"", "True"}) {
    expect_names(config_error(std::string("flag: ") + value + "\n", read_flag), "c.yaml:1", "flag: expected true or false");
  }
  const auto read_choice = [](ConfigReader& reader) { reader.choice("color", std::nullopt, {"red", "blue"}); };
  expect_names(config_error("color: green\n", read_choice), "c.yaml:1", "none of red, blue");
  const auto read_section = [](ConfigReader& reader) { reader.section("kernel"); };
  expect_names(config_error("kernel: fast\n", read_section), "c.yaml:1", "kernel: expected a section");
}

TEST(Config, NonFiniteNumbersAreRefused) {
  for (const char* value : {".nan", ".inf", "-.inf", "nan", "inf", "1e999"}) {
    expect_names(config_error(std::string("number: ") + value + "\n", read_number), "c.yaml:1",
                 "number: expected a finite number");
  }
}

TEST(Config, NumbersTooCloseToZeroForADoubleAreNotCalledInfinite) {
  for (const char* value : {"1e-400", "-1e-400", "+1e-99999"}) {
    expect_names(config_error(std::string("number: ") + value + "\n", read_number), "c.yaml:1",
                 std::string("number: expected 0 or a number of 4.9e-324 or more, with either sign, got '") + value + "'");
  }
}

TEST(Config, AnAbsentValueBelongsToTheExpectedRange) {
  const auto read_absent_count = [](ConfigReader& reader) { reader.integer("count", 1, 1, 9, -1); };
  expect_names(config_error("count: 0\n", read_absent_count), "c.yaml:1", "0 is out of range: expected 1 to 9, or -1");
  const auto read_absent_number = [](ConfigReader& reader) { reader.number("number", 1, {1, 9, false, -1}); };
  expect_names(config_error("number: 0\n", read_absent_number), "c.yaml:1", "expected >= 1 and <= 9, or -1");
}

TEST(Config, OutOfRangeNumbersAreRefused) {
  for (const char* value : {"-1", "101", "99999999999999999999"}) {
    expect_names(config_error(std::string("count: ") + value + "\n", read_count), "c.yaml:1", "count");
  }
  for (const char* value : {"0", "-3", "10.5"}) {  // 0 is an exclusive minimum
    expect_names(config_error(std::string("number: ") + value + "\n", read_number), "c.yaml:1", "out of range");
  }
}

TEST(Config, MissingAndEmptyValuesAreNamed) {
  const auto read = [](ConfigReader& reader) { reader.integer("count", std::nullopt, 0, 9); };
  expect_names(config_error("other: 1\n", read), "c.yaml", "count: required");
  expect_names(config_error("count:\n", read), "c.yaml:1", "count: has no value");
}

TEST(Config, BrokenYamlNamesTheLine) {
  expect_names(config_error("a: 1\nb: [1, 2\n", nothing), "c.yaml:2", "not YAML");
  expect_names(config_error("", nothing), "c.yaml", "one YAML document");
  expect_names(config_error("a: 1\n---\nb: 2\n", nothing), "c.yaml", "got 2");
  expect_names(config_error(", a\n", nothing), "c.yaml", "one YAML document");
  expect_names(config_error("- a\n- b\n", nothing), "c.yaml:1", "expected keys");
  for (const char* open : {"a: \"abc", "a: \"abc\n", "a: 'abc\n \n", "a: \"abc\nb: 1\n"}) {
    expect_names(config_error(open, nothing), "c.yaml:", "not YAML");
  }
}

TEST(Config, RecursiveAliasEndsInAnError) { expect_names(config_error("a: &x\n  b: *x\n", nothing), "c.yaml", "a"); }

TEST(Config, MissingFileIsAnEnvironmentError) {
  try {
    load_config("/nonexistent/c.yaml", {});
    FAIL() << "nothing was thrown";
  } catch (const ToolError& error) {
    EXPECT_EQ(error.code(), kExitEnvironment);
  }
}

TEST(Config, OverridesReplaceAndAdd) {
  const TemporaryFolder folder;
  const auto file = folder.write("c.yaml", "count: 1\nkernel:\n  isa: auto\n");
  const ConfigNode root = load_config(file, {"count=7", "kernel.threads=2", "fresh.deep.key=text"});
  ConfigReader reader(root);
  EXPECT_EQ(reader.integer("count", std::nullopt, 0, 9), 7);
  ConfigReader kernel = reader.section("kernel");
  EXPECT_EQ(kernel.text("isa"), "auto");
  EXPECT_EQ(kernel.integer("threads", std::nullopt, 0, 9), 2);
  EXPECT_EQ(reader.section("fresh").section("deep").text("key"), "text");
  reader.finish();
}

// The Python package reads some keys itself, and leaves the rest of the file to this program.
TEST(Config, WhatACallerHasReadIsLeftOut) {
  const TemporaryFolder folder;
  const auto file = folder.write("c.yaml", "count: 1\nmodel_path: x\nkernel:\n  isa: auto\n  time_block: 8\n");
  const ConfigNode root = load_config(file, {"text=y"}, {"model_path", "kernel.time_block", "text", "absent", "absent.too"});
  ConfigReader reader(root);
  EXPECT_EQ(reader.integer("count", std::nullopt, 0, 9), 1);
  ConfigReader kernel = reader.section("kernel");
  EXPECT_EQ(kernel.text("isa"), "auto");
  kernel.finish();
  reader.finish();
}

// What others read is suggested, and not listed.
TEST(Config, AWordNearAKeyOfOthersIsSaid) {
  ConfigNode root = parse_overrides({"traker=none"});
  root.others = {"tracker", "text"};
  const std::string message = usage_error([&] {
    ConfigReader reader(root);
    reader.integer("count", 1, 0, 9);
    reader.finish();
  });
  EXPECT_EQ(message, "--set traker=none: traker: unknown key; did you mean tracker?; known here: count");
}

TEST(Config, OverridesAreValidatedAlike) {
  expect_names(config_error("count: 1\n", read_count, {"count=x"}), "--set count=x", "count: expected an integer");
  expect_names(config_error("count: 1\n", read_count, {"cuont=2"}), "--set cuont=2", "cuont: unknown key");
  expect_names(config_error("count: 1\n", read_count, {"count.a=2"}), "--set count.a=2", "not a section");
  expect_names(config_error("count: 1\n", read_count, {"count"}), "--set count", "key=value");
  expect_names(config_error("count: 1\n", read_count, {"a..b=1"}), "--set a..b=1", "empty part");
}

TEST(Config, PathsInAFileAreRelativeToItAndOverridesToTheWorkingDirectory) {
  const TemporaryFolder folder;
  const auto file = folder.write("c.yaml", "a: data/x\nb: /abs/y\nc: z\n");
  const ConfigNode root = load_config(file, {"c=here"});
  ConfigReader reader(root);
  EXPECT_EQ(reader.path("a"), folder.path() / "data/x");
  EXPECT_EQ(reader.path("b"), "/abs/y");
  EXPECT_EQ(reader.path("c"), std::filesystem::current_path() / "here");
}

// ".." of a folder behind a link is the target's parent: the path may not be shortened as text.
TEST(Config, APathUpFromALinkedFolderIsTheTargetsParent) {
  const TemporaryFolder folder;
  std::filesystem::create_directories(folder.path() / "real/configs");
  folder.write("real/c_data", "x");
  folder.write("real/configs/c.yaml", "a: ../c_data\n");
  std::filesystem::create_directory_symlink("real/configs", folder.path() / "link");
  const ConfigNode root = load_config(folder.path() / "link/c.yaml", {});
  ConfigReader reader(root);
  EXPECT_EQ(test::read_text(reader.path("a")), "x");
}

std::string environment_error(const std::filesystem::path& file) {
  try {
    load_config(file, {});
  } catch (const ToolError& error) {
    EXPECT_EQ(error.code(), kExitEnvironment) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

TEST(Config, AFolderIsNamedAsOne) {
  const TemporaryFolder folder;
  EXPECT_EQ(environment_error(folder.path()), folder.path().string() + ": a folder, not a config file");
  EXPECT_EQ(environment_error(folder.path() / "c.yaml"), (folder.path() / "c.yaml").string() + ": no such config file");
}

// As `--config <(...)` hands it over. What stands in it starts at the working directory: a pipe has no folder.
TEST(Config, APipeIsRead) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const std::string text = "count: 7\na: data/x\n";
  ASSERT_EQ(write(ends[1], text.data(), text.size()), std::ssize(text));
  close(ends[1]);
  const ConfigNode root = load_config("/dev/fd/" + std::to_string(ends[0]), {});
  close(ends[0]);
  ConfigReader reader(root);
  EXPECT_EQ(reader.integer("count", std::nullopt, 0, 9), 7);
  EXPECT_EQ(reader.path("a"), std::filesystem::current_path() / "data/x");
}

TEST(Config, MoreThanAMegabyteIsRefused) {
  const auto read = [] { load_config("/dev/zero", {}); };
  EXPECT_NE(usage_error(read).find("larger than 1 MB"), std::string::npos);
  expect_names(config_error("# " + std::string(1 << 20, 'x'), nothing), "c.yaml", "larger than 1 MB");
}

// ----------------------------------------------------------------------------------------------------- gradcheck's keys

constexpr const char* kMinimal = "loss: cross_entropy\nbatch_size: 1\nseq_len: 4\nvocab_size: 64\ndtype: bf16\n";

std::string gradcheck_error(const std::string& more, const std::vector<std::string>& overrides = {}) {
  const TemporaryFolder folder;
  const auto file = folder.write("c.yaml", kMinimal + more);
  return usage_error([&] { read_gradcheck_config(file, overrides); });
}

TEST(GradcheckConfig, TakesTheLossesOptionsFromTheLibrary) {
  const TemporaryFolder folder;
  const auto file = folder.write("c.yaml", std::string(kMinimal) +
                                               "label_smoothing: 0.25\nz_loss: 1e-4\ntemperature: 0.5\nvalid_vocab: 60\n"
                                               "reduction: sum\ntemperature_on: logits\nnum_items: 12\nignore_index: -1\n");
  const GradcheckConfig config = read_gradcheck_config(file, {"label_smoothing=0.125"});
  EXPECT_EQ(config.function.get("label_smoothing", -1), 0.125);
  EXPECT_EQ(config.function.get("z_loss", -1), 1e-4);
  EXPECT_EQ(config.function.get("temperature", -1), 0.5);
  EXPECT_EQ(config.function.get("num_items", -1), 12);
  EXPECT_EQ(config.function.get_integer("valid_vocab", 0), 60);
  EXPECT_EQ(config.function.get_integer("ignore_index", 0), -1);
  EXPECT_EQ(config.function.get_choice("reduction", ""), "sum");
  EXPECT_EQ(config.seq_len, 4);
}

TEST(GradcheckConfig, RefusesWhatTheLibrarysRangesExclude) {
  expect_names(gradcheck_error("label_smoothing: 1.5\n"), "c.yaml:6", "label_smoothing: 1.5 is out of range");
  expect_names(gradcheck_error("temperature: 0\n"), "c.yaml:6", "temperature: 0 is out of range");
  expect_names(gradcheck_error("softcap: -1\n"), "c.yaml:6", "softcap: -1 is out of range");
  expect_names(gradcheck_error("reduction: median\n"), "c.yaml:6", "reduction: 'median' is none of none, sum, mean");
}

TEST(GradcheckConfig, RefusesUnknownNames) {
  expect_names(gradcheck_error("lable_smoothing: 0.1\n"), "c.yaml:6", "lable_smoothing: unknown key");
  expect_names(gradcheck_error("source:\n  kind: synthetic\n  distribution: cauchy\n"), "c.yaml:8", "source.distribution");
  expect_names(gradcheck_error("source:\n  kind: pickle\n"), "c.yaml:7", "source.kind");
  expect_names(gradcheck_error("kernel:\n  isa: mmx\n"), "c.yaml:7", "kernel.isa");
  expect_names(gradcheck_error("kernel:\n  threads: 1025\n"), "c.yaml:7", "1025 is out of range: expected 0 to 1024");
  expect_names(gradcheck_error("tolerances:\n  ulps: 1\n"), "c.yaml:7", "tolerances.ulps: unknown key");
  expect_names(gradcheck_error("outputs: [logp, perplexity]\n"), "c.yaml:6", "outputs: 'perplexity'");
  expect_names(gradcheck_error("", {"loss=focal"}), "--set loss=focal", "loss: 'focal' is none of");
  expect_names(gradcheck_error("", {"dtype=int8"}), "--set dtype=int8", "dtype");
}

TEST(GradcheckConfig, RefusesWhatDoesNotGoTogether) {
  expect_names(gradcheck_error("upstream: per_row\n"), "c.yaml:6", "upstream: per_row needs reduction: none");
  expect_names(gradcheck_error("vocab_total: 128\n"), "c.yaml:6", "vocab_total");
  expect_names(gradcheck_error("source:\n  kind: safetensors\n"), "c.yaml", "source.path: required");
}

TEST(GradcheckConfig, EveryConfigOfTheRepositoryIsRead) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(TILELOSS_SOURCE_DIR "/configs")) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("gradcheck_") || name.ends_with("_model.yaml")) continue;  // a model's: the Python tests run them
    EXPECT_NO_THROW(read_gradcheck_config(entry.path(), {})) << entry.path();
    ++count;
  }
  EXPECT_GE(count, 5);
}

}  // namespace
}  // namespace tileloss::tools
