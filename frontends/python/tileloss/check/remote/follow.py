"""The log of a run, each byte once, over connections that may be cut."""

from __future__ import annotations

import sys
import time

from tileloss.check.remote import state
from tileloss.check.remote.scripts import FOLLOW
from tileloss.check.remote.ssh import ConnectionLost, Script

_FIRST_DELAY, _LONGEST_DELAY = 0.5, 30.0


def follow(run: state.Run, *, from_start: bool, retry_for: float, quiet: bool) -> int:
    """Copies the log to stdout from where the last one stopped. The run's exit code.

    Raises ConnectionLost without a first connection, or none again in ``retry_for`` seconds; OSError where the run is gone.
    """
    copy = _Copy(run, 0 if from_start else state.load_offset(run))
    delay, last_seen = _FIRST_DELAY, None
    while True:
        try:
            return copy.until_cut()
        except ConnectionLost as error:
            if copy.connected:
                delay, last_seen = _FIRST_DELAY, time.monotonic()
            if last_seen is None:
                raise
            if time.monotonic() - last_seen + delay > retry_for:
                again = f"the run goes on, tileloss remote follow {run.id} too"
                raise ConnectionLost(f"{error}; {again}") from None
            if not quiet:
                print(f"tileloss: {error}; again in {delay:g} s", file=sys.stderr, flush=True)
        time.sleep(delay)
        delay = min(2 * delay, _LONGEST_DELAY)


class _Copy:
    def __init__(self, run: state.Run, offset: int) -> None:
        self._run = run
        self._offset = offset
        self.connected = False  # in the last try

    def until_cut(self) -> int:
        """The run's exit code. Raises ConnectionLost."""
        run = self._run
        script = Script(run.connection(), FOLLOW, run.directory, run.id, str(self._offset))
        try:
            for chunk in script.output():
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
                self._offset += len(chunk)
                state.save_offset(run, self._offset)
            errors = script.finish()
        finally:
            self.connected = script.connected
            script.kill()
        return int(errors.rpartition("tileloss-ended: ")[2])
