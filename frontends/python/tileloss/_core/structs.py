"""The structs and numbers of the C ABI (include/tileloss/tileloss.h). The arguments of a call: slots.py."""

from __future__ import annotations

from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    Union,
    c_char,
    c_char_p,
    c_double,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

NONE, FLOAT32, BFLOAT16, FLOAT16, INT32, INT64, UINT8 = range(7)
CPU, CUDA = range(2)  # device types
FORWARD, BACKWARD, VALUE_AND_GRAD, FROM_ROW_STATE = range(4)
INTERNAL = 7  # the status of a bug
PASS_NAMES = ("forward", "backward", "value_and_grad", "from_row_state")


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Fields of one type, one after the other."""
    return [(name, kind) for name in names.split()]


class Matrix(Structure):
    _fields_ = [
        ("data", c_void_p),
        *_fields(c_int64, "rows cols row_stride col_stride"),
        *_fields(c_int32, "dtype device_type device_index reserved"),
    ]


class Vector(Structure):
    _fields_ = [
        ("data", c_void_p),
        *_fields(c_int64, "size stride"),
        *_fields(c_int32, "dtype device_type device_index reserved"),
    ]


class Scalar(Structure):
    _fields_ = [("value", c_double), ("pointer", c_void_p)]


class RowState(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("rows", c_int64),
        *_fields(c_void_p, "max sum label_logit entropy_sum collision_sum smoothing_sum argmax"),
        ("smoothing_weight", c_double),
        *_fields(c_int32, "device_type device_index"),
        *_fields(c_void_p, "allowed_count allowed_weight label_logits"),
        ("labels_per_row", c_int64),
    ]


class PairState(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("rows", c_int64),
        *_fields(c_void_p, "teacher label divergence mean"),
    ]


class RowGroups(Structure):
    _fields_ = _fields(c_int64, "rows logits_stride dlogits_stride teacher_logits_stride")


class CpuPlanOptions(Structure):
    _fields_ = [
        *_fields(c_int32, "isa schedule threads reserved"),
        *_fields(c_int64, "row_block vocab_block chunk_columns"),
    ]


class CudaPlanOptions(Structure):
    _fields_ = [
        *_fields(c_int32, "kernel schedule"),
        *_fields(c_int64, "row_block vocab_block chunk_columns"),
    ]


class PlanOptions(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("workspace_bytes", c_int64),
        ("cpu", CpuPlanOptions),
        ("cuda", CudaPlanOptions),
    ]


class PlanBuffer(Structure):
    _fields_ = [("name", c_char * 24), ("bytes", c_int64)]


class CpuPlan(Structure):
    _fields_ = [
        *_fields(c_int32, "isa schedule threads reserved"),
        *_fields(c_int64, "row_block vocab_block kept_columns kept_rows chunk_columns"),
        ("isa_note", c_char * 48),
    ]


class PlanPart(Union):
    """A backend's own part of a plan."""

    _fields_ = [("cpu", CpuPlan), ("other", c_uint64 * 32)]


class Plan(Structure):
    _anonymous_ = ("part",)
    _fields_ = [
        ("struct_size", c_size_t),
        ("function", c_char * 32),
        *_fields(c_int32, "call_pass device_type device_index reserved"),
        ("workspace_bytes", c_int64),
        ("predicted_ms", c_double),
        ("fingerprint", c_uint64),
        ("buffer_count", c_int64),
        ("buffers", PlanBuffer * 16),
        ("part", PlanPart),
    ]


MergeFunction = CFUNCTYPE(c_int32, c_void_p)


class Run(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
        *_fields(c_void_p, "executor stream"),
        ("merge", MergeFunction),
        ("merge_context", c_void_p),
    ]


class Field(Structure):
    _fields_ = [
        ("name", c_char_p),
        ("type", c_int32),
        ("state_arrays", c_uint32),
        ("offset", c_size_t),
        *_fields(c_double, "default_value minimum maximum"),
        *_fields(c_int32, "exclusive_minimum has_absent"),
        *_fields(c_char_p, "choices only_with"),
        ("only_with_choices", c_uint32),
    ]


class TensorInfo(Structure):
    _fields_ = [
        ("name", c_char_p),
        ("offset", c_size_t),
        *_fields(c_int32, "rank role"),
        *_fields(c_uint32, "dtypes passes"),
        ("shape", c_char_p),
        ("state_arrays", c_uint32),
        ("is_required", c_int32),
    ]


class FunctionInfo(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        *_fields(c_char_p, "name loss"),
        *_fields(c_int32, "is_loss is_linear"),
        ("options_size", c_size_t),
        ("fields", POINTER(Field)),
        ("num_fields", c_int64),
        ("tensors", POINTER(TensorInfo)),
        ("num_tensors", c_int64),
        *_fields(c_size_t, "args_size row_state_offset sequence_length_offset row_groups_offset"),
        *_fields(c_char_p, "presets metrics"),
        *_fields(c_size_t, "pair_state_offset labels_per_row_offset"),
    ]
