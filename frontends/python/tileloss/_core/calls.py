"""Plan and call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_int64
from functools import lru_cache
from math import prod
from typing import Any

from tileloss._core import options as options_by_name
from tileloss._core import views
from tileloss._core.functions import FUNCTIONS, Function
from tileloss._core.library import lib, raise_on_error
from tileloss._core.options import Struct
from tileloss._core.slots import Args
from tileloss._core.structs import (
    BFLOAT16,
    FLOAT32,
    FORWARD,
    INT64,
    INTERNAL,
    PASS_NAMES,
    MergeFunction,
    Plan,
    PlanOptions,
    Run,
)

_ARGS_BYTES, _PLAN_BYTES = ctypes.sizeof(Args), ctypes.sizeof(Plan)
_calls: dict[str, int] = {}


def new_args() -> Args:
    return Args(_ARGS_BYTES)


def call_counts() -> dict[str, int]:
    """How often each function's kernels ran in this process, by "function/pass"."""
    return dict(_calls)


@lru_cache(maxsize=64)
def _plan_options(threads: int, workspace_bytes: int) -> PlanOptions:
    return PlanOptions(
        struct_size=ctypes.sizeof(PlanOptions), threads=threads, workspace_bytes=workspace_bytes
    )


class _Merging:
    """The tileloss_run of a call that is given other shards' states between its forward and its gradient."""

    def __init__(self, merge: Callable[[], None]) -> None:
        self.failure: BaseException | None = None

        def guarded(_: int | None) -> int:
            try:
                merge()
            except BaseException as error:  # no exception crosses C
                self.failure = error
                return INTERNAL
            return 0

        self.function = MergeFunction(guarded)  # lives as long as the call
        self.run = Run(struct_size=ctypes.sizeof(Run), merge=self.function)


def call(
    function: Function,
    call_pass: int,
    args: Args,
    options: Struct,
    *,
    threads: int = 0,
    workspace_bytes: int = 0,
    renamed: Mapping[str, str] | None = None,
    merge: Callable[[], None] | None = None,
) -> None:
    """Plans and runs. ``threads`` and ``workspace_bytes``: at most this many; 0: the library's choice. ``renamed``: what errors
    are to call the ABI's arguments. ``merge``: tileloss_run's; what it raises ends the call and is raised here."""
    plan = Plan(_PLAN_BYTES)
    args_pointer, plan_pointer = byref(args), byref(plan)
    wishes = byref(_plan_options(threads, workspace_bytes))
    status = lib.tileloss_make_plan(
        function.encoded, call_pass, args_pointer, options, wishes, None, plan_pointer
    )
    if status == 0:
        merging = None if merge is None else _Merging(merge)
        run = None if merging is None else byref(merging.run)
        status = lib.tileloss_call(
            function.encoded, call_pass, args_pointer, options, plan_pointer, run
        )
        if merging is not None and merging.failure is not None:
            raise merging.failure
    raise_on_error(status, renamed)
    key = f"{function.name}/{PASS_NAMES[call_pass]}"
    _calls[key] = _calls.get(key, 0) + 1


def set_sequences(
    args: Args, function: Function, names: str, options: Struct, shape: Sequence[int]
) -> tuple[Struct, Any]:
    """Labels [..., T] without offsets: each row of the batch is a sequence. Returns the call's options, which ``names`` made, and
    what has to outlive it.

    Of sequences without tokens only offsets can say how many there are. With offsets the library knows no T to stand for
    max_length; as there is nothing to divide, any will do.
    """
    length = args.sequence_length = shape[-1] if len(shape) > 1 else prod(shape)
    if length > 0:
        return options, None
    offsets = (c_int64 * (prod(shape[:-1]) + 1))()
    views.set_vector(args, "sequence_offsets", ctypes.addressof(offsets), INT64, len(offsets), 1)
    if "max_length" not in options_by_name.given_names(names):
        options = options_by_name.copied(options)
        function.set_value(options, "max_length", 1)
    return options, offsets


def chosen_isa() -> str:
    """The instruction set that the planner takes: what TILELOSS_ISA says, else the best that this machine has."""
    args, plan, function = new_args(), Plan(_PLAN_BYTES), FUNCTIONS["cross_entropy"]
    views.set_matrix(args, "logits", 0, BFLOAT16, (1, 2), (2, 1))
    views.set_vector(args, "labels", 0, INT64, 1, 1)
    views.set_vector(args, "loss", 0, FLOAT32, 1, 1)
    pointers = (byref(args), function.new_options(""), None, None, byref(plan))
    raise_on_error(lib.tileloss_make_plan(function.encoded, FORWARD, *pointers))
    return str(lib.tileloss_isa_name(plan.cpu.isa).decode())
