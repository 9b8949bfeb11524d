"""From a public function's arguments to a request that all ranks agree on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tileloss._core.functions import FUNCTIONS, check_option_names
from tileloss._core.slots import INPUTS, SLOTS
from tileloss.torch._apply import (
    Head,
    extra_inputs,
    has_float16_gradient,
    is_per_row,
    make_head,
    needs_of,
    wanted_outputs,
)
from tileloss.torch._call import ARGUMENT_NAMES
from tileloss.torch._define import is_traced
from tileloss.torch._dtensor import local_rows
from tileloss.torch._options import Options, Value, encode
from tileloss.torch._tensors import DTYPES, check_float, checked_labels, refuse_transforms
from tileloss.torch.distributed import _shards
from tileloss.torch.distributed._edge import local_shard
from tileloss.torch.distributed._function import compute
from tileloss.torch.distributed._meeting import Facts, Group, digest, meet, ranks_of
from tileloss.torch.distributed._request import Operands, Request


class Given(NamedTuple):
    """A call's arguments, nothing of them looked at. From logits ``linear_weight`` and what follows it have no meaning."""

    function: str
    input: Any
    target: Any
    group: Any
    vocab_start: int | None
    options: Callable[[], Mapping[str, Value]]  # called where a refusal reaches every rank
    extra: Mapping[str, Any] = {}  # by their names in the ABI
    preset: str | None = None
    outputs: Iterable[str] | None = None
    wants_metrics: bool = False
    mean_of_shard: bool = False
    inplace_backward: bool = False
    linear_weight: Any = None
    linear_bias: Any = None
    compute_dtype: torch.dtype | None = None
    workspace_bytes: int | None = None
    grad_in_forward: bool | None = False

    @property
    def is_linear(self) -> bool:
        return FUNCTIONS[self.function].is_linear

    @property
    def loss(self) -> str:
        """The function's name from logits."""
        return FUNCTIONS[self.function].loss


class _Prepared(NamedTuple):
    operands: Operands
    head: Head | None
    options: Options
    valid_vocab: int | None
    outputs: tuple[str, ...]
    grad_in_forward: bool


def call(given: Given) -> tuple[Tensor, ...]:
    """(loss, metrics), or the row outputs in the order of ROW_OUTPUTS; what was not asked for is empty."""
    if is_traced():
        raise NotImplementedError(
            "tileloss.torch.distributed: torch.compile and torch.jit.trace are not supported: call it in a function under "
            "torch.compiler.disable"
        )
    given, group = _of_this_rank(given)

    def prepare() -> tuple[_Prepared, Facts]:
        prepared = _prepare(given)
        return prepared, _facts(given, prepared)

    prepared, everyone = meet(group, prepare)
    rank, _ = ranks_of(group)
    shards = _shards.cut(
        [facts.columns for facts in everyone],
        [facts.vocab_start for facts in everyone],
        prepared.valid_vocab,
        rank,
    )
    operands = _with_class_weights(given.loss, prepared.operands, shards)
    head = prepared.head
    request = Request(
        given.loss,
        given.is_linear,
        prepared.options.names,
        prepared.options.values,
        shards,
        compute_dtype=0 if head is None else head.compute_dtype,
        workspace_bytes=0 if head is None else head.workspace_bytes,
        outputs=prepared.outputs,
        wants_metrics=given.wants_metrics,
        mean_of_shard=given.mean_of_shard,
        grad_in_forward=prepared.grad_in_forward,
    )
    wants_grad = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in operands.matrices
    )
    return compute(request, operands, group, wants_grad, given.inplace_backward)


def _of_this_rank(given: Given) -> tuple[Given, Group]:
    if not given.is_linear:
        shard, group = local_shard("input", given.input, -1, given.group)
        return given._replace(input=shard), group
    weight, group = local_shard("linear_weight", given.linear_weight, 0, given.group)
    bias, group = local_shard("linear_bias", given.linear_bias, 0, group)
    return given._replace(linear_weight=weight, linear_bias=bias), group


def _prepare(given: Given) -> _Prepared:
    """What tileloss.torch checks of the same arguments."""
    options = dict(given.options())
    check_option_names(given.function, options)
    start, valid_vocab = given.vocab_start, options.pop("valid_vocab", None)
    for name, value, least in (("vocab_start", start, 0), ("valid_vocab", valid_vocab, 1)):
        if value is not None and (not isinstance(value, int) or value < least):
            raise ValueError(f"{name}: expected an integer >= {least} or None, got {value!r}")
    head = None
    if given.is_linear:
        weight, bias = given.linear_weight, given.linear_bias
        head = make_head(given.input, weight, bias, given.compute_dtype, given.workspace_bytes)
        matrices: tuple[Tensor | None, ...] = tuple(head[:3])
    else:
        check_float("input", given.input)
        refuse_transforms(given.input)
        matrices = (given.input,)
    first = matrices[0]
    assert first is not None
    labels = checked_labels(local_rows("target", given.target), first)
    extra = {n: local_rows(ARGUMENT_NAMES.get(n, n), x) for n, x in given.extra.items()}
    tensors = extra_inputs(given.loss, extra, labels, -1, options)
    encoded = encode(given.function, options, given.preset or "")
    return _Prepared(
        Operands(matrices, labels, tensors, encoded.scalars),
        head,
        encoded,
        valid_vocab if isinstance(valid_vocab, int) else None,
        () if given.outputs is None else wanted_outputs(given.outputs),
        head is not None and _has_grad_in_forward(given, head, options),
    )


def _has_grad_in_forward(given: Given, head: Head, options: Mapping[str, Value]) -> bool:
    needs = needs_of(head)
    if is_per_row(options) or not any(needs):
        return False
    if given.grad_in_forward is None:
        return given.workspace_bytes is None and not has_float16_gradient(head, needs)
    return given.grad_in_forward


def _facts(given: Given, prepared: _Prepared) -> Facts:
    head, labels = prepared.head, prepared.operands.labels
    first = prepared.operands.matrices[0]
    assert first is not None
    asked: tuple[object, ...] = (given.function, *prepared.options, prepared.valid_vocab)
    asked += (
        prepared.grad_in_forward,
        prepared.outputs,
        given.wants_metrics,
        given.mean_of_shard,
        tuple(labels.shape),
    )
    return Facts(
        columns=first.shape[-1] if head is None else head.head.shape[0],
        vocab_start=-1 if given.vocab_start is None else given.vocab_start,
        rows=labels.numel(),
        width=0 if head is None else first.shape[-1],
        dtype=DTYPES[first.dtype],
        head_dtype=0 if head is None else DTYPES[head.head.dtype],
        has_bias=int(head is not None and head.bias is not None),
        needs_dhidden=int(head is not None and torch.is_grad_enabled() and first.requires_grad),
        options=digest(asked if head is None else (*asked, head.compute_dtype)),
        labels=digest([labels]),
        tensors=digest(prepared.operands.extra),
    )


def _with_class_weights(function: str, operands: Operands, shards: _shards.Shards) -> Operands:
    """Class weights are of the whole vocabulary on every rank: one for each class, or for each column."""
    extra = list(operands.extra)
    for number, name in enumerate(INPUTS[function]):
        tensor = extra[number]
        if SLOTS[name].shape != "C" or tensor is None:
            continue
        if tensor.shape[0] not in (shards.classes, shards.columns):
            raise ValueError(
                f"{ARGUMENT_NAMES.get(name, name)}: expected [{shards.columns}] of the columns of all shards, or "
                f"[{shards.classes}] of the classes, got {list(tensor.shape)}"
            )
        extra[number] = tensor[: shards.classes].float()
    return operands._replace(extra=extra)
