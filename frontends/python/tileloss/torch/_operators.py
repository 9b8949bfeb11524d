"""The operators ``torch.ops.tileloss.*``: one set for each function of the library, from logits and fused with the LM head.

For a loss f: f, f_value_and_grad and f_backward, and at the logits level f_value_and_grad_ and f_backward_, which write dlogits
over the logits. Row outputs have a forward and a backward. With the LM head there are f_adding and f_backward_, which adds dhead
to a float32 tensor; f_adding is f, and knows that tensor for its backward. All have a fake kernel for torch.compile; formulas for
autograd are in _apply.py. An operator takes

- a backward the upstream gradients first,
- the tensors of the function, slots.ARGUMENTS,
- the options as `tileloss._core.functions` has them: ``options`` (names), ``values`` and ``scalars``,
- with a head compute_dtype and workspace_bytes,
- a backward the row state, if the function has one,
- ``outputs``: names of what is asked for besides the loss, as the ABI has them, with commas between,
- if dhead is added, the tensor ``head_grad`` that it is added to.

It gives the loss, the gradients of the matrices, and the function's outputs, in this order; what was not asked for is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tileloss._core.functions import FUNCTIONS, given_names, is_per_row
from tileloss._core.slots import ARGUMENTS, DIFFERENTIABLE, ROW_OUTPUTS, state_arrays
from tileloss._core.structs import BACKWARD, FORWARD, VALUE_AND_GRAD
from tileloss.torch._call import (
    SLOT_DTYPES,
    Call,
    KeptCall,
    check_in_place,
    new_gradient,
    rows_of_labels,
)

Kernel = Callable[..., Any]
Results = Tensor | tuple[Tensor, ...]
Some = Tensor | None | tuple[Tensor | None, ...]  # None: not asked for
Make = Callable[
    [str, Sequence[int]], Any
]  # an output by its slot and shape; of "" an empty one, or None

# Where the first of the calls that are alike leaves itself, with the shapes and types of its results.
Alike = list[tuple[KeptCall, list[tuple[torch.Size, torch.dtype] | None]]]

HEAD = 1  # its place among the matrices of a function fused with it


class Operators:
    """Those of one function: ``name`` at its level."""

    def __init__(self, name: str) -> None:
        self.name, self.function, arguments = name, FUNCTIONS[name], ARGUMENTS[name]
        self.num_matrices, self.num_tensors = len(arguments.matrices), len(arguments.slots)
        self.slots = arguments.slots
        self.gradients = tuple(f"d{name}" for name in arguments.matrices)
        self.is_linear = self.function.is_linear
        self.end_of_options = self.num_tensors + 3
        self.end = self.end_of_options + 2 * self.is_linear
        self.place_of_labels = self.slots.index("labels")
        # A loss of labels gives no row outputs here, and one of another target keeps no row state.
        self.has_state = not arguments.target
        rows = arguments.row_outputs if arguments.target else ()
        self.results = (
            *(("loss", *rows) if self.function.is_loss else ROW_OUTPUTS),
            *(("metrics",) if self.function.metrics else ()),
        )
        self.kept_results = (*self.results, *(("row_state",) if self.has_state else ()))
        self.upstream = (
            ("loss_grad",)
            if self.function.is_loss
            else tuple(f"{name}_grad" for name in DIFFERENTIABLE)
        )
        self._define(optional=(*arguments.inputs, "bias", "hidden_r", "head_r", "teacher_bias"))

    def _define(self, optional: Sequence[str]) -> None:
        if not self.has_state:
            optional = (*optional, "labels")
        tensors = ", ".join(f"Tensor{'?' * (slot in optional)} {slot}" for slot in self.slots)
        inputs = f"{tensors}, str options, float[] values, Tensor? scalars"
        if self.is_linear:
            inputs += ", int compute_dtype, int workspace_bytes"
        upstream = "".join(
            f"Tensor{'?' * (name != 'loss_grad')} {name}, " for name in self.upstream
        )
        state = ", Tensor row_state" * self.has_state

        def add(suffix: str, kernel: Kernel, fake: Kernel, results: int) -> None:
            is_backward, in_place = "backward" in suffix, suffix.endswith("_")
            taken = f"{upstream}{inputs}{state}" if is_backward else inputs
            taken += ", str outputs"
            if self.is_linear and (in_place or suffix == "_adding"):
                taken += ", Tensor head_grad"
            mutated = ("head_grad" if self.is_linear else "logits") if in_place else None
            if mutated:
                taken = taken.replace(f"Tensor {mutated}", f"Tensor(a!) {mutated}")
            schema = f"({taken}) -> ({', '.join(['Tensor'] * results)})"
            _define(f"{self.name}{suffix}", schema, kernel, fake, mutated)

        found = len(self.results)
        add("", self._forward, self._fake_forward, len(self.kept_results))
        add("_backward", self._backward, self._fake_backward, self.num_matrices)
        if self.function.is_loss:
            kernel, fake = self._value_and_grad, self._fake_value_and_grad
            add("_value_and_grad", kernel, fake, found + self.num_matrices)
        if self.is_linear:
            add("_adding", self._forward_adding, self._fake_forward_adding, len(self.kept_results))
            adding, fake_adding = self._backward_adding, self._fake_backward_adding
            add("_backward_", adding, fake_adding, self.num_matrices)
        else:
            add("_backward_", self._backward_, lambda *_: None, 0)
            if self.function.is_loss:
                add("_value_and_grad_", self._value_and_grad_, self._fake_value_and_grad_, found)

    # ------------------------------------------------------------------------------------------------------ kernels

    def _forward(self, inputs: Sequence[Any], alike: Alike | None = None) -> Some:
        results = self._run(FORWARD, self.kept_results, inputs, alike=alike)
        return tuple(results) if len(results) > 1 else results[0]

    def _value_and_grad(self, inputs: Sequence[Any], alike: Alike | None = None) -> Some:
        gradients = self._new_gradients(inputs)
        loss, *others = self._run(VALUE_AND_GRAD, self.results, inputs, gradients, alike=alike)
        return loss, *gradients, *others

    def _value_and_grad_(self, inputs: Sequence[Any], alike: Alike | None = None) -> Some:
        check_in_place(inputs[0])
        results = self._run(VALUE_AND_GRAD, self.results, inputs, inputs[:1], alike=alike)
        return tuple(results) if len(results) > 1 else results[0]

    def _backward(self, arguments: Sequence[Any], _: Alike | None = None) -> Some:
        count = len(self.upstream)
        upstream, inputs = arguments[:count], arguments[count:]
        gradients = self._new_gradients(inputs)
        self._run(BACKWARD, (), inputs, gradients, upstream)
        return tuple(gradients) if len(gradients) > 1 else gradients[0]

    def _backward_(self, arguments: Sequence[Any], _: Alike | None = None) -> None:
        count = len(self.upstream)
        upstream, inputs = arguments[:count], arguments[count:]
        check_in_place(inputs[0])
        self._run(BACKWARD, (), inputs, inputs[:1], upstream)

    def _forward_adding(self, inputs: Sequence[Any], alike: Alike | None = None) -> Some:
        return self._forward(inputs[:-1], alike)

    def _backward_adding(self, arguments: Sequence[Any], _: Alike | None = None) -> Some:
        count = len(self.upstream)
        upstream, inputs, head_grad = arguments[:count], arguments[count:-1], arguments[-1]
        gradients = self._new_gradients(inputs)
        gradients[HEAD] = head_grad
        for gradient in gradients[HEAD + 1 :]:  # a bias's is added to as well
            if gradient is not None:
                gradient.zero_()
        self._run(BACKWARD, (), inputs, gradients, upstream, head_grad.stride())
        gradients[HEAD] = None
        return tuple(gradients)

    def _run(
        self,
        call_pass: int,
        names: Sequence[str],
        inputs: Sequence[Any],
        gradients: Sequence[Tensor | None] = (),
        upstream: Sequence[Tensor | None] = (),
        added_to: Sequence[int] | None = None,
        alike: Alike | None = None,
    ) -> list[Tensor | None]:
        """The results ``names``, None for what was not asked for. ``gradients``: where those of the matrices are to lie;
        ``added_to``: the strides of the head's, where gradients are added to what is there. ``alike``: what is kept of calls like
        this one; None: it is looked up."""
        options, values, scalars = inputs[self.num_tensors : self.end_of_options]
        tensors = (*upstream, *inputs[: self.num_tensors], *inputs[self.end : -1])
        if alike is None:
            alike = _alike(
                self,
                call_pass,
                torch.get_num_threads(),
                inputs[0].device,
                bool(gradients) and gradients[0] is inputs[0],
                added_to,
                options,
                tuple(values),
                scalars is not None,
                inputs[self.end_of_options : self.end],
                inputs[-1],
                *[t if t is None else (t.dtype, t.shape, t.stride(), t.is_neg()) for t in tensors],
            )
        if alike:
            (kept, outputs), device = alike[0], inputs[0].device
            results = [o and torch.empty(o[0], dtype=o[1], device=device) for o in outputs]
            operands = (*tensors, *gradients, *results)
            kept.run(operands) if kept.is_simple else kept.run_with(operands, scalars)
            return results
        call = self._call(inputs, gradients, upstream)
        if added_to is not None:
            call.set_options(accumulate=1)
        results = self._results(inputs, names, call.new_output_if_named)
        call.run(call_pass, inputs[self.end - 1] if self.is_linear else 0)
        before = self.upstream if upstream else ()
        after = ("row_state",) * len(inputs[self.end : -1])
        slots = (*before, *self.slots, *after, *self.gradients[: len(gradients)], *names)
        kept = KeptCall(call, call_pass, slots, (*tensors, *gradients, *results))
        if kept.is_of_tensors:
            alike.append((kept, [None if r is None else (r.shape, r.dtype) for r in results]))
        return results

    def _call(
        self,
        inputs: Sequence[Any],
        gradients: Sequence[Tensor | None],
        upstream: Sequence[Tensor | None],
    ) -> Call:
        names, values, scalars = inputs[self.num_tensors : self.end_of_options]
        call = Call(self.name, names, values, scalars, inputs[0].device)
        if self.is_linear and (compute_dtype := inputs[self.end_of_options]):
            call.set_options(compute_dtype=compute_dtype)
        call.set_tensors(inputs[: self.num_tensors], gradients)
        call.set_upstream(self.upstream, upstream)
        # A program that was exported without gradients keeps no state: the library then sweeps forward again.
        if upstream and self.has_state and (state := inputs[self.end]).dim() == 2:
            call.set_row_state(state)
        return call

    def _new_gradients(self, inputs: Sequence[Any]) -> list[Tensor | None]:
        """Of the matrices; None: not asked for."""
        asked = inputs[-1].split(",")
        return [
            new_gradient(matrix, name) if name in asked and matrix is not None else None
            for name, matrix in zip(self.gradients, inputs, strict=False)
        ]

    # -------------------------------------------------------------------------------------------------------- fakes

    def _fake_forward(self, *inputs: Any) -> Results:
        return _as_results(self._results(inputs, self.kept_results, _fake_of(inputs[0])))

    def _fake_value_and_grad(self, *inputs: Any) -> Results:
        loss, *others = self._results(inputs, self.results, _fake_of(inputs[0]))
        return loss, *self._fake_gradients(inputs), *others

    def _fake_value_and_grad_(self, *inputs: Any) -> Results:
        return _as_results(self._results(inputs, self.results, _fake_of(inputs[0])))

    def _fake_backward(self, *arguments: Any) -> Results:
        return _as_results(self._fake_gradients(arguments[len(self.upstream) :]))

    def _fake_forward_adding(self, *inputs: Any) -> Results:
        return self._fake_forward(*inputs[:-1])

    def _fake_backward_adding(self, *arguments: Any) -> Results:
        return self._fake_backward(*arguments[:-1])

    def _fake_gradients(self, inputs: Sequence[Any]) -> list[Tensor]:
        asked = inputs[-1].split(",")
        return [
            x.new_empty(x.shape)
            if name in asked and x is not None
            else inputs[0].new_empty((0,), dtype=torch.float32)
            for name, x in zip(self.gradients, inputs, strict=False)
        ]

    # --------------------------------------------------------------------------------------------------------- both

    def _results(self, inputs: Sequence[Any], names: Sequence[str], make: Make) -> list[Any]:
        labels, place = inputs[self.place_of_labels], self.num_tensors
        rows = rows_of_labels(labels, inputs[0])
        of_labels = rows if labels is None else labels.shape
        options = inputs[place], inputs[place + 1], inputs[-1]
        return self.new_results(names, rows, of_labels, *options, make)

    def new_results(
        self,
        names: Sequence[str],
        rows: Sequence[int],
        of_labels: Sequence[int],
        options: str,
        values: Sequence[float],
        outputs: str,
        make: Make,
    ) -> list[Any]:
        """``names`` of what a call gives, with `make`; ``rows``: their shape, ``of_labels``: that of logp."""
        found, asked = [], outputs.split(",")
        for name in names:
            if name == "loss":
                per_row = is_per_row(self.function, options, values)
                found.append(make(name, rows if per_row else ()))
            elif name not in asked:
                found.append(make("", (0,)))
            elif name == "row_state":
                found.append(make(name, (_state_arrays(options, outputs), prod(rows))))
            elif name == "metrics":
                found.append(make(name, (len(self.function.metrics),)))
            else:
                found.append(make(name, of_labels if name == "logp" else rows))
        return found


@lru_cache(maxsize=256)
def _alike(*_: Any) -> Alike:
    return []


@lru_cache(maxsize=256)
def _state_arrays(options: str, outputs: str) -> int:
    return state_arrays(given_names(options).union(outputs.split(",")))


def _as_results(results: Sequence[Tensor]) -> Results:
    """To torch one result is no tuple."""
    return tuple(results) if len(results) > 1 else results[0]


def _dispatched(kernel: Kernel) -> Kernel:
    """As torch's dispatcher calls it, where what was not asked for is empty."""

    def wrapper(*inputs: Any) -> Any:
        results = kernel(inputs)
        if not isinstance(results, tuple):
            return results
        like = next(x for x in inputs if isinstance(x, Tensor))
        return tuple(like.new_empty(0, dtype=torch.float32) if r is None else r for r in results)

    return wrapper


def _fake_of(like: Tensor) -> Make:
    return lambda slot, shape: like.new_empty(shape, dtype=SLOT_DTYPES.get(slot, torch.float32))


# ----------------------------------------------------------------------------------------------------------- all of them


class _Eager(NamedTuple):
    kernel: Kernel
    mutated: int | None  # which argument it writes


_eager: dict[str, _Eager] = {}
# What the arguments of an eager call are. Subclasses of Tensor have their own ideas of an operator.
_VALUES = frozenset({type(None), str, bool, int, float, torch.dtype})
_PLAIN = _VALUES | {Tensor, torch.nn.Parameter, tuple, list}
_VMAP_MODE: Any = torch._C._dispatch_key_parse("VmapMode")  # by its name it takes 2 us to look up


def _define(name: str, schema: str, kernel: Kernel, fake: Kernel, mutates: str | None) -> None:
    operator = torch.library.custom_op(
        f"tileloss::{name}",
        _dispatched(kernel),
        mutates_args=() if mutates is None else (mutates,),
        device_types=("cpu", "cuda"),
        schema=schema,
    )
    operator.register_fake(fake)
    arguments = [a.name for a in operator._opoverload._schema.arguments]
    _eager[name] = _Eager(kernel, None if mutates is None else arguments.index(mutates))


def is_traced() -> bool:
    """Whether torch.compile or torch.jit.trace is looking: they get operators, with formulas that write nothing in place."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def is_exported() -> bool:
    """Whether a program is made that may later be asked for other gradients than now: torch.compile would make another one."""
    return torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None


def is_batched() -> bool:
    """Whether torch.autograd.grad(is_grads_batched=True) goes through a batch of upstream gradients in one backward."""
    return torch._C._dispatch_tls_is_dispatch_key_included(_VMAP_MODE)


def facts(values: Sequence[Any]) -> list[Any] | None:
    """What a call's arguments are but for the tensors' memory, to be compared with another's; None where an argument's own type,
    or a transform of torch.func, may make more of it."""
    kinds = tuple(map(type, values))
    tensors = _places_of_tensors(kinds)
    if (
        tensors is None
        or forward_ad._current_level >= 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        return None
    # With the types, as 1, 1.0 and True are not the same: not each is accepted.
    found = [kinds, *values]
    try:
        for place in tensors:
            t = found[place]
            found[place] = t.dtype, t.shape, t.stride(), t.is_neg(), t.device, t.requires_grad
    except RuntimeError:  # no strides: a sparse one
        return None
    return found


@lru_cache(maxsize=256)
def _places_of_tensors(kinds: tuple[type, ...]) -> list[int] | None:
    """Behind ``kinds``; None where not all are plain."""
    if not _PLAIN.issuperset(kinds) or not {tuple, list}.isdisjoint(kinds):
        return None
    return [place for place, kind in enumerate(kinds, start=1) if kind not in _VALUES]


def run(name: str, inputs: Sequence[Any], alike: Alike | None = None) -> Any:
    """The operator ``name`` without autograd. Where nobody can be watching its kernel is called directly: the dispatcher
    and custom_op's wrapping cost 20 us, and the first such call 1.4 s, as it imports torch._dynamo. Tracers, modes, functorch's
    batching and tensor subclasses see the operator. ``alike``: what is kept of calls like this one, whose `facts` were found."""
    if (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._dispatch_tls_is_dispatch_key_included(_VMAP_MODE)
        or (
            alike is None
            and (
                is_traced()
                or torch._C._functorch.peek_interpreter_stack() is not None
                or not _PLAIN.issuperset(map(type, inputs))
            )
        )
    ):
        return getattr(torch.ops.tileloss, name)(*inputs)
    kernel, mutated = _eager[name]
    result = kernel(inputs, alike)
    if mutated is not None:
        torch.autograd.graph.increment_version(inputs[mutated])
    return result


OPERATORS = {
    name: Operators(name)
    for name, function in FUNCTIONS.items()
    if function.is_loss or function.loss == "logprobs"
}
