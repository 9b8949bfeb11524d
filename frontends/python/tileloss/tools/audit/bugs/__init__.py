"""The known bugs of loss kernels: a case each, and an implementation of ours that has it, so that the case is seen to fail.

table.py    the table's entries
right.py    the definitions that the bugs are variations of
rows.py     from logits: sums over the vocabulary, rounding, reductions
heads.py    fused with the LM head
policy.py   policy losses
targets.py  teachers and class probabilities
calls.py    cheats, and what shows in a second call
likeness.py which of them a failure looks like

``--impl tileloss.tools.audit.bugs:liger_kernel_1329`` runs one. To add one: a class that overrides one method, under a
`@bug` with the thread, what it looked like and a config on which it shows; and its row in docs/users/audit.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tileloss.tools.audit.bugs import calls, heads, policy, rows, targets
from tileloss.tools.audit.bugs.table import BUGS, Bug

__all__ = ["BUGS", "Bug", "calls", "heads", "policy", "rows", "targets"]


def __getattr__(name: str) -> Callable[[Any], Any]:
    if (found := BUGS.get(name.replace("_", "-"))) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found.plant
