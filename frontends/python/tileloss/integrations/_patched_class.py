"""The class of a patched model: derived from its own, with another forward.

The forward stands in the class, not on the instance, so that it takes the module that it is called on: copies, replicas of
nn.DataParallel, models that come from a pickle. A pickle names the class below, and what loads it derives from that again.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from tileloss.integrations import _forward_plan, _forward_source, _fused_forward, _inner_forward
from tileloss.integrations._forward_source import UnknownForward


class Patched:
    """Among the bases of every patched model's class."""

    forward: Callable[..., Any]
    tileloss_own: type[Any]  # the class that it is derived from
    tileloss_plan: Any  # a ForwardPlan; or the name of the causal LM inside, whose logits that one's forward takes

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        if "tileloss_own" not in type(self).__dict__:  # derived from again, by fully_shard
            return reduced
        return _new, (type(self).tileloss_own,), *reduced[2:]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward" and not reaches(value, type(self).forward):
            warnings.warn(
                f"{type(self).__name__}.forward: replaced by one of {_forward_source.module_of(value)} after tileloss's patch: "
                "the loss comes from that one now (use_liger_kernel=True does so: of the two, use one)",
                stacklevel=2,
            )
        super().__setattr__(name, value)


def patched_class(own: Any) -> Any:
    """The class of a patched model whose class is ``own``.

    Raises UnknownForward, naming class and statement, for a forward that cannot be done without logits.
    """
    return own if issubclass(own, Patched) else _derived(own, own.forward)


@functools.cache
def _derived(own: Any, original: Callable[..., Any]) -> Any:
    plan: Any
    try:
        plan = _forward_plan.read_forward(own)
        forward = _fused_forward.make_forward(plan, original)
    except UnknownForward as error:
        try:
            plan = _inner_forward.read_inner(own)
        except UnknownForward:
            raise error from None
        forward = _inner_forward.make_forward(plan, original)
    names = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
    space = names | {"forward": forward, "tileloss_own": own, "tileloss_plan": plan}
    return type(own)(own.__name__, (Patched, own), space)


def _new(own: Any) -> Any:
    kind = patched_class(own)
    return kind.__new__(kind)


def reaches(forward: Any, ours: Callable[..., Any]) -> bool:
    """Whether ``ours`` is the model's forward, or lies under wrappers of it."""
    while getattr(forward, "__func__", forward) is not ours:
        if not hasattr(forward, "__wrapped__"):
            return False
        forward = forward.__wrapped__
    return True


def is_dispatched(model: Any) -> bool:
    """Whether accelerate's hooks stand around the model's own forward, or around ours of a patch that has ended."""
    old = getattr(model.__dict__.get("_old_forward"), "__func__", None)
    known = (type(model).forward, _known_forward(type(model)))
    return "_hf_hook" in model.__dict__ and old in known


def drop_own_forward(model: Any) -> None:
    """Takes a forward of ours off the instance, where accelerate leaves it with its hooks. Raises ValueError for any other."""
    forward = getattr(model.forward, "__func__", model.forward)
    if forward is _known_forward(type(model)):
        del model.forward
        return
    around = _forward_source.module_of(forward)
    if around.startswith("liger_kernel"):
        raise ValueError(
            f"model: its forward is Liger's, {around} (use_liger_kernel=True), which would never call tileloss: of the two, use "
            "one (liger_kernel_config={'fused_linear_cross_entropy': False} keeps Liger's other kernels)"
        )
    raise ValueError(
        "model: expected its own forward, got one replaced on this instance; patch it before wrapping it "
        "(accelerator.unwrap_model(model, keep_fp32_wrapper=False) removes accelerate's)"
    )


def _known_forward(own: Any) -> Any:
    try:
        return patched_class(own).forward
    except UnknownForward:
        return None
