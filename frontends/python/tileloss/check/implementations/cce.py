"""Cut Cross-Entropy in its implementation under torch.compile, as its Triton kernels need a GPU."""

from __future__ import annotations

from typing import Any

from cut_cross_entropy import linear_cross_entropy

from tileloss.check.case import Case, Refused


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
        impl="torch_compile",
    )
    return case.torch_outputs(loss=loss)
