"""A case's tensors in safetensors files, as `tileloss judge` writes inputs and reads outputs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from tileloss.check.case import Case

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
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = json.loads(file.read(length))
    described = json.loads(header.pop("__metadata__")["case"])
    data = np.memmap(path, np.uint8, "r", _LENGTH_BYTES + length)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        array = np.asarray(data[begin:end]).view(_DTYPES[entry["dtype"]])
        tensors[name] = array.reshape(entry["shape"])
    return Case(tensors, **described)


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    header, offset = {}, 0
    for name, array in tensors.items():
        end = offset + array.nbytes
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": array.shape,
            "data_offsets": (offset, end),
        }
        offset = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
