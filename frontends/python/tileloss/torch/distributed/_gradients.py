"""The gradients of a rank's shard: what is written, and what the ranks add up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tileloss.torch._call import Call, check_in_place, new_gradient
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
        return _head_gradients(request, given, needs, group, run)
    return (_logits_gradient(request, given, in_place, run),) if needs[0] else ()


def _logits_gradient(
    request: Request, given: Operands, in_place: bool, run: Callable[[Call], None]
) -> Tensor:
    (logits,) = given.matrices
    assert logits is not None
    if request.shards.mine.columns == 0:
        return torch.zeros_like(logits)
    if in_place:
        check_in_place(logits)
        dlogits = logits.detach()
        given = given._replace(matrices=(dlogits,))
    else:
        dlogits = new_gradient(logits, "dlogits")
    run(request.backward(given, (dlogits,)))
    if in_place:
        torch.autograd.graph.increment_version(dlogits)
    return dlogits


def _head_gradients(
    request: Request,
    given: Operands,
    needs: Sequence[bool],
    group: Group,
    run: Callable[[Call], None],
) -> tuple[Tensor | None, ...]:
    """Those of hidden states are summed over the ranks, in float32; those of heads and bias are this rank's own. The head's is
    None where it is added to a tensor of the caller's."""
    asked = [x if need else None for x, need in zip(given.matrices, needs, strict=True)]
    hidden, head, bias, hidden_r, head_r = asked
    sums = Sum((hidden, hidden_r), group)
    head_grad = None if head is None else request.head_grad
    dhead = None if head is None or head_grad is not None else new_gradient(head, "dhead")
    dbias = None if bias is None else new_gradient(bias, "dbias")
    dhead_r = None if head_r is None else new_gradient(head_r, "dhead_r")
    is_empty = request.shards.mine.columns == 0
    for gradient in (dhead, dbias, dhead_r):
        if gradient is not None and (is_empty or head_grad is not None):
            gradient.zero_()
    try:
        if not is_empty:
            part, part_r = sums.parts
            own = dhead if head_grad is None else head_grad, dbias, part_r, dhead_r
            call = request.backward(given, (part, *own))
            if head_grad is not None:
                call.set_options(accumulate=1)
            run(call)
            if head_grad is not None:
                torch.autograd.graph.increment_version(head_grad)
    except Exception as error:
        sums.collect(error)
        raise
    dhidden, dhidden_r = sums.collect()
    return dhidden, dhead, dbias, dhidden_r, dhead_r
