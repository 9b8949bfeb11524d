"""From a public function's arguments to a request that all ranks agree on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tileloss._core.functions import (
    FUNCTIONS,
    OF_PROBABILITIES,
    PUBLIC_OPTIONS,
    by_name,
    options_of_probabilities,
)
from tileloss._core.row_states import bits_of_allowed
from tileloss._core.slots import ARGUMENTS, ROW_OUTPUTS, SLOTS
from tileloss.torch._arguments import (
    Options,
    Student,
    Value,
    check_flag,
    checked_logits,
    checked_tensors,
    encode,
    is_per_row,
    is_probabilities,
)
from tileloss.torch._call import ARGUMENT_NAMES, DTYPES, has_several_labels
from tileloss.torch._dtensor import is_dtensor
from tileloss.torch._head import check_apart, checked_head, operands, refuse_with_head_grad
from tileloss.torch._operators import is_traced
from tileloss.torch._outputs import DistillationRows, RowOutputs, checked_outputs
from tileloss.torch.distributed import _shards
from tileloss.torch.distributed._edge import Shard, group_of, local_shard
from tileloss.torch.distributed._function import IGNORED, compute
from tileloss.torch.distributed._meeting import (
    Details,
    Facts,
    Group,
    Prepared,
    check_backend,
    digest,
    meet,
    on_device_of,
    ranks_of,
)
from tileloss.torch.distributed._request import Operands, Request
from tileloss.torch.policy import policy_options


class Given(NamedTuple):
    """A call's arguments, nothing of them looked at. From logits ``linear_weight`` and what follows it have no meaning."""

    function: str  # its name from logits
    input: Any
    # All but the student's, by their names in the ABI; labels may be None where there is another target.
    tensors: Mapping[str, Any]
    group: Any
    vocab_start: int | None
    options: Callable[[], Mapping[str, Value]]  # called where a refusal reaches every rank
    preset: str | None = None
    outputs: Any = None  # names of row outputs; None: there are none to ask for
    return_metrics: bool = False
    mean_of_shard: bool = False
    inplace_backward: bool = False
    linear_weight: Any = None
    linear_bias: Any = None
    low_rank: Any = None
    compute_dtype: torch.dtype | None = None
    workspace_bytes: int | None = None
    linear_weight_grad: Any = None
    grad_in_forward: bool | None = False
    is_linear: bool = False

    @property
    def name(self) -> str:
        return f"linear_{self.function}" if self.is_linear else self.function

    @property
    def target(self) -> tuple[str, ...]:
        """The slots of what the rows are compared with besides labels."""
        return ARGUMENTS[self.name].target

    def shards(self) -> dict[str, Shard]:
        """What is cut along the vocabulary, by its name here or in the ABI."""
        found = {"input": Shard("input", self.input, -1)}
        if self.is_linear:
            found = {
                "linear_weight": Shard("linear_weight", self.linear_weight, 0),
                "linear_bias": Shard("linear_bias", self.linear_bias, 0),
            }
            if isinstance(self.low_rank, (tuple, list)) and len(self.low_rank) == 2:
                found["head_r"] = Shard("low_rank[1]", self.low_rank[1], 0)
        for slot in self.target:
            if "V" in (shape := SLOTS[slot].shape):
                dim = 0 if shape[0] == "V" else -1
                found[slot] = Shard(ARGUMENT_NAMES.get(slot, slot), self.tensors[slot], dim)
        return found


def given_of(function: str, arguments: Mapping[str, Any]) -> Given:
    """``function``: its name from logits. ``arguments``: of the public function, by name, its options apart."""
    arguments = {**arguments, **arguments["options"]}
    is_linear, target = "linear_weight" in arguments, arguments["target"]
    named = {name: arguments[name] for name in PUBLIC_OPTIONS[function] if name in arguments}

    def options() -> Mapping[str, Value]:
        if function == OF_PROBABILITIES:
            return options_of_probabilities(named)
        if function == "policy_loss":
            return policy_options(named, target, arguments["advantages"])
        return named

    if function == "cross_entropy":
        if is_probabilities(target.to_local() if is_dtensor(target) else target):
            function = OF_PROBABILITIES
    slots = ARGUMENTS[f"linear_{function}" if is_linear else function]
    tensors = {
        slot: arguments.get(ARGUMENT_NAMES.get(slot, slot))
        for slot in (*slots.target, "labels", *slots.inputs)
    }
    if "target_probs" in tensors:
        tensors["labels"] = None
    own = {name: x for name, x in arguments.items() if name in Given._fields and name != "options"}
    if isinstance(own.get("outputs"), Iterator):  # to be read more than once
        own["outputs"] = tuple(own["outputs"])
    return Given(function=function, tensors=tensors, options=options, is_linear=is_linear, **own)


class _Arguments(NamedTuple):
    student: Student
    operands: Operands
    options: Options
    valid_vocab: int | None
    outputs: tuple[str, ...]
    grad_in_forward: bool
    sides: tuple[Options | None, ...]  # of a student, its teacher, its label
    side_outputs: tuple[tuple[str, ...], ...]  # those that their states are for
    has_allowed: bool


def call(given: Given) -> dict[str, Tensor]:
    """The results of the function by name; what was not asked for is empty."""
    if is_traced():
        raise NotImplementedError(
            "tileloss.torch.distributed: torch.compile and torch.jit.trace are not supported: call it in a function under "
            "torch.compiler.disable"
        )
    with on_device_of(given.input):
        return _call(given)


def _call(given: Given) -> dict[str, Tensor]:
    group = group_of(given.group, list(given.shards().values()))
    prepared, everyone = meet(group, lambda: _prepare(_take_local_shards(given, group)))
    rank, _ = ranks_of(group)
    shards = _shards.cut(
        [facts.columns for facts in everyone],
        [facts.vocab_start for facts in everyone],
        prepared.valid_vocab,
        rank,
        prepared.has_allowed,
    )
    operands = _with_class_weights(given, prepared.operands, shards)
    compute_dtype, workspace_bytes = prepared.student.head_options or (0, 0)
    request = Request(
        given.function,
        given.is_linear,
        prepared.options.names,
        prepared.options.values,
        shards,
        compute_dtype=compute_dtype,
        workspace_bytes=workspace_bytes,
        outputs=prepared.outputs,
        has_labels=given.tensors.get("labels") is not None,
        labels_per_row=_labels_per_row(operands),
        mean_of_shard=given.mean_of_shard,
        allowed_bits=_allowed_bits(given, prepared),
        grad_in_forward=prepared.grad_in_forward,
        head_grad=given.linear_weight_grad,
    )
    sides = tuple(
        None
        if options is None
        else request._replace(
            function="logprobs",
            options=options.names,
            values=options.values,
            outputs=outputs,
            has_labels=True,
            allowed_bits=bits_of_allowed(False) if prepared.has_allowed else 0,
        )
        for options, outputs in zip(prepared.sides, prepared.side_outputs, strict=True)
    )
    wants_grad = True in prepared.student.needs()
    request = request._replace(sides=sides)
    return compute(request, operands, group, wants_grad, given.inplace_backward)


def _take_local_shards(given: Given, group: Group) -> Given:
    local = {name: local_shard(shard, group) for name, shard in given.shards().items()}
    tensors = {slot: local.pop(slot, x) for slot, x in given.tensors.items()}
    if "head_r" in local:
        local["low_rank"] = given.low_rank[0], local.pop("head_r")
    return given._replace(tensors=tensors, group=group, **local)


def _prepare(given: Given) -> Prepared:
    """The arguments, when tileloss.torch's checks of the same ones are done."""
    check_flag("grad_in_forward", given.grad_in_forward, None)
    check_flag("inplace_backward", given.inplace_backward)
    check_flag("return_metrics", given.return_metrics)
    options = dict(given.options())
    start, valid_vocab = given.vocab_start, options.pop("valid_vocab", None)
    for name, value, least in (("vocab_start", start, 0), ("valid_vocab", valid_vocab, 1)):
        if value is not None and (not isinstance(value, int) or not least <= value < 2**63):
            raise ValueError(
                f"{name}: expected an integer >= {least}, of 64 bits, or None, got {value!r}"
            )
    if given.is_linear:
        of_head = given.linear_weight, given.linear_bias, given.low_rank
        settings = given.compute_dtype, given.workspace_bytes, given.linear_weight_grad
        student = checked_head(given.input, *operands(*of_head, *settings))
        if student.adds:
            check_apart(given.linear_weight_grad, student.matrices)
    else:
        student = checked_logits(given.input, least_columns=0)
    check_backend(student.first, given.group)
    several = not given.mean_of_shard
    checked = checked_tensors(given.function, student, given.tensors, options, several)
    place = len(given.target)
    target, labels, inputs = checked[:place], checked[place], checked[place + 1 :]
    ignored: Any = IGNORED if labels is None else options.get("ignore_index", IGNORED)
    if labels is None:
        labels = student.first.new_zeros(student.first.shape[:-1], dtype=torch.int64)
    if target and (mask := inputs[ARGUMENTS[given.name].inputs.index("mask")]) is not None:
        # What the mask leaves out is not read: logprobs, which makes the states, knows no mask.
        labels = labels.to(torch.int64).masked_fill(mask.reshape(labels.shape) == 0, ignored)
    device = student.first.device
    encoded = encode(given.name, options, device, given.preset or "")
    sides = _sides(given, options, ignored, device) if target else ()
    scalars = (encoded.scalars, *(None if side is None else side.scalars for side in sides))
    outputs = _outputs(given)
    of_pairs = tuple(name for name in outputs if name not in ROW_OUTPUTS)
    arguments = _Arguments(
        student,
        Operands(student.matrices, target, labels, inputs, scalars),
        encoded,
        valid_vocab if isinstance(valid_vocab, int) else None,
        outputs,
        given.is_linear and not target and _has_grad_in_forward(given, student, options),
        sides,
        (outputs, of_pairs, ())[: len(sides)],
        given.tensors.get("allowed") is not None,
    )
    details = _details(given, arguments)
    return Prepared(arguments, _facts(given, arguments, details), details)


def _labels_per_row(operands: Operands) -> int:
    labels, first = operands.labels, operands.matrices[0]
    assert first is not None
    return labels.shape[-1] if has_several_labels(labels, first) else 1


def _allowed_bits(given: Given, arguments: _Arguments) -> int:
    if not arguments.has_allowed:
        return 0
    inputs = zip(ARGUMENTS[given.name].inputs, arguments.operands.inputs, strict=True)
    return bits_of_allowed(dict(inputs).get("class_weights") is not None)


def _outputs(given: Given) -> tuple[str, ...]:
    metrics = ("metrics",) if given.return_metrics else ()
    if given.outputs is None:
        return metrics
    kind: Any = DistillationRows if FUNCTIONS[given.function].is_loss else RowOutputs
    return *checked_outputs(kind, given.outputs), *metrics


def _sides(
    given: Given, options: Mapping[str, Value], ignored: Value, device: torch.device
) -> tuple[Options | None, ...]:
    """logprobs' options of the student, of a teacher's logits, and of the student at its label's temperature."""

    def encoded(scale: Value, softcap: Value, temperature: Value) -> Options:
        transform = {"logit_scale": scale, "softcap": softcap, "temperature": temperature}
        name = "linear_logprobs" if given.is_linear else "logprobs"
        return encode(name, {**transform, "ignore_index": ignored}, device)

    scale, softcap, temperature = map(options.get, ("logit_scale", "softcap", "temperature"))
    student, label = encoded(scale, softcap, temperature), options.get("label_temperature")
    if "target_probs" in given.target:
        return student, None, None
    own = (options.get(f"teacher_{name}") for name in ("logit_scale", "softcap", "temperature"))
    both = zip(own, (scale, softcap, temperature), strict=True)
    teacher = encoded(*(x if given is None else given for given, x in both))
    return student, teacher, None if label is None else encoded(scale, softcap, label)


def _has_grad_in_forward(given: Given, student: Student, options: Mapping[str, Value]) -> bool:
    if student.adds:
        refuse_with_head_grad(given.grad_in_forward)
        return False
    if is_per_row(options) or True not in student.needs():
        return False
    if given.grad_in_forward is None:
        return given.workspace_bytes is None and not student.has_float16_gradient()
    return given.grad_in_forward


def _details(given: Given, arguments: _Arguments) -> Details:
    """What the ranks compare by digest."""
    labels, head_options = arguments.operands.labels, arguments.student.head_options
    names, values, scalars = arguments.options
    numbers = () if scalars is None else scalars.tolist()
    inputs = dict(zip(ARGUMENTS[given.name].inputs, arguments.operands.inputs, strict=True))
    allowed = inputs.pop("allowed")  # of each rank's own columns

    def options() -> dict[str, object]:
        return {
            "function": given.name,
            "preset": given.preset,
            **by_name(FUNCTIONS[given.name], names, values, numbers),
            "valid_vocab": arguments.valid_vocab,
            "return_metrics": given.return_metrics,
            "outputs": tuple(name for name in arguments.outputs if name != "metrics"),
            "linear_weight_grad is given": arguments.student.adds,
            "low_rank": _low_rank(arguments.student),
            **{f"requires_grad of {name}": x for name, x in _needs(given, arguments.student)},
            "grad_in_forward": arguments.grad_in_forward,
            "compute_dtype": head_options[0] if head_options else None,
            "label_smoothing of this rank's columns": given.mean_of_shard,
            "device of input": arguments.student.first.device.type,
            "target is given": given.tensors.get("labels") is not None,
            "allowed": allowed if allowed is None else f"{list(allowed.shape[:-1])} rows",
            **{
                ARGUMENT_NAMES.get(slot, slot): None
                if x is None
                else f"{x.dtype}, {list(x.shape[:-1])} rows"
                for slot, x in zip(given.target, arguments.operands.target, strict=True)
                if SLOTS[slot].shape[0] == "N"
            },
        }

    def tensors() -> dict[str, object]:
        return {
            ARGUMENT_NAMES.get(name, name): None
            if tensor is None
            else f"{tensor.dtype} {list(tensor.shape)} of checksum {digest([tensor])}"
            for name, tensor in inputs.items()
        }

    def label_details() -> dict[str, object]:
        per_row, flat = _labels_per_row(arguments.operands), labels.flatten().tolist()
        places = (f"{n // per_row},{n % per_row}" if per_row > 1 else n for n in range(len(flat)))
        of_rows = {f"target[{place}]": label for place, label in zip(places, flat, strict=True)}
        return {"target": f"{labels.dtype} {list(labels.shape)}", **of_rows}

    return {"options": options, "tensors": tensors, "labels": label_details}


def _low_rank(student: Student) -> str | None:
    hidden_r, head_r = (*student.matrices[3:], None, None)[:2]
    if hidden_r is None or head_r is None:
        return None
    return f"R = {hidden_r.shape[-1]} of {hidden_r.dtype} and {head_r.dtype}"


def _needs(given: Given, student: Student) -> Iterable[tuple[str, bool]]:
    """What decides whether a gradient is made in the forward; input's is a fact of its own."""
    names = ("linear_weight", "linear_bias", "low_rank[0]", "low_rank[1]")
    return zip(names, student.needs()[1:], strict=False) if given.is_linear else ()


def _facts(given: Given, arguments: _Arguments, details: Details) -> Facts:
    student, labels = arguments.student, arguments.operands.labels
    head, bias = student.matrices[1:3] if given.is_linear else (None, None)
    return Facts(
        columns=student.vocab,
        vocab_start=-1 if given.vocab_start is None else given.vocab_start,
        rows=arguments.operands.rows.numel(),
        width=0 if head is None else student.first.shape[-1],
        dtype=DTYPES[student.first.dtype],
        head_dtype=0 if head is None else DTYPES[head.dtype],
        has_bias=int(bias is not None),
        needs_dhidden=int(head is not None and student.needs()[0]),
        options=digest(sorted(details["options"]().items())),
        labels=digest([labels]),
        tensors=digest(details["tensors"]().values()),
    )


def _with_class_weights(given: Given, operands: Operands, shards: _shards.Shards) -> Operands:
    """Class weights are of the whole vocabulary on every rank: one for each class, or for each column."""
    inputs = list(operands.inputs)
    for number, name in enumerate(ARGUMENTS[given.name].inputs):
        tensor = inputs[number]
        if SLOTS[name].shape != "C" or tensor is None:
            continue
        if tensor.shape[0] not in (shards.classes, shards.columns):
            raise ValueError(
                f"{ARGUMENT_NAMES.get(name, name)}: expected [{shards.columns}] of the columns of all shards, or "
                f"[{shards.classes}] of the classes, got {list(tensor.shape)}"
            )
        inputs[number] = tensor[: shards.classes].float()
    return operands._replace(inputs=inputs)
