#include "support/progress.h"

#include <utility>

namespace tileloss::tools {
namespace {

ProgressTo::Told told;
constexpr double kBetweenTold = 0.1;  // s

}  // namespace

void Progress::step() {
  const std::lock_guard lock(mutex_);
  ++done_;
  const double now = since_start_.seconds();
  if (!told || now < told_s_ + kBetweenTold) return;
  told_s_ = now;
  told(work_, done_, total_);
}

ProgressTo::ProgressTo(Told each) { told = std::move(each); }

ProgressTo::~ProgressTo() { told = nullptr; }

}  // namespace tileloss::tools
