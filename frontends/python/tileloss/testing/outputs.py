"""What an implementation returned, as the judge reads it."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tileloss._core.slots import SLOTS
from tileloss._core.structs import INT64, UINT8
from tileloss.testing.case import Case

_FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
_GRADIENTS = ("dlogits", "dhidden", "dhead", "dhidden_r", "dhead_r")
_INTEGERS = {INT64: np.dtype(np.int64), UINT8: np.dtype(np.bool_)}


class Missing(Exception):
    """An output that the case asks for is not there."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name}: the case asks for it, got none")
        self.output = name


def prepare(case: Case, returned: Any) -> dict[str, np.ndarray]:
    """The outputs as numpy arrays of the dtypes that the judge reads: matrices of gradients in their own, or float32 where they
    have another; row outputs of the library as integers where they are that; everything else in float32.

    Raises:
        TypeError: not a dict of arrays by name.
        Missing: no loss where the function has one, or a gradient that the case asks for is absent or None.
    """
    if not isinstance(returned, Mapping):
        raise TypeError(f"expected a dict of arrays by name, got {type(returned).__name__}")
    wanted = [] if case.function.endswith("logprobs") else ["loss"]
    for name in (*wanted, *case.gradients):
        if returned.get(name) is None:
            raise Missing(name)
    return arrays(returned)


def arrays(returned: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """As `prepare`, of what is there."""
    return {
        name: _cast_output(name, to_numpy(name, array))
        for name, array in returned.items()
        if array is not None
    }


def to_numpy(name: str, array: Any) -> np.ndarray:
    if type(array).__module__.partition(".")[0] == "torch":
        import torch

        array = array.detach().cpu().contiguous()
        if array.dtype == torch.bfloat16:
            return array.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    found = np.asarray(array)
    if found.dtype.kind in "OUS":
        raise TypeError(f"{name}: expected an array of numbers, got {type(array).__name__}")
    return found


def _cast_output(name: str, array: np.ndarray) -> np.ndarray:
    if name in SLOTS and (integer := _INTEGERS.get(SLOTS[name].dtypes[0])) is not None:
        return array.astype(integer)
    if name in _GRADIENTS and array.dtype in _FLOATS:
        return array
    return array.astype(np.float32)


def describe(error: BaseException) -> str:
    """One line: what was raised, and the last line of code that is not ours, as FILE:LINE."""
    if isinstance(error, SyntaxError):  # which names file and line itself
        return f"SyntaxError: {error}"
    package = Path(__file__).parents[1]
    ours = (str(package / "testing"), str(package / "tools"))
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(ours)] or frames
    first = " ".join(str(error).split())[:300]
    if not theirs:
        return f"{type(error).__name__}: {first}"
    file = theirs[-1].filename.rpartition("site-packages/")[2]
    return f"{type(error).__name__}: {first}, at {file}:{theirs[-1].lineno}"
