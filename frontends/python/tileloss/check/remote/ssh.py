"""Scripts on another machine by the system's ssh, which reads the user's own configuration."""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, NamedTuple

from tileloss.check.printable import one_line
from tileloss.check.program import without_secrets
from tileloss.check.remote.scripts import COMMON, REFUSED

# Answers come from nobody; a connection that is cut shows after 45 s; no forwarding, no command or master of the configuration.
_OPTIONS = (
    "BatchMode=yes",
    "ConnectTimeout=15",
    "ServerAliveInterval=15",
    "ServerAliveCountMax=3",
    "ClearAllForwardings=yes",
    "ControlMaster=no",
    "RemoteCommand=none",
)
# They would lead git to another repository than the one that is named.
_GIT_VARIABLES = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_COMMON_DIR",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_NAMESPACE",
)
_CHUNK = 1 << 16


class ConnectionLost(OSError):
    """No connection, or one that ended before the script did."""


class Host(NamedTuple):
    name: str  # what ssh calls it: a host, user@host, or a Host of the user's configuration
    options: tuple[str, ...] = ()  # ssh's -o, before ours: the first of a name counts
    secrets: tuple[str, ...] = ()  # variables that neither ssh nor git gets to see


def environment_without(names: Sequence[str]) -> dict[str, str]:
    """This process's environment, for ssh and git: without the variables ``names``, and known secrets in any case."""
    left_out = {*names, *_GIT_VARIABLES}
    return {name: value for name, value in without_secrets().items() if name not in left_out}


class Script:
    """A script that runs on a host: ``output()`` while it does, then ``finish()``."""

    def __init__(
        self, host: Host, script: str, *arguments: str, exports: Mapping[str, str] | None = None
    ) -> None:
        """``exports``: what the script's function ``secrets`` exports."""
        self._host = host
        self._errors = tempfile.TemporaryFile()
        marker = secrets.token_hex(16)
        self._marker = f"{marker}\n".encode()
        text = os.fsencode(_assemble(script, arguments, exports or {}, marker))
        options = [word for each in (*host.options, *_OPTIONS) for word in ("-o", each)]
        # The user's login shell may be any: all that it sees is this. `dd` reads no byte more than the script has.
        shell = f"exec sh -c 'eval \"$(dd bs=1 count={len(text)} 2>/dev/null)\"'"
        try:
            self._ssh = subprocess.Popen(
                ["ssh", "-T", "-a", "-x", *options, "--", host.name, shell],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=environment_without(host.secrets),
            )
        except FileNotFoundError:
            raise OSError("ssh is not installed here (Debian: openssh-client)") from None
        self.connected = False
        self.send(text)

    def send(self, data: bytes) -> None:
        assert self._ssh.stdin is not None
        try:
            self._ssh.stdin.write(data)
            self._ssh.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: finish() tells why

    def send_file(self, file: IO[bytes]) -> None:
        while chunk := file.read(_CHUNK):
            self.send(chunk)

    def close_input(self) -> None:
        assert self._ssh.stdin is not None
        try:
            self._ssh.stdin.close()
        except BrokenPipeError:
            pass

    def output(self) -> Iterator[bytes]:
        """What the script prints, as it comes. What the login shell printed before is dropped."""
        assert self._ssh.stdout is not None
        before = b""
        while chunk := os.read(self._ssh.stdout.fileno(), _CHUNK):
            if not self.connected:
                before += chunk
                _, found, chunk = before.partition(self._marker)
                self.connected = bool(found)
            if chunk and self.connected:
                yield chunk

    def finish(self) -> str:
        """Waits. What the script wrote to stderr. Raises ConnectionLost; OSError where the machine failed; ValueError where the
        script refused its arguments."""
        self.close_input()
        code = self._ssh.wait()
        self._errors.seek(0)
        errors = os.fsdecode(self._errors.read()).strip()
        last = errors.splitlines()[-1] if errors else f"ssh ended with exit code {code}"
        if code == 255:
            raise ConnectionLost(f"{self._host.name}: {last}")
        if full := errors.partition("tileloss-full: ")[2]:
            warning = f"{self._host.name}: {full.splitlines()[0]}"
            print(f"tileloss: warning: {one_line(warning)}", file=sys.stderr)
        said = errors.partition("tileloss-remote: ")[2] or errors or f"exit code {code}"
        text = f"{self._host.name}: {' '.join(said.split())}"
        if code == REFUSED:
            raise ValueError(text)
        if code:
            raise OSError(text)
        return errors

    def kill(self) -> None:
        """Ends the connection, where there still is one."""
        self.close_input()
        self._ssh.kill()
        self._ssh.wait()
        self._errors.close()


def call(
    host: Host,
    script: str,
    *arguments: str,
    data: IO[bytes] | None = None,
    exports: Mapping[str, str] | None = None,
) -> str:
    """Runs a script to its end. ``data``: its standard input. What it printed. Raises as Script.finish."""
    running = Script(host, script, *arguments, exports=exports)
    try:
        if data is not None:
            running.send_file(data)
        running.close_input()
        printed = b"".join(running.output())
        running.finish()
        return os.fsdecode(printed)
    finally:
        running.kill()


def _assemble(
    script: str, arguments: Sequence[str], exports: Mapping[str, str], marker: str
) -> str:
    """In braces, so that a script of which only a part arrived does nothing. The values are in a function: no variable that other
    children of the script would inherit."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in exports.items()]
    body = "\n".join(
        [
            f"set -- {shlex.join(arguments)}",
            "secrets() {",
            *(lines or [":"]),
            "}",
            COMMON,
            f"printf '%s\\n' {marker}",
            script,
        ]
    )
    return "{\n" + body + "\n}\n"
