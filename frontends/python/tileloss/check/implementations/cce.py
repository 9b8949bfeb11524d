"""Cut Cross-Entropy in its implementation under torch.compile, as its Triton kernels need a GPU."""

from __future__ import annotations

from typing import Any

from cut_cross_entropy import linear_cross_entropy

from tileloss.check.case import Case


def compute(case: Case) -> dict[str, Any]:
    case.refuse_unless(["linear_cross_entropy"], ["reduction", "ignore_index", "softcap"])
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
