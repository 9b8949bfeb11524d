"""A public function's arguments: checked, flat, and what is known of the call while it is traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from tileloss._core.functions import FUNCTIONS, PUBLIC_OPTIONS, Function
from tileloss._core.slots import ARGUMENTS, DIFFERENTIABLE, INPUT, SLOTS
from tileloss.jax._devices import Leading, axes_of_rows, may_be_cut, varying_alike
from tileloss.jax._floats import checked_low_rank, floats
from tileloss.jax._implementations import Choice, check_names, choose
from tileloss.jax._labels import (
    IGNORED,
    Labels,
    check_goes_with_several,
    check_leading,
    checked_labels,
)
from tileloss.jax._rows.distillation import DistillationRows
from tileloss.jax._rows.inputs import are_columns, wrong_unless
from tileloss.jax._rows.options import Options, check, resolve
from tileloss.jax._rows.slots import Slots
from tileloss.jax._rows.stats import RowOutputs
from tileloss.jax._shards import Shards
from tileloss.jax._sweeps.operands import LmHead, Logits, Operand, Spec, with_outputs
from tileloss.jax.allowed import allowed_classes, checked_allowed

# By their names in tileloss_args, as the public functions have them.
SHOWN = {"class_weights": "weight", "target_probs": "labels", "teacher_logits": "teacher"}
_IN_ABI = {shown: name for name, shown in SHOWN.items() if shown != "labels"}
_LAYOUTS = ("HV", "VH")
Arrays = dict[str, Array]


class Inputs(NamedTuple):
    """Everything that may be traced besides the operand."""

    labels: Array
    target: Arrays  # the arrays of a Target, by their names in tileloss_args
    vectors: Arrays  # by the same
    arrays: Arrays  # options that are arrays
    places: Array | None  # of the rows among the labels, where their order is another
    allowed: Array | None  # float32 [N], how many classes each row's softmax has; None: all
    # Of rows with several labels, whose labels are [N, K] until there are slots.
    slots: Slots | None = None


class Call(NamedTuple):
    """What is known of a call while it is traced. JAX keeps it with the program: it holds no array."""

    options: Options  # without values
    spec: Spec
    choice: Choice
    classes: int  # of the whole vocabulary, padding excluded
    outputs: tuple[str, ...]  # the results besides a loss
    grad_in_forward: bool
    sequence_length: int
    shards: Shards | None
    labels_per_row: int | None  # K where they are [..., K]

    @property
    def is_of_labels(self) -> bool:
        return self.options.is_of_labels

    @property
    def differentiable(self) -> list[str]:
        if self.options.function.is_loss:
            return ["loss"]
        return [name for name in self.outputs if name in DIFFERENTIABLE]

    def options_of(self, o: Inputs) -> Options:
        return self.options._replace(arrays=o.arrays)


def named(arguments: Mapping[str, Any]) -> tuple[Operand, dict[str, Any]]:
    """The operand, and what else a public function was given, tensors by their names in tileloss_args. ``arguments``: all of its
    own by name, its options apart."""
    given = {_IN_ABI.get(name, name): x for name, x in arguments.items() if name != "options"}
    given |= arguments["options"]
    if "logits" in given:
        return Logits(given.pop("logits")), given
    return LmHead(*(given.pop(name) for name in ("hidden", "head", "bias"))), given


def prepare(
    loss: str, operand: Operand, given: Mapping[str, Any]
) -> tuple[Operand, Inputs, Leading, Call]:
    """Checks the arguments and flattens the leading dimensions.

    ``given``: a public function's arguments besides the operand's arrays, tensors by their names in tileloss_args.

    Raises:
        TypeError, ValueError: a dtype, a shape, a number ..., by the public functions' names.
    """
    function = FUNCTIONS[f"linear_{loss}" if isinstance(operand, LmHead) else loss]
    tensors = ARGUMENTS[function.name]
    _check_given(function, {**operand._asdict(), **given})
    vocab_axis = given.get("vocab_axis")
    of_rows = checked_labels(given["labels"], operand[0], loss == "logprobs")
    labels: Any = of_rows.array
    chosen = {name: given.get(name) for name in PUBLIC_OPTIONS[function.name]}
    if labels is None:  # so that none is ignored
        chosen["ignore_index"] = None
    elif of_rows.per_row == 0:
        chosen["ignore_index"] = IGNORED
    options = resolve(function.name, chosen, given.get("preset") or "")
    names, outputs = check_names(given.get("implementation")), _outputs(options, given)
    if of_rows.slots:
        check_goes_with_several(outputs)
    operand, leading, width, spec = _flat(operand, of_rows, given)
    rows = operand[0]
    assert rows is not None
    target, spec = _target_arrays(tensors.target, given, operand, leading, width, spec)
    shards = 1 if vocab_axis is None else _axis_size(vocab_axis)
    vocab = shards * width
    options, are_right = options.within_ranges()
    others = {name: given.get(name) for name in tensors.inputs}
    if (words := others.pop("allowed")) is not None:
        target["allowed"] = checked_allowed(words, leading, width, shards)
    vectors, of_vectors = _flat_vectors(others, leading, vocab, options)
    has_sequences = "sequence_offsets" in tensors.inputs
    length = _sequence_length(labels, vectors) if has_sequences else 0
    check(
        options,
        rows=prod(leading.shape),
        columns=vocab,
        vectors={n: v.size for n, v in vectors.items()},
        target={n: x.shape for n, x in target.items() if n != "allowed"},
        sequence_length=length,
        has_labels=labels is not None,
        outputs=() if options.is_of_labels else outputs,
        renamed=SHOWN,
    )
    valid = options.integer("valid_vocab")
    classes = vocab if valid < 0 else valid
    if "class_weights" in vectors:
        target["class_weights"] = vectors.pop("class_weights")[:classes].astype(jnp.float32)
    if labels is None:
        labels = _any_columns(rows, target, classes)
    else:
        labels = leading.flat(labels, *of_rows.slots)
    labels = wrong_unless([*are_right, *of_vectors, *are_columns(target, classes)], labels, options)
    places = None
    if has_sequences and leading.is_cut_within:
        places = leading.flat(jnp.arange(labels.size, dtype=jnp.int32))
    spec = with_outputs(spec, options, outputs)
    spec = spec._replace(columns=classes, row_axes=axes_of_rows(rows))
    spec = spec._replace(
        has_allowed="allowed" in target,
        has_slots=bool(of_rows.slots),
        is_shard=vocab_axis is not None,
    )
    choice = choose(names, operand, spec, options.is_of_labels)
    if vocab_axis is not None or (options.is_of_labels and may_be_cut(operand)):
        choice = choice._replace(one_pass="")  # it needs all rows and columns in one place
    dtypes = [x.dtype for x in operand if x is not None]
    call = Call(
        options=options.without_values(),
        spec=spec,
        choice=choice,
        classes=classes,
        outputs=outputs,
        grad_in_forward=_has_gradient_in_forward(
            given.get("grad_in_forward"), dtypes, options, choice
        ),
        sequence_length=length,
        shards=None if vocab_axis is None else Shards(vocab_axis, shards, width, classes),
        labels_per_row=of_rows.per_row,
    )
    allowed = None
    if "allowed" in target:
        allowed = allowed_classes(target["allowed"], rows.shape[0], classes, call.shards)
    inputs = Inputs(labels, target, vectors, options.arrays, places, allowed)
    operand, inputs = varying_alike((operand, inputs), but=vocab_axis)
    return operand, inputs, leading, call


def _check_given(function: Function, tensors: Mapping[str, Any]) -> None:
    for tensor in function.info.tensors[: function.info.num_tensors]:
        name = tensor.name.decode()
        if tensor.is_required and tensor.role == INPUT and tensors.get(name) is None:
            raise TypeError(f"{SHOWN.get(name, name)}: expected an array, got None")


def _axis_size(axis: str) -> int:
    try:
        return int(lax.axis_size(axis))
    except NameError as error:
        raise ValueError(
            f"vocab_axis: expected the name of a mesh axis inside shard_map, got {axis!r}"
        ) from error


def _outputs(options: Options, given: Mapping[str, Any]) -> tuple[str, ...]:
    """The results besides a loss, by name."""
    if "outputs" not in given:
        return ("metrics",) if given.get("return_metrics") else ()
    outputs = given["outputs"]
    names = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    known = (DistillationRows if options.function.is_loss else RowOutputs)._fields
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"outputs: expected names among {', '.join(known)}, got {', '.join(unknown)}"
        )
    return tuple(dict.fromkeys(names))


def _has_gradient_in_forward(
    given: bool | None, dtypes: Sequence[DTypeLike], options: Options, choice: Choice
) -> bool:
    """Whether the gradient is made with the loss: by default where that is less work. One in float16 would be rounded before a
    loss scale multiplies it. ``dtypes``: of the operand."""
    is_per_row = not options.function.is_loss or options.is_per_row
    if given and is_per_row:
        raise ValueError(
            "grad_in_forward: expected False for a loss per row (reduction or aggregation 'none'), whose upstream gradient "
            "has to be known, got True"
        )
    if given is not None or is_per_row:
        return bool(given)
    if jnp.float16 in dtypes:
        return False
    # Of labels it saves a product, and is made so in C++.
    saves_a_product = options.function.is_linear and choice.has_one_pass(jax.default_backend())
    return saves_a_product or not options.is_of_labels


# ------------------------------------------------------------------------------------------------ the operand


def _flat(
    operand: Operand, labels: Labels, given: Mapping[str, Any]
) -> tuple[Operand, Leading, int, Spec]:
    """The operand with one leading dimension, those that it had, the size of its vocabulary, and the spec of its products.

    ``labels``: of the operand's leading dimensions, where there are any to hold against them.
    """
    if isinstance(operand, Logits):
        logits = floats("logits", operand.logits)
        check_leading("logits", "V", logits, labels)
        rows, vocab = Leading(logits), logits.shape[-1]
        return Logits(rows.flat(logits, vocab)), rows, vocab, Spec(0)
    hidden, head = floats("hidden", operand.hidden), floats("head", operand.head)
    layout = given["head_layout"]
    if layout not in _LAYOUTS:
        raise ValueError(f"head_layout: expected one of {', '.join(_LAYOUTS)}, got {layout!r}")
    check_leading("hidden", "H", hidden, labels)
    size = hidden.shape[-1]
    if size == 0:
        raise ValueError(
            f"hidden: expected a last dimension of at least 1, got shape {list(hidden.shape)}"
        )
    if head.ndim != 2 or head.shape[layout.index("H")] != size:
        expected = f"[{size}, V]" if layout == "HV" else f"[V, {size}]"
        raise ValueError(
            f"head: expected shape {expected} of head_layout {layout!r}, got {list(head.shape)}"
        )
    vocab = head.shape[layout.index("V")]
    bias = None if operand.bias is None else floats("bias", operand.bias)
    if bias is not None and bias.shape != (vocab,):
        raise ValueError(f"bias: expected shape [{vocab}], got {list(bias.shape)}")
    seen = _compute_dtype(given["compute_dtype"], hidden, head)
    rows = Leading(hidden)
    flat = LmHead(rows.flat(hidden, size), head, bias)
    has_low_rank = (low_rank := given["low_rank"]) is not None
    if has_low_rank:
        of_rows, head_r = checked_low_rank(low_rank, hidden.shape[:-1], vocab, layout)
        flat = flat._replace(hidden_r=rows.flat(of_rows, of_rows.shape[-1]), head_r=head_r)
    spec = Spec(0, head_layout=layout, compute_dtype=seen, has_low_rank=has_low_rank)
    return flat, rows, vocab, spec


def _compute_dtype(given: DTypeLike | None, *tensors: Array) -> DTypeLike:
    """What the products of ``tensors`` see."""
    if given is None:
        all_narrow = all(x.dtype == jnp.bfloat16 for x in tensors)
        return jnp.bfloat16 if all_narrow else jnp.float32
    try:
        dtype = jnp.dtype(given)
    except TypeError:
        dtype = None
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"compute_dtype: expected float32 or bfloat16, got {given}")
    return dtype


# ------------------------------------------------------------------------------------------------ what goes with the rows


def _flat_vectors(
    vectors: Mapping[str, Any], rows: Leading, columns: int, options: Options
) -> tuple[Arrays, list[Array]]:
    """What is given besides labels, by the names in tileloss_args, with one dimension; and, as bool [], whether what only the
    program knows of them is right.

    ``rows``: the operand's. ``columns``: of the whole vocabulary, padding included.

    Raises:
        TypeError, ValueError: a dtype or a shape, or offsets that are known and cannot be.
    """
    found: Arrays = {}
    shape, count = rows.shape, prod(rows.shape)
    are_right: list[Array] = []
    for name, given in vectors.items():
        if given is None:
            continue
        x = jnp.asarray(given)
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise TypeError(f"{name}: expected numbers, got {x.dtype}")
        if SLOTS[name].shape == "C":
            _check_vector("weight", x)
            valid = options.integer("valid_vocab")
            x = x[:valid] if 0 < valid < columns == x.size else x
        elif SLOTS[name].shape == "B+1":
            x, is_right = _checked_offsets(name, given, count)
            are_right += is_right
        elif SLOTS[name].shape == "B|N" and options.choice("advantage_level") != "token":
            if x.ndim != 1 and (x.ndim != 2 or x.shape[1] != 1):
                raise ValueError(
                    f"{name}: expected [B] or [B, 1] of sequences, or labels' shape {list(shape)}, got {list(x.shape)}"
                )
        elif x.shape != (shape if x.ndim != 1 else (count,)):
            # Of another shape numbers would go to other rows than meant.
            raise ValueError(
                f"{name}: expected labels' shape {list(shape)}, or [{count}], got {list(x.shape)}"
            )
        else:
            x = rows.flat(x)
        found[name] = x.reshape(-1)
    return found, are_right


def _check_vector(name: str, x: Array) -> None:
    if x.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, got {list(x.shape)}")


def _checked_offsets(name: str, given: Any, rows: int) -> tuple[Array, list[Array]]:
    """The offsets, and as bool [] whether they can be, where only the program knows: of those that cannot the library is given
    others."""
    offsets, steps = jnp.asarray(given), f"{name}[{{}}]: expected {{}}, got {{}}"
    _check_vector(name, offsets)
    if not jnp.issubdtype(offsets.dtype, jnp.integer):
        raise TypeError(f"{name}: expected integers, got {offsets.dtype}")
    last = offsets.size - 1
    if last < 0:  # the library's to refuse
        return offsets, []
    if isinstance(given, jax.core.Tracer) or not getattr(given, "is_fully_addressable", True):
        is_right = (offsets[0] == 0) & (offsets[-1] == rows) & jnp.all(offsets[1:] >= offsets[:-1])
        others = jnp.where(jnp.arange(last + 1) == last, rows, 0)
        return jnp.where(is_right, offsets, others), [is_right]
    # In the library's words.
    known = np.asarray(given).tolist()
    if known[0] != 0:
        raise ValueError(steps.format(0, 0, known[0]))
    for i in range(1, len(known)):
        if known[i] < known[i - 1]:
            message = f">= the one before it, {known[i - 1]}"
            raise ValueError(steps.format(i, message, known[i]))
    if known[-1] != rows:
        raise ValueError(steps.format(last, f"the number of rows, {rows}", known[-1]))
    return offsets, []


def _sequence_length(labels: Array, vectors: Arrays) -> int:
    """T of labels [B, T]; 0 where offsets say it all, as they do for T = 0."""
    if "sequence_offsets" in vectors:
        return 0
    if labels.ndim != 2:
        raise ValueError(
            f"labels: expected [B, T] without sequence_offsets, got shape {list(labels.shape)}"
        )
    if labels.shape[1] == 0:  # to the library: no sequences
        vectors["sequence_offsets"] = jnp.zeros(labels.shape[0] + 1, jnp.int32)
    return labels.shape[1]


def _any_columns(rows: Array, target: Arrays, classes: int) -> Array:
    """In place of labels that are not given: any column may be the one that is computed to more digits."""
    if "target_probs" in target:  # a sure row is made of its heaviest
        return jnp.argmax(target["target_probs"][:, :classes], axis=1).astype(jnp.int32)
    return jnp.zeros_like(rows, jnp.int32, shape=rows.shape[:1])


# ------------------------------------------------------------------------------------------------ the target


def _target_arrays(
    names: tuple[str, ...],
    given: Mapping[str, Any],
    student: Operand,
    rows: Leading,
    vocab: int,
    spec: Spec,
) -> tuple[Arrays, Spec]:
    """Of a target that is not labels alone, ``names`` in tileloss_args; and the spec of both sides. ``student``: flat; ``rows``:
    the leading dimensions that it had."""
    if "teacher_hidden" in names:
        return _teacher_head(given, student, rows, vocab, spec)
    if "teacher_logits" in names:
        return _teacher_logits(given["teacher_logits"], student, rows), spec
    if "teacher_ids" in names:
        return _teacher_columns(given["teacher_ids"], given["teacher_logprobs"], rows), spec
    if "target_probs" in names:
        return _probabilities(given["target_probs"], rows, vocab), spec
    return {}, spec


def _teacher_logits(teacher: Any, student: Operand, rows: Leading) -> Arrays:
    assert isinstance(student, Logits)
    array, logits = floats("teacher", teacher), student.logits
    if array.dtype != logits.dtype:
        raise TypeError(f"teacher: expected logits' dtype {logits.dtype}, got {array.dtype}")
    if array.shape != (*rows.shape, logits.shape[-1]):
        raise ValueError(
            f"teacher: expected logits' shape {[*rows.shape, logits.shape[-1]]}, got {list(array.shape)}"
        )
    return {"teacher_logits": rows.flat(array, array.shape[-1])}


def _teacher_head(
    given: Mapping[str, Any], student: Operand, rows: Leading, vocab: int, spec: Spec
) -> tuple[Arrays, Spec]:
    assert isinstance(student, LmHead) and student.hidden is not None and student.head is not None
    names = ("teacher_hidden", "teacher_head", "teacher_bias")
    hidden, head, bias = (None if given[n] is None else floats(n, given[n]) for n in names)
    assert hidden is not None and head is not None
    if hidden.ndim == 0 or hidden.shape[:-1] != rows.shape or hidden.shape[-1] == 0:
        raise ValueError(
            f"teacher_hidden: expected shape {_shape(rows, 'G')}, got {list(hidden.shape)}"
        )
    size = hidden.shape[-1]
    expected = [size, vocab] if spec.head_layout == "HV" else [vocab, size]
    if list(head.shape) != expected:
        raise ValueError(
            f"teacher_head: expected shape {expected} of head_layout {spec.head_layout!r}, got {list(head.shape)}"
        )
    found = {"teacher_hidden": rows.flat(hidden, size), "teacher_head": head}
    if bias is not None:
        found["teacher_bias"] = bias
        if bias.shape != (vocab,):
            raise ValueError(f"teacher_bias: expected shape [{vocab}], got {list(bias.shape)}")
    # What the products of both sides see: bfloat16 where all four are that.
    both = _compute_dtype(given["compute_dtype"], student.hidden, student.head, hidden, head)
    return found, spec._replace(compute_dtype=both)


def _teacher_columns(ids: Any, logprobs: Any, rows: Leading) -> Arrays:
    of_columns, log_q = jnp.asarray(ids), floats("teacher_logprobs", logprobs)
    if not jnp.issubdtype(of_columns.dtype, jnp.integer):
        raise TypeError(f"teacher_ids: expected integers, got {of_columns.dtype}")
    if of_columns.ndim == 0 or of_columns.shape[:-1] != rows.shape or of_columns.shape[-1] == 0:
        raise ValueError(
            f"teacher_ids: expected shape {_shape(rows, 'K')}, got {list(of_columns.shape)}"
        )
    if log_q.shape != of_columns.shape:
        raise ValueError(
            f"teacher_logprobs: expected teacher_ids' shape {list(of_columns.shape)}, got {list(log_q.shape)}"
        )
    pairs = {"teacher_ids": of_columns, "teacher_logprobs": log_q}
    return {name: rows.flat(x, x.shape[-1]) for name, x in pairs.items()}


def _probabilities(probs: Any, rows: Leading, vocab: int) -> Arrays:
    """Of a float type that the library does not take as float32."""
    array, shape = jnp.asarray(probs), [*rows.shape, vocab]
    if list(array.shape) != shape:
        raise ValueError(
            f"labels: expected class probabilities of the logits' shape {shape}, got {list(array.shape)}"
        )
    if array.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        array = array.astype(jnp.float32)
    return {"target_probs": rows.flat(array, vocab)}


def _shape(rows: Leading, last: str) -> str:
    return f"[{', '.join(map(str, [*rows.shape, last]))}]"
