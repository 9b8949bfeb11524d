"""Attributes of somebody else's modules and classes: replaced, also when the module is imported later, and given back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
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


class AfterImport(MetaPathFinder):
    """Between `start` and `stop` calls `then` with each of the named modules as soon as it has been imported.

    So a patch need not import what its user may never use.
    """

    def __init__(self, names: Collection[str], then: Callable[[ModuleType], None]) -> None:
        self._names = names
        self._then = then

    def start(self) -> None:
        sys.meta_path.insert(0, self)

    def stop(self) -> None:
        sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    self._then(module)

            # Of this one loader: the module keeps its kind of loader, which tools ask for its source.
            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
