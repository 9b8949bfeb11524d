// The independent double-precision oracle: losses over logits, and their gradients, straight from the definitions in
// docs (cross-entropy, log-softmax, entropy; the chain rule in its natural form). It shares no code with the kernels.
//
// It streams: a row is given as doubles (the exact values of the stored low-precision logits, valid columns only), so that no
// [rows, vocab] array in double is ever held. Cost: one exp an element for the value and the gradient together.
//
// Accuracy: about 1e-14 relative for logp, lse, entropy and every gradient component that is not itself a difference of equal
// terms, also for confident targets (1 - p_y is a sum of the others) and common offsets (max and log of the sum stay apart).
//
// All functions are const and share nothing: rows may run on any threads, each with its own SoftmaxRow and GradientRow.
//
//   oracle::CrossEntropy oracle(options, labels, token_weights, class_weights, loss_grad);
//   for each row i that is not oracle.is_ignored(i):
//     softmax.compute(options.transform, logits_as_double, labels[i]);
//     losses[i] = oracle.row_loss(i, softmax);
//     oracle.row_gradient(i, softmax, gradient);
//   double loss = oracle.reduce(losses);
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace tileloss::oracle {

// generated: enums temperature_on, reduction
enum class TemperatureOn { kLogits, kLogprob };
enum class Reduction { kNone, kSum, kMean };
// end of generated

// z = softcap(logit_scale * x) / temperature. With kLogprob the softmax is taken at temperature 1 and logp is divided by it.
struct Transform {
  double logit_scale = 1.0;
  double softcap = 0.0;  // 0: off
  double temperature = 1.0;
  TemperatureOn temperature_on = TemperatureOn::kLogits;

  bool is_identity() const { return logit_scale == 1.0 && softcap == 0.0 && logit_temperature() == 1.0; }
  double logit_temperature() const { return temperature_on == TemperatureOn::kLogits ? temperature : 1.0; }
  double logp_temperature() const { return temperature_on == TemperatureOn::kLogprob ? temperature : 1.0; }
};

// The columns that a row's softmax runs over: one byte for each valid column, 0 outside the set. Empty: all of them.
using Allowed = std::span<const std::uint8_t>;
// As a call stores a set: bit j mod 32 of word j div 32 is column j. Bits from `columns` on are not looked at.
std::vector<std::uint8_t> unpack_allowed(std::span<const std::int32_t> words, std::int64_t columns);

// A default-constructed RowOutputs is what an ignored row gives.
struct RowOutputs {
  double logp = 0.0;  // at the label; divided by the temperature with TemperatureOn::kLogprob
  double lse = 0.0;
  double entropy = 0.0;  // nats
  double log_sum_sq_probs = 0.0;
  double mean_logit = 0.0;   // of z, over the columns of the set
  std::int64_t argmax = -1;  // lowest index on ties; -1 if the row holds a NaN
  bool correct = false;
};

// One row's softmax. The buffers are kept from row to row.
//
// Outside the set z is -inf, whatever the logit is, a NaN too: p = 0, and every gradient is exactly 0 there, the label's own too.
// Means and sums over classes run over the set. An empty set: a row of -inf.
class SoftmaxRow {
 public:
  // `logits`: the valid columns. 0 <= label < logits.size(), in the set or not.
  void compute(const Transform& transform, std::span<const double> logits, std::int64_t label, Allowed allowed = {});

  // Another of a row's labels: no sum depends on it.
  void set_label(std::int64_t label);

  RowOutputs outputs() const;

  std::int64_t vocab() const { return static_cast<std::int64_t>(exps_.size()); }
  std::int64_t label() const { return label_; }
  bool is_allowed(std::int64_t column) const { return allowed_.empty() || allowed_[static_cast<std::size_t>(column)] != 0; }
  Allowed allowed() const { return allowed_; }         // empty: all columns
  std::int64_t classes() const { return classes_; }    // columns of the set
  void clear_outside(std::span<double> values) const;  // 0 in the columns outside the set
  const Transform& transform() const { return transform_; }
  double max() const { return max_; }           // m
  double log_sum() const { return log_sum_; }   // log sum exp(z - m): lse = max + log_sum
  double sum() const { return 1.0 + others_; }  // sum exp(z - m)
  double logp() const;                          // log p_y of the softmax, before any division by T
  double entropy() const;                       // H
  double one_minus_p_label() const;             // the sum of the others, not a difference
  double p(std::int64_t column) const { return exps_[static_cast<std::size_t>(column)] / sum(); }
  double dz_dx(std::int64_t column) const { return slopes_.empty() ? slope_ : slopes_[static_cast<std::size_t>(column)]; }
  double largest_slope() const { return transform_.logit_scale / transform_.logit_temperature(); }  // dz/dx where z is 0
  std::span<const double> logits_z() const { return z_; }                                           // z
  std::span<const double> exps() const { return exps_; }                                            // exp(z - m)
  std::span<const double> slopes() const { return slopes_; }  // dz/dx, empty if the same for all columns: slope()
  double slope() const { return slope_; }

 private:
  void apply_transform(std::span<const double> logits);
  void exclude(Allowed allowed);

  Transform transform_;
  std::vector<std::uint8_t> allowed_;
  std::int64_t classes_ = 0;
  std::int64_t label_ = 0;
  std::int64_t argmax_ = -1;
  double max_ = 0.0;
  double others_ = 0.0;       // sum of exp(z - m) without the argmax's column
  double entropy_sum_ = 0.0;  // sum of (m - z) exp(z - m)
  double square_sum_ = 0.0;   // sum of exp(2 (z - m)) without the argmax's column
  double log_sum_ = 0.0;
  double mean_logit_ = 0.0;
  double slope_ = 1.0;
  std::vector<double> z_, exps_, slopes_;
};

// A row's gradient in four numbers: dL/dz_j = target [j = y] + p_j (prob + prob_logp log p_j) + uniform u_j, where u_j is the
// class weight, 1 if there are none; 0 outside the row's set. Only to be shown: the gradient is not made of them.
struct RowCoefficients {
  double target = 0.0;
  double prob = 0.0;
  double prob_logp = 0.0;
  double uniform = 0.0;
};

// A row's gradient with respect to the logits x as stored, and what is needed to judge an approximation of it.
struct GradientRow {
  std::vector<double> gradient;   // dL/dx
  std::vector<double> magnitude;  // the sum of the absolute values of the terms that make up each component: what float32
                                  // arithmetic loses bits of when they cancel. Equal to |gradient| when nothing cancels.
                                  // H counts 1 more if the label is not the largest: its log S then holds that column's 1
  std::vector<double> blur;       // what an error of the coefficients themselves may add to each component; empty: nothing
  RowCoefficients coefficients;
  double dlogp = 0.0;  // the derivative of the loss with respect to this row's log p_y
  double scale = 0.0;  // the largest factor that multiplies a probability: exps lost to underflow weigh this much
};

// logprobs' backward: dL/dx for upstream gradients of logp, lse, entropy and mean logit.
struct RowUpstream {
  double logp = 0.0;
  double lse = 0.0;
  double entropy = 0.0;
  double mean = 0.0;  // of the logits
};
void logprobs_gradient(const SoftmaxRow& row, const RowUpstream& upstream, GradientRow& out);
// Of rows with several labels: the column of each and the upstream gradient of its logp, in place of upstream.logp. The row's
// own label is the likeliest of them.
struct LabelUpstream {
  std::int64_t column = 0;
  double logp = 0.0;
};
void logprobs_gradient(const SoftmaxRow& row, const RowUpstream& upstream, std::span<const LabelUpstream> labels,
                       GradientRow& out);

struct CrossEntropyOptions {
  Transform transform;
  double label_smoothing = 0.0;
  double z_loss = 0.0;
  Reduction reduction = Reduction::kMean;
  double num_items = std::numeric_limits<double>::quiet_NaN();  // NaN: not given
  std::int64_t ignore_index = -100;
};

// A row's two parts, weighted, before the reduction: mean divides them by different sums.
struct RowLoss {
  double cross_entropy = 0.0;  // w [(1-s) c_y (-logp) + (s/V) sum_j c_j (-log p_j)]; V and the sum are of the row's set
  double z_loss = 0.0;         // w zeta lse^2
  double smoothing = 0.0;      // the smoothing's part of cross_entropy
  // How much an error of logp, and of the mean log p_j, weighs in cross_entropy: w (1-s) c_y, and w (s/V) sum_j |c_j|.
  double nll_weight = 0.0;
  double smoothing_weight = 0.0;
  double total() const { return cross_entropy + z_loss; }
};

// A row's value of those of all rows, or the one that all have; `absent` where there are none.
inline double at_row(std::span<const double> values, std::int64_t row, double absent) {
  if (values.empty()) return absent;
  return values[values.size() == 1 ? 0 : static_cast<std::size_t>(row)];
}

// Which rows of a loss are in use, and what they weigh. Empty spans mean: no labels, all rows in use; weights 1; upstream
// gradient 1. loss_grad: one value, or one per row with kNone. The spans must outlive it. Throws std::invalid_argument on wrong
// sizes.
class RowWeights {
 public:
  RowWeights(std::int64_t rows, std::span<const std::int64_t> labels, std::int64_t ignore_index,
             std::span<const double> token_weights, std::span<const double> loss_grad, Reduction reduction);

  bool is_ignored(std::int64_t row) const { return !labels_.empty() && labels_[static_cast<std::size_t>(row)] == ignore_index_; }
  double token_weight(std::int64_t row) const { return at_row(token_weights_, row, 1.0); }
  double upstream(std::int64_t row) const { return at_row(loss_grad_, row, 1.0); }

 protected:
  // Of kMean: 1 over num_items, or where that is NaN over the sum of weight(row) of the rows in use; 0 where they are 0.
  template <typename Weight>
  double share_of_mean(double num_items, Weight weight) const {
    long double sum = 0.0L;
    for (std::int64_t row = 0; row < rows_; ++row) {
      if (!is_ignored(row)) sum += weight(row);
    }
    const double denominator = std::isnan(num_items) ? static_cast<double>(sum) : num_items;
    return denominator == 0.0 ? 0.0 : 1.0 / denominator;
  }

  std::int64_t rows_ = 0;
  std::span<const std::int64_t> labels_;

 private:
  std::int64_t ignore_index_ = 0;
  std::span<const double> token_weights_, loss_grad_;
};

class CrossEntropy : public RowWeights {
 public:
  // labels [N]; class_weights: one for each valid column, empty: 1. Throws std::invalid_argument on sizes or options that do not
  // go together.
  CrossEntropy(const CrossEntropyOptions& options, std::span<const std::int64_t> labels, std::span<const double> token_weights,
               std::span<const double> class_weights, std::span<const double> loss_grad);

  const CrossEntropyOptions& options() const { return options_; }

  // `softmax` is not looked at when the row is ignored.
  RowLoss row_loss(std::int64_t row, const SoftmaxRow& softmax) const;
  // dL/dx of the reduced loss times its upstream gradient. An ignored row gives softmax.vocab() zeros.
  void row_gradient(std::int64_t row, const SoftmaxRow& softmax, GradientRow& out) const;

  // The scalar loss of kSum and kMean. (With kNone the loss of a row is its total().)
  double reduce(std::span<const RowLoss> losses) const;

  double class_weight(std::int64_t column) const;
  // What the reduction multiplies the rows' two parts by.
  double cross_entropy_factor() const { return cross_entropy_factor_; }
  double z_loss_factor() const { return z_loss_factor_; }

 private:
  struct ClassWeights {
    double sum = 0.0, size = 0.0;  // size: of absolute values
  };
  ClassWeights class_weights_of(const SoftmaxRow& softmax) const;

  CrossEntropyOptions options_;
  std::span<const double> class_weights_;
  double cross_entropy_factor_ = 1.0;  // 1 / denominator
  double z_loss_factor_ = 1.0;
};

}  // namespace tileloss::oracle
