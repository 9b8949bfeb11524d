"""DTensors of torch.distributed, and other tensors without memory of their own, as the plain tensors that the library takes."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor


def is_dtensor(tensor: Any) -> bool:
    """Under torch.compile, which traces no collective of ours, nothing is."""
    if type(tensor) in (Tensor, torch.nn.Parameter) or torch.compiler.is_compiling():
        return False
    module = sys.modules.get("torch.distributed.tensor")  # whoever has a DTensor has imported it
    return module is not None and isinstance(tensor, module.DTensor)


def local_rows(name: str, tensor: Any) -> Any:
    """Logits, hidden states, labels, numbers, ...: a replicated DTensor as this process's own tensor.

    Raises ValueError for a DTensor that is not replicated: a loss of some of the rows would pass for that of all.
    """
    if not is_dtensor(tensor):
        return unwrapped(name, tensor)
    if not all(placement.is_replicate() for placement in tensor.placements):
        raise ValueError(
            f"{name}: expected a plain tensor or a replicated DTensor, got one with placements {tensor.placements}: give this "
            "process's rows, to_local(), or gather them, full_tensor()"
        )
    return tensor.to_local()


def whole_parameter(name: str, tensor: Any) -> Any:
    """The LM head's weight or bias: a replicated or sharded DTensor, as FSDP2 leaves them, gathered.

    Its gradient goes back as the mean over the mesh's processes, which is what FSDP makes of it where each has rows of its own,
    and where all have the same rows, as under tensor parallelism, leaves it as it is.
    """
    if not is_dtensor(tensor):
        return unwrapped(name, tensor)
    from torch.distributed.tensor import Replicate, Shard

    if not all(type(placement) in (Replicate, Shard) for placement in tensor.placements):
        raise ValueError(
            f"{name}: expected a plain tensor, or a DTensor that is replicated or sharded, got one with placements "
            f"{tensor.placements}: redistribute it first, e.g. {name}.redistribute(placements=[Replicate()])"
        )
    whole: Tensor = _Whole.apply(tensor)
    return whole


# How somebody else's wrapper subclass gives the tensor that it stands for: torchao's NF4Tensor, its others.
_METHODS = ("get_original_weight", "dequantize")


def unwrapped(name: str, tensor: Any) -> Any:
    """A wrapper subclass, which has no memory to read (a quantized weight of torchao, say), as what its own method makes of it;
    anything else as it is.

    Raises TypeError for one that has no such method, or would lose its gradient.
    """
    kind = type(tensor)
    if (
        not isinstance(tensor, Tensor)
        or kind.__torch_dispatch__ is Tensor.__torch_dispatch__
        or kind.data_ptr is not Tensor.data_ptr  # knows where its memory is
        or kind.__module__.startswith("torch.")  # fake tensors, futures of collectives, ...
    ):
        return tensor
    method = next(
        (m for m in _METHODS if getattr(kind, m, None) is not getattr(Tensor, m, None)), None
    )
    words = f"{name}: expected a plain tensor, got the wrapper subclass {kind.__module__}.{kind.__qualname__}"
    if method is None:
        raise TypeError(
            f"{words}, which has no method dequantize: give the tensor that it stands for"
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        raise TypeError(
            f"{words}, which requires a gradient: freeze it, requires_grad_(False), or give the tensor that it stands for"
        )
    plain = getattr(tensor, method)()
    if type(plain) is not Tensor:
        raise TypeError(f"{words}, whose {method}() gives {type(plain).__name__}")
    return plain


class _Whole(torch.autograd.Function):
    """DTensor.full_tensor, whose own gradient would be a slice of this process's gradient: not summed over the processes."""

    @staticmethod
    def forward(ctx: Any, parameter: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.mesh, ctx.placements = parameter.device_mesh, parameter.placements
        whole: Tensor = parameter.full_tensor()
        return whole.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        if grad is None:  # it was added to a tensor of the caller's
            return None
        from torch.distributed.tensor import DTensor, Partial

        share = grad / ctx.mesh.size()
        parts = DTensor.from_local(share, ctx.mesh, [Partial()] * ctx.mesh.ndim, run_check=False)
        return parts.redistribute(placements=ctx.placements)
