"""Tensors in safetensors files: what is read back, hostile files, and what the judge says of them."""

from __future__ import annotations

import faulthandler
import os
import signal
import struct
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tileloss.testing._judge import Crashed, JudgeError
from tileloss.tools.case_file import read_tensors, write_tensors
from tileloss.tools.config import Config
from tileloss.tools.requests import run_request


def held(header: str | bytes, data: bytes = b"") -> bytes:
    header = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(header)) + header + data


def entry(fields: str, data_bytes: int, name: str = "a") -> bytes:
    return held(f'{{"{name}":{{{fields}}}}}', b"\1" * data_bytes)


WHOLE = entry('"dtype":"F32","shape":[2],"data_offsets":[0,8]', 8)
DEEP = "[" * 10**6 + "]" * 10**6


def test_tensors_are_read_back_without_a_copy(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    given = {
        "labels": np.array([-100, 7]),
        "x": np.arange(6).reshape(2, 3).T.astype(ml_dtypes.bfloat16),
        "flag": np.array(True),
        "empty": np.zeros((0, 5), np.float16),
        "f8": np.ones(3, ml_dtypes.float8_e4m3fn),
    }
    write_tensors(path, given, {"case": "é"})
    found = read_tensors(path)
    assert found.keys() == given.keys()
    for name, array in given.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        np.testing.assert_array_equal(found[name], array)
        assert not found[name].flags.owndata and not found[name].flags.writeable


@pytest.mark.parametrize(
    "data",
    [
        entry('"dtype":"U8","shape":[2],"data_offsets":[0,2]', 2).ljust(0),
        held('{"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}   ', b"ab"),
        held('{"__metadata__":{"a":"b"},"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}', b"1234"),
        # A length of 0x0280 bytes starts as pickle's protocol 2 does.
        held('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'.ljust(0x280), b"x"),
        held("{}"),
    ],
)  # fmt: skip
def test_odd_files_that_are_right_are_read(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(data)
    assert len(read_tensors(tmp_path / "x")) == (data != held("{}"))


HOSTILE = [
    (b"", "header too small"),
    (b"abc", "header too small"),
    (struct.pack("<Q", 50) + b"{}", "invalid header length"),
    (struct.pack("<Q", 100_000_001) + b"{}", "header too large"),
    (b"\xff" * 8 + b"{}", "header too large"),
    (b"\0" * 8, "invalid JSON"),
    (held("[]"), "invalid JSON"),
    (held('{"a":'), "invalid JSON"),
    (held('{"a":3}'), "expected struct TensorInfo"),
    (held(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}\0garbage{{{'), "trailing"),
    (held('{"__metadata__":[]}'), "expected a map"),
    (held('{"__metadata__":{"a":{"b":"c"}}}'), "expected a string"),
    (held('{"__metadata__":{},"__metadata__":{}}'), "duplicate field `__metadata__`"),
    (entry('"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":' + DEEP, 1), "recursion limit"),
    (entry('"dtype":"U8","data_offsets":[0,1],"shape":' + DEEP, 1), "invalid JSON"),
    (held('{"a":' + "[" * 10**6), "invalid JSON"),
    (entry('"shape":[1],"data_offsets":[0,4]', 4), "missing field `dtype`"),
    (entry('"dtype":"F32","data_offsets":[0,4]', 4), "missing field `shape`"),
    (entry('"dtype":"F32","shape":[1]', 4), "missing field `data_offsets`"),
    (entry('"dtype":7,"shape":[1],"data_offsets":[0,4]', 4), "integer `7`"),
    (entry('"dtype":"F33","shape":[1],"data_offsets":[0,4]', 4), "unknown variant `F33`"),
    (entry('"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]', 1), "duplicate field"),
    *(
        (entry(f'"dtype":"F32","shape":{shape},"data_offsets":[0,0]', 0), message)
        for shape, message in (
            ("1", "expected a sequence"),
            ("[-1]", "integer `-1`"),
            ("[1.0]", "floating point"),
            ("[4611686018427387904,4]", "overflow"),
            ("[4294967296,4294967296]", "overflow"),
            ("[4611686018427387904,4,0]", "overflow"),
            ("[4611686018427387904]", "overflow"),
        )
    ),
    *(
        (entry(f'"dtype":"F32","shape":{shape},"data_offsets":{offsets}', size), message)
        for shape, offsets, size, message in (
            ("[1]", "[0]", 4, "expected a tuple"),
            ("[1]", '["0",4]', 4, "string"),
            ("[2]", "[0,4]", 4, "invalid shape"),
            ("[2]", "[0,8]", 4, "not fully covered"),
            ("[1]", "[4,0]", 4, "invalid offset for tensor `a`"),
            ("[1]", "[4,8]", 8, "invalid offset for tensor `a`"),
            ("[1]", "[0,4]", 6, "not fully covered"),
        )
    ),
    (
        held(
            '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
            '"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
            b"12345678",
        ),
        "invalid offset for tensor `b`",
    ),
    (
        entry(f'"dtype":"U8","shape":[{",".join("1" * 65)}],"data_offsets":[0,1]', 1),
        "maximum supported dimension",
    ),
    (entry('"dtype":"F4","shape":[2],"data_offsets":[0,1]', 1), "a: F4 is not read"),
    (entry('"dtype":"U8","shape":[1],"data_offsets":[0,1]', 1, "a\\u0000b"), "a\\x00b"),
    (b"\x80\x02}q\0(X\x05\0\0\0" + b"x" * 64, "this is a pickle file"),
    (b"PK\3\4" + b"x" * 64, "this is a zip archive"),
    *((WHOLE[:size], "") for size in range(len(WHOLE))),
]


@pytest.mark.parametrize("case", range(len(HOSTILE)))
def test_a_hostile_file_is_refused_by_name(case: int, tmp_path: Path) -> None:
    data, message = HOSTILE[case]
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(ValueError) as caught:
        read_tensors(path)
    assert str(caught.value).startswith(f"{path}: ") and message in str(caught.value)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600


def test_many_tensors_take_no_time(tmp_path: Path) -> None:
    entries = (
        f'"t{i}":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{i + 1}]}}' for i in range(50_000)
    )
    (tmp_path / "x").write_bytes(held("{" + ",".join(entries) + "}", b"x" * 50_000))
    start = time.process_time()
    assert list(read_tensors(tmp_path / "x"))[-1] == "t49999"
    assert time.process_time() - start < 10


def test_what_is_no_file_is_an_environment_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # nobody writes into it: an open() would wait for ever
    for path, problem in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "expected a regular file, got a folder"),
        (Path("/dev/null"), "expected a regular file, got a device"),
        (tmp_path / "pipe", "expected a regular file, got a pipe"),
    ):
        with pytest.raises(OSError, match=problem) as caught:
            read_tensors(path)
        assert caught.value.filename == str(path)


def source(folder: Path, tensors: dict[str, Any], more: str = "") -> Config:
    write_tensors(folder / "x.safetensors", tensors)
    text = f"loss: cross_entropy\nsource: {{kind: safetensors, path: x.safetensors{more}}}\n"
    (folder / "c.yaml").write_text(text)
    return Config(folder / "c.yaml", [])


LOGITS = {"logits": np.full((3, 8), 0.5, np.float32), "labels": np.array([1, 2, 3])}


def judged(config: Config, **held: Any) -> Any:
    request = {"do": "gradcheck", "config": config.tree(), "name": "c.yaml"}
    return run_request(request, config.files(), is_quiet=True, **held)


@pytest.mark.parametrize(
    ("tensors", "more", "message"),
    [
        (LOGITS, ", logits: none", "x.safetensors: no tensor 'none'; there are: "),
        ({**LOGITS, "logits": np.zeros((3, 8))}, "", "got F64"),
        ({**LOGITS, "labels": np.zeros(3, np.uint16)}, "", "got U16"),
        ({**LOGITS, "labels": np.array([1, 2])}, "", "x.safetensors: labels: expected [3]"),
        (
            {**LOGITS, "labels": np.array([1, 2, 8])},
            "",
            "x.safetensors: labels: row 2: expected a label from 0 to 7, or -100 (ignore_index)",
        ),
        ({"a\x1b\n": np.zeros(2)}, "", "no tensor 'logits'; there are: a\\x1b\\n"),
    ],
)
def test_the_judge_names_file_and_tensor(
    tensors: dict[str, Any], more: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(JudgeError) as caught:
        judged(source(tmp_path, tensors, more))
    assert caught.value.code == 2 and message in str(caught.value)


def test_the_judge_reads_what_the_file_holds(tmp_path: Path) -> None:
    assert judged(source(tmp_path, LOGITS | {"labels": np.array([1, -100, 7])})).passed


def test_a_file_that_is_cut_while_it_is_read_is_an_environment_error(tmp_path: Path) -> None:
    """The data is mapped: to touch a page that is no longer there ends the process that does."""
    path, wide = tmp_path / "x.safetensors", np.zeros((3, 50_000), np.float32)

    def judged_after(action: Any, logits: Any) -> None:
        config = source(tmp_path, LOGITS | {"logits": logits})
        judged(config, before=lambda: (faulthandler.disable(), action()))

    with pytest.raises(OSError, match="x.safetensors: the file was cut while it was read"):
        judged_after(lambda: os.truncate(path, 5000), wide)
    with pytest.raises(Crashed, match="Bus error"):  # of another cause it is the crash that it is
        judged_after(lambda: os.kill(os.getpid(), signal.SIGBUS), LOGITS["logits"])
