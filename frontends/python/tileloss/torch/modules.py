"""The losses as modules: options once, tensors at every call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tileloss.torch.cross_entropy import cross_entropy, linear_cross_entropy
from tileloss.torch.policy import policy_loss


class _Options(nn.Module):
    """Keeps keyword arguments and shows them."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class CrossEntropyLoss(_Options):
    """`tileloss.torch.cross_entropy` with its options, as `torch.nn.CrossEntropyLoss`.

    Args:
        weight: [V] class weights, a buffer of the module.
        **options: keyword arguments of `cross_entropy`.
    """

    weight: Tensor | None

    def __init__(self, weight: Tensor | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("weight", weight)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """logits [..., V], labels [...] -> the loss, float32."""
        return cross_entropy(logits, labels, self.weight, **self.options)


class LinearCrossEntropyLoss(_Options):
    """An LM head and its cross-entropy in one: `tileloss.torch.linear_cross_entropy` with the head's parameters.

    Args:
        in_features: H. out_features: V. bias: whether the head has one.
        device, dtype: of the parameters, which are drawn as `torch.nn.Linear` does.
        **options: keyword arguments of `linear_cross_entropy`.

    Shapes: `weight` [V, H], `bias` [V] or None; a head that exists is shared by assigning its parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        head = nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.weight = head.weight
        self.bias: nn.Parameter | None
        if bias:
            self.bias = head.bias
        else:
            self.register_parameter("bias", None)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """hidden [..., H], labels [...] -> the loss, float32."""
        return linear_cross_entropy(hidden, self.weight, labels, self.bias, **self.options)


class PolicyLoss(_Options):
    """`tileloss.torch.policy_loss` with its options.

    Args:
        preset: grpo, dapo, gspo, ...; None: the defaults.
        **options: keyword arguments of `policy_loss`.
    """

    def __init__(self, preset: str | None = None, **options: Any) -> None:
        super().__init__(preset=preset, **options)

    def forward(
        self,
        logits: Tensor,
        labels: Tensor,
        advantages: Tensor,
        *,
        mask: Tensor | None = None,
        old_logp: Tensor | None = None,
        ref_logp: Tensor | None = None,
        sampler_logp: Tensor | None = None,
        sequence_offsets: Tensor | None = None,
    ) -> Any:
        """The tensors of `policy_loss` -> the loss, float32, or (loss, metrics) if the options ask for metrics."""
        return policy_loss(
            logits,
            labels,
            advantages,
            mask=mask,
            old_logp=old_logp,
            ref_logp=ref_logp,
            sampler_logp=sampler_logp,
            sequence_offsets=sequence_offsets,
            **self.options,
        )
