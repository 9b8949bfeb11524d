"""An implementation in a process of its own, so that what it does to its process is a line of the audit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import tileloss
from tileloss.tools.implementations.contract import Contract

_PACKAGE = Path(tileloss.__file__).parents[1]
_SECRETS = ("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def without_secrets() -> dict[str, str]:
    """This process's environment for children, none of which needs one."""
    return {name: value for name, value in os.environ.items() if name not in _SECRETS}


def environment() -> dict[str, str]:
    """This process's without its secrets, for a child that imports this very package."""
    path = os.environ.get("PYTHONPATH")
    return {
        **without_secrets(),
        "PYTHONPATH": os.pathsep.join([str(_PACKAGE), *([path] if path else [])]),
    }


class Child:
    """Started when it is asked first, and again after a crash or a time limit.

    Use it as a context manager: leaving it ends the process and those that it started.
    """

    def __init__(
        self,
        name: str,
        seconds: float,
        more: dict[str, str] | None = None,  # environment
        cpus: int = 0,  # to run on; 0: all
        python: Path | None = None,  # the interpreter; this process's
        device: str = "cpu",  # of PyTorch's tensors
    ) -> None:
        self.name, self.seconds, self.cpus, self.device = name, seconds, cpus, device
        self._python = str(python or sys.executable)
        self._environment = environment() | (more or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()
        self._greeting: dict[str, Any] = {}

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._end()
        self._errors.close()

    @property
    def package(self) -> str:
        """ "torch 2.15.0", once it has started."""
        return str(self._greeting.get("package", self.name))

    @property
    def contract(self) -> Contract | None:
        """What its bits depend on, once it has started; None: unknown."""
        return self._greeting.get("contract")

    def ask(self, **request: Any) -> dict[str, Any]:
        """The reply, with a status; "crashed" and "timeout" are told here. What ended at its start is not started again."""
        if self._process is None and self._greeting.get("status", "ready") == "ready":
            self._start()
            self._greeting = self._read()
            if self._greeting["status"] in ("crashed", "timeout"):
                self._end()
        return self._exchange(request) if self._greeting["status"] == "ready" else self._greeting

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            self._pipe.send_bytes(json.dumps(request).encode())
        except OSError:
            pass  # it has ended: read says how
        return self._read()

    def _start(self) -> None:
        self._errors.seek(0)
        self._errors.truncate()
        self._pipe, theirs = Pipe()
        words = [self.name, str(theirs.fileno()), str(self.cpus), self.device]
        self._process = subprocess.Popen(
            [self._python, "-m", "tileloss.tools.audit.worker", *words],
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
            pass_fds=[theirs.fileno()],
            env=self._environment,
            start_new_session=True,  # compilers that it starts end with it
        )
        theirs.close()

    def _read(self) -> dict[str, Any]:
        """What the child says, or what became of it."""
        try:
            if self._pipe.poll(self.seconds):
                return dict(json.loads(self._pipe.recv_bytes()))
        except (EOFError, OSError):
            return {"status": "crashed", "message": self._how_it_ended()}
        self._end()
        return {"status": "timeout", "message": f"no answer in {self.seconds:g} s"}

    def _how_it_ended(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        self._end()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"{how}: {lines[-1][:300]}" if lines else how

    def _end(self) -> None:
        if self._process is None:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self._pipe.close()
        self._process = None
