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

NONE, FLOAT32, BFLOAT16, FLOAT16, INT32, INT64, UINT8 = range(7)
CPU, CUDA = range(2)  # device types
FORWARD, BACKWARD, VALUE_AND_GRAD, FROM_ROW_STATE = range(4)
INTERNAL = 7  # the status of a bug
PASS_NAMES = ("forward", "backward", "value_and_grad", "from_row_state")


class Matrix(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("rows", c_int64),
        ("cols", c_int64),
        ("row_stride", c_int64),
        ("col_stride", c_int64),
        ("dtype", c_int32),
        ("device_type", c_int32),
        ("device_index", c_int32),
        ("reserved", c_int32),
    ]


class Vector(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("size", c_int64),
        ("stride", c_int64),
        ("dtype", c_int32),
        ("device_type", c_int32),
        ("device_index", c_int32),
        ("reserved", c_int32),
    ]


class Scalar(Structure):
    _fields_ = [("value", c_double), ("pointer", c_void_p)]


class RowState(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("rows", c_int64),
        ("max", c_void_p),
        ("sum", c_void_p),
        ("label_logit", c_void_p),
        ("entropy_sum", c_void_p),
        ("collision_sum", c_void_p),
        ("smoothing_sum", c_void_p),
        ("argmax", c_void_p),
        ("smoothing_weight", c_double),
        ("device_type", c_int32),
        ("device_index", c_int32),
        ("allowed_count", c_void_p),
        ("allowed_weight", c_void_p),
        ("label_logits", c_void_p),
        ("labels_per_row", c_int64),
    ]


class PairState(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("rows", c_int64),
        ("teacher", c_void_p),
        ("label", c_void_p),
        ("divergence", c_void_p),
        ("mean", c_void_p),
    ]


class RowGroups(Structure):
    _fields_ = [
        ("rows", c_int64),
        ("logits_stride", c_int64),
        ("dlogits_stride", c_int64),
        ("teacher_logits_stride", c_int64),
    ]


class CpuPlanOptions(Structure):
    _fields_ = [
        ("isa", c_int32),
        ("schedule", c_int32),
        ("threads", c_int32),
        ("reserved", c_int32),
        ("row_block", c_int64),
        ("vocab_block", c_int64),
        ("chunk_columns", c_int64),
    ]


class CudaPlanOptions(Structure):
    _fields_ = [
        ("kernel", c_int32),
        ("schedule", c_int32),
        ("row_block", c_int64),
        ("vocab_block", c_int64),
        ("chunk_columns", c_int64),
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
        ("isa", c_int32),
        ("schedule", c_int32),
        ("threads", c_int32),
        ("reserved", c_int32),
        ("row_block", c_int64),
        ("vocab_block", c_int64),
        ("kept_columns", c_int64),
        ("kept_rows", c_int64),
        ("chunk_columns", c_int64),
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
        ("call_pass", c_int32),
        ("device_type", c_int32),
        ("device_index", c_int32),
        ("reserved", c_int32),
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
        ("executor", c_void_p),
        ("stream", c_void_p),
        ("merge", MergeFunction),
        ("merge_context", c_void_p),
    ]


class Field(Structure):
    _fields_ = [
        ("name", c_char_p),
        ("type", c_int32),
        ("state_arrays", c_uint32),
        ("offset", c_size_t),
        ("default_value", c_double),
        ("minimum", c_double),
        ("maximum", c_double),
        ("exclusive_minimum", c_int32),
        ("has_absent", c_int32),
        ("choices", c_char_p),
        ("only_with", c_char_p),
        ("only_with_choices", c_uint32),
    ]


class TensorInfo(Structure):
    _fields_ = [
        ("name", c_char_p),
        ("offset", c_size_t),
        ("rank", c_int32),
        ("role", c_int32),
        ("dtypes", c_uint32),
        ("passes", c_uint32),
        ("shape", c_char_p),
        ("state_arrays", c_uint32),
        ("is_required", c_int32),
    ]


class FunctionInfo(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("name", c_char_p),
        ("loss", c_char_p),
        ("is_loss", c_int32),
        ("is_linear", c_int32),
        ("options_size", c_size_t),
        ("fields", POINTER(Field)),
        ("num_fields", c_int64),
        ("tensors", POINTER(TensorInfo)),
        ("num_tensors", c_int64),
        ("args_size", c_size_t),
        ("row_state_offset", c_size_t),
        ("sequence_length_offset", c_size_t),
        ("row_groups_offset", c_size_t),
        ("presets", c_char_p),
        ("metrics", c_char_p),
        ("pair_state_offset", c_size_t),
        ("labels_per_row_offset", c_size_t),
    ]
