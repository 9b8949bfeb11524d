"""Cut Cross-Entropy: its Triton kernels on a GPU, its implementation under torch.compile elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from cut_cross_entropy import linear_cross_entropy

from tileloss.testing.case import Case, Refused


def compute(case: Case) -> dict[str, Any]:
    case.refuse_unless(["linear_cross_entropy"], ["reduction", "ignore_index", "softcap"])
    if case.backwards > 1:
        raise Refused("a second backward: torch.compile gives buffers away in the first")
    loss = linear_cross_entropy(
        case.torch("hidden"),
        case.torch("head"),
        case.torch("labels"),
        ignore_index=case.ignore_index,
        softcap=case.options.get("softcap"),
        reduction=case.options.get("reduction", "mean"),
        impl="cce" if torch.device(case.device).type == "cuda" else "torch_compile",
    )
    return case.torch_outputs(loss=loss)
