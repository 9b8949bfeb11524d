// Random cases over many options, chosen so that every pair of two options' values soon meets in some case.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "support/synthetic.h"

namespace tileloss::test {

struct Factor {
  const char* name;
  std::vector<const char*> levels;
};

// Two values that exclude each other, by name.
struct Forbidden {
  const char* factor;
  const char* level;
  const char* other_factor;
  const char* other_level;
};

class PairwiseSampler {
 public:
  PairwiseSampler(std::vector<Factor> factors, const std::vector<Forbidden>& forbidden, std::uint64_t seed)
      : factors_(std::move(factors)), random_(seed, tools::Stream::kOptions, 0) {
    for (const Factor& f : factors_) {
      first_.push_back(values_);
      values_ += f.levels.size();
    }
    first_.push_back(values_);
    state_.assign(values_ * values_, kOpen);
    for (const Forbidden& f : forbidden) {
      const std::size_t a = value(f.factor, f.level), b = value(f.other_factor, f.other_level);
      state_[a * values_ + b] = state_[b * values_ + a] = kForbidden;
    }
    for_each_pair([&](std::size_t a, std::size_t b) { total_ += state_[a * values_ + b] == kOpen ? 1 : 0; });
  }

  // The best of some random cases: the one with the most pairs that have not met yet.
  void next() {
    constexpr int kCandidates = 24;
    std::size_t best_gain = 0;
    std::vector<std::size_t> best;
    for (int k = 0; k < kCandidates; ++k) {
      const std::vector<std::size_t> candidate = draw();
      const std::size_t gain = visit(candidate, false);
      if (best.empty() || gain > best_gain) {
        best = candidate;
        best_gain = gain;
      }
    }
    current_ = best;
    covered_ += visit(current_, true);
  }

  std::size_t covered() const { return covered_; }
  std::size_t total() const { return total_; }

  std::string level(const char* factor) const {
    const std::size_t f = factor_index(factor);
    return factors_[f].levels[current_[f] - first_[f]];
  }
  bool is(const char* factor, const char* level_name) const { return level(factor) == level_name; }
  double number(const char* factor) const { return std::stod(level(factor)); }
  std::int64_t integer(const char* factor) const { return std::stoll(level(factor)); }

  std::string describe() const {
    std::string text;
    for (const Factor& f : factors_) text += std::string(text.empty() ? "" : ", ") + f.name + " " + level(f.name);
    return text;
  }
  std::string first_missing() const {
    std::string missing;
    for_each_pair([&](std::size_t a, std::size_t b) {
      if (state_[a * values_ + b] == kOpen && missing.empty()) missing = value_name(a) + ", " + value_name(b);
    });
    return missing;
  }

 private:
  enum State : unsigned char { kOpen, kCovered, kForbidden };

  std::size_t factor_index(const std::string& name) const {
    std::size_t f = 0;
    while (factors_.at(f).name != name) ++f;
    return f;
  }
  std::size_t value(const std::string& factor, const std::string& level_name) const {
    const std::size_t f = factor_index(factor);
    std::size_t l = 0;
    while (factors_[f].levels.at(l) != level_name) ++l;
    return first_[f] + l;
  }
  std::string value_name(std::size_t v) const {
    std::size_t f = 0;
    while (first_[f + 1] <= v) ++f;
    return std::string(factors_[f].name) + " " + factors_[f].levels[v - first_[f]];
  }
  template <class Function>
  void for_each_pair(Function&& function) const {
    for (std::size_t f = 0; f < factors_.size(); ++f) {
      for (std::size_t a = first_[f]; a < first_[f + 1]; ++a) {
        for (std::size_t b = first_[f + 1]; b < values_; ++b) function(a, b);
      }
    }
  }
  // Factors in random order, each with a random level among those that the earlier ones allow.
  std::vector<std::size_t> draw() {
    for (;;) {
      std::vector<std::size_t> chosen(factors_.size());
      bool possible = true;
      for (std::size_t f = 0; f < factors_.size() && possible; ++f) {
        std::vector<std::size_t> allowed;
        for (std::size_t v = first_[f]; v < first_[f + 1]; ++v) {
          bool fits = true;
          for (std::size_t g = 0; g < f; ++g) fits = fits && state_[v * values_ + chosen[g]] != kForbidden;
          if (fits) allowed.push_back(v);
        }
        possible = !allowed.empty();
        if (possible)
          chosen[f] = allowed[static_cast<std::size_t>(random_.next_below(static_cast<std::int64_t>(allowed.size())))];
      }
      if (possible) return chosen;
    }
  }
  std::size_t visit(const std::vector<std::size_t>& values, bool mark) {
    std::size_t gain = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      for (std::size_t j = i + 1; j < values.size(); ++j) {
        unsigned char& state = state_[values[i] * values_ + values[j]];
        if (state != kOpen) continue;
        ++gain;
        if (mark) state = state_[values[j] * values_ + values[i]] = kCovered;
      }
    }
    return gain;
  }

  std::vector<Factor> factors_;
  tools::Random random_;
  std::vector<std::size_t> first_;
  std::size_t values_ = 0;
  std::vector<unsigned char> state_;
  std::size_t total_ = 0, covered_ = 0;
  std::vector<std::size_t> current_;
};

}  // namespace tileloss::test
