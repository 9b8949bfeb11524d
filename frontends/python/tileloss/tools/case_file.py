"""Tensors in safetensors files, which the package of that name reads and writes; a case's, with its description."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tileloss.testing._judge import DTYPES, Tensors
from tileloss.tools.case import Case
from tileloss.tools.files import kind_of, naming, whole_file
from tileloss.tools.printable import shown

_LENGTH_BYTES = 8  # of the header's length, little-endian, before the header


def read_case(path: Path) -> Case:
    metadata, tensors = _read(path)
    if "case" not in metadata:
        raise ValueError(f"{path}: expected a case in its metadata, as --write-inputs writes it")
    return Case(tensors, **json.loads(metadata["case"]))


def write_case(path: Path, case: Case) -> None:
    """As `tileloss judge --write-inputs` does, so that read_case gives the case back; without knobs and number of backwards."""
    left_out = ("tensors", "backwards", "knobs", "_handed_out")
    names = [each.name for each in fields(case) if each.name not in left_out]
    described = {name: getattr(case, name) for name in names}
    write_tensors(path, case.tensors, {"case": json.dumps(described)})


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors by name. They stay in the file until they are touched: see ``check_whole``.

    Raises:
        OSError: there is no such file.
        ValueError: it is no safetensors file, a tensor's data is not there, or its dtype is none of whole bytes.
    """
    return _read(path)[1]


def check_whole(held: Tensors) -> None:
    """Raises OSError, naming the file, where one that these lie in has been cut since: to touch them ends the process."""
    for array in held.values():
        place: Any = array
        while place is not None and not isinstance(place, np.memmap):
            place = getattr(place, "base", None)
        if place is not None and os.stat(str(place.filename)).st_size < place.size:
            raise OSError(f"{shown(str(place.filename))}: the file was cut while it was read")


def write_tensors(
    path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """A whole file, or none. Raises OSError naming it."""
    arrays = {
        name: np.ascontiguousarray(array).reshape(array.shape) for name, array in tensors.items()
    }
    with whole_file(path) as beside:
        try:
            save_file(arrays, beside, dict(metadata) if metadata else None)
        except SafetensorError as error:
            number = re.search(r"\(os error (\d+)\)", str(error))
            if number is None:
                raise TypeError(str(error)) from None
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from None


def _read(path: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    name = shown(str(path))
    with naming(path):
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, f"expected a regular file, got {kind_of(path)}")
        with path.open("rb") as opened:
            start = opened.read(_LENGTH_BYTES + 1)
    if start[:1] == b"\x80" and start[1:2] in (b"\2", b"\3", b"\4", b"\5") and start[8:] != b"{":
        raise ValueError(
            f"{name}: this is a pickle file, which can run code when loaded; only safetensors files are read"
        )
    if start.startswith(b"PK\3\4"):
        raise ValueError(
            f"{name}: this is a zip archive (PyTorch's pickle format?); only safetensors files are read"
        )
    tensors = {}
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            data = np.memmap(path, np.uint8, "r")
            # In the order of their data, which has no gaps: safe_open has seen to that.
            end = _LENGTH_BYTES + int.from_bytes(start[:_LENGTH_BYTES], "little")
            for tensor in file.offset_keys():
                stored = file.get_slice(tensor)
                begin, shape = end, stored.get_shape()
                dtype = DTYPES.get(stored.get_dtype())
                if dtype is None or "\0" in tensor:
                    raise ValueError(f"{shown(tensor)}: {stored.get_dtype()} is not read")
                end = begin + math.prod(shape) * dtype.itemsize
                tensors[tensor] = np.asarray(data[begin:end]).view(dtype).reshape(shape)
    except (SafetensorError, ValueError) as error:
        problem = str(error).removeprefix("Error while deserializing header: ")
        raise ValueError(f"{name}: {shown(problem)}") from None
    return metadata, tensors
