"""libtileloss_judge.so through ctypes: a request by name, tensors by pointer, events as they come (src/judge/requests.h)."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from tileloss._core.library import library_path
from tileloss._core.text import escaped

Event = dict[str, Any]
Told = Callable[[Event], None]
Tensors = Mapping[str, np.ndarray]

# Names of safetensors; the judge refuses some of them by name.
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "C64": np.dtype(np.complex64),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PR_SET_PDEATHSIG = 1


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("file", c_char_p),
        ("name", c_char_p),
        ("dtype", c_char_p),
        ("shape", POINTER(c_int64)),
        ("rank", c_int64),
        ("data", c_void_p),
    )


_ON_EVENT = CFUNCTYPE(None, c_void_p, c_char_p)
_ON_TENSOR = CFUNCTYPE(None, c_void_p, POINTER(_Tensor))


class _Answer(ctypes.Structure):
    _fields_ = (("context", c_void_p), ("event", _ON_EVENT), ("tensor", _ON_TENSOR))


class JudgeError(Exception):
    """A request that was refused (code 2), or that memory, device or file system did not allow (3)."""

    def __init__(self, message: str, code: int, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.code, self.out_of_memory = code, out_of_memory


class Crashed(Exception):
    """The child that ran a request ended without an answer: ``signal`` that ended it, or None and its exit code in words."""

    def __init__(self, message: str, by: int | None) -> None:
        super().__init__(message)
        self.signal = by


@dataclass(frozen=True)
class Answer:
    """``passed``: no check failed. ``events``: all but progress, in order. ``tensors``: what draw hands over."""

    passed: bool
    events: list[Event]
    tensors: dict[str, np.ndarray]

    def event(self, name: str) -> Event:
        """The last of that name."""
        return next(event for event in reversed(self.events) if event["event"] == name)


def ask(
    request: Mapping[str, Any],
    files: Mapping[str, Tensors] | None = None,
    outputs: Tensors | None = None,
    told: Told | None = None,
) -> Answer:
    """In this process. ``files``: the config's, by path, with their tensors by name. ``told`` gets each event as it comes.

    Raises JudgeError.
    """
    events: list[Event] = []
    tensors: dict[str, np.ndarray] = {}
    failed: list[BaseException] = []

    def on_event(_: Any, text: bytes) -> None:
        event = json.loads(text)
        if event["event"] == "error":
            event["message"] = escaped(event["message"])
        if event["event"] != "progress":
            events.append(event)
        if told is not None:
            try:
                told(event)
            except BaseException as error:  # ctypes would print and forget it
                failed.append(error)

    def on_tensor(_: Any, given: Any) -> None:
        tensor = given.contents
        tensors[tensor.name.decode()] = _copied(tensor)

    given, kept = _given(files or {}, outputs or {})
    answer = _Answer(None, _ON_EVENT(on_event), _ON_TENSOR(on_tensor))
    code = _library().tileloss_judge(
        json.dumps(request).encode(), given, len(given), ctypes.byref(answer)
    )
    del kept
    if failed:
        raise failed[0]
    if code > 1:
        error = events[-1]
        raise JudgeError(error["message"], code, error["out_of_memory"])
    return Answer(code == 0, events, tensors)


def ask_apart(
    request: Mapping[str, Any],
    files: Mapping[str, Tensors] | None = None,
    outputs: Tensors | None = None,
    told: Told | None = None,
    before: Callable[[], None] | None = None,
    seconds: float | None = None,
) -> Answer:
    """As ``ask``, in a child process, which a crash of a kernel ends alone. It has the tensors without a copy, and dies with this
    process. ``before`` runs first in it: limits. After ``seconds`` it is killed.

    Raises JudgeError, Crashed, TimeoutError.
    """
    _library()  # loaded once, here
    reading, writing = Pipe(duplex=False)
    parent = os.getpid()
    with warnings.catch_warnings():
        # The child runs our C code alone, which takes no lock of the other threads'.
        warnings.filterwarnings("ignore", ".*fork.*")
        child = os.fork()
    if child == 0:
        _be_the_child(request, files, outputs, before, reading, writing, parent)
    writing.close()
    try:
        kind, item = _collect(reading, told, seconds)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        reading.close()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if kind == "error":
        raise JudgeError(*item)
    if kind == "answer":
        return item
    if code < 0:
        raise Crashed(f"signal {-code}, {signal.strsignal(-code)}", -code)
    raise Crashed(f"exit code {code}", None)


def end_with_parent() -> None:
    """In a child: whatever ends its parent kills it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _be_the_child(
    request: Mapping[str, Any],
    files: Mapping[str, Tensors] | None,
    outputs: Tensors | None,
    before: Callable[[], None] | None,
    reading: Connection,
    writing: Connection,
    parent: int,
) -> NoReturn:
    try:
        end_with_parent()
        if os.getppid() != parent:
            os._exit(70)  # it was too late
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        reading.close()
        try:
            if before is not None:
                before()
            answer = ask(request, files, outputs, lambda event: writing.send(("event", event)))
            writing.send(("answer", answer))
        except JudgeError as error:
            writing.send(("error", (str(error), error.code, error.out_of_memory)))
        except MemoryError:
            writing.send(("error", ("out of memory", 3, True)))
    except BaseException as error:
        os.write(2, f"tileloss: {error!r}\n".encode())
        os._exit(70)
    os._exit(0)


def _collect(reading: Connection, told: Told | None, seconds: float | None) -> tuple[str, Any]:
    """The last that the child sent: "answer" or "error" and what it is, or "nothing", when it has closed its end."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while True:
        if not reading.poll(None if deadline is None else max(deadline - time.monotonic(), 0)):
            raise TimeoutError(f"killed after {seconds:g} s")
        try:
            kind, item = reading.recv()
        except (EOFError, OSError):  # it may have ended within a message
            return "nothing", None
        if kind != "event":
            return kind, item
        if told is not None:
            told(item)


def _given(files: Mapping[str, Tensors], outputs: Tensors) -> tuple[Any, list[Any]]:
    kept: list[Any] = []

    def each() -> Iterable[_Tensor]:
        for file, tensors in [*files.items(), ("", outputs)]:
            for name, array in tensors.items():
                data = np.ascontiguousarray(array)
                shape = (c_int64 * max(data.ndim, 1))(*array.shape)
                kept.extend((data, shape))
                yield _Tensor(
                    os.fsencode(file),
                    name.encode(),
                    (_NAMES.get(data.dtype) or str(data.dtype)).encode(),
                    shape,
                    array.ndim,
                    data.ctypes.data,
                )

    listed = list(each())
    return (_Tensor * len(listed))(*listed), kept


def _copied(tensor: Any) -> np.ndarray:
    dtype = DTYPES[tensor.dtype.decode()]
    shape = tuple(tensor.shape[i] for i in range(tensor.rank))
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    array = np.empty(size, np.uint8)
    if size:
        ctypes.memmove(array.ctypes.data, tensor.data, size)
    return array.view(dtype).reshape(shape)


@cache
def _library() -> ctypes.CDLL:
    """Beside libtileloss.so.

    Raises ImportError where it is not.
    """
    path = library_path().with_name("libtileloss_judge.so")
    if not Path(path).is_file():
        raise ImportError(
            f"tileloss: expected libtileloss_judge.so beside {library_path()}: `./dev build` makes it, and wheels have it"
        )
    library = ctypes.CDLL(str(path))
    library.tileloss_judge.argtypes = [c_char_p, POINTER(_Tensor), c_int64, POINTER(_Answer)]
    return library
