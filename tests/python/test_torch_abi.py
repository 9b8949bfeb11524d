"""The ctypes structs against tileloss.h and the library; options by name; call counts; the public names' signatures."""

from __future__ import annotations

import ctypes
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from struct import Struct
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tileloss
from tileloss import _library
from tileloss import torch as tl
from tileloss.torch import _tensors
from torch_problems import FUNCTIONS, problem, run

HEADER = (Path(__file__).parents[2] / "include" / "tileloss" / "tileloss.h").read_text()
STRUCTS = {
    "tileloss_matrix": _library.Matrix,
    "tileloss_vector": _library.Vector,
    "tileloss_scalar": _library.Scalar,
    "tileloss_row_state": _library.RowState,
    "tileloss_row_groups": _library.RowGroups,
    "tileloss_args": _library.Args,
    "tileloss_plan_options": _library.PlanOptions,
    "tileloss_plan_buffer": _library.PlanBuffer,
    "tileloss_plan": _library.Plan,
    "tileloss_field": _library.Field,
    "tileloss_function_info": _library.FunctionInfo,
}
TYPES = {
    "double": ctypes.c_double, "size_t": ctypes.c_size_t, "int64_t": ctypes.c_int64,
    "int32_t": ctypes.c_int32, "uint64_t": ctypes.c_uint64,
}  # fmt: skip
RENAMED = {"pass": "call_pass"}  # a keyword of Python


def constants() -> dict[str, int]:
    return {
        name: int(value) for name, value in re.findall(r"\b(TILELOSS_[A-Z0-9_]+) = (\d+)", HEADER)
    }


def fields_of(struct: str) -> list[tuple[str, str, str]]:
    """(type, name, array size or "") of each field, in the header's order."""
    body = re.search(rf"typedef struct {struct} {{(.*?)}} {struct};", HEADER, re.DOTALL)
    assert body, struct
    text = re.sub(r"//[^\n]*", "", body.group(1))
    found = []
    for declaration in filter(None, (d.strip() for d in text.split(";"))):
        kind, _, names = re.sub(r"\s+", " ", declaration).rpartition(" ") if "," not in declaration else (
            *re.match(r"(\w+)(\s)(.*)", declaration, re.DOTALL).groups(),
        )  # fmt: skip
        for name in names.split(","):
            match = re.fullmatch(r"(\w+)(?:\[(\w+)\])?", name.strip())
            assert match, declaration
            found.append((kind, match.group(1), match.group(2) or ""))
    return found


def ctype_of(kind: str, size: str) -> type:
    if size:
        length = int(size) if size.isdigit() else constants()[size]
        return (ctypes.c_char if kind == "char" else ctype_of(kind, "")) * length
    if kind.endswith("char*"):
        return ctypes.c_char_p
    if kind.endswith("*"):
        return ctypes.c_void_p
    return STRUCTS.get(kind) or TYPES.get(kind) or ctypes.c_int32  # int32_t: the enumerations


@pytest.mark.parametrize("struct", STRUCTS)
def test_fields_are_the_headers_in_its_order(struct: str) -> None:
    expected = fields_of(struct)
    ours = STRUCTS[struct]._fields_
    assert [RENAMED.get(name, name) for _, name, _ in expected] == [field[0] for field in ours]
    for (kind, name, size), field in zip(expected, ours, strict=True):
        wanted = ctype_of(kind, size)
        if issubclass(field[1], ctypes._Pointer):
            assert wanted is ctypes.c_void_p, name
        elif issubclass(field[1], ctypes.Array):
            assert (field[1]._type_, field[1]._length_) == (wanted._type_, wanted._length_), name
        else:
            assert field[1] is wanted, name


@pytest.mark.parametrize("struct", [_library.Args, _library.PlanOptions])
def test_sizes_are_the_librarys(struct: type[ctypes.Structure]) -> None:
    """A larger struct is refused, and the message says how large the library's own is."""
    library = ctypes.CDLL(str(tileloss.library_path()))
    library.tileloss_last_error.restype = ctypes.c_char_p
    args, options, plan = _library.Args(), _library.PlanOptions(), _library.Plan()
    for value in (args, options, plan):
        value.struct_size = ctypes.sizeof(value)
    vector = ctypes.create_string_buffer(64)
    args.logits = _library.Matrix(ctypes.addressof(vector), 1, 2, 2, 1, _library.FLOAT32)
    args.labels = _library.Vector(ctypes.addressof(vector), 1, 1, _library.INT64)
    larger = args if struct is _library.Args else options
    larger.struct_size += 1
    wanted = [ctypes.byref(value) for value in (args, options, plan)]
    status = library.tileloss_make_plan(
        b"logprobs", ctypes.c_int(0), wanted[0], None, wanted[1], None, wanted[2]
    )
    message = library.tileloss_last_error().decode()
    assert status != 0
    assert f"struct_size: expected at most {ctypes.sizeof(struct)}, got" in message


@pytest.mark.parametrize(
    ("packed", "struct"),
    [
        (_tensors._MATRIX, _library.Matrix),
        (_tensors._VECTOR, _library.Vector),
        (_tensors._ROW_STATE, _library.RowState),
    ],
)
def test_packed_views_are_the_structs(packed: Struct, struct: type[ctypes.Structure]) -> None:
    """Numbers packed in a row are the struct's first fields in a row."""
    value = struct()
    numbers = range(1, len(packed.unpack(bytes(packed.size))) + 1)
    packed.pack_into(value, 0, *numbers)
    assert [getattr(value, f[0]) for f in struct._fields_[: len(numbers)]] == list(numbers)
    if struct is not _library.RowState:
        assert packed.size == ctypes.sizeof(struct)


def test_numbers_are_the_headers() -> None:
    named = constants()
    for name in ("NONE", "FLOAT32", "BFLOAT16", "FLOAT16", "INT32", "INT64", "UINT8"):
        assert getattr(_library, name) == named[f"TILELOSS_{name}"]
    for name in ("FORWARD", "BACKWARD", "VALUE_AND_GRAD"):
        assert getattr(_library, name) == named[f"TILELOSS_{name}"]
        assert _library.PASS_NAMES[named[f"TILELOSS_{name}"]] == name.lower()
    statuses = re.search(r"TILELOSS_OK = 0,(.*?)};", HEADER, re.DOTALL)
    assert statuses
    assert len(_library._ERRORS) == statuses.group(1).count(" = ")


def test_every_input_of_the_header_is_known_to_the_functions() -> None:
    """A tensor that the ABI gains has to reach Python as well."""
    from tileloss.torch._call import EXTRA_INPUTS, ROW_OUTPUTS

    vectors = [name for kind, name, _ in fields_of("tileloss_args") if kind == "tileloss_vector"]
    known = {"labels", "loss", "metrics", "bias", "dbias", *ROW_OUTPUTS}
    known |= {"loss_grad", "logp_grad", "lse_grad", "entropy_grad"}
    known |= {name for names in EXTRA_INPUTS.values() for name in names}
    assert set(vectors) == known


def test_every_option_of_the_library_is_an_argument() -> None:
    shards = {"vocab_start", "vocab_total"}  # this version's Python has no shards
    for name in FUNCTIONS:
        options = set(_library.FUNCTIONS[name].options) - shards
        if "policy" in name:
            given = set(tl.PolicyOptions.__annotations__)
        else:
            given = set(inspect.signature(getattr(tl, name)).parameters)
        assert options <= given, name
        if "policy" in name:
            assert given == options


@pytest.mark.parametrize("name", FUNCTIONS)
def test_defaults_are_the_librarys(name: str) -> None:
    for option, parameter in inspect.signature(getattr(tl, name)).parameters.items():
        described = _library.FUNCTIONS[name].options.get(option)
        if described is None or parameter.default is None:
            continue
        default = parameter.default
        index = described.choices.index(default) if described.choices else default
        assert index == described.default, option


def parameters(function: Callable[..., Any], kind: Any) -> dict[str, Any]:
    """Names and defaults of the parameters of one kind."""
    found = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in found if p.kind is kind}


BY_POSITION, BY_NAME = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


def test_cross_entropy_is_called_as_torchs() -> None:
    ours, theirs = tl.cross_entropy, parameters(F.cross_entropy, BY_POSITION)
    assert list(parameters(ours, BY_POSITION)) == list(theirs)[:3] == ["input", "target", "weight"]
    given = parameters(ours, BY_POSITION) | parameters(ours, BY_NAME)
    assert theirs.keys() - given.keys() == {"size_average", "reduce"}  # deprecated there
    assert {name: given[name] for name in theirs if name in given} == {
        name: default for name, default in theirs.items() if name in given
    }


def test_linear_cross_entropy_is_called_as_torchs() -> None:
    ours, theirs = tl.linear_cross_entropy, F.linear_cross_entropy
    assert parameters(ours, BY_POSITION) == parameters(theirs, BY_POSITION)
    given, expected = parameters(ours, BY_NAME), parameters(theirs, BY_NAME)
    assert expected.keys() - given.keys() == {"options"}  # its chunks; here workspace_bytes
    assert {name: given[name] for name in expected if name in given} == {
        name: default for name, default in expected.items() if name != "options"
    }


@pytest.mark.parametrize("options", [{}, {"ignore_index": None}, {"ignore_index": 3}])
def test_a_call_of_torchs_gives_the_same(options: dict[str, Any]) -> None:
    p = problem()
    given = options | {"linear_bias": p.bias, "weight": torch.rand(67), "label_smoothing": 0.1}
    rows = p.labels.flatten().clamp(min=3) if 3 in options.values() else p.labels.flatten()
    ours, theirs = (
        function(p.hidden.flatten(0, 1), p.weight, rows, **given)
        for function in (tl.linear_cross_entropy, F.linear_cross_entropy)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_tensors_come_by_position_and_options_by_name(name: str) -> None:
    function = getattr(tl, name)
    expected = ["input", "linear_weight", "target"] if "linear" in name else ["input", "target"]
    expected += ["advantages"] * ("policy" in name) + ["weight"] * (name == "cross_entropy")
    assert list(parameters(function, BY_POSITION)) == expected
    assert ("linear_bias" in parameters(function, BY_NAME)) == ("linear" in name)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if not name.endswith("logprobs")])
def test_where_the_gradient_is_computed_has_one_default(name: str) -> None:
    """None, and each function says what that means for it."""
    assert parameters(getattr(tl, name), BY_NAME)["grad_in_forward"] is None
    documented = inspect.getdoc(getattr(tl, name)) or ""
    assert "grad_in_forward" in documented and "None" in documented


@pytest.mark.parametrize("name", tl.__all__)
def test_public_names_are_documented(name: str) -> None:
    documented = inspect.getdoc(getattr(tl, name))
    assert documented
    assert len(documented) > 60


@pytest.mark.parametrize("name", FUNCTIONS)
def test_calls_are_counted(name: str) -> None:
    p = problem()
    options = {} if name.endswith("logprobs") else {"grad_in_forward": False}
    modes = [(options, {f"{name}/forward": 2, f"{name}/backward": 2})]
    if options:
        modes.append(({"grad_in_forward": True}, {f"{name}/value_and_grad": 2}))
    for mode, expected in modes:
        before = tl.call_counts()
        for _ in range(2):
            run(name, p, *p.leaves(name), **mode).backward()
        after = tl.call_counts()
        assert {
            k: v - before.get(k, 0) for k, v in after.items() if v != before.get(k, 0)
        } == expected
    tl.call_counts().clear()
    assert tl.call_counts() == after


def test_a_call_that_fails_is_not_counted() -> None:
    before = tl.call_counts()
    with pytest.raises(IndexError):
        tl.cross_entropy(torch.zeros(1, 3), torch.tensor([3]))
    assert tl.call_counts() == before
