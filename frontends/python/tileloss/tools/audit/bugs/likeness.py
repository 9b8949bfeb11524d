"""Which known bug a failure looks like: the one whose planted implementation is off by the same, on the same inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tileloss.testing.case import Case, Refused
from tileloss.testing.outputs import Missing, prepare
from tileloss.tools.audit.bugs import BUGS
from tileloss.tools.audit.bugs.calls import zeros
from tileloss.tools.audit.cases import AuditCase

NOTHING = 2e-6  # relative: what float32 arithmetic is off by
NEAR = 0.2  # of what an output is off by may be left when the planted one is taken off
OTHERS = 0.9  # the same of its other outputs, where rounding comes to it
Arrays = dict[str, np.ndarray]


def look(case: AuditCase, drawn: Case, found: Mapping[str, np.ndarray], gate: str) -> str | None:
    """ "linkedin/Liger-Kernel#1329: ..." for what an implementation returned of a drawn case and the first gate that failed;
    None where no bug is like it."""
    if gate.startswith("calls/"):
        return next(bug.looks_like for bug in BUGS.values() if f"calls/{bug.case.calls}" == gate)
    given = replace(drawn, backwards=case.backwards).with_numbers()
    right = _right(given)
    if right is None:
        return None
    failed = gate.removeprefix("per_").partition("/")[0]
    likely = []
    for bug in BUGS.values():
        if bug.case.calls:
            continue  # what it gives in one call is right
        if bug.plant is zeros and case.settings.get("expect_mostly_zero"):
            continue  # what is right is next to nothing there
        try:
            with np.errstate(all="ignore"):
                planted = prepare(given, bug.plant(given))
        except Refused:
            continue
        except Missing as error:
            planted = None
            distance = 0.0 if gate == f"{error.output}/missing" else np.inf
        if planted is not None:
            distance = _distance(failed, right, found, planted)
        if distance < NEAR:
            likely.append((distance, bug))
    least = min((distance for distance, _ in likely), default=0)
    as_near = [bug for distance, bug in likely if distance <= least + NEAR / 4]
    # Of several the one whose case it is.
    as_near.sort(key=lambda bug: bug.case.name != case.name)
    return as_near[0].looks_like if as_near else None


def _right(case: Case) -> Arrays | None:
    """Of the first definition that has the case's function and options."""
    from tileloss.tools.audit.bugs.policy import Policy
    from tileloss.tools.audit.bugs.right import Right
    from tileloss.tools.audit.bugs.targets import Columns, Distilled, SoftLabels

    for definition in (Right, Policy, SoftLabels, Distilled, Columns):
        try:
            return prepare(case, definition(case).run())
        except Refused:
            continue
    return None


def _distance(
    failed: str, right: Arrays, found: Mapping[str, np.ndarray], planted: Arrays
) -> float:
    """Of the output that failed, the share of its error that is left when the bug's is taken off; inf where another output is
    off and the bug says nothing of it, or the other way round."""
    shares = {
        n: _left(found[n], planted[n], x) for n, x in right.items() if n in found and n in planted
    }
    known = {name: share for name, share in shares.items() if share is not None}
    if not known or max(known.values()) > OTHERS:
        return np.inf
    return known.get(failed, max(known.values()))


def _left(found: np.ndarray, planted: np.ndarray, right: np.ndarray) -> float | None:
    """None: nothing is wrong with either."""
    if found.shape != planted.shape:
        return np.inf
    if found.shape != right.shape:
        return 0.0
    a, b, r = (x.astype(np.float64).ravel() for x in (found, planted, right))
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return np.inf
    finite = np.isfinite(a) & np.isfinite(r)
    scale = float(np.linalg.norm(r[finite])) or 1.0
    a, b, r = a[finite], b[finite], r[finite]
    off, other, left = (float(np.linalg.norm(x)) for x in (a - r, b - r, a - b))
    if not finite.all():
        return left / max(off, other, 1e-6 * scale)
    if max(off, other) < NOTHING * scale:
        return None
    return left / max(off, other)
