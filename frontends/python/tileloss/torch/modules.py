"""The losses as modules: options once; tensors, and what changes from batch to batch, at every call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tileloss.torch.cross_entropy import cross_entropy, linear_cross_entropy
from tileloss.torch.distillation import distillation, linear_distillation
from tileloss.torch.policy import linear_policy_loss, policy_loss
from tileloss.torch.sparse_distillation import linear_sparse_distillation, sparse_distillation

Number = float | Tensor


class _Options(nn.Module):
    """Keeps and shows keyword arguments of a function: those that are neither given at every call nor held by the module."""

    _held: tuple[str, ...] = ()

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        super().__init__()
        parameters = inspect.signature(function).parameters.values()
        known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        others = {*inspect.signature(self.forward).parameters, *self._held}
        expected = [name for name in known if name not in others]
        unknown = sorted(options.keys() - set(expected))
        if unknown:
            name = type(self).__name__
            raise TypeError(
                f"{name}: expected options among {', '.join(expected)}, got {', '.join(unknown)}"
            )
        self.options = options

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class _WithHead(_Options):
    """The options of a fused function, and the LM head as torch's own modules hold it: `linear`, a `torch.nn.Linear`."""

    _held = ("linear_bias", "weight")

    def __init__(
        self,
        function: Callable[..., Any],
        options: dict[str, Any],
        in_features: int,
        num_classes: int,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(function, options)
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)


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
        input: Tensor,
        target: Tensor,
        *,
        token_weights: Tensor | None = None,
        num_items: Number | None = None,
    ) -> Tensor:
        """input [..., V], target [...] -> the loss, float32."""
        return cross_entropy(
            input,
            target,
            self.weight,
            token_weights=token_weights,
            num_items=num_items,
            **self.options,
        )


class LinearCrossEntropyLoss(_WithHead):
    """An LM head and its cross-entropy in one, as `torch.nn.LinearCrossEntropyLoss`: `tileloss.torch.linear_cross_entropy`.

    Args:
        in_features: H. num_classes: V. bias: whether the head has one.
        device, dtype: of the head, which is drawn as `torch.nn.Linear` does.
        weight: [V] class weights, a buffer of the module.
        **options: keyword arguments of `linear_cross_entropy`.

    The head is `linear`, with `linear.weight` [V, H] and `linear.bias` [V] or None; one that exists is shared by assigning it, or
    its parameters. States are saved as torch's module saves them.
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weight: Tensor | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            linear_cross_entropy, options, in_features, num_classes, bias, device, dtype
        )
        self.register_buffer("weight", weight)

    def forward(
        self,
        input: Tensor,
        target: Tensor,
        *,
        token_weights: Tensor | None = None,
        num_items: Number | None = None,
    ) -> Tensor:
        """input [..., H], target [...] -> the loss, float32."""
        return linear_cross_entropy(
            input,
            self.linear.weight,
            target,
            linear_bias=self.linear.bias,
            weight=self.weight,
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
        input: Tensor,
        target: Tensor,
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
            input,
            target,
            advantages,
            mask=mask,
            old_logp=old_logp,
            ref_logp=ref_logp,
            sampler_logp=sampler_logp,
            sequence_offsets=sequence_offsets,
            num_items=num_items,
            **self.options,
        )


class LinearPolicyLoss(_WithHead):
    """An LM head and a policy loss in one: `tileloss.torch.linear_policy_loss`.

    Args:
        in_features, num_classes, bias, device, dtype: as `LinearCrossEntropyLoss`, and so is the head, `linear`.
        preset: grpo, dapo, gspo, ...; None: the defaults.
        **options: keyword arguments of `linear_policy_loss`.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        preset: str | None = None,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        options = {"preset": preset, **options}
        super().__init__(linear_policy_loss, options, in_features, num_classes, bias, device, dtype)

    def forward(
        self,
        input: Tensor,
        target: Tensor,
        advantages: Tensor,
        *,
        mask: Tensor | None = None,
        old_logp: Tensor | None = None,
        ref_logp: Tensor | None = None,
        sampler_logp: Tensor | None = None,
        sequence_offsets: Tensor | None = None,
        num_items: Number | None = None,
    ) -> Any:
        """input [..., H] and the tensors of `policy_loss` -> the loss, or (loss, metrics) if the options ask for metrics."""
        return linear_policy_loss(
            input,
            self.linear.weight,
            target,
            advantages,
            linear_bias=self.linear.bias,
            mask=mask,
            old_logp=old_logp,
            ref_logp=ref_logp,
            sampler_logp=sampler_logp,
            sequence_offsets=sequence_offsets,
            num_items=num_items,
            **self.options,
        )


class DistillationLoss(_Options):
    """`tileloss.torch.distillation` with its options, keyword arguments of that function."""

    def __init__(self, **options: Any) -> None:
        super().__init__(distillation, options)

    def forward(
        self,
        input: Tensor,
        teacher: Tensor,
        target: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        token_weights: Tensor | None = None,
        num_items: Number | None = None,
    ) -> Any:
        """input, teacher [..., V] -> the loss, float32, or (loss, DistillationRows) if the options ask for outputs."""
        return distillation(
            input,
            teacher,
            target,
            mask=mask,
            token_weights=token_weights,
            num_items=num_items,
            **self.options,
        )


class LinearDistillationLoss(_WithHead):
    """The student's LM head and its distillation in one: `tileloss.torch.linear_distillation`.

    Args:
        in_features, num_classes, bias, device, dtype: as `LinearCrossEntropyLoss`, and so is the student's head, `linear`.
        **options: keyword arguments of `linear_distillation`.

    The teacher's head is no part of the module, which would save it and show it to optimizers: it is given at every call.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            linear_distillation, options, in_features, num_classes, bias, device, dtype
        )

    def forward(
        self,
        input: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        target: Tensor | None = None,
        *,
        teacher_bias: Tensor | None = None,
        mask: Tensor | None = None,
        token_weights: Tensor | None = None,
        num_items: Number | None = None,
    ) -> Any:
        """input [..., H], teacher_input [..., G], teacher_weight [V, G] -> the loss, or (loss, DistillationRows)."""
        return linear_distillation(
            input,
            self.linear.weight,
            teacher_input,
            teacher_weight,
            target,
            linear_bias=self.linear.bias,
            teacher_bias=teacher_bias,
            mask=mask,
            token_weights=token_weights,
            num_items=num_items,
            **self.options,
        )


class SparseDistillationLoss(_Options):
    """`tileloss.torch.sparse_distillation` with its options, keyword arguments of that function."""

    def __init__(self, **options: Any) -> None:
        super().__init__(sparse_distillation, options)

    def forward(
        self,
        input: Tensor,
        teacher_ids: Tensor,
        teacher_logprobs: Tensor,
        target: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        token_weights: Tensor | None = None,
        num_items: Number | None = None,
    ) -> Any:
        """input [..., V], teacher_ids and teacher_logprobs [..., K] -> the loss, or (loss, DistillationRows)."""
        return sparse_distillation(
            input,
            teacher_ids,
            teacher_logprobs,
            target,
            mask=mask,
            token_weights=token_weights,
            num_items=num_items,
            **self.options,
        )


class LinearSparseDistillationLoss(_WithHead):
    """The student's LM head and distillation from some columns of a teacher: `tileloss.torch.linear_sparse_distillation`.

    Args:
        in_features, num_classes, bias, device, dtype: as `LinearCrossEntropyLoss`, and so is the head, `linear`.
        **options: keyword arguments of `linear_sparse_distillation`.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            linear_sparse_distillation, options, in_features, num_classes, bias, device, dtype
        )

    def forward(
        self,
        input: Tensor,
        teacher_ids: Tensor,
        teacher_logprobs: Tensor,
        target: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        token_weights: Tensor | None = None,
        num_items: Number | None = None,
    ) -> Any:
        """input [..., H], teacher_ids and teacher_logprobs [..., K] -> the loss, or (loss, DistillationRows)."""
        return linear_sparse_distillation(
            input,
            self.linear.weight,
            teacher_ids,
            teacher_logprobs,
            target,
            linear_bias=self.linear.bias,
            mask=mask,
            token_weights=token_weights,
            num_items=num_items,
            **self.options,
        )
