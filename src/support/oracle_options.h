// The options of a call as the oracle has them.
#pragma once

#include <tileloss/tileloss.h>

#include <cstdint>

#include "oracle/distillation.h"
#include "oracle/oracle.h"
#include "oracle/policy.h"

namespace tileloss::tools {

oracle::Transform make_transform(const tileloss_logit_options& from);
oracle::CrossEntropyOptions make_oracle_options(const tileloss_cross_entropy_options& from);
// `sequence_length`: of a [B,T] batch, 0 if there is none. max_length falls back to it.
oracle::PolicyOptions make_oracle_options(const tileloss_policy_loss_options& from, std::int64_t sequence_length);
oracle::DistillationOptions make_oracle_options(const tileloss_distillation_options& from);
// Without the tail.
oracle::DistillationOptions make_oracle_options(const tileloss_sparse_distillation_options& from);
// Weights and reductions, which are a distillation's without a divergence.
oracle::DistillationOptions make_oracle_options(const tileloss_soft_cross_entropy_options& from);

}  // namespace tileloss::tools
