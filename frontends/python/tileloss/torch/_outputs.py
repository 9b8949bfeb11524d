"""What the public functions give besides a loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from tileloss._core.functions import FUNCTIONS


class RowOutputs(NamedTuple):
    """What `logprobs` gives for each row, logp for each label; None: not asked for. Rows that are ignored give 0 (argmax -1)."""

    # generated: rows of logprobs
    logp: Tensor | None = None  # float32: log softmax at the label
    lse: Tensor | None = None  # float32: log sum_j exp(z_j)
    entropy: Tensor | None = None  # float32: nats
    argmax: Tensor | None = None  # int64: lowest index on ties; -1 if the row holds a NaN
    correct: Tensor | None = None  # bool: argmax == label
    log_sum_sq_probs: Tensor | None = None  # float32: log sum_j p_j^2
    # float32: mean of z over the valid columns; not together with class_weights
    mean_logit: Tensor | None = None
    # end of generated


class DistillationRows(NamedTuple):
    """Numbers of each row, [...] as the rows lie; None: not asked for. Whatever either side has is the student's. None of them is
    differentiable."""

    # generated: rows of distillation
    divergence: Tensor | None = None  # float32: the divergence alone, neither weighted nor scaled
    entropy: Tensor | None = None  # float32: nats
    teacher_entropy: Tensor | None = None  # float32: nats, of the classes that the divergence sees
    agreement: Tensor | None = None  # bool: whether both have the same argmax
    logp: Tensor | None = None  # float32: log softmax at the label
    lse: Tensor | None = None  # float32: log sum_j exp(z_j)
    # end of generated


Rows = TypeVar("Rows", RowOutputs, DistillationRows)


def checked_outputs(kind: type[Rows], outputs: Iterable[str]) -> tuple[str, ...]:
    """Names of what ``kind`` holds: a list of at least one; of a loss also none, or a name by itself."""
    is_loss = kind is DistillationRows
    given = (outputs,) if is_loss and isinstance(outputs, str) else outputs
    is_list = isinstance(given, Iterable) and not isinstance(given, str)
    names = tuple(given) if is_list else None
    unknown = [name for name in names or () if name not in kind._fields]
    if unknown or names is None or not (names or is_loss):
        kinds = "names" if is_list else "a tuple of names"
        raise ValueError(
            f"outputs: expected {kinds} among {', '.join(kind._fields)}, got {unknown or outputs!r}"
        )
    return names


def rows_of(
    kind: type[Rows],
    results: Mapping[str, Tensor],
    names: tuple[str, ...],
    has_labels: bool = True,
) -> Rows:
    """The row outputs ``names``; the ABI's truth values are bool. ``has_labels``: False of labels [..., 0], in whose place there
    were `empty_slots`."""
    named = {name: results[name] for name in names}
    if not has_labels and "logp" in named:
        named["logp"] = named["logp"][..., :0]
    return kind(
        **{n: t.view(torch.bool) if t.dtype == torch.uint8 else t for n, t in named.items()}
    )


def with_rows(
    results: Mapping[str, Tensor], names: tuple[str, ...]
) -> Tensor | tuple[Tensor, DistillationRows]:
    """A loss; with the row outputs ``names``, where there are any."""
    loss = results["loss"]
    return (loss, rows_of(DistillationRows, results, names)) if names else loss


def with_metrics(
    results: Mapping[str, Tensor], wants_metrics: bool
) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    """A loss; with the metrics by name, where they are asked for."""
    if not wants_metrics:
        return results["loss"]
    names = FUNCTIONS["policy_loss"].metrics
    return results["loss"], dict(zip(names, results["metrics"].unbind(), strict=True))
