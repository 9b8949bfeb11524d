"""The calls that others make of a vocabulary cut over ranks, with their signatures, so that a project changes one import.

Each agrees with what it is named after, but for this: where that one takes shards of one width, these may differ; labels out of
range raise; tensors are on the CPU or a CUDA device.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from tileloss._core.row_states import MEAN_OUTPUT
from tileloss.torch._arguments import Value, check_float
from tileloss.torch.distributed._meeting import ranks_of
from tileloss.torch.distributed._prepare import Given, call
from tileloss.torch.distributed.functions import cross_entropy, linear_logprobs

Group = dist.ProcessGroup | None


class LigerFusedLinearScaledCrossEntropyTPFunction:
    """liger_kernel.ops.LigerFusedLinearScaledCrossEntropyTPFunction (Liger 0.8.3 and newer; verl's fused head)."""

    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        tp_group: Group,
        temperature: float = 1.0,
        ignore_index: int = -100,
        tiles_per_reduce: int = 1,
        return_entropy: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """-log p of the labels under softmax(_input @ weight.T / temperature), or (that, entropy): [M] float32, differentiable.

        Args:
            _input: hidden states [M, H], the same on every rank; their gradient is summed over the ranks.
            weight: this rank's rows of the head, [V_r, H].
            target: [M] classes of the whole vocabulary. Rows with ``ignore_index`` give 0.
            tiles_per_reduce: how Liger's kernels cut their reductions; here it has no effect.
        """
        names = ("logp", "entropy") if return_entropy else ("logp",)
        rows = linear_logprobs(
            _input,
            weight,
            target,
            group=tp_group,
            outputs=names,
            temperature=temperature,
            ignore_index=ignore_index,
        )
        assert rows.logp is not None
        if not return_entropy:
            return -rows.logp
        assert rows.entropy is not None
        return -rows.logp, rows.entropy


def loss_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    tp_group: Group,
    global_vocab_size: int,
    reduction: str = "sum",
) -> Tensor:
    """torchtitan's _LossParallelCrossEntropy.apply: logits [T, V_r] of shards as torch.chunk cuts them, labels [T] with -100 for
    rows that do not count. "sum": a scalar; "none": [T].

    Raises ValueError where a shard has not the columns that torch.chunk gives it.
    """
    rank, count = ranks_of(tp_group)

    def options() -> dict[str, Value]:
        check_float("logits", logits)
        width = -(-global_vocab_size // count)
        start = min(global_vocab_size, width * rank)
        columns = min(global_vocab_size, start + width) - start
        if logits.shape[-1:] != (columns,):
            raise ValueError(
                f"logits: expected {columns} columns on rank {rank} of {count}, as global_vocab_size is {global_vocab_size}, "
                f"got shape {list(logits.shape)}"
            )
        return {"reduction": reduction}

    return call(Given("cross_entropy", logits, {"labels": labels}, tp_group, None, options))["loss"]


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: Group = None,
) -> Tensor:
    """megatron.core.tensor_parallel.vocab_parallel_cross_entropy: logits [s, b, V_r], target [s, b] -> losses [s, b], float32.

    With ``label_smoothing`` a, as there, a' = a K/(K-1) over the K columns of this rank's shard, and the loss is

        (1 - a') (-log p_y) - a' mean(log p_j over this rank's columns),

    so that it differs from rank to rank, and its gradient is that of each rank's own loss: of more than one rank it is no loss of
    the whole logits. `cross_entropy` of tileloss.torch.distributed smooths over the whole vocabulary. ``tp_group`` None: all
    processes. Rows with the label -100 give 0.
    """
    if label_smoothing == 0:
        return cross_entropy(vocab_parallel_logits, target, group=tp_group, reduction="none")

    def options() -> dict[str, Value]:
        if not 0 < label_smoothing < 1:
            raise ValueError(
                f"label_smoothing: expected 0 <= label_smoothing < 1, got {label_smoothing}"
            )
        check_float("vocab_parallel_logits", vocab_parallel_logits)
        if vocab_parallel_logits.shape[-1] < 2:
            raise ValueError(
                f"vocab_parallel_logits: expected at least 2 columns with label_smoothing, got {vocab_parallel_logits.shape[-1]}"
            )
        return {}

    given = Given(
        "logprobs",
        vocab_parallel_logits,
        {"labels": target},
        tp_group,
        None,
        options,
        outputs=("logp", "lse", MEAN_OUTPUT),
        mean_of_shard=True,
    )
    rows = call(given)
    columns = vocab_parallel_logits.shape[-1]
    smoothing = label_smoothing * columns / (columns - 1)
    mean_logp = rows[MEAN_OUTPUT] - rows["lse"]
    return -(1 - smoothing) * rows["logp"] - smoothing * mean_logp
