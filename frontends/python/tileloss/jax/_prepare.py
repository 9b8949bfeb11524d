"""A public function's arguments, checked and flat, and what is known of the call while it is traced."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from tileloss._core.functions import FUNCTIONS, PUBLIC_OPTIONS, Function
from tileloss._core.row_states import ARRAYS, bits_of_loss, bits_of_outputs
from tileloss._core.slots import ARGUMENTS, DIFFERENTIABLE, INPUT
from tileloss.jax._arguments import checked_labels, flat, flat_vectors, wrong_unless
from tileloss.jax._devices import Leading, axes_of_rows, may_be_cut, varying_alike
from tileloss.jax._differentiated import SHOWN
from tileloss.jax._implementations import Choice, check_names, choose
from tileloss.jax._rows.distillation import DistillationRows
from tileloss.jax._rows.options import Options, check, resolve
from tileloss.jax._rows.stats import RowOutputs
from tileloss.jax._shards import Shards
from tileloss.jax._sweeps.operands import LmHead, Logits, Operand, Spec, Sums
from tileloss.jax._target import are_columns, target_arrays


class Inputs(NamedTuple):
    """Everything that may be traced besides the operand."""

    labels: Array
    target: dict[str, Array]  # the arrays of a Target, by their names in tileloss_args
    vectors: dict[str, Array]  # by the same
    arrays: dict[str, Array]  # options that are arrays
    places: Array | None  # of the rows among the labels, where their order is another


class Call(NamedTuple):
    """What is known of a call while it is traced. JAX keeps it with the program: it holds no array."""

    options: Options  # without values
    spec: Spec
    choice: Choice
    classes: int  # of the whole vocabulary, padding excluded
    outputs: tuple[str, ...]  # the results besides a loss
    sequence_length: int = 0
    shards: Shards | None = None

    @property
    def is_of_labels(self) -> bool:
        return self.options.is_of_labels

    @property
    def differentiable(self) -> list[str]:
        if self.options.function.is_loss:
            return ["loss"]
        return [name for name in self.outputs if name in DIFFERENTIABLE]

    def run(self, sweep: str, x: Operand, *arguments: Any) -> Any:
        """``sweep``: "forward" or "backward", with its arguments; over all shards of the vocabulary."""
        if self.shards is None:
            return self.choice.run(sweep, x, *arguments)
        return getattr(self.shards, sweep)(self.choice.run, x, *arguments)

    def options_of(self, o: Inputs) -> Options:
        return self.options._replace(arrays=o.arrays)


def prepare(loss: str, arguments: Mapping[str, Any]) -> tuple[Operand, Inputs, Leading, Call]:
    """Checks the arguments and flattens the leading dimensions."""
    operand: Operand = LmHead(None, None, None)
    if "hidden" in arguments:
        function = f"linear_{loss}"
        operand = LmHead(*(arguments[name] for name in ("hidden", "head", "bias")))
        layout, seen = arguments["head_layout"], arguments["compute_dtype"]
        spec = Spec(0, head_layout=layout, compute_dtype=seen)
    else:
        function, operand, spec = loss, Logits(arguments["logits"]), Spec(0)
    _check_given(FUNCTIONS[function], arguments)
    labels, vocab_axis = arguments["labels"], arguments.get("vocab_axis")
    given = {name: arguments.get(name) for name in PUBLIC_OPTIONS[function]}
    if labels is None:  # so that none is ignored
        given["ignore_index"] = None
    else:
        labels = checked_labels(labels)
    options = resolve(function, given, arguments.get("preset") or "")
    names, outputs = check_names(arguments.get("implementation")), _outputs(options, arguments)
    operand, leading, width, spec = flat(operand, labels, spec)
    rows = operand[0]
    assert rows is not None
    target, spec = target_arrays(options.function, arguments, operand, leading, spec)
    shards = 1 if vocab_axis is None else _axis_size(vocab_axis)
    vocab = shards * width
    options, are_right = options.within_ranges()
    vectors, of_vectors = flat_vectors(
        {name: arguments.get(SHOWN.get(name, name)) for name in ARGUMENTS[loss].inputs},
        leading,
        vocab,
        options,
    )
    length = 0
    if "advantages" in vectors and "sequence_offsets" not in vectors:
        if labels.ndim != 2:
            raise ValueError(
                f"labels: expected [B, T] without sequence_offsets, got shape {list(labels.shape)}"
            )
        length = labels.shape[1]
        if length == 0:  # to the library: no sequences
            vectors["sequence_offsets"] = jnp.zeros(labels.shape[0] + 1, jnp.int32)
    check(
        options,
        rows=prod(leading.shape),
        columns=vocab,
        vectors={n: v.size for n, v in vectors.items()},
        target={n: x.shape for n, x in target.items()},
        sequence_length=length,
        has_labels=labels is not None,
        outputs=() if options.is_of_labels else outputs,
        renamed=SHOWN,
    )
    valid = options.integer("valid_vocab")
    classes = vocab if valid < 0 else valid
    if "class_weights" in vectors:
        target["class_weights"] = vectors.pop("class_weights")[:classes].astype(jnp.float32)
    if labels is None:  # any column may be the one that is computed to more digits
        labels = jnp.zeros_like(rows, jnp.int32, shape=rows.shape[:1])
        if (probs := target.get("target_probs")) is not None:  # a sure row is made of its heaviest
            labels = jnp.argmax(probs[:, :classes], axis=1).astype(jnp.int32)
    else:
        labels = leading.flat(labels)
    labels = wrong_unless([*are_right, *of_vectors, *are_columns(target, classes)], labels, options)
    places = None
    if "advantages" in vectors and leading.is_cut_within:
        places = leading.flat(jnp.arange(labels.size, dtype=jnp.int32))
    spec = _spec(options, outputs, spec)._replace(columns=classes, row_axes=axes_of_rows(rows))
    choice = choose(names, operand, spec, options.is_of_labels)
    if vocab_axis is not None or (options.is_of_labels and may_be_cut(operand)):
        choice = choice._replace(one_pass="")  # it needs all rows and columns in one place
    inputs = Inputs(labels, target, vectors, options.arrays, places)
    operand, inputs = varying_alike((operand, inputs), but=vocab_axis)
    call = Call(options.without_values(), spec, choice, classes, outputs, length)
    if vocab_axis is not None:
        cut = Shards(vocab_axis, shards, width, classes)
        call = call._replace(shards=cut)
    return operand, inputs, leading, call


def has_gradient_in_forward(given: bool | None, x: Operand, call: Call) -> bool:
    """Whether the gradient is made with the loss: by default where that is less work. One in float16 would be rounded before a
    loss scale multiplies it."""
    is_per_row = not call.options.function.is_loss or call.options.is_per_row
    if given and is_per_row:
        raise ValueError(
            "grad_in_forward: expected False for a loss per row (reduction or aggregation 'none'), whose upstream gradient "
            "has to be known, got True"
        )
    if given is not None or is_per_row:
        return bool(given)
    if any(tensor is not None and tensor.dtype == jnp.float16 for tensor in x):
        return False
    # Of labels it saves a product, and is made so in C++.
    saves_a_product = isinstance(x, LmHead) and call.choice.has_one_pass(jax.default_backend())
    return saves_a_product or not call.is_of_labels


def _check_given(function: Function, arguments: Mapping[str, Any]) -> None:
    for tensor in function.info.tensors[: function.info.num_tensors]:
        name = tensor.name.decode()
        names = {name, SHOWN.get(name, name)}
        is_needed = tensor.is_required and tensor.role == INPUT
        if is_needed and all(arguments.get(name) is None for name in names):
            raise TypeError(f"{SHOWN.get(name, name)}: expected an array, got None")


def _axis_size(axis: str) -> int:
    try:
        return int(lax.axis_size(axis))
    except NameError as error:
        raise ValueError(
            f"vocab_axis: expected the name of a mesh axis inside shard_map, got {axis!r}"
        ) from error


def _outputs(options: Options, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """The results besides a loss, by name."""
    if "outputs" not in arguments:
        return ("metrics",) if arguments.get("return_metrics") else ()
    outputs = arguments["outputs"]
    names = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    known = (DistillationRows if options.function.is_loss else RowOutputs)._fields
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"outputs: expected names among {', '.join(known)}, got {', '.join(unknown)}"
        )
    return tuple(dict.fromkeys(names))


def _spec(options: Options, outputs: tuple[str, ...], spec: Spec) -> Spec:
    """With what the sweeps are to give of each row."""
    function = options.function
    if not options.is_of_labels:
        return spec._replace(outputs=_target_outputs(options, outputs))
    sums = _sums(options, outputs)

    def may_be_on(name: str) -> bool:
        return name in function.options and options.may_differ(name, 0)

    return spec._replace(
        sums=sums,
        # What is differentiated through the sums of row outputs has a gradient of that kind.
        has_prob_logp=may_be_on("entropy_coef") if function.is_loss else sums.entropy_sum,
        has_uniform=may_be_on("label_smoothing") if function.is_loss else sums.smoothing_sum,
    )


def _target_outputs(options: Options, outputs: tuple[str, ...]) -> tuple[str, ...]:
    if "label_weight" not in options.function.options:
        return ("loss",)
    needed = {"divergence"} | ({"logp"} if options.may_differ("label_weight", 0) else set())
    return tuple(name for name in DistillationRows._fields if name in {*outputs, *needed})


def _sums(options: Options, outputs: tuple[str, ...]) -> Sums:
    """The optional arrays of the row state that the results are made of."""
    if options.function.is_loss:
        given = (*options.numbers(), *options.arrays)
        bits = bits_of_loss(options.function, given, "metrics" in outputs)
    else:
        bits = bits_of_outputs(outputs)
    return Sums(*(bool(bits >> ARRAYS.index(name) & 1) for name in Sums._fields))
