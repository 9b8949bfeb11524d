"""One call of the library on tensors, which are the C ABI's views: no copy where strides can say it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tileloss._core import calls, functions, structs, views
from tileloss._core.functions import FUNCTIONS, Function
from tileloss._core.slots import ARGUMENTS, SLOTS, Args, Place
from tileloss._core.views import Layout
from tileloss.torch import _pages

DTYPES = {
    torch.float32: structs.FLOAT32,
    torch.bfloat16: structs.BFLOAT16,
    torch.float16: structs.FLOAT16,
    torch.int32: structs.INT32,
    torch.int64: structs.INT64,
    torch.bool: structs.UINT8,
    torch.uint8: structs.UINT8,
}
_DTYPES_BY_CODE = {code: dtype for dtype, code in DTYPES.items()}
# An output's type, and what an input becomes of a type that the slot does not take.
SLOT_DTYPES = {name: _DTYPES_BY_CODE[slot.dtypes[0]] for name, slot in SLOTS.items()}
_TAKEN = {
    name: frozenset(dtype for dtype, code in DTYPES.items() if code in slot.dtypes)
    for name, slot in SLOTS.items()
}
_VECTORS = frozenset(name for name, slot in SLOTS.items() if slot.rank == 1)
CPU = torch.device("cpu")
# The ABI's names of what the public functions name as torch does.
ARGUMENT_NAMES = {
    # generated: names in PyTorch
    "logits": "input",
    "hidden": "input",
    "head": "linear_weight",
    "hidden_r": "low_rank[0]",
    "head_r": "low_rank[1]",
    "dhidden_r": "low_rank[0]",
    "dhead_r": "low_rank[1]",
    "labels": "target",
    "class_weights": "weight",
    "bias": "linear_bias",
    "teacher_logits": "teacher",
    "teacher_hidden": "teacher_input",
    "teacher_head": "teacher_weight",
    "target_probs": "target",
    # end of generated
    "labels_per_row": "labels a row of target",
    "dhead": "linear_weight_grad",  # that of the library's own making is never wrong
}


class Call:
    """The arguments of one call under construction; keeps alive what they point to."""

    def __init__(
        self,
        name: str,
        names: str,
        values: Sequence[float],
        scalars: Tensor | None,
        device: torch.device,
    ) -> None:
        """``device``: where all tensors of the call lie, those that it makes too."""
        self.function: Function = FUNCTIONS[name]
        self.device = device
        self.alive: list[Any] = [scalars]
        self.args = calls.new_args(
            None
            if device.type == "cpu"
            else place_of(device, partial(_allocate, device, self.alive))
        )
        address = None if scalars is None else scalars.data_ptr()
        self.options = functions.to_struct(self.function, names, values, address)
        self.names = names

    def set_tensors(
        self, tensors: Sequence[Tensor | None], gradients: Sequence[Tensor | None] = ()
    ) -> None:
        """``tensors``: those of ARGUMENTS, in its order. ``gradients``: where those of the matrices are to lie."""
        arguments = ARGUMENTS[self.function.name]
        first = tensors[0]
        rows = 0 if first is None else first.shape[:-1].numel()
        for slot, tensor in zip(arguments.slots, tensors, strict=True):
            if tensor is None:
                continue
            if slot in _VECTORS:
                kept = _set_vector(self.args, slot, tensor)
            elif slot == "logits":
                kept = _set_logits(self.args, tensor, gradients[0] if gradients else None)
            else:
                kept = _set_matrix(self.args, slot, tensor, rows)
            self.alive.append(kept)
        if self.function.is_linear:
            for slot, gradient in zip(arguments.matrices, gradients, strict=False):
                if gradient is not None:
                    setter = _set_vector if slot in _VECTORS else _set_matrix
                    self.alive.append(setter(self.args, f"d{slot}", gradient))
        first, labels = tensors[0], tensors[arguments.slots.index("labels")]
        if first is not None and labels is not None and has_several_labels(labels, first):
            self.args.labels_per_row = labels.shape[-1]
        if "sequence_offsets" in arguments.inputs and not self.args.sequence_offsets.dtype:
            assert labels is not None
            self.options = calls.set_sequences(
                self.args, self.function, self.names, self.options, labels.shape, self._zeros
            )

    def set_options(self, **values: int) -> None:
        """Options that a front end sets besides those that were given."""
        self.options = functions.copied(self.options)
        for name, value in values.items():
            self.function.set_value(self.options, name, value)

    def set_upstream(self, slots: Sequence[str], gradients: Sequence[Tensor | None]) -> None:
        """Upstream gradients. An output that was not asked for is empty, and so is its gradient where torch.compile makes one."""
        for slot, gradient in zip(slots, gradients, strict=False):
            if gradient is not None and (slot == "loss_grad" or gradient.numel()):
                self.alive.append(_set_vector(self.args, slot, gradient))

    def new_output(self, slot: str, shape: Sequence[int]) -> Tensor:
        """What the call writes: an output, or the row state; "": nothing, for what was not asked for."""
        dtype = SLOT_DTYPES.get(slot, torch.float32)
        output = torch.empty(shape, dtype=dtype, device=self.device)
        if slot == "row_state":
            self.set_row_state(output)
        elif slot:
            code = DTYPES[dtype]
            calls.set_vector(self.args, slot, output.data_ptr(), code, output.numel(), 1)
        self.alive.append(output)
        return output

    def new_output_if_named(self, slot: str, shape: Sequence[int]) -> Tensor | None:
        return self.new_output(slot, shape) if slot else None

    def set_row_state(self, state: Tensor) -> None:
        """[K,N] float32: the first K of slots.STATE."""
        calls.set_row_state(self.args, state.data_ptr(), *state.shape)

    def _zeros(self, count: int) -> int:
        zeros = torch.zeros(count, dtype=torch.int64, device=self.device)
        self.alive.append(zeros)
        return zeros.data_ptr()

    def run(
        self, call_pass: int, workspace_bytes: int = 0, merge: Callable[[], None] | None = None
    ) -> None:
        self.plan = calls.call(
            self.function,
            call_pass,
            self.args,
            self.options,
            threads=torch.get_num_threads(),
            workspace_bytes=workspace_bytes,
            renamed=ARGUMENT_NAMES,
            merge=merge,
        )


class KeptCall(calls.KeptCall):
    """What a call that went well leaves to those of tensors alike, with the same options."""

    def __init__(
        self, call: Call, call_pass: int, slots: Sequence[str], tensors: Sequence[Tensor | None]
    ) -> None:
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        named = zip(slots, addresses, strict=True)
        rest = call.options, call.plan, named, ARGUMENT_NAMES
        super().__init__(call.function, call_pass, call.args, *rest)
        self._device = call.device
        self._scalars = functions.scalar_names(call.names)
        self.is_simple = not self._scalars and call.device.type == "cpu"  # `run` will do

    def run_with(self, tensors: Sequence[Tensor | None], scalars: Tensor | None) -> None:
        """`run` on any device, with the options' ``scalars``."""
        alive: list[Any] = []
        place = place_of(self._device, partial(_allocate, self._device, alive))
        first = 0 if scalars is None else scalars.data_ptr()
        addresses = {name: first + 4 * i for i, name in enumerate(self._scalars)}
        self.run(tensors, addresses, None if place.device_type == structs.CPU else place)


def rows_of_labels(labels: Tensor | None, first: Tensor) -> torch.Size:
    """The leading shape of ``first``, which is that of the labels, or, where rows have several, theirs but for the last
    dimension."""
    if labels is None or has_several_labels(labels, first):
        return first.shape[:-1]
    return labels.shape


def has_several_labels(labels: Tensor, first: Tensor) -> bool:
    """Whether labels are [..., K]."""
    return labels.dim() == first.dim()


def _allocate(device: torch.device, alive: list[Any], size: int) -> int:
    """No method, as a call that its own arguments hold would keep its tensors until Python looks for cycles."""
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    alive.append(workspace)
    return workspace.data_ptr()


def place_of(device: torch.device, allocate: Callable[[int], int] | None = None) -> Place:
    """In the words of the ABI: the device, and its current stream."""
    if device.type == "cpu":
        return Place()
    stream = torch.cuda.current_stream(device)
    return Place(structs.CUDA, device.index, stream.cuda_stream, allocate)


def scale_gradient(gradient: Tensor, factor: Tensor) -> None:
    """gradient *= factor, in place and on the device's current stream: in float32, rounded once more. The device looks at the
    factor, and leaves the gradient alone where that is 1. ``gradient`` is a new one, or lies over logits."""
    lie, cols = _layout(gradient), gradient.shape[-1]
    assert lie is not None
    rows, place = lie.group_rows or lie.rows, place_of(gradient.device)
    step = lie.group_stride * gradient.element_size()
    for group in range(lie.rows // rows if gradient.numel() else 0):
        calls.scale_gradient(
            place,
            gradient.data_ptr() + group * step,
            DTYPES[gradient.dtype],
            (rows, cols),
            lie.row_stride,
            factor.data_ptr(),
        )
    torch.autograd.graph.increment_version(gradient)


def check_errors(device: torch.device | str | int | None = None) -> None:
    """Raises what the calls on a CUDA device found wrong while they ran, since this was last asked.

    A call only queues its work there, and cannot raise for what the device alone can look at: labels, numbers given as tensors,
    sequence offsets, a sparse teacher's ids. The rows concerned are NaN, outputs and gradients, and so is the loss of all rows.
    This waits until the device's current stream has done what it was given, and raises the first such error, which is forgotten
    then. On the CPU calls raise by themselves, and nothing is left to say here.

    Args:
        device: which; None: torch's current CUDA device.

    Raises:
        IndexError: a label out of range. ValueError: another of these was wrong. The message names it and its place.
        NotImplementedError: this build has no CUDA device.
    """
    device = torch.device("cuda") if device is None else torch.device(device)
    if device.type == "cpu":
        return
    if device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    place = place_of(device)
    torch.cuda.current_stream(device).synchronize()
    calls.check_errors(place, ARGUMENT_NAMES)


def new_gradient(like: Tensor, kind: str) -> Tensor:
    """An uninitialised contiguous tensor. A large one on the CPU lies on huge pages, in the memory that the last one of its kind
    had, if that was freed (see _pages)."""
    lent = _pages.lend(like, kind) if like.is_cpu and like.nbytes >= _pages.LARGE else None
    if lent is not None:
        return lent
    if like.is_contiguous():
        return torch.empty_like(like)
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def check_in_place(logits: Tensor) -> None:
    if _layout(logits) is None:
        raise ValueError(
            "inplace_backward: expected logits whose rows can be written where they lie (last stride 1, no broadcast), "
            f"got shape {list(logits.shape)} with strides {list(logits.stride())}{', negated' * logits.is_neg()}"
        )


def _layout(tensor: Tensor) -> Layout | None:
    """How the rows of [..., C] lie, if the ABI can say it (also of x[:, :-1])."""
    if tensor.is_neg():
        return None
    if tensor.is_contiguous() and (size := tensor.numel()) > 0:
        cols = tensor.shape[-1]
        return Layout(size // cols, cols)
    return views.layout(tensor.shape, tensor.stride())


# What follows returns what must outlive the call: the tensor, or a copy where the ABI cannot say how it lies, or the slot takes
# other types.


def _set_matrix(args: Args, slot: str, tensor: Tensor, rows: int = 0) -> Tensor:
    """``rows``: of the call."""
    shape = SLOTS[slot].shape
    if shape == "N,V" and args.logits.rows:
        return _set_target_rows(args, slot, tensor)
    if shape == "N,W":
        return _set_words(args, slot, tensor, rows)
    if shape[0] == "N":
        tensor = tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])
    tensor = tensor.resolve_neg()
    if not tensor.is_contiguous() and (
        not views.lies_apart(tensor.shape, tensor.stride())
        or (shape == "N,V" and tensor.stride(-1) != 1)
    ):
        tensor = tensor.contiguous()
    dtype = DTYPES[tensor.dtype]
    calls.set_matrix(args, slot, tensor.data_ptr(), dtype, tensor.shape, tensor.stride())
    return tensor


def _set_words(args: Args, slot: str, tensor: Tensor, rows: int) -> Tensor:
    """Sets of columns, [..., W] or one for all rows, [W]: a row's may be another's."""
    words = tensor.shape[-1]
    tensor = (
        tensor.resolve_neg().expand(rows, words)
        if tensor.dim() == 1
        else tensor.reshape(rows, words)
    )
    if words > 1 and tensor.stride(1) != 1:
        tensor = tensor.contiguous()
    dtype = DTYPES[tensor.dtype]
    calls.set_matrix(args, slot, tensor.data_ptr(), dtype, tensor.shape, (tensor.stride(0), 1))
    return tensor


def _set_logits(args: Args, logits: Tensor, dlogits: Tensor | None) -> Tensor:
    """[..., V] as [N,V]. ``dlogits`` is contiguous, or the logits themselves."""
    lie = _layout(logits)
    if lie is None:
        logits = logits.resolve_neg().contiguous()
        lie = Layout(logits.numel() // logits.shape[-1], logits.shape[-1])
    dtype, cols = DTYPES[logits.dtype], logits.shape[-1]
    calls.set_logits(args, logits.data_ptr(), dtype, cols, lie)
    if dlogits is not None:
        calls.set_dlogits(args, dlogits.data_ptr(), dtype, cols, lie, dlogits is logits)
    return logits


def _set_target_rows(args: Args, slot: str, tensor: Tensor) -> Tensor:
    """A teacher's logits, or class probabilities: [..., V] as [N,V], after the logits, whose groups of rows it shares."""
    lie, groups, cols = _layout(tensor), args.row_groups, tensor.shape[-1]
    if lie is None or (lie.group_rows and groups.rows and lie.group_rows != groups.rows):
        tensor = tensor.resolve_neg().contiguous()
        lie = Layout(tensor.numel() // cols, cols)
    if lie.group_rows and not groups.rows:
        groups.rows = lie.group_rows
        groups.logits_stride = lie.group_rows * args.logits.row_stride
        groups.dlogits_stride = lie.group_rows * args.dlogits.row_stride
    if groups.rows:
        own = groups.rows * lie.row_stride
        groups.teacher_logits_stride = lie.group_stride if lie.group_rows else own
    strides = (lie.row_stride, 1)
    dtype = DTYPES[tensor.dtype]
    calls.set_matrix(args, slot, tensor.data_ptr(), dtype, (lie.rows, cols), strides)
    return tensor


def _set_vector(args: Args, slot: str, tensor: Tensor) -> Tensor:
    """[...] as [N] with one stride, 0 for a broadcast value."""
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if tensor.dtype not in _TAKEN[slot]:
        wanted = SLOT_DTYPES[slot]
        tensor = tensor.ne(0) if wanted == torch.uint8 else tensor.to(wanted)
    if slot == "class_weights":  # looked up by label: the ABI wants them without gaps
        tensor = tensor.contiguous()
    if tensor.dim() != 1 and not tensor.is_contiguous():
        tensor = tensor.reshape(-1)
    stride = tensor.stride(0) if tensor.dim() == 1 else 1
    address, dtype = tensor.data_ptr(), DTYPES[tensor.dtype]
    calls.set_vector(args, slot, address, dtype, tensor.numel(), stride)
    return tensor
