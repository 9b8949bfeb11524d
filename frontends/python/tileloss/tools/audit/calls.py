"""How an implementation is called where one call does not show what is wrong with it: an AuditCase's `calls`.

kept      once; its inputs are then what they were, and no output lies in their memory
repeated  twelve times with the same inputs: the same bits each time
moved     with other numbers first, then with the case's in other memory: the outputs are not the first call's
renewed   the same in the same memory
shared    as moved: what the first call returned stays what it was
split     with all rows, then with each half of them: the same bits of the loss of a row or its log-probability
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tileloss.testing.case import Case
from tileloss.testing.outputs import prepare, to_numpy

TIMES = 12
_MATRICES = ("logits", "hidden")
Arrays = dict[str, np.ndarray]


class Misbehaved(Exception):
    """What showed: `gate` is "calls/kept", ..."""

    def __init__(self, gate: str, message: str) -> None:
        super().__init__(message)
        self.gate = gate


def call(compute: Any, case: Case, calls: str) -> Any:
    """The outputs to be judged of `compute`, a function of a case.

    Raises:
        Misbehaved: the calls show that something is wrong, whatever the numbers are.
    """
    tensors = {name: np.array(x) for name, x in case.tensors.items()}
    return _WAYS[calls](compute, replace(case, tensors=tensors))


def _once(compute: Any, case: Case) -> Any:
    return compute(case)


def _kept(compute: Any, case: Case) -> Any:
    before = {name: x.copy() for name, x in case.tensors.items()}
    returned = compute(case)
    given = [*case.tensors.items(), *case._handed_out.items()]  # it may have read either
    for name, x in given:
        if to_numpy(name, x).tobytes() != before[name].tobytes():
            raise Misbehaved("calls/kept", f"{name}: written to")
    for output, array in _arrays(returned):
        begin, end = _memory(array)
        for name, x in given:
            first, last = _memory(x)
            if begin < last and first < end:
                raise Misbehaved("calls/kept", f"{output}: in the memory of {name}")
    return returned


def _repeated(compute: Any, case: Case) -> Any:
    first = _copied(case, compute(case))
    for turn in range(2, TIMES + 1):
        returned = compute(replace(case))
        _compare("calls/repeated", first, _copied(case, returned), f"in call {turn}")
    return returned


def _moved(compute: Any, case: Case, gate: str = "calls/moved") -> Any:
    other = _others(case)
    first = compute(other)
    kept = _copied(case, first)
    returned = compute(case)
    if gate == "calls/shared":
        _compare(gate, kept, _copied(case, first), "after another call")
    else:
        _refuse_replay(gate, kept, _copied(case, returned))
    return returned


def _shared(compute: Any, case: Case) -> Any:
    return _moved(compute, case, "calls/shared")


def _renewed(compute: Any, case: Case) -> Any:
    right, other = case.tensors, _others(case)
    first = _copied(other, compute(other))
    for name, x in right.items():
        other.tensors[name][...] = x
    _renew_handed_out(other)
    returned = compute(other)
    _refuse_replay("calls/renewed", first, _copied(other, returned))
    return returned


def _others(case: Case) -> Case:
    """The case with other logits or hidden states, in memory of its own."""
    tensors = {name: -x if name in _MATRICES else x.copy() for name, x in case.tensors.items()}
    return replace(case, tensors=tensors)


def _refuse_replay(gate: str, first: Arrays, second: Arrays) -> None:
    if all(x.tobytes() == second[name].tobytes() for name, x in first.items()):
        raise Misbehaved(gate, "the outputs of the call before, which had other numbers")


def _split(compute: Any, case: Case) -> Any:
    rows = len(case.in_use)
    half = rows // 2
    whole = _rows(_copied(case, compute(case)), rows)
    parts = []
    for part in (slice(0, half), slice(half, rows)):
        tensors = {
            n: x[part] if len(x) == rows and n != "head" else x for n, x in case.tensors.items()
        }
        own = replace(case, tensors=tensors, batch_size=1, seq_len=len(tensors["labels"]))
        parts.append(_rows(_copied(own, compute(own)), len(tensors["labels"])))
    joined = {name: np.concatenate([part[name] for part in parts]) for name in whole}
    _compare("calls/split", whole, joined, "of the halves")
    return compute(replace(case))


def _rows(found: Arrays, rows: int) -> Arrays:
    return {name: x for name, x in found.items() if name in ("logp", "loss") and x.shape == (rows,)}


def _compare(gate: str, expected: Arrays, found: Arrays, when: str) -> None:
    for name, x in expected.items():
        if x.tobytes() != found[name].tobytes():
            raise Misbehaved(gate, f"{name}: other bits {when}")


def _copied(case: Case, returned: Any) -> Arrays:
    return {name: x.copy() for name, x in prepare(case, returned).items()}


def _arrays(returned: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(returned, Mapping):
        yield from ((name, x) for name, x in returned.items() if x is not None)


def _memory(x: Any) -> tuple[int, int]:
    """The addresses of an array of numpy or PyTorch; nothing of JAX's, which nobody can write to."""
    if hasattr(x, "data_ptr"):
        return x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()
    if isinstance(x, np.ndarray):
        return x.ctypes.data, x.ctypes.data + x.nbytes
    return 0, 0


def _renew_handed_out(case: Case) -> None:
    """PyTorch's tensors of the case get its numbers, where they are."""
    if not case._handed_out:
        return
    import torch

    fresh = replace(case)
    with torch.no_grad():
        for name, tensor in case._handed_out.items():
            tensor.copy_(fresh.torch(name))
            tensor.grad = None


_WAYS = {
    "": _once, "kept": _kept, "repeated": _repeated, "moved": _moved, "renewed": _renewed, "shared": _shared, "split": _split,
}  # fmt: skip
