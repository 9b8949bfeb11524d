"""A public function's arguments, checked: the side that learns, what its rows are compared with, what goes with them, options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tileloss._core import functions
from tileloss._core.functions import FUNCTIONS, Function
from tileloss._core.slots import ARGUMENTS, SLOTS
from tileloss._core.structs import INT64, Scalar
from tileloss._core.views import WORD, words_of
from tileloss.torch._call import ARGUMENT_NAMES, has_several_labels, rows_of_labels
from tileloss.torch._dtensor import local_rows, whole_parameter

Value = float | int | bool | str | Tensor | None
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_NUMBERS = (int, float, torch.SymFloat, torch.SymInt)
_NO_FORWARD_MODE = "tileloss: forward-mode differentiation is not supported"


def plain(name: str, tensor: Any, of_dtensor: Callable[[str, Any], Any] = local_rows) -> Any:
    """A DTensor as the plain tensor that ``of_dtensor`` makes of it, anything else as it is."""
    if type(tensor) in (Tensor, torch.nn.Parameter) or tensor is None:
        return tensor
    return of_dtensor(name, tensor)


# ------------------------------------------------------------------------------------------------------ the side that learns


class Student(NamedTuple):
    """What gradients are of: logits [..., V], or hidden states [..., H] and the LM head that makes the logits of them."""

    matrices: tuple[Tensor | None, ...]  # logits; or hidden, head, bias and a low-rank part's two
    first: Tensor  # of these
    vocab: int
    head_options: tuple[int, ...] = ()  # compute_dtype and workspace_bytes
    adds: bool = False  # the head's gradient to a tensor of the caller's

    def name_of(self, function: str) -> str:
        """A function's name at this level."""
        return f"linear_{function}" if self.head_options else function

    def has(self) -> list[bool]:
        """Which of the matrices are there."""
        return [x is not None for x in self.matrices]

    def needs(self) -> list[bool]:
        """Whether gradients of the matrices are asked for."""
        if not torch.is_grad_enabled():
            return [False] * len(self.matrices)
        return [x is not None and x.requires_grad for x in self.matrices]

    def has_float16_gradient(self) -> bool:
        """A gradient that is stored in float16 before it is multiplied by AMP's scale loses what the scale is there to save."""
        tensors = zip(self.matrices, self.needs(), strict=True)
        return any(need and x is not None and x.dtype == torch.float16 for x, need in tensors)


def checked_logits(input: Tensor, least_columns: int = 1) -> Student:
    logits = plain("input", input)
    check_float("input", logits)
    refuse_transforms(logits)
    check_last_dimension(logits, least_columns)
    return Student((logits,), logits, logits.shape[-1])


# The side that learns as the caller gave it: its check, and what that takes, the matrices first. No class, as one is made a call.
Unchecked = tuple[Callable[..., Student], tuple[Any, ...]]


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What `torch.autocast` computes in on that type of device, None outside of it."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


# ------------------------------------------------------------------------------------------- what goes with the student's rows


def is_probabilities(target: Any) -> bool:
    """Whether class probabilities stand for the labels, as `torch.nn.functional.cross_entropy` takes them."""
    return isinstance(target, Tensor) and target.is_floating_point()


def checked_tensors(
    function: str, student: Student, tensors: Mapping[str, Any], given: Any, several: bool = True
) -> list[Tensor | None]:
    """What follows the student's matrices in ARGUMENTS, checked and detached. ``tensors``: by their names in the ABI; those that
    are not there are None. ``several``: of logprobs, which then takes several labels a row."""
    arguments, labels = ARGUMENTS[student.name_of(function)], tensors.get("labels")
    if labels is not None or not arguments.target:
        labels = plain("target", labels)
        labels = _checked_labels(labels, student.first, function == "logprobs" and several)
    rows = rows_of_labels(labels, student.first)
    checked: list[Tensor | None] = []
    sizes = {"V": student.vocab}
    for slot in arguments.target:
        checked.append(_checked_target(slot, tensors.get(slot), student, rows, sizes))
    checked.append(labels)
    for slot in arguments.inputs:
        tensor = tensors.get(slot)
        if tensor is not None:
            tensor = _checked_input(slot, tensor, student, rows, given)
        checked.append(tensor)
    return checked


def empty_slots(labels: Any, first: Any, ignore_index: Value) -> Tensor | None:
    """A slot for each row where labels are [..., 0], as the ABI has no rows without; else None. What is wrong with them stays."""
    # The dimensions first: a compiled program may not know how many rows there are before it runs.
    try:
        has_none = labels.ndim == first.ndim and labels.shape[-1:] == (0,)
    except AttributeError:
        return None
    if not has_none or not isinstance(labels, Tensor):
        return None
    dtype = torch.int64 if labels.dtype == torch.uint8 else labels.dtype
    usual = int(FUNCTIONS["logprobs"].options["ignore_index"].default)
    ignored = ignore_index if isinstance(ignore_index, int) else usual
    return labels.new_full((*labels.shape[:-1], 1), ignored, dtype=dtype)


def _checked_labels(target: Tensor, first: Tensor, several: bool) -> Tensor:
    """Labels as int32 or int64, of the leading shape of ``first``; ``several``: they may be [..., K]."""
    if not isinstance(target, Tensor):
        raise TypeError(f"target: expected a Tensor, got {type(target).__name__}")
    if target.dtype not in (torch.int64, torch.int32, torch.uint8):
        raise TypeError(f"target: expected int64, int32 or uint8, got {target.dtype}")
    check_device("target", target, first.device)
    rows = first.shape[:-1]
    wanted = (*rows, target.shape[-1]) if several and has_several_labels(target, first) else rows
    if not has_shape(target, wanted):
        also = f" or {[*rows, 'K']}".replace("'", "") if several else ""
        raise ValueError(
            f"target: expected the leading shape of input, {list(rows)}{also}, got {list(target.shape)}"
        )
    # The ABI has no labels of 8 bits.
    return target.long() if target.dtype == torch.uint8 else target


def _checked_target(
    slot: str, tensor: Any, student: Student, rows: Sequence[int], sizes: dict[str, int]
) -> Tensor | None:
    """``sizes``: of the letters of the slots' shapes as far as they are known."""
    name, of_rows = ARGUMENT_NAMES.get(slot, slot), SLOTS[slot].shape[0] == "N"
    tensor = plain(name, tensor, local_rows if of_rows else whole_parameter)
    if tensor is None and SLOTS[slot].rank == 1:  # a bias
        return None
    if slot == "target_probs":
        check_device(name, tensor, student.first.device)
    elif INT64 in SLOTS[slot].dtypes:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a Tensor, got {type(tensor).__name__}")
        if tensor.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"{name}: expected int64 or int32, got {tensor.dtype}")
        check_device(name, tensor, student.first.device)
    else:
        check_float(name, tensor, student.first.device)
    if of_rows:
        refuse_gradient(name, tensor)
    else:  # a frozen model's parameters may still say that they require a gradient
        refuse_transforms(tensor)
    if slot == "teacher_logits" and tensor.dtype != student.first.dtype:
        raise TypeError(f"{name}: expected input's dtype {student.first.dtype}, got {tensor.dtype}")
    check_shape(slot, tensor, rows, sizes)
    tensor = tensor.detach()
    if slot == "target_probs" and tensor.dtype not in FLOATS:
        tensor = tensor.to(torch.float32)
    return tensor


_SHAPES = {
    "head": "shape {}, as input's last dimension",
    "teacher_logits": "input's shape {}",
    "teacher_logprobs": "teacher_ids' shape {}",
    "target_probs": "labels of an integer type, or class probabilities of the logits' shape {}",
}


def check_shape(slot: str, tensor: Tensor, rows: Sequence[int], sizes: dict[str, int]) -> None:
    """Against the slot's letters: N is ``rows``, others are in ``sizes``, which learns those that it does not know."""
    letters, found = SLOTS[slot].shape.split(","), list(tensor.shape)
    of_rows = letters[0] == "N"
    expected: list[Any] = [*rows] if of_rows else []
    expected += [sizes.get(letter, letter) for letter in letters[of_rows:]]
    unknown = [i for i, size in enumerate(expected) if isinstance(size, str) and i < len(found)]
    wanted = tuple(found[i] if i in unknown else size for i, size in enumerate(expected))
    if not has_shape(tensor, wanted) or (of_rows and any(found[i] == 0 for i in unknown)):
        words = _SHAPES.get(slot, "shape {}").format(f"[{', '.join(map(str, expected))}]")
        got = f"{tensor.dtype} of shape {found}" if slot == "target_probs" else f"{found}"
        raise ValueError(f"{ARGUMENT_NAMES.get(slot, slot)}: expected {words}, got {got}")
    for i in unknown:
        sizes[expected[i]] = found[i]


def _checked_input(
    slot: str, tensor: Any, student: Student, rows: torch.Size, given: Mapping[str, Value]
) -> Tensor:
    name, shape = ARGUMENT_NAMES.get(slot, slot), SLOTS[slot].shape
    tensor = plain(name, tensor)
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a Tensor, got {type(tensor).__name__}")
    check_device(name, tensor, student.first.device)
    if tensor.dtype not in _INTEGERS and not tensor.is_floating_point():
        raise TypeError(f"{name}: expected numbers, got {tensor.dtype}")
    refuse_gradient(name, tensor)
    if shape in ("C", "B+1") and tensor.dim() != 1:
        raise ValueError(f"{name}: expected one dimension, got {list(tensor.shape)}")
    if shape == "C":
        valid = given.get("valid_vocab")
        if isinstance(valid, int) and 0 < valid < student.vocab == tensor.shape[0]:
            tensor = tensor[:valid]
    elif shape == "B+1":
        if tensor.dtype not in _INTEGERS or tensor.dtype == torch.bool:
            raise TypeError(f"{name}: expected integers, got {tensor.dtype}")
    elif shape == "N,W":
        _check_words(name, tensor, rows, student.vocab)
    elif shape == "B|N" and given.get("advantage_level") != "token":
        if tensor.dim() != 1 and (tensor.dim() != 2 or tensor.shape[1] != 1):
            raise ValueError(
                f"{name}: expected [B] or [B, 1] of sequences, or target's shape {list(rows)}, got {list(tensor.shape)}"
            )
    # A number for each row lies as the rows do, or flat: of another shape it would go to other rows than meant.
    elif not has_shape(tensor, rows if tensor.dim() != 1 else (rows.numel(),)):
        raise ValueError(
            f"{name}: expected target's shape {list(rows)}, or [{rows.numel()}], got {list(tensor.shape)}"
        )
    return tensor.detach()


def _check_words(name: str, tensor: Tensor, rows: torch.Size, vocab: int) -> None:
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name}: expected int32 words (allowed_from), got {tensor.dtype}")
    words = words_of(vocab)
    if not any(has_shape(tensor, (*of, words)) for of in ((), rows, (rows.numel(),))):
        raise ValueError(
            f"{name}: expected shape [{words}], one set for all rows, or {[*rows, words]}, a word for {WORD} columns, "
            f"got {list(tensor.shape)}"
        )


# -------------------------------------------------------------------------------------------------------------------- options


class Options(NamedTuple):
    """As an operator takes them: see tileloss._core.functions."""

    names: str
    values: tuple[float, ...]
    scalars: Tensor | None


def encode(
    function: str, given: Mapping[str, Value], device: torch.device, preset: str = ""
) -> Options:
    """``given``: options by their names in losses.md; None: the default, or the preset's. Those that are tensors are brought to
    ``device``."""
    compiling = torch.compiler.is_compiling()
    if not compiling and _PLAIN_VALUES.issuperset(map(type, (preset, *given.values()))):
        return _plain_options(function, preset, tuple(given), *given.values())
    described = FUNCTIONS[function]
    tensors: dict[str, Tensor] = {}
    for name, value in given.items():
        if isinstance(value, Tensor):
            tensors[name] = _as_scalar(described, name, plain(name, value), device)
        elif (
            compiling
            and isinstance(value, (float, int))
            and _changes(described, name, value, preset)
        ):
            # As one of `values` a changing number would be a constant of the graph, compiled anew at each change; torch.compile
            # keeps it symbolic where it is a factor.
            number = described.number(name, value, _NUMBERS)
            tensors[name] = torch.ones(1, dtype=torch.float32, device=device) * number
    if tensors:
        given = {name: value for name, value in given.items() if name not in tensors}
    names, numbers = functions.encode(described, given, preset, list(tensors), _NUMBERS)
    scalars = list(tensors.values())
    joined = None if not scalars else scalars[0] if len(scalars) == 1 else torch.cat(scalars)
    return Options(names, tuple(numbers), joined)


_PLAIN_VALUES = frozenset({type(None), float, int, bool, str})


@lru_cache(maxsize=256, typed=True)
def _plain_options(function: str, preset: str, names: tuple[str, ...], *values: Any) -> Options:
    """Options without a tensor, which most calls have the same of. 1, 1.0 and True are not the same: not each is accepted."""
    given = dict(zip(names, values, strict=True))
    found, numbers = functions.encode(FUNCTIONS[function], given, preset)
    return Options(found, tuple(numbers), None)


def _as_scalar(function: Function, name: str, value: Tensor, device: torch.device) -> Tensor:
    function.option(name)
    if value.numel() != 1:
        raise ValueError(
            f"{name}: expected a number or a tensor of one element, got shape {list(value.shape)}"
        )
    if value.is_complex() or value.is_meta:
        raise TypeError(
            f"{name}: expected a real number with a value, got {value.dtype} on {value.device}"
        )
    refuse_gradient(name, value)
    is_fed = device.type != "cpu"  # on the way to the CPU the value has to be there
    is_there = type(value) is Tensor and not torch.compiler.is_compiling()  # or somebody traces
    if is_fed and is_there and value.is_cpu and torch.cuda.is_current_stream_capturing():
        # Replays would see the number of now, or what lies in its place by then.
        raise ValueError(
            f"{name}: expected a number or a tensor on {device}, as a CUDA graph is being captured, got a tensor on cpu"
        )
    if is_there and value.is_cpu and value.isnan():  # to the library an option that is not given
        raise ValueError(f"{name}: expected a number, got nan")
    return value.detach().to(device, torch.float32, non_blocking=is_fed).reshape(1)


def _changes(function: Function, name: str, value: float, preset: str) -> bool:
    option = function.option(name)
    return option.kind is Scalar and (bool(preset) or value != option.default)


def is_per_row(given: Mapping[str, Value]) -> bool:
    # No preset aggregates by none.
    return "none" in (given.get("reduction"), given.get("aggregation"))


# ----------------------------------------------------------------------------------------------------------------- any tensor


def check_float(name: str, tensor: Tensor, device: torch.device | None = None) -> None:
    """Raises unless ``tensor`` is a float32, bfloat16 or float16 tensor, and where `check_device` wants it."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in FLOATS:
        raise TypeError(f"{name}: expected float32, bfloat16 or float16, got {tensor.dtype}")
    check_device(name, tensor, device)


def check_device(name: str, tensor: Tensor, device: torch.device | None) -> None:
    """``device``: that of input, where the other tensors have to be; None: this is input. All lie by strides."""
    if device is None:
        if not (tensor.is_cpu or tensor.is_cuda):
            raise NotImplementedError(
                f"{name}: expected a CPU or CUDA tensor, got one on {tensor.device}"
            )
    elif tensor.device != device:
        raise ValueError(
            f"{name}: expected a tensor on {device}, where input is, got one on {tensor.device}"
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else tensor.layout
        raise TypeError(f"{name}: expected a dense tensor, torch.strided, got {layout}")


def check_flag(name: str, value: Any, *more: None) -> None:
    """Raises where ``value`` is neither True nor False, nor ``more``."""
    if not isinstance(value, bool) and value not in more:
        words = "True, False or None" if more else "True or False"
        raise TypeError(f"{name}: expected {words}, got {value!r}")


def check_last_dimension(input: Tensor, least: int = 1) -> None:
    if input.dim() == 0:
        raise ValueError("input: expected at least one dimension, got a scalar")
    if input.shape[-1] < least:
        raise ValueError(
            f"input: expected a last dimension of at least 1, got shape {list(input.shape)}"
        )


def may_have_shape(tensor: Tensor, shape: Sequence[int]) -> bool:
    """Whether ``tensor`` has that shape. A size that torch.compile learns only when the graph runs, as that of x[mask], may."""
    if not torch.compiler.is_compiling():
        return tensor.shape == shape
    if tensor.dim() != len(shape):
        return False
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return all(guard_or_true(a == b) for a, b in zip(tensor.shape, shape, strict=True))


def has_shape(tensor: Tensor, shape: Sequence[int]) -> bool:
    """The same; of a size that torch.compile does not know yet the graph checks it, and raises a RuntimeError."""
    if not torch.compiler.is_compiling():
        return tensor.shape == shape
    if not may_have_shape(tensor, shape):
        return False
    for a, b in zip(tensor.shape, shape, strict=True):
        torch._check(a == b)
    return True


def refuse_gradient(name: str, tensor: Tensor) -> None:
    """Raises where autograd would expect a gradient of ``tensor`` and get none."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: expected a tensor without gradient, as it is not differentiated (detach it), got one that requires it"
        )
    refuse_transforms(tensor)


def refuse_transforms(*tensors: Tensor | None) -> None:
    """Raises inside torch.func's transforms, and for dual tensors of forward-mode differentiation: the operators
    would lose the tangent in silence, or fail far from here."""
    if torch.compiler.is_compiling():
        # torch.compile knows the level, but not which tensors are dual. The other transforms are not seen here: under them the
        # operators fail by themselves, or give what they should (vmap without gradients).
        if forward_ad._current_level >= 0:
            raise NotImplementedError(_NO_FORWARD_MODE)
        return
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotImplementedError(
            "tileloss: the transforms of torch.func (vmap, grad, jvp, ...) are not supported: logits and hidden states take any "
            "leading shape, torch.autograd.grad and backward() give gradients"
        )
    refuse_duals(*tensors)


def refuse_duals(*tensors: Tensor | None) -> None:
    if forward_ad._current_level >= 0:
        if any(t is not None and _tangent(t) is not None for t in tensors):
            raise NotImplementedError(_NO_FORWARD_MODE)


def _tangent(tensor: Tensor) -> Tensor | None:
    tangent: Tensor | None = forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-untyped-call]
    return tangent
