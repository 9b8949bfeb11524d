// SIGINT and SIGTERM ask for a stop: the work in hand (a case, a result line) is finished first.
#ifndef TILELOSS_TOOLS_SIGNALS_H_
#define TILELOSS_TOOLS_SIGNALS_H_

namespace tileloss::tools {

void install_signal_handlers();

// The signal that asked for a stop, 0 if none did. Polled between cases, passes, iterations and blocks of rows.
int stop_requested();

// Thrown by check_stop(); main() turns it into exit code 128 + signal (130, 143).
struct Stopped {
  int signal;
};
void check_stop();

}  // namespace tileloss::tools

#endif  // TILELOSS_TOOLS_SIGNALS_H_
