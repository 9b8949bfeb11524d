"""The gradients of a rank's shard: what is written, and what the ranks add up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tileloss.torch._call import Call
from tileloss.torch._ops_linear import new_head_gradients
from tileloss.torch._tensors import check_in_place, new_gradient
from tileloss.torch.distributed._meeting import Group, Sum
from tileloss.torch.distributed._request import Operands, Request


def gradients_of(
    request: Request,
    given: Operands,
    needs: Sequence[bool],
    group: Group,
    in_place: bool,
    run: Callable[[Call], None],
) -> tuple[Tensor | None, ...]:
    """Of the operands' matrices, those that are needed. ``run``: makes the backward call, which has its operands and
    gradients, with the upstream gradient and the states."""
    if request.is_linear:
        return _of_head(request, given, needs, group, run)
    return (_of_logits(request, given, in_place, run),) if needs[0] else ()


def _of_logits(
    request: Request, given: Operands, in_place: bool, run: Callable[[Call], None]
) -> Tensor:
    logits = given.matrices[0]
    assert logits is not None
    if request.shards.mine.columns == 0:
        return torch.zeros_like(logits)
    if in_place:
        check_in_place(logits)
        dlogits = logits = logits.detach()
        given = given._replace(matrices=(logits,))
    else:
        dlogits = new_gradient(logits, "dlogits")
    run(request.backward(given, dlogits))
    if in_place:
        torch.autograd.graph.increment_version(logits)
    return dlogits


def _of_head(
    request: Request,
    given: Operands,
    needs: Sequence[bool],
    group: Group,
    run: Callable[[Call], None],
) -> tuple[Tensor | None, ...]:
    """dhidden is summed over the ranks, in float32; those of head and bias are this rank's own."""
    hidden = given.matrices[0]
    assert hidden is not None
    dhidden = Sum(hidden.shape, group) if needs[0] else None
    try:
        if request.shards.mine.columns == 0:
            gradients: Any = [None if x is None else torch.zeros_like(x) for x in given.matrices]
        else:
            call, part = request.backward(given), None if dhidden is None else dhidden.part
            gradients = list(new_head_gradients(call, given.matrices, needs, part))
            run(call)
    except Exception as error:
        if dhidden is not None:
            dhidden.collect(error)
        raise
    if dhidden is not None:
        gradients[0] = dhidden.collect().to(hidden.dtype)
    return tuple(g if need else None for g, need in zip(gradients, needs, strict=True))
