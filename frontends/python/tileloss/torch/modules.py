"""The losses as modules: options once; tensors, and what changes from batch to batch, at every call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tileloss.torch.cross_entropy import cross_entropy, linear_cross_entropy
from tileloss.torch.policy import PolicyOptions, policy_loss

Number = float | Tensor


class _Options(nn.Module):
    """Keeps keyword arguments of a function, those that are not given at every call, and shows them."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        super().__init__()
        parameters = inspect.signature(function).parameters.values()
        known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            known += PolicyOptions.__annotations__
        at_every_call = inspect.signature(self.forward).parameters
        expected = [name for name in known if name not in at_every_call]
        unknown = sorted(options.keys() - set(expected))
        if unknown:
            name = type(self).__name__
            raise TypeError(
                f"{name}: expected options among {', '.join(expected)}, got {', '.join(unknown)}"
            )
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
        super().__init__(cross_entropy, options)
        self.register_buffer("weight", weight)

    def forward(
        self,
        logits: Tensor,
        labels: Tensor,
        *,
        token_weights: Tensor | None = None,
        num_items: Number | None = None,
    ) -> Tensor:
        """logits [..., V], labels [...] -> the loss, float32."""
        return cross_entropy(
            logits,
            labels,
            self.weight,
            token_weights=token_weights,
            num_items=num_items,
            **self.options,
        )


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
        super().__init__(linear_cross_entropy, options)
        head = nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.weight = head.weight
        self.bias: nn.Parameter | None
        if bias:
            self.bias = head.bias
        else:
            self.register_parameter("bias", None)

    def extra_repr(self) -> str:
        vocab, width = self.weight.shape
        shape = f"in_features={width}, out_features={vocab}, bias={self.bias is not None}"
        return ", ".join(filter(None, (shape, super().extra_repr())))

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor,
        *,
        token_weights: Tensor | None = None,
        num_items: Number | None = None,
    ) -> Tensor:
        """hidden [..., H], labels [...] -> the loss, float32."""
        return linear_cross_entropy(
            hidden,
            self.weight,
            labels,
            self.bias,
            token_weights=token_weights,
            num_items=num_items,
            **self.options,
        )


class PolicyLoss(_Options):
    """`tileloss.torch.policy_loss` with its options.

    Args:
        preset: grpo, dapo, gspo, ...; None: the defaults.
        **options: keyword arguments of `policy_loss`.
    """

    def __init__(self, preset: str | None = None, **options: Any) -> None:
        super().__init__(policy_loss, {"preset": preset, **options})

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
        num_items: Number | None = None,
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
            num_items=num_items,
            **self.options,
        )
