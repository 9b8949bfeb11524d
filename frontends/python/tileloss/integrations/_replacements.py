"""Attributes of somebody else's modules and classes, replaced and given back."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple


class Replacement(NamedTuple):
    owner: ModuleType | type
    name: str
    value: Any  # of a class: as its `__dict__` has it, a staticmethod for one

    def path(self) -> str:
        owner = self.owner
        if isinstance(owner, type):
            return f"{owner.__module__}.{owner.__qualname__}.{self.name}"
        return f"{owner.__name__}.{self.name}"


class Replacements:
    """What is replaced now; false while that is nothing."""

    def __init__(self, integration: str) -> None:
        self._integration = integration  # begins the messages
        self._made: list[tuple[Replacement, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._made)

    def make(self, replacement: Replacement) -> None:
        owner, name, value = replacement
        self._made.append((replacement, vars(owner)[name]))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Gives all of them back.

        Raises:
            RuntimeError: one was replaced again by somebody else; nothing is changed then.
        """
        for replacement, _ in self._made:
            found = vars(replacement.owner).get(replacement.name)
            if found is not replacement.value:
                raise RuntimeError(
                    f"{self._integration}: expected {replacement.path()} as patch() left it, got {found!r}; undo the later "
                    "replacement first"
                )
        for replacement, original in self._made:
            setattr(replacement.owner, replacement.name, original)
        self._made.clear()
