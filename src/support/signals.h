// SIGINT and SIGTERM ask for a stop: the work in hand (a case, a result line) is finished first.
#ifndef TILELOSS_SUPPORT_SIGNALS_H_
#define TILELOSS_SUPPORT_SIGNALS_H_

namespace tileloss::tools {

// SIGXFSZ is ignored as well: a write beyond the limit of a file's size fails, with EFBIG, where it would end the process.
void install_signal_handlers();

// The signal that asked for a stop, 0 if none did. Polled between cases, passes, iterations and blocks of rows.
int stop_requested();

// Thrown by check_stop(); main() turns it into exit code 128 + signal (130, 143).
struct Stopped {
  int signal;
};
void check_stop();

// What a call on a pipe may wait for, which is for ever: a read or write that the handlers interrupt is taken up again by the
// kernel. So pipes are opened with O_NONBLOCK, and waited for here: until the descriptor has what `events` (POLLIN, POLLOUT)
// name, an end or an error. False when `seconds` are over or a stop is asked for, however short before the wait that came.
inline constexpr double kForever = 1e9;
bool wait_for(int descriptor, short events, double seconds = kForever);

}  // namespace tileloss::tools

#endif  // TILELOSS_SUPPORT_SIGNALS_H_
