"""The table of known bugs: where each was seen, what it looked like, and a case on which it shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tileloss.testing.case import Case
from tileloss.tools.audit.cases import AuditCase, Settings

Outputs = dict[str, Any]
_CASE_FIELDS = ("backwards", "logits", "calls", "judged")  # in AuditCase, beside the config


class Bug(NamedTuple):
    where: str  # "linkedin/Liger-Kernel#1329", or a script of ours that shows it
    case: AuditCase  # which shows it, by the name "bug/liger-kernel-1329"
    plant: Callable[[Case], Outputs]  # an implementation of ours that has it

    @property
    def name(self) -> str:
        return self.case.name.removeprefix("bug/")

    @property
    def looks_like(self) -> str:
        return f"{self.where}: {self.case.shows}"


BUGS: dict[str, Bug] = {}  # by name


def bug(where: str, looked: str, usual: Settings, **settings: Any) -> Callable[[Any], Any]:
    """Enters a class derived from `Right`, or a function of a case. Of the settings those that AuditCase has by name are
    its own, the others the config's."""
    repository, _, number = where.partition(", ")[0].rpartition("/")[2].partition("#")
    name = (
        f"{repository.lower()}-{number}"
        if number
        else repository.removesuffix(".py").replace("_", "-")
    )
    own = {key: settings.pop(key) for key in _CASE_FIELDS if key in settings}

    def enter(plant: Any) -> Any:
        run = (lambda case: plant(case).run()) if isinstance(plant, type) else plant
        if name in BUGS:
            raise ValueError(f"{name}: entered twice")
        BUGS[name] = Bug(where, AuditCase(f"bug/{name}", looked, usual | settings, **own), run)
        return plant

    return enter
