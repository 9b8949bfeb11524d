#include "support/config.h"

#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "support/exit_codes.h"
#include "tests/shared/configs.h"

namespace tileloss::tools {
namespace {

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

// Of a tree that is read by `read`.
std::string tree_error(const ConfigNode& root, const std::function<void(ConfigReader&)>& read) {
  return usage_error([&] {
    ConfigReader reader(root);
    read(reader);
    reader.finish();
  });
}
std::string config_error(const Sets& sets, const std::function<void(ConfigReader&)>& read) {
  return tree_error(config_tree("", sets), read);
}

void read_count(ConfigReader& reader) { reader.integer("count", 1, 0, 100); }
void read_number(ConfigReader& reader) { reader.number("number", 1.0, {0, 10, true, std::nullopt}); }

void expect_names(const std::string& message, const std::string& text) {
  EXPECT_NE(message.find(text), std::string::npos) << text << " is not in " << message;
}

// As the command hands it over.
constexpr const char* kTree = R"({"kind": "map", "origin": "c.yaml:1", "directory": "/configs", "children": [
  {"key": "count", "kind": "scalar", "text": "7", "origin": "c.yaml:1"},
  {"key": "quoted", "kind": "scalar", "text": "7", "quoted": true, "origin": "c.yaml:2"},
  {"key": "empty", "kind": "empty", "origin": "c.yaml:3"},
  {"key": "kernel", "kind": "map", "origin": "c.yaml:4", "children": [
    {"key": "isaa", "kind": "scalar", "text": "x", "origin": "c.yaml:5"}]},
  {"key": "names", "kind": "list", "origin": "c.yaml:6", "children": [
    {"kind": "scalar", "text": "a", "origin": "c.yaml:6"}, {"kind": "scalar", "text": "b", "origin": "c.yaml:7"}]},
  {"key": "file", "kind": "scalar", "text": "../x", "origin": "--set file=../x", "directory": "/here"}]})";

TEST(ConfigNode, KnowsWhatItIsAndWhereItStands) {
  const ConfigNode root = config_node(Json::parse(kTree));
  ConfigReader reader(root);
  EXPECT_EQ(reader.integer("count", std::nullopt, 0, 9), 7);
  EXPECT_EQ(reader.text("quoted"), "7");
  EXPECT_EQ(reader.list("names", {}, {"a", "b", "c"}), (Sets{"a", "b"}));
  EXPECT_EQ(reader.path("file"), "/here/../x");  // as it stands: behind a link, ".." is not what the text before it says
  const auto fails = [&](const auto& read, const std::string& text) { expect_names(tree_error(root, read), text); };
  fails([](ConfigReader& r) { r.integer("quoted", 1, 0, 9); }, "c.yaml:2: quoted: expected an integer, got '7'");
  fails([](ConfigReader& r) { r.text("empty", ""); }, "c.yaml:3: empty: has no value");
  fails([](ConfigReader& r) { r.text("absent"); }, "c.yaml:1: absent: required");
  fails([](ConfigReader& r) { r.section("kernel").finish(); }, "c.yaml:5: kernel.isaa: unknown key");
  fails([](ConfigReader& r) { r.list("names", {}, {"a"}); }, "c.yaml:6: names: 'b' is none of a");
  fails([](ConfigReader& r) { r.integer("file", 1, 0, 9); }, "--set file=../x: file: expected an integer");
  fails([](ConfigReader& r) { r.section("count"); }, "c.yaml:1: count: expected a section, got a value");
}

TEST(Config, AnUnknownKeyIsNamedWithTheOneThatWasMeant) {
  expect_names(config_error({"count=1", "cuont=2"}, read_count), "cuont=2: cuont: unknown key; did you mean count?");
}

TEST(Config, WrongTypesAreRefused) {
  for (const char* value : {"many", "1.5", "1e1", "[1]", "true", "0x10", "1 2"}) {
    expect_names(config_error({std::string("count=") + value}, read_count), "count: expected an integer");
  }
  for (const char* value : {"much", "1.5.2", "[1]", "1,5"}) {
    expect_names(config_error({std::string("number=") + value}, read_number), "number: expected a number");
  }
  const auto read_flag = [](ConfigReader& reader) { reader.boolean("flag", false); };
  for (const char* value : {"yes", "1", "True"}) {
    expect_names(config_error({std::string("flag=") + value}, read_flag), "flag: expected true or false");
  }
  const auto read_choice = [](ConfigReader& reader) { reader.choice("color", std::nullopt, {"red", "blue"}); };
  expect_names(config_error({"color=green"}, read_choice), "none of red, blue");
}

TEST(Config, NonFiniteNumbersAreRefused) {
  for (const char* value : {".nan", ".inf", "-.inf", "nan", "inf", "1e999"}) {
    expect_names(config_error({std::string("number=") + value}, read_number), "number: expected a finite number");
  }
}

TEST(Config, NumbersTooCloseToZeroForADoubleAreNotCalledInfinite) {
  for (const char* value : {"1e-400", "-1e-400", "+1e-99999"}) {
    expect_names(config_error({std::string("number=") + value}, read_number),
                 std::string("number: expected 0 or a number of 4.9e-324 or more, with either sign, got '") + value + "'");
  }
}

TEST(Config, OutOfRangeNumbersAreRefused) {
  for (const char* value : {"-1", "101", "99999999999999999999"}) {
    expect_names(config_error({std::string("count=") + value}, read_count), "out of range: expected 0 to 100");
  }
  for (const char* value : {"0", "-3", "10.5"}) {  // 0 is an exclusive minimum
    expect_names(config_error({std::string("number=") + value}, read_number), "out of range: expected > 0 and <= 10");
  }
  const auto read_absent_count = [](ConfigReader& reader) { reader.integer("count", 1, 1, 9, -1); };
  expect_names(config_error({"count=0"}, read_absent_count), "0 is out of range: expected 1 to 9, or -1");
  const auto read_absent_number = [](ConfigReader& reader) { reader.number("number", 1, {1, 9, false, -1}); };
  expect_names(config_error({"number=0"}, read_absent_number), "expected >= 1 and <= 9, or -1");
}

// ----------------------------------------------------------------------------------------------------- gradcheck's keys

constexpr const char* kMinimal = "loss=cross_entropy batch_size=1 seq_len=4 vocab_size=64 dtype=bf16";

std::string gradcheck_error(const std::string& set) {
  return usage_error([&] { config_of(kMinimal, {set}); });
}

TEST(GradcheckConfig, TakesTheLossesOptionsFromTheLibrary) {
  const GradcheckConfig config = config_of(std::string(kMinimal) +
                                           " label_smoothing=0.25 z_loss=1e-4 temperature=0.5 valid_vocab=60 reduction=sum "
                                           "temperature_on=logits num_items=12 ignore_index=-1");
  EXPECT_EQ(config.function.get("label_smoothing", -1), 0.25);
  EXPECT_EQ(config.function.get("z_loss", -1), 1e-4);
  EXPECT_EQ(config.function.get("temperature", -1), 0.5);
  EXPECT_EQ(config.function.get("num_items", -1), 12);
  EXPECT_EQ(config.function.get_integer("valid_vocab", 0), 60);
  EXPECT_EQ(config.function.get_integer("ignore_index", 0), -1);
  EXPECT_EQ(config.function.get_choice("reduction", ""), "sum");
  EXPECT_EQ(config.seq_len, 4);
}

// What the command reads itself is suggested, and not listed.
TEST(Config, AWordNearAKeyOfOthersIsSaid) {
  ConfigNode root = config_tree("", {"traker=none"});
  root.others = {"tracker", "text"};
  expect_names(tree_error(root, read_count), "traker: unknown key; did you mean tracker?; known here: count");
}

TEST(GradcheckConfig, RefusesWhatTheLibrarysRangesExclude) {
  expect_names(gradcheck_error("label_smoothing=1.5"), "label_smoothing: 1.5 is out of range");
  expect_names(gradcheck_error("temperature=0"), "temperature: 0 is out of range");
  expect_names(gradcheck_error("softcap=-1"), "softcap: -1 is out of range");
  expect_names(gradcheck_error("reduction=median"), "reduction: 'median' is none of none, sum, mean");
}

TEST(GradcheckConfig, RefusesUnknownNames) {
  expect_names(gradcheck_error("lable_smoothing=0.1"), "lable_smoothing: unknown key; did you mean label_smoothing?");
  expect_names(gradcheck_error("source.distribution=cauchy"), "source.distribution: 'cauchy' is none of");
  expect_names(gradcheck_error("source.kind=pickle"), "source.kind: 'pickle' is none of");
  expect_names(gradcheck_error("kernel.isa=mmx"), "kernel.isa: 'mmx' is none of");
  expect_names(gradcheck_error("kernel.threads=1025"), "1025 is out of range: expected 0 to 1024");
  expect_names(gradcheck_error("tolerances.ulps=1"), "tolerances.ulps: unknown key");
  expect_names(gradcheck_error("outputs=[logp, perplexity]"), "outputs: 'perplexity'");
  expect_names(gradcheck_error("loss=focal"), "loss: 'focal' is none of");
  expect_names(gradcheck_error("dtype=int8"), "dtype: 'int8' is none of");
}

TEST(GradcheckConfig, RefusesWhatDoesNotGoTogether) {
  expect_names(gradcheck_error("upstream=per_row"), "upstream: per_row needs reduction: none");
  expect_names(gradcheck_error("vocab_total=128"), "vocab_total");
  expect_names(gradcheck_error("source.kind=safetensors"), "source.path: required");
}

TEST(GradcheckConfig, EveryConfigOfTheRepositoryIsRead) {
  EXPECT_GE(config_names().size(), 20U);
  for (const std::string& name : config_names()) EXPECT_NO_THROW(config_of(name)) << name;
}

}  // namespace
}  // namespace tileloss::tools
