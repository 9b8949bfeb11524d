"""The blocks that `tileloss.jax.tune` found, in a file of this user: {device kind: {kernel and shape: [rows, columns]}}."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path


def path() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    return folder / "tileloss" / "tpu_blocks.json"


def find(device_kind: str, key: str) -> tuple[int, int] | None:
    """Raises ValueError when the file is not one that `save` wrote."""
    found = _read(path()).get(device_kind, {}).get(key)
    return None if found is None else (found[0], found[1])


def save(device_kind: str, key: str, blocks: tuple[int, int]) -> None:
    """Adds to what there is. The file is whole at any time."""
    place = path()
    entries = {kind: dict(by_key) for kind, by_key in _read(place).items()}
    entries.setdefault(device_kind, {})[key] = list(blocks)
    place.parent.mkdir(parents=True, exist_ok=True)
    beside = place.with_name(f"{place.name}.{os.getpid()}")
    beside.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
    beside.replace(place)
    _read.cache_clear()


@functools.cache
def _read(place: Path) -> dict[str, dict[str, list[int]]]:
    """Once a process: a program's blocks do not change while it runs."""
    if not place.exists():
        return {}
    try:
        entries = json.loads(place.read_text())
        pairs = [pair for by_key in entries.values() for pair in by_key.values()]
        is_ours = all(
            len(pair) == 2 and all(type(n) is int and n > 0 for n in pair) for pair in pairs
        )
    except (ValueError, AttributeError, TypeError):
        is_ours = False
    if not is_ours:
        raise ValueError(
            f"{place}: expected the blocks that tileloss.jax.tune writes, got something else: delete the file"
        )
    return entries
