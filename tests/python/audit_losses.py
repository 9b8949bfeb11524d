"""Losses for the audit's own tests, right and wrong, in numpy: a child that imports no framework starts in no time.

Also ways of an implementation to end its process.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np

from tileloss.testing import Case, Refused


def right(case: Case) -> dict[str, Any]:
    """Cross-entropy in double precision, reduction mean or none."""
    case.refuse_unless(["cross_entropy"], ["reduction"])
    if case.options.get("reduction") == "sum":
        raise Refused("reduction sum: not offered")
    used = case.in_use
    z, labels = case.tensors["logits"].astype(np.float64), np.where(used, case.tensors["labels"], 0)
    rows = np.arange(len(z))
    log_p = z - z.max(-1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
    loss = np.where(used, -log_p[rows, labels], 0)
    gradient = np.exp(log_p)
    gradient[rows, labels] -= 1
    upstream = case.tensors.get("loss_grad", np.ones(1)) * used
    if case.options.get("reduction", "mean") == "mean":
        loss, upstream = loss.sum() / max(used.sum(), 1), upstream / max(used.sum(), 1)
    dlogits = (upstream[:, None] * gradient).astype(case.tensors["logits"].dtype)
    return {"loss": loss, "dlogits": dlogits}


def halved(case: Case) -> dict[str, Any]:
    found = right(case)
    return found | {"dlogits": found["dlogits"] / 2}


def off(case: Case) -> dict[str, Any]:
    found = right(case)
    return found | {"loss": found["loss"] * 1.01}


def without_gradient(case: Case) -> dict[str, Any]:
    return right(case) | {"dlogits": None}


def transposed(case: Case) -> dict[str, Any]:
    found = right(case)
    return found | {"dlogits": found["dlogits"].T}


def a_list(case: Case) -> Any:
    return list(right(case).values())


def refusing(case: Case) -> dict[str, Any]:
    raise Refused("not today")


def raising(case: Case) -> dict[str, Any]:
    print("this is no line of the protocol")
    raise ValueError("no such\nluck")


def _in_half_precision(case: Case) -> bool:
    return case.tensors["logits"].dtype.itemsize == 2


def aborting(case: Case) -> dict[str, Any]:
    """In bfloat16 alone: the cases after it run."""
    if _in_half_precision(case):
        os.write(2, b"first\nlast words\n")
        os.abort()
    return right(case)


def exiting(case: Case) -> dict[str, Any]:
    os._exit(7)


def hanging(case: Case) -> dict[str, Any]:
    if _in_half_precision(case):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    return right(case)


def batch_dependent(case: Case) -> dict[str, Any]:
    """Off by how many rows it is given."""
    found = right(case)
    return found | {"loss": found["loss"] * (1 + len(case.tensors["labels"]) / 1000)}


def claiming(case: Case) -> dict[str, Any]:
    """The same, and it says otherwise."""
    return batch_dependent(case)


claiming.contract = {"logp": ["exp"], "dlogits": []}  # type: ignore[attr-defined]


def mine(case: Case) -> dict[str, Any]:
    return right(case)


def mine_again(case: Case) -> dict[str, Any]:
    return right(case)


def not_mine(case: Case) -> dict[str, Any]:
    """It says that it is."""
    return off(case)


def without_exp(case: Case) -> dict[str, Any]:
    return off(case)


def others(case: Case) -> dict[str, Any]:
    return off(case)


_MINE = {"kernels": "mine 1", "logp": ["exp"], "dlogits": ["exp"]}
for _function in (mine, mine_again, not_mine):
    _function.contract = _MINE  # type: ignore[attr-defined]
without_exp.contract = _MINE | {"logp": []}  # type: ignore[attr-defined]
others.contract = _MINE | {"kernels": "mine 2"}  # type: ignore[attr-defined]


def telling(case: Case) -> dict[str, Any]:
    key, path = os.environ.get("WANDB_API_KEY", "no key"), os.environ.get("PATH")
    raise Refused(f"{key}, but a path" if path else key)
