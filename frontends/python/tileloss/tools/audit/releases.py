"""`tileloss audit --versions PACKAGE==A,B`: an implementation release by release, each in an environment of its own.

Such an environment has the release, and what --with names, without what they depend on: all else is the audit's own, such as
torch.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tileloss.tools.audit.child import without_secrets
from tileloss.tools.implementations import KNOWN

_BAD = ("failed", "crashed", "timeout")


class Releases(NamedTuple):
    package: str  # as pip knows it
    versions: tuple[str, ...]

    @property
    def implementation(self) -> str:
        """Raises ValueError where none of the list is of that package."""
        names = [name for name, known in KNOWN.items() if known.packages[0] == self.package]
        if not names:
            packages = ", ".join(dict.fromkeys(known.packages[0] for known in KNOWN.values()))
            raise ValueError(
                f"--versions: expected one of {packages}, or --impl with a function of yours that calls it, got {self.package}"
            )
        return names[0]


def parse(text: str) -> Releases:
    """Of "liger-kernel==0.5.0,0.6.0". Raises ValueError."""
    package, equal, versions = text.partition("==")
    named = tuple(dict.fromkeys(v.strip() for v in versions.split(",") if v.strip()))
    fits = re.fullmatch(r"[A-Za-z0-9][\w.-]*", package) and all(
        re.fullmatch(r"[0-9][\w.+!-]*", version) for version in named
    )
    if not (equal and named and fits):
        raise ValueError(f"--versions: expected PACKAGE==VERSION,VERSION, got {text!r}")
    return Releases(package, named)


def environment_of(package: str, version: str, beside: tuple[str, ...]) -> Path:
    """Its Python. Made once, in the user's cache. ``beside``: what else pip is to install.

    Raises:
        RuntimeError: pip cannot install it; with pip's last line.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    others = hashlib.sha256(f"{sys.prefix} {sys.version} {beside}".encode()).hexdigest()[:8]
    folder = cache / "tileloss" / "releases" / f"{package}-{version}-{others}"
    python, complete = folder / "bin" / "python", folder / "complete"
    if complete.exists():
        return python
    _run([sys.executable, "-m", "venv", "--without-pip", "--clear", str(folder)])
    flags = ["--quiet", "--no-deps", "--disable-pip-version-check"]
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", *flags]
    _run([*pip, f"{package}=={version}", *beside])
    (own,) = folder.glob("lib/python*/site-packages")
    # Behind the release, which is found first.
    (own / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    complete.touch()
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, env=without_secrets(), check=False
    )
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise RuntimeError(lines[-1])


def changes(lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Of the lines of several releases, in their order, the cases that did not fare the same in all, and when what was the case:
    ("bug/liger-kernel-1298", "fails in 0.5.0 to 0.8.2, not in 0.8.5")."""
    found = []
    for case in dict.fromkeys(line["case"] for line in lines):
        own = [(x["release"], x["status"]) for x in lines if x["case"] == case]
        fate = [(release, status in _BAD) for release, status in own if status in (*_BAD, "pass")]
        if len({is_bad for _, is_bad in fate}) == 2:
            found.append((case, f"fails in {_runs(fate, True)}; passes in {_runs(fate, False)}"))
    return found


def _runs(fate: Sequence[tuple[str, bool]], wanted: bool) -> str:
    runs: list[list[str]] = []
    before = not wanted
    for release, is_bad in fate:
        if is_bad == wanted:
            if before != wanted:
                runs.append([])
            runs[-1].append(release)
        before = is_bad
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
