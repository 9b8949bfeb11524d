"""One call of the library on tensors: what every operator's kernel comes down to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tileloss._core import calls, options, views
from tileloss._core.functions import FUNCTIONS, Function
from tileloss._core.slots import INPUTS, SLOTS
from tileloss.torch import _tensors

# The ABI's names of what the public functions name as torch does.
ARGUMENT_NAMES = {
    "logits": "input",
    "hidden": "input",
    "head": "linear_weight",
    "bias": "linear_bias",
    "teacher_hidden": "teacher_input",
    "teacher_head": "teacher_weight",
    "labels": "target",
    "class_weights": "weight",
}


class Call:
    """The arguments of one call under construction; keeps alive what they point to."""

    def __init__(
        self, name: str, names: str, values: Sequence[float], scalars: Tensor | None
    ) -> None:
        self.function: Function = FUNCTIONS[name]
        self.args = calls.new_args()
        self.alive: list[Any] = [scalars]
        address = None if scalars is None else scalars.data_ptr()
        self.options = options.to_struct(self.function, names, values, address)
        self.names, self.values = names, values

    def logits(self, logits: Tensor, dlogits: Tensor | None = None) -> None:
        self.alive.append(_tensors.set_logits(self.args, logits, dlogits))

    def head(self, hidden: Tensor, head: Tensor, bias: Tensor | None, compute_dtype: int) -> None:
        self._head("", hidden, head, bias)
        if compute_dtype:
            self.set_options(compute_dtype=compute_dtype)

    def teacher_head(self, hidden: Tensor, head: Tensor, bias: Tensor | None) -> None:
        self._head("teacher_", hidden, head, bias)

    def wanted(self, slots: Sequence[str], tensors: Sequence[Tensor]) -> None:
        """What says more of a row than its label, after the logits or the head."""
        for slot, tensor in zip(slots, tensors, strict=True):
            if SLOTS[slot].shape == "N,V" and self.args.logits.rows:
                self.alive.append(_tensors.set_beside_logits(self.args, slot, tensor))
                continue
            rows = _tensors.without_overlap(
                tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])
            )
            if SLOTS[slot].shape == "N,V" and rows.stride(-1) != 1:
                rows = rows.contiguous()
            self.alive.append(rows)
            _tensors.set_strided_matrix(self.args, slot, rows)

    def _head(self, side: str, hidden: Tensor, head: Tensor, bias: Tensor | None) -> None:
        rows = _tensors.without_overlap(hidden.reshape(-1, hidden.shape[-1]))
        head = head.resolve_neg()
        self.alive += (rows, head)
        _tensors.set_strided_matrix(self.args, f"{side}hidden", rows)
        _tensors.set_strided_matrix(self.args, f"{side}head", head)
        self.vector(f"{side}bias", bias)

    def set_options(self, **values: int) -> None:
        """Options that a front end sets besides those that were given."""
        self.options = options.copied(self.options)
        for name, value in values.items():
            self.function.set_value(self.options, name, value)

    def vector(self, slot: str, tensor: Tensor | None) -> None:
        if tensor is not None:
            self.alive.append(_tensors.set_vector(self.args, slot, tensor))

    def inputs(self, function: str, labels: Tensor | None, given: Sequence[Tensor | None]) -> None:
        """``function``: its name from logits. ``given``: its INPUTS."""
        self.vector("labels", labels)
        names = INPUTS[function]
        for name, tensor in zip(names, given, strict=True):
            if tensor is not None:
                # Class weights are looked up by label: the ABI wants them without gaps.
                self.vector(name, tensor.contiguous() if SLOTS[name].shape == "C" else tensor)
        if "sequence_offsets" in names and given[names.index("sequence_offsets")] is None:
            self.options, alive = calls.set_sequences(
                self.args,
                self.function,
                self.names,
                self.options,
                labels.shape if labels is not None else (),
            )
            self.alive.append(alive)

    def new_output(self, slot: str, shape: Sequence[int]) -> Tensor:
        dtype = _tensors.SLOT_DTYPES[slot]
        output = torch.empty(shape, dtype=dtype, device=_tensors.CPU)
        self.alive.append(output)
        code = _tensors.DTYPES[dtype]
        views.set_vector(self.args, slot, output.data_ptr(), code, output.numel(), 1)
        return output

    def run(
        self, call_pass: int, workspace_bytes: int = 0, merge: Callable[[], None] | None = None
    ) -> None:
        calls.call(
            self.function,
            call_pass,
            self.args,
            self.options,
            threads=torch.get_num_threads(),
            workspace_bytes=workspace_bytes,
            renamed=ARGUMENT_NAMES,
            merge=merge,
        )
