"""From a public function's arguments to its results: the operator that serves the call.

What the checks of the arguments find, and which operator it is to be, is the same for all calls whose arguments differ in their
tensors' memory alone. It is kept from the first of them that went well, so that a training step pays for it once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tileloss._core.functions import PUBLIC_OPTIONS
from tileloss._core.slots import ARGUMENTS
from tileloss.torch._apply import FUNCTIONS
from tileloss.torch._arguments import (
    Student,
    Unchecked,
    Value,
    autocast_dtype,
    check_flag,
    checked_tensors,
    encode,
    is_per_row,
)
from tileloss.torch._head import check_apart, checked_head, refuse_with_head_grad
from tileloss.torch._operators import (
    OPERATORS,
    Alike,
    Operators,
    facts,
    is_exported,
    is_traced,
    run,
)

Tensors = Sequence[Tensor | None]


class _Way(NamedTuple):
    """How a call goes."""

    operator: str
    rest: tuple[Any, ...]  # what the operator takes after its tensors
    wants_grad: bool
    in_place: bool  # whether the backward may write over its inputs, or over the gradients that the forward computed
    adds: bool  # whether the backward adds the head's gradient to the caller's last argument
    results: tuple[str, ...]  # the names of what it gives; a row state may follow


class _Known(NamedTuple):
    """That of calls which are alike, and what is kept of the operator's. ``places``: where the operator's tensors after its
    matrices stand among the caller's arguments; None: that one was not given."""

    way: _Way
    alike: Alike
    num_matrices: int
    places: list[int | None]


@lru_cache(maxsize=256)
def _known(*_: Any) -> list[_Known]:
    """Where the first of the calls that are alike leaves how they go."""
    return []


def results_of(
    function: str,
    student: Unchecked,
    given: Mapping[str, Value],
    outputs: tuple[str, ...] = (),
    grad_in_forward: bool | None = False,
    inplace_backward: bool = False,
    *,
    preset: str = "",
) -> dict[str, Tensor]:
    """The loss, and the outputs that were asked for, by their names in the ABI; others are empty, or None. ``function``: its name
    from logits. ``given``: all tensors but the student's, and options, by their names in the ABI."""
    how = preset, grad_in_forward, inplace_backward
    check, arguments = student
    values = (*arguments, *given.values())
    known = None
    if not is_traced() and (found := facts((*values, *how))) is not None:
        modes: list[Any] = [torch.is_grad_enabled(), torch.get_num_threads()]
        if check is checked_head:
            modes += map(autocast_dtype, ("cpu", "cuda"))
        known = _known(function, check, *given, outputs, *modes, *found)
    if known:
        way, alike, count, places = known[0]
        kept = [None if place is None else values[place] for place in places]
        return _run(way, values[:count], kept, arguments[-1], alike)
    checked = check(*arguments)
    tensors = checked_tensors(function, checked, given, given)
    way = _way_of(checked.name_of(function), checked, given, outputs, *how)
    if known is None or any(isinstance(each, Tensor) for each in way.rest):
        return _run(way, checked.matrices, tensors, arguments[-1])
    count, alike = len(checked.matrices), []
    slots = ARGUMENTS[checked.name_of(function)].slots[count:]
    places = _places_of(slots, tensors, given, len(arguments))
    results = _run(way, checked.matrices, tensors, arguments[-1], alike if places else None)
    if places:
        known.append(_Known(way, alike, count, places))
    return results


def _run(
    way: _Way, matrices: Tensors, tensors: Tensors, last: Any, alike: Alike | None = None
) -> dict[str, Tensor]:
    """``last``: of the student's arguments, for a way that adds. ``alike``: what is kept of the operator's calls like this one;
    None: whether somebody traces is still to be asked."""
    inputs: tuple[Any, ...] = (*tensors, *way.rest)
    if way.adds:
        check_apart(last, matrices)
        inputs = (*inputs, last)
    if alike is None and is_traced():
        results = getattr(torch.ops.tileloss, way.operator)(*matrices, *inputs)
    elif way.wants_grad:
        results = FUNCTIONS[way.operator].apply(*matrices, inputs, way.in_place, alike)
    else:
        results = run(way.operator, (*matrices, *inputs), alike)
    results = results if isinstance(results, tuple) else (results,)
    return dict(zip(way.results, results, strict=False))


def _places_of(
    slots: Sequence[str], tensors: Tensors, given: Mapping[str, Value], first: int
) -> list[int | None]:
    """Of ``tensors``, by their slots, among the arguments, of which ``given`` begins at ``first``; [] where one of them is
    another than the caller's."""
    names, places = [*given], list[int | None]()
    for slot, tensor in zip(slots, tensors, strict=True):
        own = given.get(slot)
        if tensor is None:
            places.append(None)
        elif isinstance(own, Tensor) and _is_same(tensor, own):
            places.append(first + names.index(slot))
        else:
            return []
    return places


def _is_same(tensor: Tensor, own: Tensor) -> bool:
    """Whether the caller's ``own`` may stand for it, which was detached."""
    if tensor is own:
        return True
    same_type = tensor.dtype == own.dtype and tensor.shape == own.shape
    return same_type and not own.requires_grad and tensor.data_ptr() == own.data_ptr()


def _way_of(
    name: str,
    student: Student,
    given: Mapping[str, Value],
    outputs: tuple[str, ...],
    preset: str,
    grad_in_forward: bool | None,
    inplace_backward: bool,
) -> _Way:
    """``name``: the function's at the student's level."""
    check_flag("grad_in_forward", grad_in_forward, None)
    check_flag("inplace_backward", inplace_backward)
    op = OPERATORS[name]
    named = {name: given[name] for name in PUBLIC_OPTIONS[op.name] if name in given}
    options = (*encode(op.name, named, student.first.device, preset), *student.head_options)
    needs = student.needs()
    wants_grad, in_place = True in needs, inplace_backward and not is_traced()
    if wants_grad and _is_in_forward(grad_in_forward, op, student, given, in_place):
        if is_exported():
            needs = student.has()
        needed = [name for name, need in zip(op.gradients, needs, strict=True) if need]
        gradients = () if in_place else op.gradients
        return _Way(
            f"{op.name}_value_and_grad{'_' * in_place}",
            (*options, ",".join((*needed, *outputs))),
            wants_grad=True,
            in_place=True,
            adds=False,
            results=(op.results[0], *gradients, *op.results[1:]),
        )
    asked = (*outputs, "row_state") if wants_grad and op.has_state else outputs
    operator = f"{op.name}_adding" if student.adds else op.name
    rest = (*options, ",".join(asked))
    return _Way(operator, rest, wants_grad, in_place, student.adds, op.results)


def _is_in_forward(
    asked: bool | None,
    op: Operators,
    student: Student,
    given: Mapping[str, Value],
    in_place: bool,
) -> bool:
    """Whether the gradient is made with the loss. That is the default with a head, where it saves a product; of a target that is
    more than labels, where a backward of its own makes all of the forward's sums again; and of labels from logits on a GPU, where
    it saves a read of them, but while somebody traces, as a compiled backward multiplies by 1 too. It is not for float16, which
    AMP's scale would reach too late, not in place, where the logits are the caller's until the backward, and not for a program
    that is exported while some tensors ask for no gradient. A loss per row with a head takes two passes whatever is asked, and so
    does one that adds its head's gradient to a tensor of the caller's."""
    per_row = is_per_row(given)
    if student.adds:
        refuse_with_head_grad(asked)
        return False
    if asked is None:
        saves = op.is_linear or not op.has_state or (student.first.is_cuda and not is_traced())
        by_default = saves and (op.is_linear or not (in_place or per_row))
        if by_default and is_exported():
            by_default = student.needs() == student.has()
        asked = by_default and not student.has_float16_gradient()
    if asked and per_row and not op.is_linear:
        raise ValueError(
            "grad_in_forward: expected False for a loss per row (reduction or aggregation 'none'), whose upstream gradient "
            "has to be known, got True"
        )
    return asked and not per_row
