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
    """dhidden is summed over the ranks, in float32; those of head and bias are this rank's own. The head's is None where it is
    added to a tensor of the caller's."""
    hidden, head, bias, *_ = given.matrices
    assert hidden is not None and head is not None
    dhidden = Sum(hidden.shape, group, hidden.device) if needs[0] else None
    head_grad = request.head_grad if needs[1] else None
    dhead = new_gradient(head, "dhead") if needs[1] and head_grad is None else None
    dbias = new_gradient(bias, "dbias") if needs[2] and bias is not None else None
    is_empty = request.shards.mine.columns == 0
    for gradient in (dhead, dbias):
        if gradient is not None and (is_empty or head_grad is not None):
            gradient.zero_()
    try:
        if not is_empty:
            part = None if dhidden is None else dhidden.part
            call = request.backward(given, (part, dhead if head_grad is None else head_grad, dbias))
            if head_grad is not None:
                call.set_options(accumulate=1)
            run(call)
            if head_grad is not None:
                torch.autograd.graph.increment_version(head_grad)
    except Exception as error:
        if dhidden is not None:
            dhidden.collect(error)
        raise
    return None if dhidden is None else dhidden.collect().to(hidden.dtype), dhead, dbias
