"""From a public function's arguments to a request that all ranks agree on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tileloss._core.functions import FUNCTIONS
from tileloss._core.options import by_name
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
from tileloss.torch._soft_labels import checked_probabilities
from tileloss.torch._tensors import CPU, DTYPES, check_float, checked_labels, refuse_transforms
from tileloss.torch._wanted import checked_outputs
from tileloss.torch.distillation import checked_teacher, checked_teacher_head
from tileloss.torch.distributed import _pairs, _shards
from tileloss.torch.distributed._edge import Shard, group_of, local_shard
from tileloss.torch.distributed._function import compute
from tileloss.torch.distributed._meeting import (
    Details,
    Facts,
    Group,
    Prepared,
    digest,
    meet,
    ranks_of,
)
from tileloss.torch.distributed._request import Operands, Request

_IGNORED = -100  # where there are no labels


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
    # What says more of a row than its label, by the arguments' names; target may be None then.
    wanted: Mapping[str, Any] = {}

    @property
    def is_linear(self) -> bool:
        return FUNCTIONS[self.function].is_linear

    @property
    def loss(self) -> str:
        """The function's name from logits."""
        return FUNCTIONS[self.function].loss

    def shards(self) -> list[Shard]:
        along = {"teacher_weight": 0, "teacher_bias": 0, "teacher": -1, "target": -1}
        wanted = [Shard(n, self.wanted[n], dim) for n, dim in along.items() if n in self.wanted]
        if not self.is_linear:
            return [Shard("input", self.input, -1), *wanted]
        return [
            Shard("linear_weight", self.linear_weight, 0),
            Shard("linear_bias", self.linear_bias, 0),
            *wanted,
        ]


def names_of(outputs: Iterable[str]) -> Any:
    """An iterator once more than once; what is no list of names is refused later, on every rank."""
    return tuple(outputs) if isinstance(outputs, Iterator) else outputs


class _Arguments(NamedTuple):
    operands: Operands
    head: Head | None
    options: Options
    valid_vocab: int | None
    outputs: tuple[str, ...]
    grad_in_forward: bool
    wanted: tuple[Tensor | None, ...]
    sides: tuple[Options | None, ...]  # of a student, its teacher, its label


def call(given: Given) -> tuple[Tensor, ...]:
    """(loss, metrics), or the row outputs in the order of ROW_OUTPUTS; what was not asked for is empty."""
    if is_traced():
        raise NotImplementedError(
            "tileloss.torch.distributed: torch.compile and torch.jit.trace are not supported: call it in a function under "
            "torch.compiler.disable"
        )
    group = group_of(given.group, given.shards())
    prepared, everyone = meet(group, lambda: _prepare(_of_this_rank(given, group)))
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
    if not given.wanted:
        return compute(request, operands, group, wants_grad, given.inplace_backward)
    pair = _pair_request(request, prepared, given.target is not None)
    both = _pairs.PairOperands(operands, prepared.wanted)
    return _pairs.compute(pair, both, group, wants_grad, given.inplace_backward)


def _pair_request(request: Request, arguments: _Arguments, has_labels: bool) -> _pairs.PairRequest:
    outputs = arguments.outputs
    agreement = ("argmax",) if "agreement" in outputs else ()
    of_sides = (
        (*agreement, *(("entropy",) if "entropy" in outputs else ())),
        (*agreement, *(("entropy",) if "teacher_entropy" in outputs else ())),
        (),
    )
    student, teacher, label = (
        None
        if options is None
        else request._replace(
            function="logprobs", options=options.names, values=options.values, outputs=names
        )
        for options, names in zip(arguments.sides, of_sides, strict=True)
    )
    assert student is not None
    scalars = tuple(None if options is None else options.scalars for options in arguments.sides)
    return _pairs.PairRequest(
        request._replace(outputs=()), student, teacher, label, scalars, outputs, has_labels
    )


def _of_this_rank(given: Given, group: Group) -> Given:
    local = {shard.name: local_shard(shard, group) for shard in given.shards()}
    wanted = {name: local.pop(name, x) for name, x in given.wanted.items()}
    return given._replace(wanted=wanted, **local)


def _prepare(given: Given) -> Prepared:
    """The arguments, when tileloss.torch's checks of the same ones are done."""
    options = dict(given.options())
    start, valid_vocab = given.vocab_start, options.pop("valid_vocab", None)
    for name, value, least in (("vocab_start", start, 0), ("valid_vocab", valid_vocab, 1)):
        if value is not None and (not isinstance(value, int) or not least <= value < 2**63):
            raise ValueError(
                f"{name}: expected an integer >= {least}, of 64 bits, or None, got {value!r}"
            )
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
    if given.target is None:
        labels = torch.zeros(first.shape[:-1], dtype=torch.int64, device=CPU)
    else:
        labels = checked_labels(local_rows("target", given.target), first)
    wanted = _checked_wanted(given, first, head, options) if given.wanted else ()
    extra = {n: local_rows(ARGUMENT_NAMES.get(n, n), x) for n, x in given.extra.items()}
    tensors = extra_inputs(given.loss, extra, labels, -1, options)
    encoded = encode(given.function, options, given.preset or "")
    arguments = _Arguments(
        Operands(matrices, labels, tensors, encoded.scalars),
        head,
        encoded,
        valid_vocab if isinstance(valid_vocab, int) else None,
        _outputs(given),
        head is not None and not wanted and _has_grad_in_forward(given, head, options),
        wanted,
        _sides(given, options) if wanted else (),
    )
    if wanted and (mask := extra.get("mask")) is not None:
        # What the mask leaves out is not read: logprobs, which makes the states, knows no mask.
        unused: Any = _IGNORED if given.target is None else options["ignore_index"]
        masked = labels.to(torch.int64).masked_fill(mask.reshape(labels.shape) == 0, unused)
        arguments = arguments._replace(operands=arguments.operands._replace(labels=masked))
    details = _details(given, arguments)
    return Prepared(arguments, _facts(given, arguments, details), details)


def _outputs(given: Given) -> tuple[str, ...]:
    if given.outputs is None:
        return ()
    return checked_outputs(given.outputs) if given.wanted else wanted_outputs(given.outputs)


def _checked_wanted(
    given: Given, first: Tensor, head: Head | None, options: Mapping[str, Value]
) -> tuple[Tensor | None, ...]:
    wanted = given.wanted
    if "target" in wanted:
        shape = [*first.shape[:-1], first.shape[-1] if head is None else head.head.shape[0]]
        return (checked_probabilities(wanted["target"], shape, options),)
    if head is None:
        return (checked_teacher(wanted["teacher"], first),)
    return checked_teacher_head(
        wanted["teacher_input"], wanted["teacher_weight"], wanted["teacher_bias"], head
    )


def _sides(given: Given, options: Mapping[str, Value]) -> tuple[Options | None, ...]:
    """logprobs' options of the student, of a teacher's logits, and of the student at its label's temperature."""
    name = "linear_logprobs" if given.is_linear else "logprobs"
    ignored = _IGNORED if given.target is None else options["ignore_index"]

    def encoded(scale: Value, softcap: Value, temperature: Value) -> Options:
        return encode(
            name,
            {
                "logit_scale": scale,
                "softcap": softcap,
                "temperature": temperature,
                "ignore_index": ignored,
            },
        )

    scale, softcap, temperature = map(options.get, ("logit_scale", "softcap", "temperature"))
    student, label = encoded(scale, softcap, temperature), options.get("label_temperature")
    if "target" in given.wanted:
        return student, None, None
    own = options["teacher_temperature"]
    teacher = encoded(
        options["teacher_logit_scale"],
        options["teacher_softcap"],
        temperature if own is None else own,
    )
    return student, teacher, None if label is None else encoded(scale, softcap, label)


def _has_grad_in_forward(given: Given, head: Head, options: Mapping[str, Value]) -> bool:
    needs = needs_of(head)
    if is_per_row(options) or not any(needs):
        return False
    if given.grad_in_forward is None:
        return given.workspace_bytes is None and not has_float16_gradient(head, needs)
    return given.grad_in_forward


def _details(given: Given, arguments: _Arguments) -> Details:
    """What the ranks compare by digest."""
    head, labels = arguments.head, arguments.operands.labels
    names, values, scalars = arguments.options
    numbers = () if scalars is None else scalars.tolist()

    def options() -> dict[str, object]:
        return {
            "function": given.function,
            "preset": given.preset,
            **by_name(FUNCTIONS[given.function], names, values, numbers),
            "valid_vocab": arguments.valid_vocab,
            "outputs": arguments.outputs,
            "return_metrics": given.wants_metrics,
            "grad_in_forward": arguments.grad_in_forward,
            "compute_dtype": None if head is None else head.compute_dtype,
            "label_smoothing of this rank's columns": given.mean_of_shard,
            "target is given": given.target is not None,
            **{
                name: None if x is None else f"{x.dtype}, {list(x.shape[:-1])} rows"
                for name, x in given.wanted.items()
                if name in ("teacher", "teacher_input", "target")
            },
        }

    def tensors() -> dict[str, object]:
        found = zip(INPUTS[given.loss], arguments.operands.extra, strict=True)
        return {
            ARGUMENT_NAMES.get(name, name): None
            if tensor is None
            else f"{tensor.dtype} {list(tensor.shape)} of checksum {digest([tensor])}"
            for name, tensor in found
        }

    def of_labels() -> dict[str, object]:
        of_rows = {f"target[{row}]": label for row, label in enumerate(labels.flatten().tolist())}
        return {"target": f"{labels.dtype} {list(labels.shape)}", **of_rows}

    return {"options": options, "tensors": tensors, "labels": of_labels}


def _facts(given: Given, arguments: _Arguments, details: Details) -> Facts:
    head, labels = arguments.head, arguments.operands.labels
    first = arguments.operands.matrices[0]
    assert first is not None
    return Facts(
        columns=first.shape[-1] if head is None else head.head.shape[0],
        vocab_start=-1 if given.vocab_start is None else given.vocab_start,
        rows=labels.numel(),
        width=0 if head is None else first.shape[-1],
        dtype=DTYPES[first.dtype],
        head_dtype=0 if head is None else DTYPES[head.head.dtype],
        has_bias=int(head is not None and head.bias is not None),
        needs_dhidden=int(head is not None and torch.is_grad_enabled() and first.requires_grad),
        options=digest(sorted(details["options"]().items())),
        labels=digest([labels]),
        tensors=digest(details["tensors"]().values()),
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
