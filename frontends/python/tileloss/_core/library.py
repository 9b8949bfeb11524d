"""libtileloss.so through ctypes: found, loaded, its statuses as exceptions."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from ctypes import c_char_p, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path

from tileloss._core.files import packaged_file


def _find() -> Path:
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
    lib.tileloss_row_state_merge.restype = status
    lib.tileloss_row_state_merge.argtypes = [c_void_p, c_void_p]
    lib.tileloss_call.restype = status
    lib.tileloss_call.argtypes = [c_char_p, c_int32, *[c_void_p] * 4]
    lib.tileloss_scale_gradient.restype = status
    lib.tileloss_scale_gradient.argtypes = [c_void_p] * 3
    lib.tileloss_check_errors.restype = status
    lib.tileloss_check_errors.argtypes = [c_int32, c_int32, c_void_p]
    return lib


_PATH = _find()
lib = _load(_PATH)


def library_path() -> Path:
    """The shared library in use."""
    return _PATH


def version() -> str:
    """The library's version, as ``tileloss_version()`` states it."""
    return str(lib.tileloss_version().decode())


# tileloss_status -> what Python raises. Labels out of range raise what PyTorch's cross_entropy raises.
ERRORS: dict[int, type[Exception]] = {
    1: ValueError,
    2: IndexError,
    3: MemoryError,
    4: ValueError,
    5: NotImplementedError,
    6: RuntimeError,
    7: RuntimeError,
}


# A second argument, beside which the first is wrong.
_OTHER = re.compile(r"a buffer apart from (\w+),")


def raise_on_error(status: int, renamed: Mapping[str, str] | None = None) -> None:
    """Raises this thread's last error. ``renamed``: names of the ABI's arguments -> the caller's own."""
    if status == 0:
        return
    # What the ABI has for an integer that is not given.
    message = lib.tileloss_last_error().decode().replace(", or -1, got", ", or None, got")
    name = message.partition(":")[0].partition(".")[0].partition("[")[0]
    if renamed and name in renamed:
        message = renamed[name] + message[len(name) :]
    if renamed and (other := _OTHER.search(message)) and other[1] in renamed:
        message = message[: other.start(1)] + renamed[other[1]] + message[other.end(1) :]
    raise ERRORS.get(status, RuntimeError)(message)
