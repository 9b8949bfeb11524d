"""What the modules have in common."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn


class WithOptions(nn.Module):
    """Keeps keyword arguments of a function, and shows those that are not the defaults."""

    def __init__(self, function: Callable[..., Any], given: dict[str, Any]) -> None:
        """``given``: a constructor's arguments, of which those are kept that the function has and the module does not hold."""
        super().__init__()
        parameters = inspect.signature(function).parameters.values()
        names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "weight"]
        self.options = {name: given[name] for name in names if name in given}

    def extra_repr(self) -> str:
        defaults = inspect.signature(type(self)).parameters
        shown = {n: v for n, v in self.options.items() if v != defaults[n].default}
        return ", ".join(f"{n}={v!r}" for n, v in shown.items())


class WithHead(WithOptions):
    """The options of a fused function, and the LM head as torch's own modules hold it: `linear`, a `torch.nn.Linear`."""

    def __init__(self, function: Callable[..., Any], given: dict[str, Any]) -> None:
        super().__init__(function, given)
        of_head = {name: given[name] for name in ("bias", "device", "dtype")}
        self.linear = nn.Linear(given["in_features"], given["num_classes"], **of_head)
