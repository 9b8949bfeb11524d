"""A case's tensors in safetensors files, as `tileloss judge` writes inputs and reads outputs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tileloss.testing.case import Case
from tileloss.tools.files import naming

_LENGTH_BYTES = 8  # of the header's length, little-endian, before the header
_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def read_case(path: Path) -> Case:
    metadata, tensors = _read(path)
    return Case(tensors, **json.loads(metadata["case"]))


def write_case(path: Path, case: Case) -> None:
    """As `tileloss judge --write-inputs` does, so that read_case gives the case back; without knobs and number of backwards."""
    left_out = ("tensors", "backwards", "knobs", "_handed_out")
    names = [each.name for each in fields(case) if each.name not in left_out]
    described = {name: getattr(case, name) for name in names}
    write_tensors(path, case.tensors, {"case": json.dumps(described)})


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    return _read(path)[1]


def write_tensors(
    path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, array in tensors.items():
        end = offset + array.nbytes
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": array.shape,
            "data_offsets": (offset, end),
        }
        offset = end
    text = json.dumps(header).encode()
    with naming(path), path.open("wb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)


def _read(path: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Metadata and tensors, which stay in the file until they are touched."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = json.loads(file.read(length))
    metadata = header.pop("__metadata__", {})
    data = np.memmap(path, np.uint8, "r", _LENGTH_BYTES + length)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        array = np.asarray(data[begin:end]).view(_DTYPES[entry["dtype"]])
        tensors[name] = array.reshape(entry["shape"])
    return metadata, tensors
