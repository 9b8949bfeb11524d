"""The arguments of a call, plan and call.

Addresses, shapes and strides are the ABI's views: strides are in elements, dtypes the ABI's numbers. A view is packed into the
arguments in one go, which takes a third of the time of making and assigning ctypes structs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref
from functools import lru_cache
from math import prod
from struct import Struct

from tileloss._core import functions
from tileloss._core.functions import FUNCTIONS, Function
from tileloss._core.library import lib, raise_on_error
from tileloss._core.slots import OFFSETS, Args, Place
from tileloss._core.structs import (
    BFLOAT16,
    CPU,
    FLOAT32,
    FORWARD,
    INT64,
    INTERNAL,
    PASS_NAMES,
    CpuPlanOptions,
    Matrix,
    MergeFunction,
    Plan,
    PlanOptions,
    RowState,
    Run,
)
from tileloss._core.views import Layout

# The fields of Matrix and Vector.
MATRIX, VECTOR = Struct("Q4q4i"), Struct("Q2q4i")
_ARGS_BYTES, _PLAN_BYTES = ctypes.sizeof(Args), ctypes.sizeof(Plan)
_ROW_STATE_BYTES, _RUN_BYTES = ctypes.sizeof(RowState), ctypes.sizeof(Run)
_calls: dict[str, int] = {}


def new_args(place: Place | None = None) -> Args:
    args = Args(_ARGS_BYTES)
    if place is not None:
        args.place = place
    return args


def set_matrix(
    args: Args, slot: str, address: int, dtype: int, shape: Sequence[int], strides: Sequence[int]
) -> None:
    """[R,C] with any strides."""
    MATRIX.pack_into(args, OFFSETS[slot], address, *shape, *strides, dtype, *args.place[:2], 0)


def set_vector(args: Args, slot: str, address: int, dtype: int, size: int, stride: int) -> None:
    """[N] with one stride, 0 for a broadcast value."""
    VECTOR.pack_into(args, OFFSETS[slot], address, size, stride, dtype, *args.place[:2], 0)


def set_logits(args: Args, address: int, dtype: int, cols: int, lie: Layout) -> None:
    set_matrix(args, "logits", address, dtype, (lie.rows, cols), (lie.row_stride, 1))
    if lie.group_rows:
        args.row_groups.rows, args.row_groups.logits_stride = lie.group_rows, lie.group_stride


def set_dlogits(
    args: Args, address: int, dtype: int, cols: int, lie: Layout, in_place: bool
) -> None:
    """The gradient of logits that lie so: over them, or contiguous."""
    stride = lie.row_stride if in_place else cols
    set_matrix(args, "dlogits", address, dtype, (lie.rows, cols), (stride, 1))
    if lie.group_rows:
        own = lie.group_rows * cols
        args.row_groups.dlogits_stride = lie.group_stride if in_place else own


def set_row_state(args: Args, address: int, arrays: int, rows: int) -> None:
    """[K,N] float32, contiguous: the first K of slots.STATE."""
    pitch = rows * 4
    entropy_sum = address + 3 * pitch if arrays > 3 else 0
    state = RowState(
        _ROW_STATE_BYTES, rows, address, address + pitch, address + 2 * pitch, entropy_sum
    )
    state.device_type, state.device_index = args.place[:2]
    args.row_state = ctypes.addressof(state)
    args.kept_row_state = state  # as long as the arguments are


def call_counts() -> dict[str, int]:
    """How often each function's kernels ran in this process, by "function/pass"."""
    return dict(_calls)


@lru_cache(maxsize=64)
def _plan_options(threads: int, workspace_bytes: int) -> PlanOptions:
    return PlanOptions(
        struct_size=ctypes.sizeof(PlanOptions),
        workspace_bytes=workspace_bytes,
        cpu=CpuPlanOptions(threads=threads),
    )


class _Run:
    """The tileloss_run of a call on a device of its own, or one that is given other shards' states between its forward and its
    gradient."""

    def __init__(
        self, place: Place, workspace_bytes: int, merge: Callable[[], None] | None
    ) -> None:
        self.failures: list[BaseException] = []
        self.struct = Run(struct_size=_RUN_BYTES, stream=place.stream)
        if place.allocate is not None and workspace_bytes > 0:
            self.struct.workspace = place.allocate(workspace_bytes)
            self.struct.workspace_bytes = workspace_bytes
        if merge is None:
            return

        # A function that holds `self` would be a cycle, with all that `merge` holds.
        failures = self.failures

        def guarded(_: int | None) -> int:
            try:
                merge()
            except BaseException as error:  # no exception crosses C
                failures.append(error)
                return INTERNAL
            return 0

        self.struct.merge = self.function = MergeFunction(guarded)  # lives as long as the call


def call(
    function: Function,
    call_pass: int,
    args: Args,
    options: functions.Struct,
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
        run = None
        if merge is not None or args.place.device_type != CPU:
            run = _Run(args.place, plan.workspace_bytes, merge)
        run_pointer = None if run is None else byref(run.struct)
        status = lib.tileloss_call(
            function.encoded, call_pass, args_pointer, options, plan_pointer, run_pointer
        )
        if run is not None and run.failures:
            raise run.failures[0]
    if status:
        raise_on_error(status, renamed)
    key = f"{function.name}/{PASS_NAMES[call_pass]}"
    _calls[key] = _calls.get(key, 0) + 1


def scale_gradient(
    place: Place, address: int, dtype: int, shape: Sequence[int], row_stride: int, factor: int
) -> None:
    """[R,C] times the float32 at the address ``factor``, both at ``place``: in place, on its stream."""
    gradient = Matrix(address, *shape, row_stride, 1, dtype, *place[:2])
    run = Run(struct_size=_RUN_BYTES, stream=place.stream)
    raise_on_error(lib.tileloss_scale_gradient(byref(gradient), factor, byref(run)))


def check_errors(place: Place, renamed: Mapping[str, str] | None = None) -> None:
    """Raises what calls found wrong that only queued their work; its stream has been synchronised."""
    raise_on_error(lib.tileloss_check_errors(*place[:3]), renamed)


def set_sequences(
    args: Args,
    function: Function,
    names: str,
    options: functions.Struct,
    shape: Sequence[int],
    zeros: Callable[[int], int],
) -> functions.Struct:
    """Labels [..., T] without offsets: each row of the batch is a sequence. Returns the call's options, which ``names`` made.
    ``zeros``: the address of so many int64 that are 0, where the call's tensors lie, which outlive it.

    Of sequences without tokens only offsets can say how many there are. With offsets the library knows no T to stand for
    max_length where the aggregation divides by it; as there is nothing to divide, any will do.
    """
    length = args.sequence_length = shape[-1] if len(shape) > 1 else prod(shape)
    if length > 0:
        return options
    count = prod(shape[:-1]) + 1
    set_vector(args, "sequence_offsets", zeros(count), INT64, count, 1)
    is_norm = function.is_choice(options, "aggregation", "seq_mean_token_sum_norm")
    if is_norm and "max_length" not in functions.given_names(names):
        options = functions.copied(options)
        function.set_value(options, "max_length", 1)
    return options


def chosen_isa() -> str:
    """The instruction set that the planner takes: what TILELOSS_ISA says, else the best that this machine has."""
    args, plan, function = new_args(), Plan(_PLAN_BYTES), FUNCTIONS["cross_entropy"]
    set_matrix(args, "logits", 0, BFLOAT16, (1, 2), (2, 1))
    set_vector(args, "labels", 0, INT64, 1, 1)
    set_vector(args, "loss", 0, FLOAT32, 1, 1)
    pointers = (byref(args), function.new_options(""), None, None, byref(plan))
    raise_on_error(lib.tileloss_make_plan(function.encoded, FORWARD, *pointers))
    return str(lib.tileloss_isa_name(plan.cpu.isa).decode())
