"""Cheats that benchmarks have let through, and defects that one call alone does not show."""

from __future__ import annotations

from typing import Any

import numpy as np

from tileloss.testing.case import Case
from tileloss.tools.audit.bugs.right import Right
from tileloss.tools.audit.bugs.table import Outputs, bug
from tileloss.tools.audit.cases import CROSS_ENTROPY, LINEAR, LOGPROBS

_KEPT: dict[Any, Any] = {}  # what these keep between calls, for as long as the process lives


@bug("ScalingIntelligence/KernelBench#82", "zeros for results", CROSS_ENTROPY)
def zeros(case: Case) -> Outputs:
    return {name: np.zeros_like(x) for name, x in Right(case).run().items()}


@bug(
    "tensara/tensara#238",
    "the first call's result, copied again and again",
    CROSS_ENTROPY,
    calls="moved",
)
def replayed(case: Case) -> Outputs:
    shapes = ("replayed", tuple(x.shape for x in case.tensors.values()))
    return _KEPT.setdefault(shapes, Right(case).run())


@bug(
    "gpu-mode/pygpubench#7",
    "results kept by the input's address",
    CROSS_ENTROPY,
    calls="renewed",
    reduction="sum",
)
def by_address(case: Case) -> Outputs:
    return _KEPT.setdefault(case.tensors["logits"].ctypes.data, Right(case).run())


@bug(
    "unslothai/unsloth#5002", "the gradient is written over the logits", CROSS_ENTROPY, calls="kept"
)
def over_the_input(case: Case) -> Outputs:
    found = Right(case).run()
    case.tensors["logits"][:] = found["dlogits"]
    return found | {"dlogits": case.tensors["logits"]}


@bug(
    "karpathy/llm.c#852",
    "right for the first ten calls, which are checked, and wrong from then on",
    CROSS_ENTROPY,
    calls="repeated",
)
def right_at_first(case: Case) -> Outputs:
    _KEPT["calls"] = _KEPT.get("calls", 0) + 1
    found = Right(case).run()
    return found if _KEPT["calls"] <= 10 else found | {"loss": found["loss"] * 1.5}


@bug(
    "linkedin/Liger-Kernel#1305",
    "a buffer that two calls share: the second writes over the first's gradient",
    LINEAR,
    calls="shared",
)
def one_buffer(case: Case) -> Outputs:
    found = Right(case).run()
    for name in case.gradients:
        buffer = _KEPT.setdefault(("buffer", name, found[name].shape), np.empty_like(found[name]))
        buffer[:] = found[name]
        found[name] = buffer
    return found


@bug(
    "NVIDIA-NeMo/RL#3743",
    "a row's log-probability has other bits in another batch",
    LOGPROBS,
    calls="split",
    upstream="per_row",
)
def batch_dependent_logp(case: Case) -> Outputs:
    found = Right(case).run()
    return found | {"logp": found["logp"] * np.float32(1 - len(case.in_use) * 2.0**-24)}
