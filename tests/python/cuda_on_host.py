"""CUDA tensors without a GPU: their memory is the emulated device's (tests/cuda_on_host), and what TileLoss is asked of them runs
in build/release/cuda_on_host/libtileloss_cuda.so, opened by libtileloss.so as the real one is.

PyTorch's own operators on such a tensor are done by the CPU's kernels, in order with all else on the current stream, which waits
for no other: what is queued elsewhere is not done in time. Whoever reads such a tensor on the host raises, but in `get` and
inside of `reads`. To autograd the tensors are a third device's, as a CUDA build of torch looks for a driver.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tileloss._core import calls
from tileloss._core.library import library_path
from tileloss._core.structs import CUDA
from tileloss.torch import _apply, _operators

OTHER = 1  # a device that is not the first
BACKEND = "gloo"
START = "fork"
TOLERANCE_OF_MODELS = 1e-5
BACKWARD_ENDS = 0.0
_NAME = "cuda_on_host"
_WORK = ctypes.CFUNCTYPE(None)
_library = ctypes.CDLL(str(library_path().parent / "libtileloss_cuda.so"))
_library.cuda_on_host_malloc.restype = ctypes.c_void_p
_library.cuda_on_host_malloc.argtypes = [ctypes.c_int, ctypes.c_size_t]
_library.cuda_on_host_free.argtypes = [ctypes.c_void_p]
_library.cuda_on_host_stream.restype = ctypes.c_void_p
_library.cuda_on_host_give.argtypes = [ctypes.c_void_p, ctypes.c_int, _WORK]
_library.cuda_on_host_wait.argtypes = [ctypes.c_void_p, ctypes.c_int]
_library.cuda_on_host_count.argtypes = [ctypes.POINTER(ctypes.c_uint64)] * 3
_library.cuda_on_host_begin_capture.argtypes = [ctypes.c_void_p]
_library.cuda_on_host_end_capture.restype = ctypes.c_void_p
_library.cuda_on_host_end_capture.argtypes = [ctypes.c_void_p]
_library.cuda_on_host_replay.argtypes = [ctypes.c_void_p, ctypes.c_void_p]

_pieces: dict[int, int] = {}  # address -> bytes
_reads: list[bool] = []
_operators_done: list[str] = []  # torch's own, that look at memory
_ANY = torch.device("cuda", 0)
_unused: list[int] = []  # freed by Python, perhaps before the device is done with them


class Stream:
    """As torch.cuda.current_stream gives it."""

    def __init__(self, index: int, cuda_stream: int | None) -> None:
        self.index, self.cuda_stream = index, cuda_stream

    def run(self, work: Callable[[], Any]) -> Any:
        """What ``work`` gives, once the stream has done what it was given before."""
        found: list[Any] = []

        def guarded() -> None:
            try:
                found.append(work())
            except BaseException as error:
                found.append(error)

        function = _WORK(guarded)
        _library.cuda_on_host_give(self.cuda_stream, self.index, function)
        _library.cuda_on_host_wait(self.cuda_stream, self.index)
        assert found, "waited for the stream while it was captured"
        while _unused:
            _library.cuda_on_host_free(_unused.pop())
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]

    def synchronize(self) -> None:
        self.run(lambda: None)

    def wait_stream(self, other: Stream) -> None:
        other.synchronize()


_streams = {index: Stream(index, _library.cuda_on_host_stream(index)) for index in range(2)}


def current_stream(device: torch.device) -> Stream:
    return _streams[device.index]


_current = [0]


def _exchange_device(index: int) -> int:
    """As torch.cuda's of that name: the device before; nothing for a negative one."""
    before = _current[0]
    if index >= 0:
        _current[0] = index
    return before if index >= 0 else -1


def _free(address: int) -> None:
    del _pieces[address]
    _unused.append(address)


class Graph:
    """As torch.cuda.CUDAGraph. What is made while it captures lies in memory of its own, which lives as long as the graph."""

    def __init__(self) -> None:
        self._stream, self._executable = _streams[0], None
        self._end = 1 << 18
        self._pool = _library.cuda_on_host_malloc(0, self._end)
        self._taken: list[int] = []
        self._work: list[Any] = []
        weakref.finalize(self, _free_pool, self._pool, self._taken).atexit = False

    @contextmanager
    def capture(self) -> Iterator[None]:
        _library.cuda_on_host_begin_capture(self._stream.cuda_stream)
        _captures.append(self)
        try:
            yield
        finally:
            _captures.pop()
            self._executable = _library.cuda_on_host_end_capture(self._stream.cuda_stream)
        assert self._executable is not None, "something was done that may not be captured"

    def add(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operator of torch, for later: what it will give, or the first argument, which it is to change."""
        outputs = args[0]
        if not func._schema.is_mutable:
            meta = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, (args, kwargs))
            device = {"device": "meta"} if "device" in kwargs else {}
            shapes = func(*meta[0], **meta[1] | device)
            outputs = tree_map(lambda x: _new_memory(x, 0) if isinstance(x, Tensor) else x, shapes)

        def work() -> None:
            found = func(*args, **kwargs)
            for output, x in zip(tree_leaves(outputs), tree_leaves(found), strict=True):
                if output is not x:
                    output.copy_(x)

        self._work.append(_WORK(work))
        _library.cuda_on_host_give(self._stream.cuda_stream, 0, self._work[-1])
        return outputs

    def replay(self) -> None:
        _library.cuda_on_host_replay(self._executable, self._stream.cuda_stream)

    def take(self, size: int) -> int:
        self._end = (self._end - size) // 64 * 64
        assert self._end >= 0
        self._taken.append(self._pool + self._end)
        _pieces[self._taken[-1]] = size
        return self._taken[-1]


_captures: list[Graph] = []  # the one that captures now


def _free_pool(pool: int, taken: list[int]) -> None:
    for address in taken:
        del _pieces[address]
    _unused.append(pool)


def _new_memory(x: Tensor, index: int) -> Tensor:
    """Contiguous, of x's shape and dtype, in the device's memory; holds NaN."""
    size = max(x.numel() * x.element_size(), 1)
    address = _captures[0].take(size) if _captures else _library.cuda_on_host_malloc(index, size)
    memory = (ctypes.c_char * size).from_address(address)
    if not _captures:
        _pieces[address] = size
        weakref.finalize(memory, _free, address).atexit = False
    flat = (
        torch.frombuffer(memory, dtype=x.dtype, count=x.numel())
        if x.numel()
        else _own["empty"](0, dtype=x.dtype)
    )
    return flat.view(x.shape)


def _is_on_device(x: Tensor) -> bool:
    return x.untyped_storage().data_ptr() in _pieces


class CudaTensor(Tensor):
    """``held``: a CPU tensor of memory that the host cannot touch."""

    @staticmethod
    def __new__(cls, held: Tensor, index: int = 0) -> CudaTensor:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=f"{_NAME}:0",
        )

    def __init__(self, held: Tensor, index: int = 0) -> None:
        self.held, self.index = held, index

    device = property(lambda self: torch.device("cuda", self.index))  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    def get_device(self) -> int:
        return self.index

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "tileloss":
            return func._op_dk(torch._C.DispatchKey.CUDA, *args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, CudaTensor)]
        reads = func is torch.ops.aten._local_scalar_dense.default
        if reads or (kwargs.get("device") or _ANY).type == "cpu":
            assert _reads, f"{func}: the host reads what lies on the device"
            copy = get(args[0])
            return copy.item() if reads else copy
        return _on_device(func, args, kwargs, tensors[0].index)


def _on_device(func: Any, args: Any, kwargs: dict[str, Any], index: int) -> Any:
    """The operator, by the CPU's kernel."""
    if kwargs.get("device") is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    wrapped: dict[int, CudaTensor] = {}

    def held(x: Any) -> Any:
        if not isinstance(x, CudaTensor):
            return x
        wrapped[id(x.held)] = x
        return x.held

    stream = current_stream(torch.device("cuda", index))
    inputs = tree_map(held, (args, kwargs))

    def work() -> Any:
        found = func(*_as_seen(func, inputs[0]), **inputs[1])
        if func.namespace == "c10d":  # another thread is at it
            found[-1].wait()
        if func.namespace == "_c10d_functional":
            found = torch.ops._c10d_functional.wait_tensor(found)
        return found

    if not func.is_view:
        _operators_done.append(func.overloadpacket.__name__)
    if func.is_view:
        found = work()
    elif _captures:
        found = _captures[0].add(func, *inputs)
    else:
        found = stream.run(work)

    def on_device(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) in wrapped:
            return wrapped[id(x)]
        return CudaTensor(x, index) if _is_on_device(x) else to_device(x, index)

    return tree_map(on_device, found)


def _as_seen(func: Any, args: Any) -> Any:
    """A GPU's kernels, other than the CPU's, round a factor without dimensions to the type that the result has."""
    if func.overloadpacket._qualified_op_name not in ("aten::mul", "aten::mul_"):
        return args
    x, y = args
    if isinstance(y, Tensor) and x.ndim > y.ndim == 0:
        return x, y.to(torch.result_type(x, y))
    return args


def to_device(x: Tensor, index: int = 0) -> CudaTensor:
    memory = _new_memory(x, index)
    current_stream(torch.device("cuda", index)).run(lambda: memory.copy_(x))
    return CudaTensor(memory, index)


def move(module: torch.nn.Module) -> None:
    """Its parameters, the tied ones as they are, and buffers."""
    made: dict[Tensor, torch.nn.Parameter] = {}
    for each in module.modules():
        for name, x in each.named_parameters(recurse=False):
            if x not in made:
                made[x] = torch.nn.Parameter(to_device(x.detach()))
            each._parameters[name] = made[x]
        for name, x in each.named_buffers(recurse=False):
            each._buffers[name] = to_device(x)


class Traffic:
    """What was done in a with block: bytes of rows that TileLoss's kernels read and wrote, kernels, fills and copies, and the
    operators that torch ran."""

    counts = True
    loaded, stored, queued, operators = 0, 0, 0, [""]

    def __enter__(self) -> Traffic:
        _count()
        _operators_done.clear()
        return self

    def __exit__(self, *_: object) -> None:
        self.loaded, self.stored, self.queued = _count()
        self.operators = [*_operators_done]


def _count() -> tuple[int, int, int]:
    for stream in _streams.values():
        stream.synchronize()
    counts = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
    _library.cuda_on_host_count(*counts)
    loaded, stored, queued = (count.value for count in counts)
    return loaded, stored, queued


@contextmanager
def reads() -> Iterator[None]:
    """What is tested here may read on the host."""
    _reads.append(True)
    yield
    _reads.pop()


def get(x: Tensor) -> Tensor:
    """On the CPU, after all that the device was given."""
    assert isinstance(x, CudaTensor)
    return current_stream(x.device).run(x.held.clone)


def _is_cuda(device: Any) -> bool:
    return isinstance(device, torch.device) and device.type == "cuda"


def _makes(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any, **kwargs: Any) -> Tensor:
        device: Any = kwargs.get("device")
        if not _is_cuda(device):
            return function(*args, **kwargs)
        found = function(*args, **kwargs | {"device": "cpu"})
        if function is _own["empty"]:
            return CudaTensor(_new_memory(found, device.index), device.index)
        return to_device(found, device.index)

    return made


def _to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    device: Any = kwargs.get("device", args[0] if args else None)
    if not _is_cuda(device):
        return _own_to(x, *args, **kwargs)
    rest = [each for each in (*args, kwargs.get("dtype")) if isinstance(each, torch.dtype)]
    found = _own_to(x, *rest) if rest else x
    if found.device == device:
        return found
    return to_device(get(found) if found.is_cuda else found, device.index)


_own = {
    name: getattr(torch, name) for name in ("empty", "zeros", "ones", "tensor", "arange", "full")
}
_own_to = Tensor.to


def _check(address: int, on_device: bool) -> None:
    is_there = any(begin <= address < begin + size for begin, size in _pieces.items())
    assert address == 0 or is_there == on_device, (address, on_device)


def _checked(setter: Callable[..., None]) -> Callable[..., None]:
    def checked(args: Any, *rest: Any) -> None:
        _check(next(x for x in rest if isinstance(x, int)), args.place.device_type == CUDA)
        setter(args, *rest)

    return checked


def _checked_run(run: Callable[..., None]) -> Callable[..., None]:
    def checked(kept: Any, tensors: Any, scalars: Any = None, place: Any = None) -> None:
        for number, _, _ in kept._places:
            _check(tensors[number].data_ptr(), place is not None)
        run(kept, tensors, scalars, place)

    return checked


@contextmanager
def installed() -> Iterator[None]:
    """Tensors are made on, and brought to, "cuda"; TileLoss takes such ones for plain ones, and is given no address elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("set_matrix", "set_vector", "set_row_state"):
            patch.setattr(calls, name, _checked(getattr(calls, name)))
        patch.setattr(calls.KeptCall, "run", _checked_run(calls.KeptCall.run))
        patch.setattr(_operators, "_PLAIN", _operators._PLAIN | {CudaTensor})
        patch.setattr(_apply, "Tensor", CudaTensor)
        for name, function in _own.items():
            patch.setattr(torch, name, _makes(function))
        patch.setattr(Tensor, "to", _to)
        patch.setattr(torch.cuda, "current_stream", current_stream)
        patch.setattr(torch.cuda, "default_stream", lambda device: Stream(device.index, None))
        patch.setattr(torch.cuda, "current_device", lambda: _current[0])
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(_captures))
        for name in ("_exchange_device", "_maybe_exchange_device"):
            patch.setattr(torch.cuda, name, _exchange_device)
        yield


_setup_privateuseone_for_python_backend(rename=_NAME)
torch._C._ensureCUDADeviceGuardSet()


def _empty(size: Any, *, dtype: torch.dtype | None = None, **_: Any) -> CudaTensor:
    """What torch's own code makes beside a tensor, on the first device."""
    return CudaTensor(_new_memory(_own["empty"](size, dtype=dtype), 0))


_kernels = torch.library.Library("aten", "IMPL")
_kernels.impl("empty.memory_format", _empty, "PrivateUse1")
