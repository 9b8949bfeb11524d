"""Whether TRL is the one that the integration was written for, and its tensors are where and what TileLoss can read."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from tileloss.integrations._head_wrappers import is_of_zero3
from tileloss.torch._arguments import autocast_dtype

INTEGRATION = "tileloss.integrations.trl"
DEVICE_TYPES = ("cpu", "cuda")
_KNOWN_VERSIONS = r"1\.16\.\d+"  # a pre-release of 1.16 could be anything between 1.15 and 1.16


def known_utils() -> ModuleType:
    """trl.trainer.utils of a version this was written for.

    Raises:
        ImportError: trl is not installed. RuntimeError: its version is another.
    """
    try:
        import trl
    except ImportError as error:
        raise ImportError(
            f"{INTEGRATION}: the package trl is not installed; expected trl 1.16.x (pip install 'trl==1.16.*')"
        ) from error
    if not re.fullmatch(_KNOWN_VERSIONS, trl.__version__):
        raise RuntimeError(f"{INTEGRATION}: expected trl 1.16.x, got trl {trl.__version__}")
    from trl.trainer import utils

    return utils


def parameters_of(function: Callable[..., Any] | None, is_ours: bool = False) -> tuple[str, ...]:
    """``is_ours``: it wraps one of theirs."""
    if function is None:
        return ()
    return tuple(inspect.signature(function, follow_wrapped=not is_ours).parameters)


def check_parameters(path: str, found: Any, got: Sequence[str], expected: Sequence[str]) -> None:
    """Raises RuntimeError unless `found`, what is at `path`, takes the parameters of TRL 1.16's own."""
    if tuple(got) != tuple(expected):
        raise RuntimeError(
            f"{INTEGRATION}: expected trl 1.16's own {path} with the parameters {', '.join(expected)}, got {found!r} with "
            f"({', '.join(got)})"
        )


def refuse_other_devices(what: str, tensor: torch.Tensor) -> None:
    if tensor.device.type not in DEVICE_TYPES:
        # TRL brings hidden states to the head's device, without the call of the head that would bring its weight.
        offloaded = " (meta: the LM head is offloaded by accelerate; keep it on a device)"
        raise NotImplementedError(
            f"{INTEGRATION}: expected {what} on the CPU or a CUDA device, got them on {tensor.device}; unpatch() to train there "
            f"on TRL's own function{offloaded * tensor.is_meta}"
        )


def refuse_zero3(*weights: torch.Tensor) -> None:
    """ZeRO-3 partitions the head again after the forward, and the backward needs it whole."""
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    if is_deepspeed_zero3_enabled() or any(map(is_of_zero3, weights)):
        raise NotImplementedError(
            f"{INTEGRATION}: DeepSpeed ZeRO-3 partitions the LM head, which TileLoss "
            "needs whole in the backward; use ZeRO stage 1 or 2, or unpatch()"
        )


def refuse_fsdp1(weight: torch.Tensor) -> None:
    """A head that is a unit of FSDP1 by itself is whole in its own forward alone, and flat outside of it."""
    if weight.dim() != 2:
        raise ValueError(
            f"{INTEGRATION}: expected an LM head's weight of two dimensions, got shape {list(weight.shape)}: a unit of FSDP1 by "
            "itself is whole only while it is called, which TRL does not; leave the head in the root unit, or use FSDP2"
        )


def compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    """What a product of these is computed in: TRL's type, autocast's or else theirs, but float32 in place of float16."""
    dtype = autocast_dtype(hidden.device.type) or hidden.dtype
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
