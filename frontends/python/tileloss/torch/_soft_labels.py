"""Class probabilities in place of labels, as `torch.nn.functional.cross_entropy` takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tileloss.torch._dtensor import local_rows
from tileloss.torch._options import Value, refuse_gradient
from tileloss.torch._tensors import FLOATS, check_cpu


def is_probabilities(target: Any) -> bool:
    return isinstance(target, Tensor) and target.is_floating_point()


def checked_probabilities(
    target: Tensor, shape: Sequence[int], given: Mapping[str, Value]
) -> Tensor:
    """Of the logits' shape; converted to float32 if they are not float32, bfloat16 or float16."""
    target = local_rows("target", target)
    check_cpu("target", target)
    refuse_gradient("target", target)
    if list(target.shape) != list(shape):
        raise ValueError(
            f"target: expected labels of an integer type, or class probabilities of the logits' shape {list(shape)}, got "
            f"{target.dtype} of shape {list(target.shape)}"
        )
    refuse_z_loss(given)
    target = target.detach()
    return target if target.dtype in FLOATS else target.to(torch.float32)


def refuse_z_loss(given: Mapping[str, Value]) -> None:
    if given.get("z_loss", 0) != 0:
        raise ValueError(f"z_loss: expected 0 with class probabilities, got {given['z_loss']}")


def soft_options(given: Mapping[str, Value]) -> dict[str, Value]:
    return {name: value for name, value in given.items() if name != "z_loss"}
