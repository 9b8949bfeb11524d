"""Another machine, as far as ssh can tell: an sshd of this user's on the loopback address, with keys and settings of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from tileloss.check.command import run

SSHD = shutil.which("sshd", path=os.defpath + ":/usr/sbin:/sbin")
NOT_RUN = "" if SSHD and shutil.which("ssh") else "NOT RUN: there is no sshd"

NAME = "a-host"  # what the client's configuration calls it
PATIENCE_S = 300  # a busy machine takes its time; nothing waits so long where all is well


class LoopbackHost:
    """``home`` is the home folder there, ``bin`` a folder with the ssh that knows of it: to be put in front of PATH."""

    def __init__(self, folder: Path) -> None:
        self.home, self.bin = folder / "home", folder / "bin"
        self._folder = folder
        self._server: subprocess.Popen[bytes] | None = None
        self.settings = {"SetEnv": f"HOME={self.home}"}
        for each in (self.home, self.bin):
            each.mkdir()
        for key in ("host", "client"):
            make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key]
            subprocess.run(make, check=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.settings |= self._no_penalties()
        known = (folder / "host.pub").read_text()
        (folder / "known").write_text(f"[127.0.0.1]:{self.port} {known}")
        config = [f"Host {NAME} build-host", "HostName 127.0.0.1", *map(" ".join, self.options())]
        (folder / "ssh_config").write_text("\n".join(config) + "\n")
        self.write_ssh("")

    def options(self) -> list[tuple[str, str]]:
        return [
            ("Port", str(self.port)),
            ("IdentityFile", str(self._folder / "client")),
            ("IdentitiesOnly", "yes"),
            ("UserKnownHostsFile", str(self._folder / "known")),
            ("StrictHostKeyChecking", "yes"),
            ("KexAlgorithms", "curve25519-sha256"),  # half the time
        ]

    def write_ssh(self, first: str) -> None:
        """``first``: shell commands before ssh's own."""
        command = (
            f'exec {shutil.which("ssh")} -F {shlex.quote(str(self._folder / "ssh_config"))} "$@"'
        )
        path = self.bin / "ssh"
        path.write_text(f"#!/bin/sh\n{first}\n{command}\n")
        path.chmod(0o755)

    def start(self, **settings: str) -> None:
        """Returns when it listens. ``settings``: of sshd_config, over the usual ones."""
        values = {
            "ListenAddress": "127.0.0.1",
            "Port": str(self.port),
            "HostKey": str(self._folder / "host"),
            "AuthorizedKeysFile": str(self._folder / "client.pub"),
            "StrictModes": "no",
            "UsePAM": "no",
            "PidFile": "none",
            "MaxStartups": "100",
            **self.settings,
            **settings,
        }
        config = self._folder / "sshd_config"
        config.write_text("".join(f"{name} {value}\n" for name, value in values.items()))
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # root's sshd wants it
        with open(self._folder / "sshd.log", "ab") as log:
            assert SSHD
            command = [SSHD, "-D", "-e", "-f", str(config)]
            self._server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S).close()
                return
            except OSError:
                assert self._server.poll() is None, (self._folder / "sshd.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.02)

    def _no_penalties(self) -> dict[str, str]:
        """Since 9.8 a client whose connections end as ours do is refused for a while."""
        setting = {"PerSourcePenalties": "no"}
        command = [str(SSHD), "-t", "-f", os.devnull, "-h", str(self._folder / "host")]
        command += [f"-o{name}={value}" for name, value in setting.items()]
        known = subprocess.run(command, capture_output=True).returncode == 0
        return setting if known else {}

    def stop(self, *, cut: bool = False) -> None:
        """No new connections; those that are open stay, or are cut."""
        if self._server is None:
            return
        sessions = self._sessions() if cut else []
        self._server.terminate()
        self._server.wait()
        self._server = None
        _kill(sessions)

    def cut(self) -> int:
        """Ends every open connection, as a network that is gone does. How many processes of sshd that took."""
        sessions = self._sessions()
        _kill(sessions)
        return len(sessions)

    def restart(self, **settings: str) -> None:
        self.stop()
        self.start(**settings)

    def _sessions(self) -> list[int]:
        assert self._server is not None
        return [
            each for each in _descendants(self._server.pid) if _stat(each)[0].startswith("sshd")
        ]


@contextlib.contextmanager
def loopback_host(folder: Path) -> Iterator[LoopbackHost]:
    host = LoopbackHost(folder)
    host.start()
    try:
        yield host
    finally:
        host.stop()
        _kill(processes_with(f"HOME={host.home}"))  # of a test that failed


def _stat(process: int) -> tuple[str, int]:
    """Name and parent; ("", 0) of a process that is gone."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return "", 0
    name, _, rest = text.partition("(")[2].rpartition(") ")
    return name, int(rest.split()[1])


def _kill(processes: list[int]) -> None:
    for process in processes:
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _descendants(process: int) -> list[int]:
    numbers = [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]
    parents = {number: _stat(number)[1] for number in numbers}
    found = [process]
    for parent in found:
        found += [number for number, of in parents.items() if of == parent]
    return found[1:]


class Said(NamedTuple):
    stdout: str
    stderr: str


class Client:
    """`tileloss remote` with a small checkout and a state folder."""

    def __init__(self, folder: Path, host: LoopbackHost) -> None:
        self.repo, self.state = folder / "a checkout", folder / "state"
        self.directory = (
            f'it\'s a "folder" of ${{{folder.name}}}'  # relative to the home folder there
        )
        self.environment = {
            **os.environ,
            "PATH": f"{host.bin}:{os.environ['PATH']}",
            "XDG_STATE_HOME": str(self.state),
        }
        self._host = host
        self.repo.mkdir()
        self.git("init", "--quiet")
        self.commit("README", "one\n")

    @property
    def there(self) -> Path:
        return self._host.home / self.directory

    def git(self, *arguments: str) -> str:
        by = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(self.repo), *by, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self, name: str, content: str) -> str:
        (self.repo / name).write_text(content)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message=change")
        return self.git("rev-parse", "HEAD")

    def command(self, *arguments: str) -> list[str]:
        """For a process of its own."""
        return [sys.executable, "-m", "tileloss", "remote", *arguments]

    def __call__(self, *arguments: str, code: int = 0) -> Said:
        """In this process, which is what most tests need and takes half the time."""
        out, err = io.TextIOWrapper(io.BytesIO(), "utf-8", newline=""), io.StringIO()
        with (
            mock.patch.dict(os.environ, self.environment, clear=True),
            contextlib.chdir(self.repo),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                returned = run(Path("no program"), ["remote", *arguments])
            except SystemExit as exit:
                returned = exit.code
        out.seek(0)
        said = Said(out.read(), err.getvalue())
        assert returned == code, (arguments, returned, said)
        return said

    def start(self, *command: str, options: Sequence[str] = ()) -> str:
        """The run's id."""
        where = [NAME, f"--dir={self.directory}", *options]
        return self("start", *where, "--", *command).stdout.removesuffix("\n")

    def shell(self, script: str, options: Sequence[str] = ()) -> str:
        return self.start("sh", "-c", script, options=options)

    def status(self, run: str) -> dict[str, Any]:
        line: dict[str, Any] = json.loads(self("status", run, "--json").stdout)
        return line

    def run_folder(self, run: str) -> Path:
        return self.there / "runs" / run


def processes_of(run: str) -> list[int]:
    return processes_with(f"TILELOSS_REMOTE_RUN={run}")


def processes_with(variable: str) -> list[int]:
    """Those that have it in their environment: NAME=VALUE."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if variable.encode() in words:
            found.append(int(entry.name))
    return found


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)
