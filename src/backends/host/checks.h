// What can only be checked where the data can be looked at: on a device whose memory the host can read, before anything is
// written.
#pragma once

#include <cstdint>

#include "backends/problem.h"
#include "schema/status.h"

namespace tileloss::impl::host {

// Numbers behind pointers, and sequence offsets.
Status check_numbers(const Problem& problem);

// Each row's label column, kIgnoredRow, kLabelElsewhere or kBadLabel: [rows].
void find_label_columns(const Problem& problem, std::int64_t* label_columns);

// Whether every used label is one of the vocabulary's.
Status check_labels(const Problem& problem, const std::int64_t* label_columns);

// The columns that a sparse teacher knows, of the rows in use: each one of the vocabulary's or negative, none twice; and no log q
// above 0.
Status check_target(const Problem& problem, const std::int64_t* label_columns);

}  // namespace tileloss::impl::host
