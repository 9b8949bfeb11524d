// The loss, written where the host can write.
#ifndef TILELOSS_BACKENDS_HOST_LOSS_H_
#define TILELOSS_BACKENDS_HOST_LOSS_H_

#include "backends/problem.h"

namespace tileloss::impl::host {

// args.loss: one value a row, or their sum in order of the rows, the same for any number of threads.
void write_loss(const Problem& problem, const double* losses);

}  // namespace tileloss::impl::host

#endif  // TILELOSS_BACKENDS_HOST_LOSS_H_
