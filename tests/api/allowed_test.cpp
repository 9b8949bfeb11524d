// Allowed tokens of a row. From logits: the bits of a call on the row's allowed columns alone, zeros between them. With the LM
// head: what the logits' call makes of the same logits.
// On cuda: AllowedTokens, AllowedShards.
#include <gtest/gtest.h>
#include <tileloss/tileloss.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace tileloss::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

template <class T>
T init() {
  T value;
  tileloss_struct_init(&value, sizeof value);
  return value;
}

// Elements of a float format, with float values.
struct Floats {
  tileloss_dtype dtype;
  std::vector<std::uint32_t> words;
  std::vector<std::uint16_t> halves;
  explicit Floats(tileloss_dtype t, std::size_t n = 0) : dtype(t) { t == TILELOSS_FLOAT32 ? words.resize(n) : halves.resize(n); }
  void* data() { return dtype == TILELOSS_FLOAT32 ? static_cast<void*>(words.data()) : halves.data(); }
  std::int64_t size() const { return static_cast<std::int64_t>(words.size() + halves.size()); }
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
  std::int64_t rows;
  Floats logits, teacher, dlogits;
  std::vector<std::int32_t> words = std::vector<std::int32_t>(rows * kWords);
  std::vector<std::int64_t> labels = std::vector<std::int64_t>(rows), ids = std::vector<std::int64_t>(rows * kKnown);
  std::vector<float> log_q = std::vector<float>(rows * kKnown), class_weights = std::vector<float>(kVocab),
                     per_row = std::vector<float>(rows);
  std::mt19937 random{7};

  explicit Case(tileloss_dtype t, std::int64_t count = kRows)
      : rows(count), logits(t, rows * kVocab), teacher(t, rows * kVocab), dlogits(t, rows * kVocab) {
    std::normal_distribution<float> normal(0, 3);
    for (std::int64_t i = 0; i < rows * kVocab; ++i) {
      logits.set(static_cast<std::size_t>(i), normal(random));
      teacher.set(static_cast<std::size_t>(i), normal(random));
    }
    for (std::int64_t i = 0; i < rows; ++i) {
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
    switch (i % kRows) {
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

// What stands for the logits with the LM head, in float32 or bfloat16, and the gradients.
struct Head {
  std::int64_t width;
  Floats hidden, head, teacher_hidden, teacher_head, bias;
  std::vector<float> dhidden, dhead, dbias;
  tileloss_plan_options hints;
  bool accumulate = false;
};

// Of rows whose matrices and words lie at these places.
tileloss_status call(const Function& f, tileloss_pass pass, std::int64_t rows, std::int64_t vocab, std::int64_t valid, void* x,
                     void* teacher, void* dx, tileloss_dtype t, std::vector<std::int64_t> labels, std::vector<std::int64_t> ids,
                     std::vector<float> log_q, std::vector<float> weights, std::vector<float> per_row, const void* words,
                     Results& r, std::int64_t word_stride = kWords, Head* h = nullptr) {
  auto info = init<tileloss_function_info>();
  std::int64_t index = 0;
  do {
    if (tileloss_get_function_info(index++, &info) != TILELOSS_OK) return TILELOSS_INTERNAL;
  } while (std::string(info.name) != f.name);
  const std::string full_name = h == nullptr ? f.name : std::string("linear_") + f.name;
  std::vector<std::byte> options(info.options_size);
  if (tileloss_options_init(f.name, options.data(), options.size()) != TILELOSS_OK) return TILELOSS_INTERNAL;
  const auto set = [&](const char* name, double value) {
    EXPECT_EQ(tileloss_options_set(f.name, options.data(), name, value), TILELOSS_OK) << tileloss_last_error();
  };
  set("valid_vocab", static_cast<double>(valid));
  bool has_weights = false, has_labels = !is(f, "soft_cross_entropy");
  for (const auto& [name, value] : f.numbers) {
    if (std::string(name) == "class_weights") {
      has_weights = true;
    } else if (std::string(name) == "labels") {
      has_labels = true;
    } else {
      set(name, value);
    }
  }
  for (const auto& [name, value] : f.choices) {
    EXPECT_EQ(tileloss_options_set_choice(f.name, options.data(), name, value), TILELOSS_OK) << tileloss_last_error();
  }
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
  if (h == nullptr) return tileloss_call(f.name, pass, &a, options.data(), nullptr, nullptr);
  a.logits = a.dlogits = a.teacher_logits = {};
  a.hidden = tileloss_make_matrix(h->hidden.data(), h->hidden.dtype, rows, h->width, h->width);
  a.head = tileloss_make_matrix(h->head.data(), h->head.dtype, vocab, h->width, h->width);
  a.bias = tileloss_make_vector(h->bias.data(), h->bias.dtype, h->bias.size());
  if (h->bias.size() == 0) a.bias = {};
  if (is(f, "distillation")) {
    a.teacher_hidden = tileloss_make_matrix(h->teacher_hidden.data(), h->hidden.dtype, rows, h->width, h->width);
    a.teacher_head = tileloss_make_matrix(h->teacher_head.data(), h->hidden.dtype, vocab, h->width, h->width);
  }
  if (pass != TILELOSS_FORWARD) {
    a.dhidden = tileloss_make_matrix(h->dhidden.data(), TILELOSS_FLOAT32, rows, h->width, h->width);
    a.dhead = tileloss_make_matrix(h->dhead.data(), TILELOSS_FLOAT32, vocab, h->width, h->width);
    if (!h->dbias.empty()) a.dbias = tileloss_make_vector(h->dbias.data(), TILELOSS_FLOAT32, vocab);
  }
  auto plan = init<tileloss_plan>();
  if (const tileloss_status s = tileloss_make_plan(full_name.c_str(), pass, &a, options.data(), &h->hints, nullptr, &plan);
      s != TILELOSS_OK)
    return s;
  return tileloss_call(full_name.c_str(), pass, &a, options.data(), &plan, nullptr);
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

// dlogits [rows, V] times a matrix, in double.
std::vector<double> product(const Floats& g, std::int64_t rows, const Floats& by, std::int64_t width, bool down) {
  std::vector<double> to(static_cast<std::size_t>((down ? kVocab : rows) * width));
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < kVocab; ++j) {
      const double x = g.get(static_cast<std::size_t>(i * kVocab + j));
      if (x == 0) continue;
      for (std::int64_t k = 0; k < width; ++k) {
        to[static_cast<std::size_t>((down ? j : i) * width + k)] +=
            x * by.get(static_cast<std::size_t>((down ? i : j) * width + k));
      }
    }
  }
  return to;
}

void expect_close(const std::vector<float>& got, const std::vector<double>& wanted, std::int64_t width, double tolerance,
                  const char* name) {
  double of_all = 0;
  for (const double w : wanted) of_all = std::max(of_all, std::fabs(w));
  for (std::size_t at = 0; at < wanted.size(); ++at) {
    const bool is_nothing = wanted[at] == 0 && got[at] == 0;
    ASSERT_TRUE(is_nothing || std::fabs(got[at] - wanted[at]) <= tolerance * of_all)
        << name << "[" << at / static_cast<std::size_t>(width) << "," << at % static_cast<std::size_t>(width) << "]: " << got[at]
        << ", expected " << wanted[at] << " of " << of_all;
  }
}

TEST_P(AllowedTokens, WithTheHeadAreThoseOfItsLogits) {
  constexpr std::int64_t kMany = 150, kWidth = 17;
  for (const Function& f : kFunctions) {
    for (const tileloss_schedule schedule :
         {TILELOSS_SCHEDULE_AUTO, TILELOSS_SCHEDULE_STASH, TILELOSS_SCHEDULE_RECOMPUTE, TILELOSS_SCHEDULE_SWEEPS}) {
      for (const int how : {0, 1, 2, 3}) {  // bits: with bias; some rows at a time
        if (schedule > TILELOSS_SCHEDULE_STASH && (has_teacher(f) || is(f, "soft_cross_entropy"))) continue;
        if (schedule > TILELOSS_SCHEDULE_AUTO && (is(f, "logprobs") || how % 3 == 0)) continue;
        Case c(TILELOSS_FLOAT32, kMany);
        Head h{kWidth,
               Floats(GetParam(), kMany * kWidth),
               Floats(GetParam(), kVocab * kWidth),
               Floats(GetParam(), kMany * kWidth),
               Floats(GetParam(), kVocab * kWidth),
               Floats(GetParam(), how % 2 == 0 ? 0 : kVocab),
               std::vector<float>(kMany * kWidth, kNan),
               std::vector<float>(kVocab * kWidth, kNan),
               std::vector<float>(how % 2 == 0 ? 0 : kVocab, kNan),
               {}};
        tileloss_plan_options_init(&h.hints);
        h.hints.cpu.schedule = schedule;
        h.hints.cpu.chunk_columns = 256;
        h.hints.cpu.vocab_block = how < 2 ? 64 : 256;
        h.hints.cpu.threads = 2;
        if (how >= 2) h.hints.cpu.row_block = 128;
        std::normal_distribution<float> normal(0, 0.6F);
        for (Floats* m : {&h.hidden, &h.head, &h.teacher_hidden, &h.teacher_head, &h.bias}) {
          for (std::int64_t at = 0; at < m->size(); ++at) m->set(static_cast<std::size_t>(at), normal(c.random));
        }
        const auto multiply = [&](Floats& z, const Floats& a, const Floats& b, bool biased) {
          for (std::int64_t i = 0; i < kMany; ++i) {
            for (std::int64_t j = 0; j < kVocab; ++j) {
              double sum = biased ? h.bias.get(static_cast<std::size_t>(j)) : 0;
              for (std::int64_t k = 0; k < kWidth; ++k)
                sum += double{a.get(static_cast<std::size_t>(i * kWidth + k))} * b.get(static_cast<std::size_t>(j * kWidth + k));
              z.set(static_cast<std::size_t>(i * kVocab + j), static_cast<float>(sum));
            }
          }
        };
        multiply(c.logits, h.hidden, h.head, h.bias.size() > 0);
        multiply(c.teacher, h.teacher_hidden, h.teacher_head, false);
        const bool is_soft = is(f, "soft_cross_entropy");
        for (std::int64_t i = 0; i < kMany; ++i) {
          if (i % kRows == 3) c.allow(i, 7, true);
          for (std::int64_t j = 0; j < kVocab && is_soft; ++j) {
            const auto at = static_cast<std::size_t>(i * kVocab + j);
            c.teacher.set(at, c.allows(i, j) ? std::exp2(c.teacher.get(at) - 8) : 0);
          }
          c.labels[static_cast<std::size_t>(i)] = i % kRows == 3 ? 7 : c.labels[static_cast<std::size_t>(i)];
          // dhead has columns that no row allows
          for (std::int64_t j = 500; j < 560; ++j) {
            if (c.labels[static_cast<std::size_t>(i)] != j) c.allow(i, j, false);
          }
        }
        SCOPED_TRACE(std::string(f.name) + " " + std::to_string(&f - kFunctions) + " schedule " + std::to_string(schedule) +
                     " how " + std::to_string(how));
        Results got(kMany), wanted(kMany);
        const auto pass = is(f, "logprobs") ? TILELOSS_BACKWARD : TILELOSS_VALUE_AND_GRAD;
        for (Head* head : {static_cast<Head*>(nullptr), &h}) {
          const tileloss_status s = call(f, pass, kMany, kVocab, kValid, c.logits.data(), c.teacher.data(), c.dlogits.data(),
                                         TILELOSS_FLOAT32, c.labels, c.ids, c.log_q, c.class_weights, c.per_row, c.words.data(),
                                         head == nullptr ? wanted : got, kWords, head);
          ASSERT_EQ(s, TILELOSS_OK) << tileloss_last_error();
        }
        const bool is_rounded = GetParam() == TILELOSS_BFLOAT16;
        for (std::size_t i = 0; i < kMany; ++i) {
          if (got.loss[i] != wanted.loss[i]) {
            ASSERT_NEAR(got.loss[i], wanted.loss[i], 1e-4 * std::max(1.0F, std::fabs(wanted.loss[i]))) << i;
          }
          ASSERT_EQ(got.argmax[i], wanted.argmax[i]) << i;
          ASSERT_NEAR(got.lse[i], wanted.lse[i], 1e-4) << i;
          ASSERT_NEAR(got.mean_logit[i], wanted.mean_logit[i], 1e-4) << i;
          ASSERT_NEAR(got.entropy[i], wanted.entropy[i], 1e-4) << i;
        }
        const double tolerance = is_rounded ? 1e-2 : 1e-5;
        expect_close(h.dhidden, product(c.dlogits, kMany, h.head, kWidth, false), kWidth, tolerance, "dhidden");
        expect_close(h.dhead, product(c.dlogits, kMany, h.hidden, kWidth, true), kWidth, tolerance, "dhead");
        if (!h.dbias.empty()) {
          Floats ones(TILELOSS_FLOAT32, kMany);
          for (std::size_t i = 0; i < kMany; ++i) ones.set(i, 1);
          expect_close(h.dbias, product(c.dlogits, kMany, ones, 1, true), 1, is_rounded ? 1e-2 : 1e-4, "dbias");
        }
      }
    }
  }
}

// A row state of all arrays, and where they lie.
struct States {
  std::vector<float> values = std::vector<float>(8 * kRows);
  std::vector<std::int64_t> argmax = std::vector<std::int64_t>(kRows);
  tileloss_row_state c = init<tileloss_row_state>();
  States() {
    c.rows = kRows;
    float** const arrays[] = {&c.max,           &c.sum,           &c.label_logit,   &c.entropy_sum,
                              &c.collision_sum, &c.smoothing_sum, &c.allowed_count, &c.allowed_weight};
    for (std::size_t a = 0; a < 8; ++a) *arrays[a] = values.data() + a * kRows;
    c.argmax = argmax.data();
    EXPECT_EQ(tileloss_row_state_set_identity(&c), TILELOSS_OK) << tileloss_last_error();
  }
};

TEST(AllowedShards, MergeIntoTheRowsOfTheWholeVocabulary) {
  constexpr std::int64_t kCut = 512;
  for (const bool has_weights : {false, true}) {
    Case c(TILELOSS_FLOAT32);
    Floats& x = c.logits;
    std::vector<float> loss(kRows), whole_loss(kRows), lse(kRows), whole_lse(kRows), mean(kRows), whole_mean(kRows);
    std::vector<std::int64_t> argmax(kRows), whole_argmax(kRows);
    auto options = init<tileloss_cross_entropy_options>();
    tileloss_cross_entropy_options_init(&options);
    options.reduction = TILELOSS_REDUCTION_NONE;
    options.label_smoothing = 0.2;
    const auto args = [&](std::int64_t begin, std::int64_t end) {
      auto a = init<tileloss_args>();
      a.labels = tileloss_make_vector(c.labels.data(), TILELOSS_INT64, kRows);
      if (has_weights) a.class_weights = tileloss_make_vector(c.class_weights.data(), TILELOSS_FLOAT32, kVocab);
      if (end == begin) return a;
      a.logits = tileloss_make_matrix(x.words.data() + begin, TILELOSS_FLOAT32, kRows, end - begin, kVocab);
      a.allowed = tileloss_make_matrix(c.words.data() + begin / 32, TILELOSS_INT32, kRows, (end - begin + 31) / 32, kWords);
      return a;
    };
    const auto dlogits = [&](Floats& to, std::int64_t begin, std::int64_t end) {
      return tileloss_make_matrix(to.words.data() + begin, TILELOSS_FLOAT32, kRows, end - begin, kVocab);
    };
    const auto vector = [](auto& v, tileloss_dtype t) { return tileloss_make_vector(v.data(), t, kRows); };
    Floats whole(TILELOSS_FLOAT32, kRows * kVocab);
    auto a = args(0, kVocab);
    a.dlogits = dlogits(whole, 0, kVocab);
    a.loss = vector(whole_loss, TILELOSS_FLOAT32);
    a.lse = vector(whole_lse, TILELOSS_FLOAT32);
    a.argmax = vector(whole_argmax, TILELOSS_INT64);
    if (!has_weights) a.mean_logit = vector(whole_mean, TILELOSS_FLOAT32);
    ASSERT_EQ(tileloss_cross_entropy_value_and_grad(&a, &options, nullptr, nullptr), TILELOSS_OK) << tileloss_last_error();

    States all;
    options.logit.vocab_total = kVocab;
    for (const auto& [begin, end] : {std::pair{std::int64_t{0}, kCut}, {kCut, kVocab}}) {
      States part;
      a = args(begin, end);
      a.row_state = &part.c;
      options.logit.vocab_start = begin;
      ASSERT_EQ(tileloss_cross_entropy(&a, &options, nullptr, nullptr), TILELOSS_OK) << tileloss_last_error();
      ASSERT_EQ(tileloss_row_state_merge(&all.c, &part.c), TILELOSS_OK) << tileloss_last_error();
    }
    options.logit.vocab_start = 0;
    a = args(0, 0);
    a.row_state = &all.c;
    a.loss = vector(loss, TILELOSS_FLOAT32);
    a.lse = vector(lse, TILELOSS_FLOAT32);
    a.argmax = vector(argmax, TILELOSS_INT64);
    if (!has_weights) a.mean_logit = vector(mean, TILELOSS_FLOAT32);
    ASSERT_EQ(tileloss_cross_entropy_from_row_state(&a, &options, nullptr, nullptr), TILELOSS_OK) << tileloss_last_error();
    for (const auto& [begin, end] : {std::pair{std::int64_t{0}, kCut}, {kCut, kVocab}}) {
      a = args(begin, end);
      a.row_state = &all.c;
      a.dlogits = dlogits(c.dlogits, begin, end);
      options.logit.vocab_start = begin;
      ASSERT_EQ(tileloss_cross_entropy_backward(&a, &options, nullptr, nullptr), TILELOSS_OK) << tileloss_last_error();
      all.c.allowed_count = nullptr;
      EXPECT_EQ(tileloss_cross_entropy_backward(&a, &options, nullptr, nullptr), TILELOSS_INVALID_ARGUMENT);
      EXPECT_NE(std::string(tileloss_last_error()).find("row_state.allowed_count"), std::string::npos) << tileloss_last_error();
      all.c.allowed_count = all.values.data() + 6 * kRows;
    }
    const auto near = [](float got, float wanted) {
      return (std::isnan(got) && std::isnan(wanted)) || got == wanted ||
             std::fabs(got - wanted) <= 2e-5F * std::max(1.0F, std::fabs(wanted));
    };
    for (std::size_t i = 0; i < kRows; ++i) {
      EXPECT_TRUE(near(loss[i], whole_loss[i])) << i << ": " << loss[i] << " " << whole_loss[i];
      EXPECT_TRUE(near(lse[i], whole_lse[i])) << i << ": " << lse[i] << " " << whole_lse[i];
      EXPECT_TRUE(near(mean[i], whole_mean[i])) << i << ": " << mean[i] << " " << whole_mean[i];
      EXPECT_EQ(argmax[i], whole_argmax[i]) << i;
      for (std::size_t j = 0; j < kVocab; ++j) {
        const float g = c.dlogits.get(i * kVocab + j), w = whole.get(i * kVocab + j);
        ASSERT_TRUE(near(g, w)) << i << "," << j << ": " << g << " " << w;
        ASSERT_EQ(g == 0, w == 0) << i << "," << j;
      }
    }
    options.logit.vocab_start = 40;
    a = args(kCut, kVocab);
    EXPECT_EQ(tileloss_cross_entropy(&a, &options, nullptr, nullptr), TILELOSS_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(tileloss_last_error()), "vocab_start: expected a multiple of 32 with allowed, got 40");
  }
}

TEST(AllowedValidation, NamesWhatIsWrong) {
  Case c(TILELOSS_FLOAT32);
  const auto refused = [&](auto&& change, const std::string& message) {
    auto a = init<tileloss_args>();
    a.logits = tileloss_make_matrix(c.logits.data(), TILELOSS_FLOAT32, kRows, kVocab, kVocab);
    a.labels = tileloss_make_vector(c.labels.data(), TILELOSS_INT64, kRows);
    a.allowed = tileloss_make_matrix(c.words.data(), TILELOSS_INT32, kRows, kWords, kWords);
    change(a.allowed);
    EXPECT_EQ(tileloss_logprobs(&a, nullptr, nullptr, nullptr), TILELOSS_INVALID_ARGUMENT);
    EXPECT_EQ(tileloss_last_error(), message);
  };
  refused([](tileloss_matrix& m) { m.dtype = TILELOSS_INT64; }, "allowed.dtype: expected int32, got int64");
  refused([](tileloss_matrix& m) { m.cols = 31; }, "allowed: expected a word for 32 columns of the logits, [12,32], got [12,31]");
  refused([](tileloss_matrix& m) { m.rows = 1; }, "allowed: expected a word for 32 columns of the logits, [12,32], got [1,32]");
  refused([](tileloss_matrix& m) { m.row_stride = 8; }, "allowed.row_stride: expected >= cols = 32, got 8");
  refused([](tileloss_matrix& m) { m.col_stride = 2; }, "allowed.col_stride: expected 1, got 2");
  refused([](tileloss_matrix& m) { m.data = nullptr; }, "allowed.data: expected a pointer, got null");
}

TEST(AllowedValidation, StatesWithCountsAndWithoutAreNotMerged) {
  float numbers[5] = {};
  auto with = init<tileloss_row_state>();
  with.rows = 1;
  with.max = &numbers[0];
  with.sum = &numbers[1];
  with.label_logit = &numbers[2];
  tileloss_row_state without = with;
  with.allowed_count = &numbers[3];
  EXPECT_EQ(tileloss_row_state_merge(&with, &without), TILELOSS_INVALID_ARGUMENT);
  EXPECT_STREQ(tileloss_last_error(), "from.allowed_count: expected an array, as into has one, got none");
  EXPECT_EQ(tileloss_row_state_merge(&without, &with), TILELOSS_INVALID_ARGUMENT);
  EXPECT_STREQ(tileloss_last_error(), "from.allowed_count: expected none, as into has none, got an array");
  without.allowed_count = &numbers[3];
  without.allowed_weight = &numbers[4];
  EXPECT_EQ(tileloss_row_state_merge(&with, &without), TILELOSS_INVALID_ARGUMENT);
  EXPECT_STREQ(tileloss_last_error(), "from.allowed_weight: expected none, as into has none, got an array");
}

}  // namespace
}  // namespace tileloss::test
