// Allowed tokens of a row. From logits: the bits of a call on the row's allowed columns alone, zeros between them. With the LM
// head and of shards: as the oracle has them.
// On cuda: AllowedTokens, AllowedShards.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tests/api/shards.h"
#include "tests/shared/gradcheck_call.h"

namespace tileloss::test {
namespace {

using tools::joined;
using tools::Sets;

constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

// Elements of a float format, with float values.
struct Floats {
  tileloss_dtype dtype;
  std::vector<std::uint32_t> words;
  std::vector<std::uint16_t> halves;
  explicit Floats(tileloss_dtype t, std::size_t n) : dtype(t) { t == TILELOSS_FLOAT32 ? words.resize(n) : halves.resize(n); }
  void* data() { return dtype == TILELOSS_FLOAT32 ? static_cast<void*>(words.data()) : halves.data(); }
  void set(std::size_t at, float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    dtype == TILELOSS_FLOAT32 ? void(words[at] = bits) : void(halves[at] = static_cast<std::uint16_t>(bits >> 16));
  }
  float get(std::size_t at) const {
    return std::bit_cast<float>(dtype == TILELOSS_FLOAT32 ? words[at] : std::uint32_t{halves[at]} << 16);
  }
};

constexpr std::int64_t kRows = 12, kVocab = 1000, kValid = 977, kWords = (kVocab + 31) / 32, kKnown = 9;

// Rows of every kind of set, and what goes with them.
struct Case {
  Floats logits, teacher, dlogits;
  std::vector<std::int32_t> words = std::vector<std::int32_t>(kRows * kWords);
  std::vector<std::int64_t> labels = std::vector<std::int64_t>(kRows), ids = std::vector<std::int64_t>(kRows * kKnown);
  std::vector<float> log_q = std::vector<float>(kRows * kKnown), class_weights = std::vector<float>(kVocab),
                     per_row = std::vector<float>(kRows);
  std::mt19937 random{7};

  explicit Case(tileloss_dtype t) : logits(t, kRows * kVocab), teacher(t, kRows * kVocab), dlogits(t, kRows * kVocab) {
    std::normal_distribution<float> normal(0, 3);
    for (std::int64_t i = 0; i < kRows * kVocab; ++i) {
      logits.set(static_cast<std::size_t>(i), normal(random));
      teacher.set(static_cast<std::size_t>(i), normal(random));
    }
    for (std::int64_t i = 0; i < kRows; ++i) {
      for (std::int64_t j = 0; j < kVocab; ++j) allow(i, j, in_set(i, j));
      for (std::int64_t j = kValid; j < kVocab; ++j) allow(i, j, true);  // padding is not looked at
      const std::vector<std::int64_t> in = columns(i);
      labels[i] = in.empty() ? 5 : in[random() % in.size()];
      for (std::int64_t k = 0; k < kKnown; ++k) {
        ids[i * kKnown + k] = k == 4 ? -1 : (i * 131 + k * 107) % kValid;
        log_q[i * kKnown + k] = -2 - static_cast<float>(k) / 3;
      }
      per_row[i] = 0.3F + static_cast<float>(i) / 8;
    }
    for (float& c : class_weights) c = 0.5F + static_cast<float>(random() % 100) / 100;
  }
  bool in_set(std::int64_t i, std::int64_t j) {
    switch (i) {
      case 0: return true;
      case 1: return random() % 2 == 0;
      case 2: return j == 700;
      case 3: return false;
      case 4: return j >= 100 && j < 420;
      case 5: return random() % 50 == 0;
      case 6: return j != 333;
      case 7: return j >= kValid - 1;
      case 8: return j % 32 == 31 || j < 64;
      case 9: return j < 1;
      case 10: return j < 33;
      default: return random() % 10 != 0;
    }
  }
  void allow(std::int64_t i, std::int64_t j, bool is_allowed) {
    std::int32_t& word = words[static_cast<std::size_t>(i * kWords + j / 32)];
    const std::int32_t bit = static_cast<std::int32_t>(std::uint32_t{1} << (j % 32));
    word = is_allowed ? word | bit : word & ~bit;
  }
  bool allows(std::int64_t i, std::int64_t j) const {
    return (static_cast<std::uint32_t>(words[static_cast<std::size_t>(i * kWords + j / 32)]) >> (j % 32) & 1) != 0;
  }
  std::vector<std::int64_t> columns(std::int64_t i) const {
    std::vector<std::int64_t> all;
    for (std::int64_t j = 0; j < kValid; ++j) {
      if (allows(i, j)) all.push_back(j);
    }
    return all;
  }
};

// A function with its options, by name.
struct Function {
  const char* name;
  std::vector<std::pair<const char*, double>> numbers;
  std::vector<std::pair<const char*, const char*>> choices;
};

struct Results {
  std::vector<float> loss, logp, lse, entropy, mean_logit, collision, divergence, teacher_entropy;
  std::vector<std::int64_t> argmax;
  explicit Results(std::size_t n)
      : loss(n), logp(n), lse(n), entropy(n), mean_logit(n), collision(n), divergence(n), teacher_entropy(n), argmax(n) {}
};

bool is(const Function& f, const char* name) { return std::string(f.name) == name; }
bool has_teacher(const Function& f) { return is(f, "distillation") || is(f, "sparse_distillation"); }

// Of rows whose matrices and words lie at these places.
tileloss_status call(const Function& f, tileloss_pass pass, std::int64_t rows, std::int64_t vocab, std::int64_t valid, void* x,
                     void* teacher, void* dx, tileloss_dtype t, std::vector<std::int64_t> labels, std::vector<std::int64_t> ids,
                     std::vector<float> log_q, std::vector<float> weights, std::vector<float> per_row, const void* words,
                     Results& r, std::int64_t word_stride = kWords) {
  tools::Function function(f.name);
  function.set_integer("valid_vocab", valid);
  bool has_weights = false, has_labels = !is(f, "soft_cross_entropy");
  for (const auto& [name, value] : f.numbers) {
    if (std::string(name) == "class_weights") {
      has_weights = true;
    } else if (std::string(name) == "labels") {
      has_labels = true;
    } else {
      function.set_number(name, value);
    }
  }
  for (const auto& [name, value] : f.choices) function.set_choice(name, value);
  auto a = init<tileloss_args>();
  const auto vector = [&](auto& v, tileloss_dtype type) { return tileloss_make_vector(v.data(), type, rows); };
  a.logits = tileloss_make_matrix(x, t, rows, vocab, vocab);
  a.labels = vector(labels, TILELOSS_INT64);
  if (words != nullptr) a.allowed = tileloss_make_matrix(words, TILELOSS_INT32, rows, (vocab + 31) / 32, word_stride);
  if (is(f, "distillation")) a.teacher_logits = tileloss_make_matrix(teacher, t, rows, vocab, vocab);
  if (is(f, "soft_cross_entropy")) {
    if (!has_labels) a.labels = {};
    a.target_probs = tileloss_make_matrix(teacher, t, rows, vocab, vocab);
  }
  if (is(f, "sparse_distillation")) {
    a.teacher_ids = tileloss_make_matrix(ids.data(), TILELOSS_INT64, rows, kKnown, kKnown);
    a.teacher_logprobs = tileloss_make_matrix(log_q.data(), TILELOSS_FLOAT32, rows, kKnown, kKnown);
  }
  if (has_weights) a.class_weights = tileloss_make_vector(weights.data(), TILELOSS_FLOAT32, valid);
  if (is(f, "policy_loss")) a.advantages = vector(per_row, TILELOSS_FLOAT32);
  const bool is_logprobs = is(f, "logprobs");
  if (pass != TILELOSS_FORWARD) a.dlogits = tileloss_make_matrix(dx, t, rows, vocab, vocab);
  if (pass != TILELOSS_FORWARD && is_logprobs)
    a.logp_grad = a.lse_grad = a.entropy_grad = a.mean_logit_grad = vector(per_row, TILELOSS_FLOAT32);
  if (!is_logprobs) {
    if (pass != TILELOSS_BACKWARD) a.loss = vector(r.loss, TILELOSS_FLOAT32);
    a.loss_grad = vector(per_row, TILELOSS_FLOAT32);
  }
  if (pass != TILELOSS_BACKWARD) {
    if (has_labels) a.logp = vector(r.logp, TILELOSS_FLOAT32);
    a.lse = vector(r.lse, TILELOSS_FLOAT32);
    a.entropy = vector(r.entropy, TILELOSS_FLOAT32);
    if (!has_weights) a.mean_logit = vector(r.mean_logit, TILELOSS_FLOAT32);
    a.log_sum_sq_probs = vector(r.collision, TILELOSS_FLOAT32);
    a.argmax = vector(r.argmax, TILELOSS_INT64);
    if (has_teacher(f)) {
      a.divergence = vector(r.divergence, TILELOSS_FLOAT32);
      a.teacher_entropy = vector(r.teacher_entropy, TILELOSS_FLOAT32);
    }
  }
  return tileloss_call(f.name, pass, &a, function.options(), nullptr, nullptr);
}

const Function kFunctions[] = {
    {"logprobs", {}, {}},
    {"logprobs", {{"softcap", 5}, {"temperature", 0.7}}, {}},
    {"cross_entropy", {{"label_smoothing", 0.2}, {"z_loss", 0.1}}, {{"reduction", "none"}}},
    {"cross_entropy", {{"label_smoothing", 0.2}, {"softcap", 4}, {"class_weights", 1}}, {{"reduction", "none"}}},
    {"cross_entropy", {{"logit_scale", 0.5}}, {{"reduction", "none"}}},
    {"policy_loss",
     {{"entropy_coef", 0.1}},
     {{"aggregation", "none"}, {"advantage_level", "token"}, {"entropy_reduction", "as_loss"}}},
    {"distillation", {{"label_weight", 0.5}}, {{"divergence", "forward_kl"}, {"reduction", "none"}}},
    {"distillation", {{"softcap", 6}}, {{"divergence", "jsd"}, {"reduction", "none"}}},
    {"distillation", {}, {{"divergence", "total_variation"}, {"reduction", "none"}}},
    {"sparse_distillation", {{"label_weight", 0.5}}, {{"tail", "lump"}, {"reduction", "none"}}},
    {"sparse_distillation", {{"softcap", 6}}, {{"tail", "ignore"}, {"divergence", "jsd"}, {"reduction", "none"}}},
    {"sparse_distillation", {}, {{"tail", "renormalise"}, {"reduction", "none"}}},
    {"soft_cross_entropy", {{"label_smoothing", 0.1}}, {{"reduction", "none"}}},
    {"soft_cross_entropy", {{"softcap", 6}, {"class_weights", 1}}, {{"reduction", "none"}}},
};

// A device adds up in the order of its columns' numbers, which are others in a call on fewer.
bool same(float a, float b) {
  const auto bits_a = std::bit_cast<std::uint32_t>(a), bits_b = std::bit_cast<std::uint32_t>(b);
  if (std::getenv("TILELOSS_TEST_DEVICE") == nullptr || bits_a == bits_b || std::isnan(a))
    return bits_a == bits_b || (std::isnan(a) && std::isnan(b));
  const bool is_half = ((bits_a | bits_b) & 0xffff) == 0;
  return a == b || std::fabs(a - b) <= 2e-5F + std::max(std::fabs(a), std::fabs(b)) * (is_half ? 0x1p-7F : 0x1p-16F);
}

class AllowedTokens : public testing::TestWithParam<tileloss_dtype> {};
INSTANTIATE_TEST_SUITE_P(Formats, AllowedTokens, testing::Values(TILELOSS_FLOAT32, TILELOSS_BFLOAT16));

void expect_same_row(const Results& got, std::size_t i, const Results& wanted, const std::vector<std::int64_t>& columns) {
  EXPECT_TRUE(same(got.loss[i], wanted.loss[0])) << got.loss[i] << " " << wanted.loss[0];
  EXPECT_TRUE(same(got.logp[i], wanted.logp[0])) << got.logp[i] << " " << wanted.logp[0];
  EXPECT_TRUE(same(got.lse[i], wanted.lse[0])) << got.lse[i] << " " << wanted.lse[0];
  EXPECT_TRUE(same(got.entropy[i], wanted.entropy[0])) << got.entropy[i] << " " << wanted.entropy[0];
  EXPECT_TRUE(same(got.mean_logit[i], wanted.mean_logit[0])) << got.mean_logit[i] << " " << wanted.mean_logit[0];
  EXPECT_TRUE(same(got.collision[i], wanted.collision[0]));
  EXPECT_TRUE(same(got.divergence[i], wanted.divergence[0])) << got.divergence[i] << " " << wanted.divergence[0];
  EXPECT_TRUE(same(got.teacher_entropy[i], wanted.teacher_entropy[0]));
  const std::int64_t argmax = wanted.argmax[0];
  EXPECT_EQ(got.argmax[i], argmax < 0 ? argmax : columns[static_cast<std::size_t>(argmax)]);
}

TEST_P(AllowedTokens, AreACallOnTheirColumnsAlone) {
  for (const Function& f : kFunctions) {
    for (const tileloss_pass pass : {TILELOSS_FORWARD, TILELOSS_BACKWARD, TILELOSS_VALUE_AND_GRAD}) {
      if (pass == TILELOSS_VALUE_AND_GRAD && is(f, "logprobs")) continue;
      for (const bool in_place : {false, true}) {
        Case c(GetParam());
        const bool is_soft = is(f, "soft_cross_entropy");
        for (std::int64_t i = 0; i < kRows; ++i) {
          for (std::int64_t j = 0; j < kVocab; ++j) {
            const auto at = static_cast<std::size_t>(i * kVocab + j);
            if (is_soft) c.teacher.set(at, c.allows(i, j) ? std::exp2(c.teacher.get(at) - 8) : 0);
            if (!is_soft && !c.allows(i, j)) c.logits.set(at, j % 2 == 0 ? kNan : kInf);  // nobody looks at it
            c.dlogits.set(at, kNan);
          }
        }
        const Floats x = c.logits;
        Results got(kRows);
        Floats& dx = in_place ? c.logits : c.dlogits;
        SCOPED_TRACE(std::string(f.name) + " pass " + std::to_string(pass) + (in_place ? " in place " : " ") +
                     std::to_string(&f - kFunctions));
        ASSERT_EQ(call(f, pass, kRows, kVocab, kValid, c.logits.data(), c.teacher.data(), dx.data(), GetParam(), c.labels, c.ids,
                       c.log_q, c.class_weights, c.per_row, c.words.data(), got),
                  TILELOSS_OK)
            << tileloss_last_error();
        for (std::int64_t i = 0; i < kRows; ++i) {
          SCOPED_TRACE(i);
          const std::vector<std::int64_t> in = c.columns(i);
          const auto row = static_cast<std::size_t>(i);
          if (in.empty()) {
            if (pass != TILELOSS_BACKWARD) {
              EXPECT_EQ(got.lse[row], -kInf);
            }
            if (pass != TILELOSS_BACKWARD && !is(f, "logprobs") && !is(f, "policy_loss")) {
              EXPECT_TRUE(std::isnan(got.loss[row]));
            }
            for (std::int64_t j = 0; j < kVocab && pass != TILELOSS_FORWARD; ++j) {
              const float g = dx.get(static_cast<std::size_t>(i * kVocab + j));
              ASSERT_TRUE(j < kValid ? std::isnan(g) : g == 0) << j << " " << g;
            }
            continue;
          }
          const std::size_t n = in.size();
          Floats less(GetParam(), n), teacher(GetParam(), n), dless(GetParam(), n);
          std::vector<float> weights(n);
          std::int64_t label = -1;
          std::vector<std::int64_t> ids(kKnown, -1);
          for (std::size_t k = 0; k < n; ++k) {
            const auto at = static_cast<std::size_t>(i * kVocab + in[k]);
            less.set(k, x.get(at));
            teacher.set(k, c.teacher.get(at));
            weights[k] = c.class_weights[static_cast<std::size_t>(in[k])];
            if (in[k] == c.labels[row]) label = static_cast<std::int64_t>(k);
            for (std::int64_t m = 0; m < kKnown; ++m) {
              if (c.ids[static_cast<std::size_t>(i * kKnown + m)] == in[k])
                ids[static_cast<std::size_t>(m)] = static_cast<std::int64_t>(k);
            }
          }
          const std::vector<float> log_q(c.log_q.begin() + i * kKnown, c.log_q.begin() + (i + 1) * kKnown);
          Results wanted(1);
          const auto count = static_cast<std::int64_t>(n);
          ASSERT_EQ(call(f, pass, 1, count, count, less.data(), teacher.data(), in_place ? less.data() : dless.data(), GetParam(),
                         {label}, ids, log_q, weights, {c.per_row[row]}, nullptr, wanted),
                    TILELOSS_OK)
              << tileloss_last_error();
          if (pass != TILELOSS_BACKWARD) expect_same_row(got, row, wanted, in);
          const Floats& dwanted = in_place ? less : dless;
          for (std::int64_t j = 0, k = 0; j < kVocab && pass != TILELOSS_FORWARD; ++j) {
            const float g = dx.get(static_cast<std::size_t>(i * kVocab + j));
            const bool is_in = j < kValid && c.allows(i, j);
            const float w = is_in ? dwanted.get(static_cast<std::size_t>(k++)) : 0;
            ASSERT_TRUE(same(g, w)) << "column " << j << ": " << g << ", expected " << w;
          }
        }
      }
    }
  }
}

TEST_P(AllowedTokens, OfAllAreTheCallWithoutThem) {
  const std::vector<std::int32_t> all(kWords, -1);
  for (const Function& f : kFunctions) {
    Case c(GetParam());
    Results got(kRows), wanted(kRows);
    Floats plain(GetParam(), kRows * kVocab);
    const auto pass = is(f, "logprobs") ? TILELOSS_BACKWARD : TILELOSS_VALUE_AND_GRAD;
    for (std::size_t at = 0; at < kRows * kVocab; ++at) c.teacher.set(at, std::exp2(c.teacher.get(at) - 8));
    for (const bool is_allowed : {false, true}) {
      ASSERT_EQ(call(f, pass, kRows, kVocab, kValid, c.logits.data(), c.teacher.data(),
                     is_allowed ? c.dlogits.data() : plain.data(), GetParam(), c.labels, c.ids, c.log_q, c.class_weights,
                     c.per_row, is_allowed ? all.data() : nullptr, is_allowed ? got : wanted, 0),
                TILELOSS_OK)
          << tileloss_last_error();
    }
    EXPECT_EQ(c.dlogits.words, plain.words) << f.name;
    EXPECT_EQ(c.dlogits.halves, plain.halves) << f.name;
    EXPECT_EQ(got.argmax, wanted.argmax) << f.name;
    for (std::size_t i = 0; i < kRows; ++i) EXPECT_TRUE(same(got.loss[i], wanted.loss[i])) << f.name << i;
  }
}

TEST_P(AllowedTokens, ALabelOutsideIsOneOfMinusInfinity) {
  Case c(GetParam());
  for (std::int64_t i = 0; i < kRows; ++i) {
    for (std::int64_t j = 0; j < kValid && i != 3; ++j) {
      if (!c.allows(i, j)) c.labels[static_cast<std::size_t>(i)] = j;
    }
  }
  const Function soft = {"soft_cross_entropy", {{"labels", 1}}, {{"reduction", "none"}}};
  Results got(kRows), of_soft(kRows);
  for (std::size_t at = 0; at < kRows * kVocab; ++at) c.teacher.set(at, 0.25F);
  ASSERT_EQ(call(soft, TILELOSS_VALUE_AND_GRAD, kRows, kVocab, kValid, c.logits.data(), c.teacher.data(), c.dlogits.data(),
                 GetParam(), c.labels, {}, {}, {}, c.per_row, c.words.data(), of_soft),
            TILELOSS_OK)
      << tileloss_last_error();
  const Function f = {"cross_entropy", {}, {{"reduction", "none"}}};
  ASSERT_EQ(call(f, TILELOSS_VALUE_AND_GRAD, kRows, kVocab, kValid, c.logits.data(), nullptr, c.dlogits.data(), GetParam(),
                 c.labels, {}, {}, {}, c.per_row, c.words.data(), got),
            TILELOSS_OK)
      << tileloss_last_error();
  for (std::size_t i = 0; i < kRows; ++i) {
    if (i == 0 || i == 3) continue;
    EXPECT_EQ(got.logp[i], -kInf) << i;
    EXPECT_EQ(of_soft.logp[i], -kInf) << i;
    EXPECT_EQ(of_soft.loss[i], kInf) << i << ": probabilities outside";
    EXPECT_EQ(got.loss[i], kInf) << i;
    EXPECT_EQ(c.dlogits.get(i * kVocab + static_cast<std::size_t>(c.labels[i])), 0) << i;
    double sum = 0;
    for (std::size_t j = 0; j < kVocab; ++j) sum += c.dlogits.get(i * kVocab + j);
    EXPECT_NEAR(sum, c.per_row[i], 0.01) << i;
  }
}

// In every schedule: rows of several blocks, columns in several chunks, some of which no row allows.
TEST_P(AllowedTokens, WithTheHeadAreAsTheOracleHasThem) {
  const std::string base =
      "level=linear hidden_size=17 batch_size=3 seq_len=50 vocab_size=1000 valid_vocab=977 seed=7 source.std=2 ignore_prob=0.1 "
      "upstream=per_row kernel.threads=2 outputs=[logp, lse, entropy, argmax] ";
  const std::vector<Sets> hows = {
      {"allowed=runs", "bias=none", "kernel.vocab_block=64", "gradients=[dhidden, dhead]"},
      {"allowed=half", "allowed_rows=[all, one]", "bias=random", "kernel.vocab_block=64"},
      {"allowed=shared", "bias=none", "kernel.vocab_block=256", "kernel.row_block=128", "gradients=[dhidden, dhead]"},
      {"allowed=runs", "allowed_rows=[label_outside]", "bias=random", "kernel.vocab_block=256", "kernel.row_block=128"}};
  for (const std::string loss :
       {"loss=logprobs softcap=5 temperature=0.7", "loss=cross_entropy label_smoothing=0.2 z_loss=0.1",
        "loss=cross_entropy label_smoothing=0.2 softcap=4 class_weights=random", "loss=cross_entropy logit_scale=0.5",
        "loss=policy_loss entropy_coef=0.1 entropy_reduction=as_loss old_logp_noise_scale=0.2",
        "loss=distillation label_weight=0.5 divergence=forward_kl", "loss=distillation softcap=6 divergence=jsd",
        "loss=distillation divergence=total_variation", "loss=sparse_distillation label_weight=0.5 tail=lump",
        "loss=sparse_distillation softcap=6 tail=ignore divergence=jsd", "loss=sparse_distillation tail=renormalise",
        "loss=soft_cross_entropy label_smoothing=0.1", "loss=soft_cross_entropy softcap=6 class_weights=random"}) {
    const bool is_logprobs = loss.starts_with("loss=logprobs"), is_policy = loss.starts_with("loss=policy");
    const bool is_of_labels = is_logprobs || is_policy || loss.starts_with("loss=cross");
    for (const std::string schedule : {"auto", "stash", "recompute", "sweeps"}) {
      if (schedule != "auto" && (is_logprobs || (schedule != "stash" && !is_of_labels))) continue;
      for (std::size_t how = 0; how < hows.size(); ++how) {
        if (schedule != "auto" && how % 3 == 0) continue;
        Sets sets = joined({"gradients=[dhidden, dhead, dbias]", "kernel.schedule=" + schedule}, hows[how]);
        sets.emplace_back(GetParam() == TILELOSS_FLOAT32 ? "dtype=fp32" : "dtype=bf16");
        if (!is_logprobs) sets.emplace_back(is_policy ? "aggregation=none" : "reduction=none");
        tools::GradcheckConfig config = tools::config_of(base + loss, sets);
        config.kernel.chunk_columns = 256;
        EXPECT_EQ(tools::GradcheckCall(config).failures(), Sets()) << loss << testing::PrintToString(sets);
      }
    }
  }
}

TEST(AllowedShards, MergeIntoTheRowsOfTheWholeVocabulary) {
  const Case sets(TILELOSS_FLOAT32);
  for (const bool has_weights : {false, true}) {
    LogitsCase c({.rows = kRows, .vocab = kVocab, .class_weights = has_weights, .per_row_loss = true, .extra_outputs = true});
    c.set_allowed(sets.words);
    const tileloss_cross_entropy_options options{.label_smoothing = 0.2, .reduction = TILELOSS_REDUCTION_NONE};
    run_sharded("cross_entropy", c.args(), options, {{0, 512}, {512, kVocab - 512}});
    EXPECT_TRUE(agrees(check_cross_entropy(c, options))) << has_weights;
  }
}

TEST(AllowedShards, AreRefusedWithoutCountsOrBetweenWords) {
  LogitsCase c({.rows = 2, .vocab = 64, .loss = false, .row_outputs = false});
  c.set_allowed({-1, -1, -1, -1});
  RowStateArrays state(2, 0, true);
  c.args().row_state = &state.get();
  const tileloss_matrix dlogits = c.args().dlogits;
  c.args().dlogits = {};
  const auto is_refused = [&](tileloss_pass pass, std::int64_t start, const std::string& message) {
    const auto options = of_shard(cross_entropy_options(), {start, 64}, 128);
    return refused(tileloss_call("cross_entropy", pass, &c.args(), &options, nullptr, nullptr), TILELOSS_INVALID_ARGUMENT,
                   message);
  };
  EXPECT_TRUE(is_refused(TILELOSS_FORWARD, 40, "vocab_start: expected a multiple of 32 with allowed, got 40"));
  const auto options = of_shard(cross_entropy_options(), {32, 64}, 128);
  ASSERT_TRUE(runs("cross_entropy", TILELOSS_FORWARD, c.args(), &options, plan_options()));
  state.get().allowed_count = nullptr;
  c.args().dlogits = dlogits;
  EXPECT_TRUE(
      is_refused(TILELOSS_BACKWARD, 32, "row_state.allowed_count: expected an array, for a shard with allowed, got null"));
}

TEST(AllowedValidation, NamesWhatIsWrong) {
  LogitsCase c({.rows = kRows, .vocab = kVocab, .loss = false, .dlogits = false});
  c.set_allowed(std::vector<std::int32_t>(kRows * kWords));
  const auto refused = [&](void (*change)(tileloss_matrix&), const std::string& message) {
    tileloss_args args = c.args();
    change(args.allowed);
    EXPECT_TRUE(test::refused(tileloss_logprobs(&args, nullptr, nullptr, nullptr), TILELOSS_INVALID_ARGUMENT, message));
  };
  refused([](tileloss_matrix& m) { m.dtype = TILELOSS_INT64; }, "allowed.dtype: expected int32, got int64");
  refused([](tileloss_matrix& m) { m.cols = 31; }, "allowed: expected a word for 32 columns of the logits, [12,32], got [12,31]");
  refused([](tileloss_matrix& m) { m.rows = 1; }, "allowed: expected a word for 32 columns of the logits, [12,32], got [1,32]");
  refused([](tileloss_matrix& m) { m.row_stride = 8; }, "allowed.row_stride: expected >= cols = 32, got 8");
  refused([](tileloss_matrix& m) { m.col_stride = 2; }, "allowed.col_stride: expected 1, got 2");
  refused([](tileloss_matrix& m) { m.data = nullptr; }, "allowed.data: expected a pointer, got null");
}

TEST(AllowedValidation, StatesWithCountsAndWithoutAreNotMerged) {
  RowStateArrays with(1, 0, true), without(1);
  const auto is_refused = [](RowStateArrays& into, RowStateArrays& from, const std::string& message) {
    return refused(tileloss_row_state_merge(&into.get(), &from.get()), TILELOSS_INVALID_ARGUMENT, message);
  };
  EXPECT_TRUE(is_refused(with, without, "from.allowed_count: expected an array, as into has one, got none"));
  EXPECT_TRUE(is_refused(without, with, "from.allowed_count: expected none, as into has none, got an array"));
  RowStateArrays counts(1, 0, true);
  counts.get().allowed_weight = nullptr;
  EXPECT_TRUE(is_refused(counts, with, "from.allowed_weight: expected none, as into has none, got an array"));
}

}  // namespace
}  // namespace tileloss::test
