#include "support/signals.h"

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <ctime>

#include "support/timer.h"

namespace tileloss::tools {
namespace {

// Written by the handler, read by the oracle's threads.
std::atomic<int> g_signal = 0;
static_assert(std::atomic<int>::is_always_lock_free);

// A second signal ends the process at once: the first may have come while a long kernel call was running.
void on_signal(int signal) {
  if (g_signal != 0) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }
  g_signal = signal;
}

// SIGINT and SIGTERM wait until a poll lets them in: none can slip in between a look at stop_requested() and the poll.
class SignalsHeld {
 public:
  SignalsHeld() {
    sigset_t held;
    sigemptyset(&held);
    sigaddset(&held, SIGINT);
    sigaddset(&held, SIGTERM);
    sigprocmask(SIG_BLOCK, &held, &before_);
  }
  ~SignalsHeld() { sigprocmask(SIG_SETMASK, &before_, nullptr); }
  SignalsHeld(const SignalsHeld&) = delete;
  SignalsHeld& operator=(const SignalsHeld&) = delete;
  const sigset_t* before() const { return &before_; }

 private:
  sigset_t before_;
};

timespec to_timespec(double seconds) {
  const double positive = std::max(seconds, 0.0);
  const auto whole = static_cast<time_t>(positive);
  return {whole, static_cast<long>((positive - static_cast<double>(whole)) * 1e9)};
}

}  // namespace

void install_signal_handlers() {
  struct sigaction action = {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;  // a result line being written is not cut
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  std::signal(SIGXFSZ, SIG_IGN);
}

int stop_requested() { return g_signal; }

void check_stop() {
  if (const int signal = stop_requested()) throw Stopped{signal};
}

bool wait_for(int descriptor, short events, double seconds) {
  const SignalsHeld held;
  const Timer timer;
  while (stop_requested() == 0 && timer.seconds() < seconds) {
    pollfd waiting = {descriptor, events, 0};
    const timespec left = to_timespec(seconds - timer.seconds());
    if (ppoll(&waiting, 1, &left, held.before()) > 0) return true;
  }
  return false;
}

}  // namespace tileloss::tools
