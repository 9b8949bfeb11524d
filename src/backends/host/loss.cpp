#include "backends/host/loss.h"

#include "losses/row_outputs.h"

namespace tileloss::impl::host {

void write_loss(const Problem& p, const double* losses) {
  const tileloss_vector& v = p.args.loss;
  if (v.data == nullptr || p.pass == TILELOSS_BACKWARD) return;
  const RowOutput<float> out(v);
  double sum = 0;
  for (std::int64_t i = 0; i < p.rows; ++i) {
    if (p.is_per_row) out.set(i, static_cast<float>(losses[i]));
    sum += losses[i];
  }
  if (!p.is_per_row) out.set(0, static_cast<float>(sum));
}

}  // namespace tileloss::impl::host
