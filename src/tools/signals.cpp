#include "tools/signals.h"

#include <atomic>
#include <csignal>

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

}  // namespace

void install_signal_handlers() {
  struct sigaction action = {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;  // a result line being written is not cut
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

int stop_requested() { return g_signal; }

void check_stop() {
  if (const int signal = stop_requested()) throw Stopped{signal};
}

}  // namespace tileloss::tools
