"""The runs that `tileloss remote` started from this machine, a JSON file each.

They lie in ${XDG_STATE_HOME:-~/.local/state}/tileloss/remote.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from tileloss.check.files import write_whole
from tileloss.check.remote.ssh import Host


@dataclass(frozen=True)
class Run:
    """What it takes to find a run again. Of secrets it has the names."""

    id: str
    host: str
    ssh_options: list[str]
    directory: str  # there, absolute: what --dir named
    commit: str
    command: list[str]
    secrets: list[str]
    started: str  # UTC

    def connection(self) -> Host:
        return Host(self.host, tuple(self.ssh_options), tuple(self.secrets))


def new_id(now: datetime) -> str:
    return f"{now.astimezone(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def save(run: Run) -> None:
    _write(_folder() / f"{run.id}.json", json.dumps(asdict(run), indent=1) + "\n")


def load(run_id: str) -> Run:
    """Raises ValueError for an id that is none of this machine's."""
    path = _folder() / f"{run_id}.json"
    if not re.fullmatch(r"[0-9a-f-]+", run_id) or not path.is_file():
        raise ValueError(
            f"ID: expected a run of {_folder()}, got {run_id!r}; `tileloss remote list` shows them"
        )
    try:
        return Run(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"ID: {path} is no run: {error}") from None


def load_all() -> list[Run]:
    """The oldest first."""
    return [load(path.stem) for path in sorted(_folder().glob("*.json"))]


def forget(run: Run) -> None:
    for suffix in (".json", ".offset"):
        (_folder() / f"{run.id}{suffix}").unlink(missing_ok=True)


def load_offset(run: Run) -> int:
    """How many bytes of the log `follow` has printed."""
    try:
        return int((_folder() / f"{run.id}.offset").read_text())
    except FileNotFoundError:
        return 0


def save_offset(run: Run, offset: int) -> None:
    _write(_folder() / f"{run.id}.offset", f"{offset}\n")


def _folder() -> Path:
    configured = Path(os.environ.get("XDG_STATE_HOME", ""))
    base = configured if configured.is_absolute() else Path.home() / ".local" / "state"
    return base / "tileloss" / "remote"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(path, text)
