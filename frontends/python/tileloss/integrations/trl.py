"""TRL's trainers on TileLoss: `patch()` and `unpatch()`, for TRL 1.16.

TRL's SFT, DPO, KTO, GRPO and RLOO trainers give their models a fused LM head
(`trl.trainer.utils.add_fused_lm_head`): instead of logits the model returns each token's
log-probability, entropy, log sum p^2, mean logit and whether the label is the most likely token,
all from one autograd function, `_ChunkedLogProbFunction`. `patch()` puts
`tileloss.torch.linear_logprobs` in that function's place. TRL drops the masked tokens before the
product with the head on Triton's devices only; with the patch it does so on the CPU and on CUDA
devices without Triton too, so that
prompts and padding cost nothing. Where FSDP2 has sharded the head (a unit of its own), TRL gathers it
with `full_tensor()`, whose gradient is not summed over the processes: each then trains its shard on
its own batch alone. With the patch `linear_logprobs` gets the head as it is, and its gradient is the
mean over the processes, as FSDP's.

The divergences of TRL's distillation trainers go to `tileloss.torch.distillation` and
`linear_distillation` (_trl_distillation.py), and SFTTrainer takes weights for tokens (_trl_sft.py). Their
modules are patched where they are imported already, and else as soon as they are.

All names are looked up at each call: trainers made before the patch use TileLoss from then on, and
trainers made under it use TRL's own functions again after `unpatch()`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import torch

from tileloss.integrations._replacements import AfterImport, Replacement, Replacements
from tileloss.integrations._trl_checks import (
    DEVICE_TYPES,
    INTEGRATION,
    check_parameters,
    compute_dtype,
    known_utils,
    parameters_of,
    refuse_fsdp1,
    refuse_other_devices,
    refuse_zero3,
)
from tileloss.integrations._trl_spots import SPOTS, replacement_in
from tileloss.torch import linear_logprobs

__all__ = ["LogProbFunction", "Patch", "is_patched", "patch", "unpatch"]

# TRL's names of the row outputs and ours, in the order in which TRL's function returns them.
_ROW_OUTPUTS = {
    "log_probs": "logp",
    "entropy": "entropy",
    "log_sum_sq_probs": "log_sum_sq_probs",
    "mean_logits": "mean_logit",
    "is_top1": "correct",
}


class LogProbFunction:
    """Stands in for TRL's `_ChunkedLogProbFunction`, which is called through `apply` alone, with TRL 1.16's parameters after
    `ctx`."""

    @staticmethod
    def apply(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = tuple(_ROW_OUTPUTS),
    ) -> tuple[torch.Tensor | None, ...]:
        """Per-token outputs of softmax(z), z = softcap(logit_scale * (hidden weight^T + bias)) / T.

        Args:
            hidden: [N, H] float32, bfloat16 or float16, on the CPU or a CUDA device.
            weight: [V, H], the LM head. bias: [V] or None. Both in any of the three types; also
                FSDP2's DTensors.
            targets: [N] int64, each in [0, V).
            temperature: T > 0. logit_scale: > 0. final_logit_softcapping: > 0, or None for none.
            chunk_size: TRL's width of a logits tile. Not used: TileLoss plans its own within its
                workspace.
            outputs: which of "entropy", "log_sum_sq_probs", "mean_logits", "is_top1" to compute.

        Returns:
            (log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1), each [N], float32
            (is_top1: bool), None where not asked for. log_probs is always there. log_probs and
            entropy are differentiable by hidden, weight and bias.

        The product is computed in the type in which TRL does it, autocast's or else hidden's, with
        float32 in place of float16. Its sums, the logits and all that follows are float32, where
        TRL rounds the logits to that type.

        Raises:
            NotImplementedError: hidden is on another device, the head is offloaded, or DeepSpeed ZeRO-3 partitions it.
            IndexError: a target is out of range. ValueError: an option is. The message names it.
        """
        del chunk_size
        refuse_other_devices("hidden states", hidden)
        if torch.is_grad_enabled():
            refuse_zero3(weight)
        refuse_fsdp1(weight)
        rows = linear_logprobs(
            hidden,
            weight,
            targets,
            linear_bias=bias,
            outputs=tuple(
                ours
                for theirs, ours in _ROW_OUTPUTS.items()
                if theirs == "log_probs" or theirs in outputs
            ),
            logit_scale=logit_scale,
            softcap=final_logit_softcapping or 0.0,
            temperature=temperature,
            compute_dtype=compute_dtype(hidden),
        )
        if rows.mean_logit is not None:  # TRL's has no gradient
            rows = rows._replace(mean_logit=rows.mean_logit.detach())
        return tuple(getattr(rows, ours) for ours in _ROW_OUTPUTS.values())


class _NeverADTensor:
    """Stands in for DTensor in TRL's question whether to gather the head: nothing is one."""


class Patch:
    """What `patch()` returns. As a context manager it undoes on leaving what that call did."""

    def __init__(self, installed: bool) -> None:
        self._installed = installed

    def undo(self) -> None:
        """Undoes the patch if that call of `patch()` made it; else and later does nothing. Raises as `unpatch()`."""
        if self._installed:
            unpatch()
            self._installed = False

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


_replaced = Replacements(INTEGRATION)
_later = AfterImport(SPOTS, lambda module: _replaced.make(replacement_in(module)))


def patch() -> Patch:
    """Makes the fused LM head and the distillation of TRL's trainers run on TileLoss, in this process.

    Patching twice is harmless: the second call changes nothing, and undoing its result neither.

    Raises:
        ImportError: trl is not installed.
        RuntimeError: its version is not 1.16.x, or a function not the one of 1.16, because
            somebody else has replaced it.
    """
    if _replaced:
        return Patch(installed=False)
    utils = _known_utils()
    own_use_triton: Callable[[torch.device], bool] = utils._use_triton

    def drops_masked_rows(device: torch.device) -> bool:
        return device.type in DEVICE_TYPES or own_use_triton(device)

    replacements = [
        Replacement(utils, "_ChunkedLogProbFunction", LogProbFunction),
        Replacement(utils, "_use_triton", drops_masked_rows),
        Replacement(utils, "DTensor", _NeverADTensor),
        *(replacement_in(sys.modules[name]) for name in SPOTS if name in sys.modules),
    ]
    for replacement in replacements:
        _replaced.make(replacement)
    _later.start()
    return Patch(installed=True)


def unpatch() -> None:
    """Gives TRL its own functions back. Without a patch it does nothing.

    Raises:
        RuntimeError: somebody has replaced one of TileLoss's functions since `patch()`; nothing is
            changed then.
    """
    if _replaced:
        _replaced.undo()
        _later.stop()


def is_patched() -> bool:
    """Whether `patch()` is in force."""
    return bool(_replaced)


def _known_utils() -> ModuleType:
    """trl.trainer.utils, after making sure that it is the one this module was written for."""
    utils = known_utils()
    function = getattr(utils, "_ChunkedLogProbFunction", None)
    got, expected = getattr(function, "forward", None), parameters_of(LogProbFunction.apply)
    path = "trl.trainer.utils._ChunkedLogProbFunction"
    check_parameters(path, function, parameters_of(got)[1:], expected)
    for name in ("_use_triton", "DTensor"):
        if not callable(found := getattr(utils, name, None)):
            raise RuntimeError(
                f"{INTEGRATION}: expected trl 1.16's own trl.trainer.utils.{name}, got {found!r}"
            )
    return utils
