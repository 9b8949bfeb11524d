"""What the modules have in common."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn


class WithOptions(nn.Module):
    """A function of tileloss.torch with its keyword arguments, of which those are shown that are not the defaults."""

    _function: ClassVar[Callable[..., Any]]

    def __init__(self, given: dict[str, Any]) -> None:
        """``given``: a constructor's arguments, of which those are kept that the function has and the module does not hold."""
        super().__init__()
        parameters = inspect.signature(self._function).parameters.values()
        names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "weight"]
        given = {**given, **given["options"]}
        self.options = {name: given[name] for name in names if name in given}

    def _call(self, input: Any, *given: Any, low_rank: Any = None, **named: Any) -> Any:
        if low_rank is not None:  # functions without a head refuse it by its name
            named["low_rank"] = low_rank
        return self._function(input, *given, **named, **self.options)

    def extra_repr(self) -> str:
        defaults = inspect.signature(type(self)).parameters
        shown = {n: v for n, v in self.options.items() if v != defaults[n].default}
        return ", ".join(f"{n}={v!r}" for n, v in shown.items())


class WithHead(WithOptions):
    """A fused function, and the LM head as torch's own modules hold it: `linear`, a `torch.nn.Linear`.

    `linear_weight_grad`, None unless it is assigned: the function's. No part of the module's state, and not moved with it.
    """

    linear_weight_grad: Tensor | None = None

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(given)
        of_head = {name: given[name] for name in ("bias", "device", "dtype")}
        self.linear = nn.Linear(given["in_features"], given["num_classes"], **of_head)

    def _call(self, input: Any, *given: Any, **named: Any) -> Any:
        kind = type(self.linear)  # peft's has a weight too, and adds to its product
        if kind.forward is not nn.Linear.forward or "forward" in vars(self.linear):
            raise TypeError(
                "linear: expected a layer whose forward is torch.nn.Linear's, "
                f"got {kind.__module__}.{kind.__qualname__} with its own; what LoRA adds to a head is low_rank"
            )
        head, bias = self.linear.weight, self.linear.bias
        named["linear_weight_grad"] = self.linear_weight_grad
        return super()._call(input, head, *given, linear_bias=bias, **named)
