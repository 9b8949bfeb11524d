"""The C ABI of libtileloss (include/tileloss/tileloss.h) through ctypes: structs, options by name, plan and call."""

from __future__ import annotations

import ctypes
import os
from ctypes import (
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_double,
    c_int32,
    c_int64,
    c_size_t,
    c_uint64,
    c_void_p,
)
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from tileloss._files import packaged_file

NONE, FLOAT32, BFLOAT16, FLOAT16, INT32, INT64, UINT8 = range(7)
FORWARD, BACKWARD, VALUE_AND_GRAD = range(3)
PASS_NAMES = ("forward", "backward", "value_and_grad")


class Matrix(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("rows", c_int64),
        ("cols", c_int64),
        ("row_stride", c_int64),
        ("col_stride", c_int64),
        ("dtype", c_int32),
        ("device_type", c_int32),
        ("device_index", c_int32),
        ("reserved", c_int32),
    ]


class Vector(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("size", c_int64),
        ("stride", c_int64),
        ("dtype", c_int32),
        ("device_type", c_int32),
        ("device_index", c_int32),
        ("reserved", c_int32),
    ]


class Scalar(Structure):
    _fields_ = [("value", c_double), ("pointer", c_void_p)]


class RowState(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("rows", c_int64),
        ("max", c_void_p),
        ("sum", c_void_p),
        ("target", c_void_p),
        ("entropy_sum", c_void_p),
        ("collision_sum", c_void_p),
        ("smoothing_sum", c_void_p),
        ("argmax", c_void_p),
        ("smoothing_weight", c_double),
        ("device_type", c_int32),
        ("device_index", c_int32),
    ]


class RowGroups(Structure):
    _fields_ = [("rows", c_int64), ("logits_stride", c_int64), ("dlogits_stride", c_int64)]


class Args(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("logits", Matrix),
        *[(name, Vector) for name in ("labels", "token_weights", "class_weights")],
        *[(name, Vector) for name in ("loss_grad", "logp_grad", "lse_grad", "entropy_grad")],
        *[(name, Vector) for name in ("loss", "logp", "lse", "entropy", "argmax", "correct")],
        *[(name, Vector) for name in ("log_sum_sq_probs", "mean_logit")],
        ("dlogits", Matrix),
        ("row_state", RowState),
        *[
            (name, Vector)
            for name in ("mask", "old_logp", "ref_logp", "sampler_logp", "advantages")
        ],
        *[(name, Vector) for name in ("sequence_offsets", "metrics")],
        ("sequence_length", c_int64),
        ("hidden", Matrix),
        ("head", Matrix),
        ("bias", Vector),
        ("dhidden", Matrix),
        ("dhead", Matrix),
        ("dbias", Vector),
        ("compute_dtype", c_int32),
        ("accumulate", c_int32),
        ("row_groups", RowGroups),
    ]


class PlanOptions(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("isa", c_int32),
        ("schedule", c_int32),
        ("threads", c_int32),
        ("reserved", c_int32),
        ("row_block", c_int64),
        ("vocab_block", c_int64),
        ("workspace_bytes", c_int64),
        ("chunk_columns", c_int64),
    ]


class PlanBuffer(Structure):
    _fields_ = [("name", c_char * 24), ("bytes", c_int64)]


class Plan(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("function", c_char * 32),
        ("call_pass", c_int32),
        ("isa", c_int32),
        ("schedule", c_int32),
        ("threads", c_int32),
        ("row_block", c_int64),
        ("vocab_block", c_int64),
        ("workspace_bytes", c_int64),
        ("predicted_ms", c_double),
        ("fingerprint", c_uint64),
        ("buffer_count", c_int64),
        ("buffers", PlanBuffer * 16),
        ("isa_note", c_char * 48),
        ("kept_columns", c_int64),
        ("kept_rows", c_int64),
        ("chunk_columns", c_int64),
    ]


class Field(Structure):
    _fields_ = [
        ("name", c_char_p),
        ("type", c_int32),
        ("reserved", c_int32),
        ("offset", c_size_t),
        ("default_value", c_double),
        ("minimum", c_double),
        ("maximum", c_double),
        ("exclusive_minimum", c_int32),
        ("has_absent", c_int32),
        ("choices", c_char_p),
    ]


class FunctionInfo(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("name", c_char_p),
        ("options_size", c_size_t),
        ("fields", POINTER(Field)),
        ("num_fields", c_int64),
        ("is_loss", c_int32),
        ("reserved", c_int32),
        ("presets", c_char_p),
        ("metrics", c_char_p),
    ]


_FIELD_TYPES: dict[int, type] = {0: c_double, 1: c_int64, 2: Scalar, 3: c_int32}


def _find_library() -> Path:
    """The file to load: ``TILELOSS_LIBRARY`` if it is set, else the one that the package carries."""
    override = os.environ.get("TILELOSS_LIBRARY")
    if override:
        if not Path(override).is_file():
            raise ImportError(
                f"tileloss: TILELOSS_LIBRARY: expected the path of libtileloss.so, got {override}"
            )
        return Path(override)
    path = packaged_file("lib/libtileloss.so")
    if path is None:
        raise ImportError(
            "tileloss: this package carries no compiled library: `pip install .` in a checkout builds it in; or set "
            "TILELOSS_LIBRARY to build/release/libtileloss.so after `./dev build`"
        )
    return path


def _load(path: Path) -> ctypes.CDLL:
    lib = ctypes.CDLL(str(path))
    status = c_int32
    lib.tileloss_last_error.restype = c_char_p
    lib.tileloss_version.restype = c_char_p
    lib.tileloss_function_count.restype = c_int64
    lib.tileloss_get_function_info.restype = status
    lib.tileloss_get_function_info.argtypes = [c_int64, c_void_p]
    lib.tileloss_options_preset.restype = status
    lib.tileloss_options_preset.argtypes = [c_char_p, c_char_p, c_void_p, c_size_t]
    lib.tileloss_options_init.restype = status
    lib.tileloss_options_init.argtypes = [c_char_p, c_void_p, c_size_t]
    lib.tileloss_make_plan.restype = status
    lib.tileloss_make_plan.argtypes = [c_char_p, c_int32, *[c_void_p] * 5]
    lib.tileloss_isa_name.restype = c_char_p
    lib.tileloss_isa_name.argtypes = [c_int32]
    lib.tileloss_call.restype = status
    lib.tileloss_call.argtypes = [c_char_p, c_int32, *[c_void_p] * 4]
    return lib


_PATH = _find_library()
_lib = _load(_PATH)


def library_path() -> Path:
    """The shared library in use."""
    return _PATH


def version() -> str:
    """The library's version, as ``tileloss_version()`` states it."""
    return str(_lib.tileloss_version().decode())


# tileloss_status -> what Python raises. Labels out of range raise what PyTorch's cross_entropy raises.
_ERRORS: dict[int, type[Exception]] = {
    1: ValueError,
    2: IndexError,
    3: MemoryError,
    4: ValueError,
    5: NotImplementedError,
    6: RuntimeError,
    7: RuntimeError,
}


def raise_on_error(status: int, renamed: dict[str, str] | None = None) -> None:
    """Raises this thread's last error. ``renamed``: names of the ABI's arguments -> the caller's own."""
    if status == 0:
        return
    message = _lib.tileloss_last_error().decode()
    name = message.partition(":")[0].partition(".")[0].partition("[")[0]
    if renamed and name in renamed:
        message = renamed[name] + message[len(name) :]
    raise _ERRORS.get(status, RuntimeError)(message)


class Option(NamedTuple):
    """One option of a function, in plain Python: torch.compile traces through the look-ups."""

    offset: int
    kind: type
    choices: tuple[str, ...]
    default: float  # NaN: not given


class Function:
    """A registered function of the library: its options by name, its presets, its metrics."""

    def __init__(self, info: FunctionInfo) -> None:
        self.name: str = info.name.decode()
        self.encoded: bytes = info.name
        self.options_size: int = info.options_size
        self.is_loss = bool(info.is_loss)
        self.presets = info.presets.decode().split("|") if info.presets else []
        self.metrics = info.metrics.decode().split("|") if info.metrics else []
        self.options: dict[str, Option] = {}
        for i in range(info.num_fields):
            field = info.fields[i]
            choices = tuple(field.choices.decode().split("|")) if field.choices else ()
            self.options[field.name.decode()] = Option(
                field.offset, _FIELD_TYPES[field.type], choices, field.default_value
            )

    def option(self, name: str) -> Option:
        if name not in self.options:
            raise TypeError(
                f"{self.name}: expected an option among {', '.join(self.options)}, got {name!r}"
            )
        return self.options[name]

    def choice(self, name: str, value: str) -> int:
        """The index of a choice, e.g. reduction "sum" -> 1."""
        choices = self.option(name).choices
        if value not in choices:
            expected = f"one of {', '.join(choices)}" if choices else "a number"
            raise ValueError(f"{name}: expected {expected}, got {value!r}")
        return choices.index(value)

    def new_options(self, preset: str) -> ctypes.Array[c_char]:
        """An options struct: the defaults, or those of ``preset`` when it is not ""."""
        options = ctypes.create_string_buffer(self.options_size)
        if preset:
            raise_on_error(
                _lib.tileloss_options_preset(
                    self.encoded, preset.encode(), options, self.options_size
                )
            )
        else:
            raise_on_error(_lib.tileloss_options_init(self.encoded, options, self.options_size))
        return options

    def _place(self, options: ctypes.Array[c_char], name: str) -> Any:
        option = self.option(name)
        return option.kind.from_buffer(options, option.offset)  # type: ignore[attr-defined]

    def set_value(self, options: ctypes.Array[c_char], name: str, value: float) -> None:
        place = self._place(options, name)
        if isinstance(place, (c_int32, c_int64)):
            if value != int(value):
                raise TypeError(f"{name}: expected an integer, got {value}")
            value = int(value)
        place.value = value

    def set_pointer(self, options: ctypes.Array[c_char], name: str, address: int) -> None:
        """Has the library read the option where ``address`` points: one float32."""
        place = self._place(options, name)
        if not isinstance(place, Scalar):
            scalars = [n for n, option in self.options.items() if option.kind is Scalar]
            raise TypeError(
                f"{name}: expected a number, got a tensor (only {', '.join(scalars)} can be tensors)"
            )
        place.pointer = address


def _all_functions() -> dict[str, Function]:
    found = {}
    for i in range(_lib.tileloss_function_count()):
        info = FunctionInfo(struct_size=ctypes.sizeof(FunctionInfo))
        raise_on_error(_lib.tileloss_get_function_info(i, ctypes.byref(info)))
        function = Function(info)
        found[function.name] = function
    return found


FUNCTIONS = _all_functions()


@lru_cache(maxsize=64)
def _plan_options(threads: int, workspace_bytes: int) -> PlanOptions:
    return PlanOptions(
        struct_size=ctypes.sizeof(PlanOptions), threads=threads, workspace_bytes=workspace_bytes
    )


def chosen_isa() -> str:
    """The instruction set that the planner takes: what TILELOSS_ISA says, else the best that this machine has."""
    args = Args(struct_size=ctypes.sizeof(Args))
    args.logits = Matrix(rows=1, cols=2, row_stride=2, col_stride=1, dtype=BFLOAT16)
    args.labels = Vector(size=1, stride=1, dtype=INT64)
    args.loss = Vector(size=1, stride=1, dtype=FLOAT32)
    plan, options = (
        Plan(struct_size=ctypes.sizeof(Plan)),
        FUNCTIONS["cross_entropy"].new_options(""),
    )
    pointers = (ctypes.byref(args), options, None, None, ctypes.byref(plan))
    raise_on_error(_lib.tileloss_make_plan(b"cross_entropy", FORWARD, *pointers))
    return str(_lib.tileloss_isa_name(plan.isa).decode())


_calls: dict[str, int] = {}


def call_counts() -> dict[str, int]:
    """How often each function's kernels ran in this process, by "function/pass"."""
    return dict(_calls)


def call(
    function: Function,
    call_pass: int,
    args: Args,
    options: ctypes.Array[c_char],
    *,
    threads: int = 0,
    workspace_bytes: int = 0,
    renamed: dict[str, str] | None = None,
) -> None:
    """Plans and runs. ``threads`` and ``workspace_bytes``: at most this many; 0: the library's choice."""
    plan = Plan(struct_size=ctypes.sizeof(Plan))
    args_pointer, plan_pointer = ctypes.byref(args), ctypes.byref(plan)
    wishes = ctypes.byref(_plan_options(threads, workspace_bytes))
    status = _lib.tileloss_make_plan(
        function.encoded, call_pass, args_pointer, options, wishes, None, plan_pointer
    )
    if status == 0:
        status = _lib.tileloss_call(
            function.encoded, call_pass, args_pointer, options, plan_pointer, None
        )
    raise_on_error(status, renamed)
    key = f"{function.name}/{PASS_NAMES[call_pass]}"
    _calls[key] = _calls.get(key, 0) + 1


_MADV_HUGEPAGE = 14
_HUGE_PAGE = 2 << 20
_madvise: Any = None
try:
    _madvise = ctypes.CDLL(None).madvise
    _madvise.argtypes = [c_void_p, c_size_t, c_int32]
except AttributeError:  # not Linux: no advice to give
    pass


def advise_huge_pages(address: int, size: int) -> None:
    """Asks for 2 MiB pages: the first touch of a fresh 622 MB buffer then costs 54-80 ms in place of 140-860."""
    begin = -(-address // _HUGE_PAGE) * _HUGE_PAGE
    length = (address + size - begin) // _HUGE_PAGE * _HUGE_PAGE
    if _madvise is not None and length > 0:
        _madvise(begin, length, _MADV_HUGEPAGE)
