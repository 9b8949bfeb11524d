// What every kind of policy loss works on and gives: one token's loss and its two partial derivatives.
#pragma once

#include <tileloss/tileloss.h>

#include <cmath>

#include "losses/loss.h"

namespace tileloss::impl::policy {

// The numbers of the options, read from behind their pointers.
struct Numbers {
  double low = 0, high = 0;  // clip's bounds of rho
  double delta = 0, dual_clip = 0;
  double cap_low = 0, cap = 0;  // cispo's
  double tau_pos = 0, tau_neg = 0;
  double entropy_threshold = 0;
  double beta = 0, entropy_coef = 0, num_items = 0;
};

TILELOSS_HOST_DEVICE inline Numbers read_numbers(const tileloss_policy_loss_options& o) {
  const double epsilon_low = scalar_value(o.epsilon_low), epsilon_high = scalar_value(o.epsilon_high);
  Numbers n;
  n.low = 1 - epsilon_low;
  n.high = 1 + (std::isnan(epsilon_high) ? epsilon_low : epsilon_high);
  n.delta = scalar_value(o.delta);
  n.dual_clip = scalar_value(o.dual_clip);
  n.cap_low = scalar_value(o.cap_low);
  n.cap = o.cispo_cap == TILELOSS_CISPO_CAP_RAW ? epsilon_high : 1 + epsilon_high;
  n.tau_pos = o.tau_pos;
  n.tau_neg = o.tau_neg;
  n.entropy_threshold = scalar_value(o.entropy_threshold);
  n.beta = scalar_value(o.beta);
  n.entropy_coef = scalar_value(o.entropy_coef);
  n.num_items = scalar_value(o.num_items);
  return n;
}

struct Token {
  double logp = 0;
  double ratio = 1;  // rho: the token's, or its sequence's
  double advantage = 0;
  double phi = 1;  // vespo's weight
};

struct TokenLoss {
  double loss = 0;
  double dratio = 0;  // dl / drho
  double dlogp = 0;   // dl / dlogp besides the path through rho
};

// NaN keeps neither bound nor value: it stays NaN.
TILELOSS_HOST_DEVICE inline double clamp(double x, double low, double high) { return x < low ? low : x > high ? high : x; }

// x * y where an exact 0 in x wins over an infinite y, but not over NaN.
TILELOSS_HOST_DEVICE inline double scaled(double x, double y) { return x == 0 && std::isinf(y) ? 0.0 : x * y; }

}  // namespace tileloss::impl::policy
