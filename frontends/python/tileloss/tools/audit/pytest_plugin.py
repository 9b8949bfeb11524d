"""`pytest --tileloss-audit FILE.py:function`: the audit's cases as tests of a project's own loss (docs/users/audit.md)."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tileloss.tools.audit.cases import AuditCase
    from tileloss.tools.audit.child import Child


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tileloss")
    group.addoption(
        "--tileloss-audit",
        metavar="NAME",
        action="append",
        default=[],
        help="an implementation of `tileloss audit`, module:function or FILE.py:function: each case becomes a test of it",
    )
    group.addoption(
        "--tileloss-case",
        metavar="A,B",
        default="*",
        help="the audit's cases, patterns such as 'ce/*' among them; default: all",
    )


def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Behind the project's own tests."""
    for name in config.getoption("--tileloss-audit"):
        items.extend(_tests(session, name, config.getoption("--tileloss-case").split(",")))


def _tests(session: pytest.Session, name: str, patterns: Iterable[str]) -> list[pytest.Item]:
    from tileloss._program import find
    from tileloss.tools.audit.cells import chosen
    from tileloss.tools.audit.child import Child
    from tileloss.tools.implementations import check_name

    program = find()
    if program is None:
        raise pytest.UsageError("tileloss: the compiled program is not in this package")
    try:
        check_name(name, "--tileloss-audit")
        cases = chosen(tuple(patterns), "--tileloss-case")
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    child = Child(name, seconds=120)
    session.config.add_cleanup(child.close)
    return [
        AuditTest.from_parent(
            session, name=f"{name}[{case.name}]", program=program, child=child, case=case
        )
        for case in cases
    ]


class AuditTest(pytest.Item):
    """A case; one process takes all cases of an implementation, and a crash starts another."""

    def __init__(self, *, program: Path, child: Child, case: AuditCase, **given: Any) -> None:
        super().__init__(**given)
        self.program, self.child, self.case = program, child, case

    def runtest(self) -> None:
        from tileloss.tools.audit.cells import cell, prepare
        from tileloss.tools.audit.table import what_failed

        with tempfile.TemporaryDirectory(prefix="tileloss-") as folder:
            prepared = prepare(self.program, self.case, Path(folder))
            line = cell(self.program, self.child, self.case, prepared)
        if line["status"] in ("refused", "not_installed"):
            pytest.skip(line["message"])
        if line["status"] != "pass":
            raise Failed(f"{self.case.name} ({self.case.shows}): {what_failed(line)}")

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        """One line, no trace: nothing of it is the project's code."""
        if isinstance(excinfo.value, Failed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)


class Failed(Exception):
    """The case's verdict."""
