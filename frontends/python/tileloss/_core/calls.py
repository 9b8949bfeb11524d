"""The arguments of a call, plan and call; what one call leaves to others like it.

Addresses, shapes and strides are the ABI's views: strides are in elements, dtypes the ABI's numbers. A view is packed into the
arguments in one go, which takes a third of the time of making and assigning ctypes structs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import byref, c_uint64
from functools import lru_cache
from math import prod
from struct import Struct
from typing import Any

from tileloss._core import functions
from tileloss._core.functions import FUNCTIONS, Function
from tileloss._core.library import lib, raise_on_error
from tileloss._core.slots import OFFSETS, SLOTS, Args, Place
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
_NAMES = {(f, i): f"{f}/{name}" for f in FUNCTIONS for i, name in enumerate(PASS_NAMES)}
# Where pointers stand in the arguments, and in the row state behind them, in words of 8 bytes: a view begins with its own.
_POINTERS: dict[str, tuple[int, ...]] = {slot: (OFFSETS[slot] // 8,) for slot in SLOTS}
_STATE_ARRAYS = (RowState.max, RowState.sum, RowState.label_logit, RowState.entropy_sum)
_POINTERS["row_state"] = tuple((_ARGS_BYTES + array.offset) // 8 for array in _STATE_ARRAYS)
_ROW_STATE = OFFSETS["row_state"] // 8


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
) -> Plan:
    """Plans and runs; gives the plan. ``threads`` and ``workspace_bytes``: at most this many; 0: the library's choice.
    ``renamed``: what errors are to call the ABI's arguments. ``merge``: tileloss_run's; what it raises is raised here."""
    plan = Plan(_PLAN_BYTES)
    args_pointer, plan_pointer = byref(args), byref(plan)
    hints = byref(_plan_options(threads, workspace_bytes))
    status = lib.tileloss_make_plan(
        function.encoded, call_pass, args_pointer, options, hints, None, plan_pointer
    )
    if status:
        raise_on_error(status, renamed)
    run = None
    if merge is not None or args.place.device_type != CPU:
        run = _Run(args.place, plan.workspace_bytes, merge)
    _run(function, call_pass, args_pointer, options, plan_pointer, run, renamed)
    return plan


def _run(
    function: Function,
    call_pass: int,
    args: Any,
    options: functions.Struct,
    plan: Any,
    run: _Run | None,
    renamed: Mapping[str, str] | None,
) -> None:
    """By a plan. ``args`` and ``plan``: pointers."""
    run_pointer = None if run is None else byref(run.struct)
    status = lib.tileloss_call(function.encoded, call_pass, args, options, plan, run_pointer)
    if run is not None and run.failures:
        raise run.failures[0]
    if status:
        raise_on_error(status, renamed)
    name = _NAMES[function.name, call_pass]
    _calls[name] = _calls.get(name, 0) + 1


class KeptCall:
    """What a call leaves to others whose tensors have the same types, shapes and strides, and whose options are the same: its
    arguments, which lack nothing but the addresses, its options and its plan. A later call packs no view and makes no plan."""

    def __init__(
        self,
        function: Function,
        call_pass: int,
        args: Args,
        options: functions.Struct,
        plan: Plan,
        tensors: Iterable[tuple[str, int]],
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        """``tensors``: slots, "row_state" among them, and addresses, 0 where there is none. ``renamed``: as `call`'s."""
        self._function, self._pass, self._renamed = function, call_pass, renamed
        self._options, self._plan, self._plan_pointer = options, plan, byref(plan)
        state = args.kept_row_state
        packed = bytes(args) + (b"" if state is None else bytes(state))
        self._kind = c_uint64 * (len(packed) // 8)
        words = self._kind.from_buffer_copy(packed)
        words[_ROW_STATE] = 0
        self._has_state = state is not None
        # Which tensor's address goes into which word of the arguments, and how far past it that points.
        self._places: list[tuple[int, int, int]] = []
        for number, (slot, address) in enumerate(tensors):
            for word in _POINTERS[slot] if address else ():
                found = words[word] if word < len(words) else 0
                if found == address or (found and slot == "row_state"):
                    self._places.append((number, word, found - address))
                    words[word] = 0
        self._packed = bytes(words)
        # Not so where the call made a copy of a tensor, or has memory of its own.
        self.is_of_tensors = not any(words[_POINTERS[slot][0]] for slot in SLOTS)

    def run(
        self,
        tensors: Sequence[Any],
        scalars: Mapping[str, int] | None = None,
        place: Place | None = None,
    ) -> None:
        """``tensors``: in the order of those that it was made with; each says its address by data_ptr(), as torch's do.
        ``scalars``: addresses of options by name. ``place``: None on the CPU."""
        args, options = self._kind.from_buffer_copy(self._packed), self._options
        if self._has_state:
            args[_ROW_STATE] = ctypes.addressof(args) + _ARGS_BYTES
        for number, word, past in self._places:
            args[word] = tensors[number].data_ptr() + past
        if scalars:
            options = functions.copied(options)
            for name, address in scalars.items():
                self._function.set_pointer(options, name, address)
        run = None if place is None else _Run(place, self._plan.workspace_bytes, None)
        _run(
            self._function, self._pass, byref(args), options, self._plan_pointer, run, self._renamed
        )


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
