"""What the operators of both levels are made of: schemas, outputs, their fakes, registration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tileloss._core.functions import FUNCTIONS
from tileloss._core.options import given_names, is_per_row
from tileloss._core.slots import DIFFERENTIABLE, INPUTS, ROW_OUTPUTS, state_arrays
from tileloss.torch._call import Call
from tileloss.torch._tensors import CPU, SLOT_DTYPES, set_row_state

Extra = Sequence[Tensor | None]

OPTIONS = "str options, float[] values, Tensor? scalars"


def extra_schema(function: str) -> str:
    return "".join(f", Tensor? {name}" for name in INPUTS[function])


def empty() -> Tensor:
    return torch.empty(0, dtype=torch.float32, device=CPU)


def metrics_size(name: str, wanted: bool) -> int:
    return len(FUNCTIONS[name].metrics) if wanted else 0


def new_loss(call: Call, labels: Tensor) -> Tensor:
    shape = labels.shape if is_per_row(call.function, call.names, call.values) else ()
    return call.new_output("loss", shape)


def new_metrics(call: Call, wanted: bool) -> Tensor:
    size = metrics_size(call.function.name, wanted)
    return call.new_output("metrics", (size,)) if size else empty()


def new_state(call: Call, labels: Tensor, arrays: int) -> Tensor:
    state = torch.empty((arrays, labels.numel()), dtype=torch.float32, device=CPU)
    if arrays:
        set_row_state(call.args, state)
    return state


def loss_state_arrays(options: str, keep_state: bool) -> int:
    return state_arrays(given_names(options)) if keep_state else 0


def split(
    function: str, rest: Sequence[Any]
) -> tuple[Extra, str, list[float], Tensor | None, Sequence[Any]]:
    """An operator's arguments after its labels: the extra inputs, the options, what is left."""
    n = len(INPUTS[function])
    return rest[:n], rest[n], rest[n + 1], rest[n + 2], rest[n + 3 :]


def define(
    name: str,
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    mutates: tuple[str, ...] = (),
) -> None:
    operator = torch.library.custom_op(
        f"tileloss::{name}", kernel, mutates_args=mutates, device_types="cpu", schema=schema
    )
    operator.register_fake(fake)
    arguments = [a.name for a in operator._opoverload._schema.arguments]
    _kernels[name] = _Kernel(kernel, arguments.index(mutates[0]) if mutates else None)


class _Kernel(NamedTuple):
    function: Callable[..., Any]
    mutated: int | None  # which argument it writes


_kernels: dict[str, _Kernel] = {}
# What the arguments of an eager call are. Subclasses of Tensor have their own ideas of an operator.
_PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None), str, list, bool, int, float})


def is_traced() -> bool:
    """Whether torch.compile or torch.jit.trace is looking: they get operators, with formulas that write nothing in place."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def is_batched() -> bool:
    """Whether torch.autograd.grad(is_grads_batched=True) goes through a batch of upstream gradients in one backward."""
    return torch._C._dispatch_tls_is_dispatch_key_included("VmapMode")


def run(name: str, *inputs: Any) -> Any:
    """The operator ``name`` without autograd. Where nobody can be watching its kernel is called directly: the dispatcher
    and custom_op's wrapping cost 20 us, and the first such call 1.4 s, as it imports torch._dynamo. Tracers, modes, functorch's
    batching and tensor subclasses see the operator."""
    if (
        is_traced()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or is_batched()
        or not _PLAIN.issuperset(map(type, inputs))
    ):
        return getattr(torch.ops.tileloss, name)(*inputs)
    kernel = _kernels[name]
    result = kernel.function(*inputs)
    if kernel.mutated is not None:
        torch.autograd.graph.increment_version(inputs[kernel.mutated])
    return result


def fake_loss(
    f: str, labels: Tensor, options: str, values: Sequence[float], wants_metrics: bool
) -> tuple[Tensor, Tensor]:
    per_row = is_per_row(FUNCTIONS[f], options, values)
    loss = labels.new_empty(labels.shape if per_row else (), dtype=torch.float32)
    return loss, labels.new_empty((metrics_size(f, wants_metrics),), dtype=torch.float32)


ROWS = "(" + ", ".join(["Tensor"] * (len(ROW_OUTPUTS) + 1)) + ")"
ROW_GRADS = ", ".join(f"Tensor? {name}_grad" for name in DIFFERENTIABLE)


def new_row_outputs(
    call: Call, labels: Tensor, outputs: str, keep_state: bool
) -> tuple[Tensor, ...]:
    wanted = outputs.split(",")
    results = [
        call.new_output(name, labels.shape) if name in wanted else empty() for name in ROW_OUTPUTS
    ]
    results.append(new_state(call, labels, state_arrays(wanted) if keep_state else 0))
    return tuple(results)


def fake_row_outputs(labels: Tensor, outputs: str, keep_state: bool) -> tuple[Tensor, ...]:
    wanted = outputs.split(",")
    results = [
        labels.new_empty(labels.shape, dtype=SLOT_DTYPES[name])
        if name in wanted
        else labels.new_empty((0,), dtype=torch.float32)
        for name in ROW_OUTPUTS
    ]
    arrays = state_arrays(wanted) if keep_state else 0
    results.append(labels.new_empty((arrays, labels.numel()), dtype=torch.float32))
    return tuple(results)


def row_grads(call: Call, grads: Sequence[Tensor | None], state: Tensor) -> None:
    """An output that was not asked for is empty, and so is its gradient where torch.compile makes one."""
    for name, grad in zip(DIFFERENTIABLE, grads, strict=True):
        call.vector(f"{name}_grad", grad if grad is not None and grad.numel() else None)
    set_row_state(call.args, state)
