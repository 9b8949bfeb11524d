"""tileloss._core: the ctypes structs against tileloss.h and the library, its table of tensors, calls without a framework."""

from __future__ import annotations

import ctypes
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
import pytest
import torch

import tileloss
from tileloss import _core
from tileloss import torch as tl
from tileloss._core import calls, functions, library, slots, structs, views
from tileloss._core.functions import FUNCTIONS, Function

HEADER = (Path(__file__).parents[2] / "include" / "tileloss" / "tileloss.h").read_text()
STRUCTS = {
    "tileloss_matrix": structs.Matrix,
    "tileloss_vector": structs.Vector,
    "tileloss_scalar": structs.Scalar,
    "tileloss_row_state": structs.RowState,
    "tileloss_row_groups": structs.RowGroups,
    "tileloss_args": slots.Args,
    "tileloss_plan_options": structs.PlanOptions,
    "tileloss_cpu_plan_options": structs.CpuPlanOptions,
    "tileloss_cuda_plan_options": structs.CudaPlanOptions,
    "tileloss_plan_buffer": structs.PlanBuffer,
    "tileloss_cpu_plan": structs.CpuPlan,
    "tileloss_plan": structs.Plan,
    "tileloss_field": structs.Field,
    "tileloss_tensor": structs.TensorInfo,
    "tileloss_function_info": structs.FunctionInfo,
}
TYPES = {
    "double": ctypes.c_double, "size_t": ctypes.c_size_t, "int64_t": ctypes.c_int64,
    "int32_t": ctypes.c_int32, "uint64_t": ctypes.c_uint64,
    "uint32_t": ctypes.c_uint32, "tileloss_plan_part": structs.PlanPart,
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
    text = re.sub(r"//[^\n]*|#ifdef __cplusplus.*?#endif", "", body.group(1), flags=re.DOTALL)
    text = re.sub(r"union {.*?};", "tileloss_plan_part part;", text, flags=re.DOTALL)
    text = re.sub(r" TILELOSS_DEFAULT\(.*?\)", "", text)
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


@pytest.mark.parametrize("struct", [slots.Args, structs.PlanOptions])
def test_sizes_are_the_librarys(struct: type[ctypes.Structure]) -> None:
    """A larger struct is refused, and the message says how large the library's own is."""
    lib = ctypes.CDLL(str(tileloss.library_path()))
    lib.tileloss_last_error.restype = ctypes.c_char_p
    args, options, plan = slots.Args(), structs.PlanOptions(), structs.Plan()
    for value in (args, options, plan):
        value.struct_size = ctypes.sizeof(value)
    vector = ctypes.create_string_buffer(64)
    args.logits = structs.Matrix(ctypes.addressof(vector), 1, 2, 2, 1, structs.FLOAT32)
    args.labels = structs.Vector(ctypes.addressof(vector), 1, 1, structs.INT64)
    larger = args if struct is slots.Args else options
    larger.struct_size += 1
    wanted = [ctypes.byref(value) for value in (args, options, plan)]
    status = lib.tileloss_make_plan(
        b"logprobs", ctypes.c_int(0), wanted[0], None, wanted[1], None, wanted[2]
    )
    message = lib.tileloss_last_error().decode()
    assert status != 0
    assert (
        f"struct_size: expected that of its init function, at most {ctypes.sizeof(struct)}, got"
        in message
    )


@pytest.mark.parametrize(
    ("packed", "struct"),
    [
        (calls.MATRIX, structs.Matrix),
        (calls.VECTOR, structs.Vector),
    ],
)
def test_packed_views_are_the_structs(packed: Struct, struct: type[ctypes.Structure]) -> None:
    """Numbers packed in a row are the struct's first fields in a row."""
    value = struct()
    numbers = range(1, len(packed.unpack(bytes(packed.size))) + 1)
    packed.pack_into(value, 0, *numbers)
    assert [getattr(value, f[0]) for f in struct._fields_[: len(numbers)]] == list(numbers)
    assert packed.size == ctypes.sizeof(struct)


def test_numbers_are_the_headers() -> None:
    named = constants()
    for name in ("NONE", "FLOAT32", "BFLOAT16", "FLOAT16", "INT32", "INT64", "UINT8"):
        assert getattr(structs, name) == named[f"TILELOSS_{name}"]
    for name in ("FORWARD", "BACKWARD", "VALUE_AND_GRAD"):
        assert getattr(structs, name) == named[f"TILELOSS_{name}"]
        assert structs.PASS_NAMES[named[f"TILELOSS_{name}"]] == name.lower()
    statuses = re.search(r"TILELOSS_OK = 0,(.*?)};", HEADER, re.DOTALL)
    assert statuses
    assert len(library.ERRORS) == statuses.group(1).count(" = ")


@pytest.mark.parametrize("module", [m.name for m in pkgutil.iter_modules(_core.__path__)])
def test_no_framework_is_imported(module: str) -> None:
    """Nor do those who use another pay for one."""
    code = (
        f"import sys, tileloss._core.{module};"
        "sys.exit(str({'torch', 'jax', 'numpy'} & sys.modules.keys() or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) in ((0, ""), (1, "")), done.stderr


# ------------------------------------------------------------------------------------------------ the table of tensors

DTYPES = ("FLOAT32", "BFLOAT16", "FLOAT16", "INT32", "INT64", "UINT8")
N, V, H = 4, 6, 5


def planned(function: str, call_pass: int, slot: str, dtype: int) -> str:
    """What the library says when the plan of a call has that tensor of that type beside those that it needs; "" if nothing."""
    args, plan = calls.new_args(), structs.Plan(ctypes.sizeof(structs.Plan))
    memory = ctypes.create_string_buffer(8192)
    address = ctypes.addressof(memory) + 64
    sizes = {"N": N, "V": V, "W": 1, "C": V, "H": H, "B+1": 2, "B|N": 1, "L": 1}
    sizes["M"] = max(len(FUNCTIONS[function].metrics), 1)
    needed = ["hidden", "head"] if "linear" in function else ["logits"]
    if call_pass == structs.BACKWARD:
        needed += [f"d{needed[0]}"]
        calls.set_row_state(args, address + 4096, 4, N)
    if "policy" in function:
        needed += ["advantages"]
    given = {"labels": structs.INT64} | dict.fromkeys(needed, structs.FLOAT32) | {slot: dtype}
    for number, (name, kind) in enumerate(given.items()):
        shape, place = slots.SLOTS[name].shape, address + 320 * number
        if "," in shape:
            rows, cols = (sizes[letter] for letter in shape.split(","))
            lie = (rows, cols)
            calls.set_matrix(args, name, place, kind, lie, (lie[1], 1))
        else:
            calls.set_vector(args, name, place, kind, sizes[shape], 1)
    struct = FUNCTIONS[function].new_options("")
    pointers = (ctypes.byref(args), struct, None, None, ctypes.byref(plan))
    status = library.lib.tileloss_make_plan(function.encode(), call_pass, *pointers)
    return library.lib.tileloss_last_error().decode() if status else ""


PASS_OF_ROLES = {
    slots.INPUT: structs.FORWARD,
    slots.OUTPUT: structs.FORWARD,
    slots.ROW_OUTPUT: structs.FORWARD,
    slots.UPSTREAM: structs.BACKWARD,
}


@pytest.mark.parametrize("name", [s.name for s in slots.SLOTS.values() if s.role in PASS_OF_ROLES])
def test_types_and_functions_are_the_librarys(name: str) -> None:
    slot = slots.SLOTS[name]
    of_labels = [
        f for f in FUNCTIONS if not slots.ARGUMENTS[f].target and not FUNCTIONS[f].is_linear
    ]
    for function in of_labels:
        for prefix in ("", "linear_"):
            tensors = FUNCTIONS[f"{prefix}{function}"].tensors
            for dtype in map(structs.__dict__.get, DTYPES):
                message = planned(f"{prefix}{function}", PASS_OF_ROLES[slot.role], name, dtype)
                taken = name in tensors and dtype in slot.dtypes
                assert (not re.match(rf"{name}\b", message)) == taken, (function, dtype, message)


# ------------------------------------------------------------------------------------------------ without a framework


def strides_of(array: np.ndarray) -> list[int]:
    return [stride // array.itemsize for stride in array.strides]


def numpy_cross_entropy(
    x: np.ndarray, y: np.ndarray, given: dict[str, Any], weight: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(loss, its gradient, the gradient of a backward of its own), each through views of numpy's memory."""
    function = FUNCTIONS["cross_entropy"]
    dlogits, twice = (np.empty(x.shape, x.dtype) for _ in range(2))
    loss, state = np.empty((), np.float32), np.empty((3, y.size), np.float32)
    upstream = np.ones((), np.float32)

    def run(call_pass: int, gradient: np.ndarray | None, **vectors: np.ndarray) -> None:
        args, lie = calls.new_args(), views.layout(x.shape, strides_of(x))
        assert lie is not None
        calls.set_logits(args, x.ctypes.data, structs.FLOAT32, x.shape[-1], lie)
        if gradient is not None:
            address = gradient.ctypes.data
            calls.set_dlogits(args, address, structs.FLOAT32, x.shape[-1], lie, in_place=False)
        calls.set_vector(args, "labels", y.ctypes.data, structs.INT64, y.size, 1)
        if weight is not None:
            vectors["class_weights"] = weight
        for slot, array in vectors.items():
            calls.set_vector(args, slot, array.ctypes.data, structs.FLOAT32, array.size, 1)
        if call_pass != structs.VALUE_AND_GRAD:
            calls.set_row_state(args, state.ctypes.data, *state.shape)
        struct = functions.to_struct(function, *functions.encode(function, given))
        calls.call(function, call_pass, args, struct)

    run(structs.VALUE_AND_GRAD, dlogits, loss=loss)
    value = loss.copy()
    run(structs.FORWARD, None, loss=loss)
    assert value == loss
    run(structs.BACKWARD, twice, loss_grad=upstream)
    return loss, dlogits, twice


@pytest.mark.parametrize(
    "given", [{}, {"reduction": "sum", "label_smoothing": 0.1, "z_loss": 1e-3}], ids=str
)
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_numpy_and_torch_give_the_same_bits(given: dict[str, Any], cut: bool) -> None:
    x = np.random.default_rng(0).standard_normal((3, 7, 1001), np.float32)
    y = np.random.default_rng(1).integers(0, 1001, (3, 7))
    y[0, :2] = -100
    weight = np.linspace(0.5, 2, 1001, dtype=np.float32) if given else None
    if cut:  # two levels of strides; labels have one
        x, y = x[:, :-1], y[:, :-1].copy()
    loss, *gradients = numpy_cross_entropy(x, y, given, weight)
    z, classes = torch.from_numpy(x), None if weight is None else torch.from_numpy(weight)
    for in_forward, gradient in zip((True, False), gradients, strict=True):
        leaf = z.detach().requires_grad_()
        ours = tl.cross_entropy(
            leaf, torch.from_numpy(y), classes, grad_in_forward=in_forward, **given
        )
        (expected,) = torch.autograd.grad(ours, leaf)
        assert ours.item() == loss.item()
        assert np.array_equal(gradient, expected.numpy())


def test_scalars_are_read_where_they_lie() -> None:
    function = FUNCTIONS["cross_entropy"]
    names, values = functions.encode(function, {"z_loss": 0.5}, scalars=["temperature"])
    assert (names, values) == (":z_loss;temperature", [0.5])
    number = ctypes.c_float(0.7)
    struct = functions.to_struct(function, names, values, ctypes.addressof(number))
    place = structs.Scalar.from_buffer(struct, function.options["temperature"].offset)
    assert place.pointer == ctypes.addressof(number)
    # The struct that calls share has no address of this call.
    shared = functions.to_struct(function, names, values)
    assert not structs.Scalar.from_buffer(shared, function.options["temperature"].offset).pointer


def test_only_what_differs_from_the_default_travels() -> None:
    function = FUNCTIONS["linear_policy_loss"]
    usual = {name: option.usual for name, option in function.options.items()}
    given = {name: value for name, value in usual.items() if value == value}
    assert functions.encode(function, given) == (":;", [])
    # On top of a preset a default says something too.
    assert functions.encode(function, {"kind": "clip"}, "cispo") == ("cispo:kind;", [0])
    assert (
        functions.encode(function, {"ignore_index": 2**53 + 1})[0]
        == ":ignore_index=9007199254740993;"
    )
    assert not functions.is_per_row(function, *functions.encode(function, {"aggregation": "sum"}))
    assert functions.is_per_row(function, *functions.encode(function, {"aggregation": "none"}))


def test_an_option_that_the_library_gains_is_known_at_once() -> None:
    """Names, ranges and choices are the library's alone."""
    info = structs.FunctionInfo(struct_size=ctypes.sizeof(structs.FunctionInfo))
    names = list(FUNCTIONS)
    number = ctypes.c_int64(names.index("policy_loss"))
    assert library.lib.tileloss_get_function_info(number, ctypes.byref(info)) == 0
    fields = (structs.Field * (info.num_fields + 1))(*info.fields[: info.num_fields])
    place = info.options_size
    fields[info.num_fields] = structs.Field(b"mood", 3, 0, place, 1, 0, 1, 0, 0, b"calm|bold")
    info.fields, info.num_fields, info.options_size = fields, len(fields), place + 8
    function = Function(info)
    assert function.options["mood"].usual == "bold"
    names_given, values = functions.encode(function, {"mood": "calm", "beta": 0.0})
    assert (names_given, values) == (":mood;", [0])
    with pytest.raises(ValueError, match="^mood: expected one of calm, bold, got 'sad'$"):
        functions.encode(function, {"mood": "sad"})
