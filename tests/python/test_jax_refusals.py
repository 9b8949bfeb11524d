"""What the functions of tileloss.jax refuse: the exception's type and message, which name the argument, what was expected and
what was given."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import tileloss.jax


def ints(*shape: int) -> Any:
    return jnp.zeros(shape, jnp.int32)


def floats(*shape: int) -> Any:
    return jnp.ones(shape)


HEAD = {"hidden": floats(12, 5), "head": floats(5, 40)}
# By function: what is right, of which a row changes some.
RIGHT: dict[str, dict[str, Any]] = {
    "cross_entropy": {"logits": floats(3, 5), "labels": ints(3)},
    "logprobs": {"logits": floats(2, 3, 77), "labels": ints(2, 3)},
    "policy_loss": {"logits": floats(3, 5, 7), "labels": ints(3, 5), "advantages": floats(3)},
    "distillation": {"logits": floats(2, 5, 13), "teacher": floats(2, 5, 13)},
    "sparse_distillation": {
        "logits": floats(2, 203),
        "teacher_ids": jnp.array([[1, 2], [3, 4]]),
        "teacher_logprobs": jnp.zeros((2, 2)),
        "labels": ints(2),
    },
    "linear_cross_entropy": HEAD | {"labels": ints(12)},
    "linear_policy_loss": HEAD | {"hidden": floats(3, 4, 5), "labels": ints(3, 4), "advantages": floats(3)},
    "linear_distillation": {
        "hidden": floats(2, 5, 24),
        "head": floats(24, 203),
        "bias": floats(203),
        "teacher_hidden": floats(2, 5, 16),
        "teacher_head": floats(16, 203),
        "teacher_bias": floats(203),
    },
}  # fmt: skip
ONE_PASS = {"grad_in_forward": True}
NOT_PER_ROW = "grad_in_forward: expected False for a loss per row .*, got True"
NO_PALLAS = {"implementation": "pallas_tpu"}
OTHERS = {"implementation": ("pallas_tpu", "cuda")}
Row = tuple[dict[str, Any], type[Exception], str]
UNEXPECTED = r"^\w+\(\) got an unexpected keyword argument"
POLICIES: list[Row] = [
    ({"epsilom": 1}, TypeError, f"{UNEXPECTED} 'epsilom'$"),
    ({"kind": "ppo"}, ValueError, "kind: expected one of clip, cispo"),
    ({"kind": "cispo"}, ValueError, "epsilon_high: expected a number"),
    ({"tau_pos": jnp.float32(1)}, TypeError, "tau_pos: expected a number, got an array"),
    ({"kind": "sapo", "delta": jnp.float32(2)}, ValueError, "delta: expected none with kind = sapo"),
    ({"beta": jnp.ones(2)}, ValueError, "beta: expected a number or an array of one element"),
    ({"beta": jnp.float32(0.1)}, ValueError, "ref_logp: expected a float32 vector"),
    ({"epsilon_low": -1.0}, ValueError, "epsilon_low: expected a number >= 0"),
    ({"sampler_max": 2.0}, ValueError, "sampler_max: expected none with sampler_correction = off"),
    ({"advantage_level": "token"}, ValueError, "advantages: expected"),
    ({"aggregation": "none"} | ONE_PASS, ValueError, NOT_PER_ROW),
]  # fmt: skip
WRONG: dict[str, list[Row]] = {
    "cross_entropy": [
        ({"logits": None}, TypeError, "^logits: expected an array, got None"),
        ({"labels": None}, TypeError, "^labels: expected an array, got None"),
        ({"logits": ints(3, 1)}, TypeError, "logits: expected float32, bfloat16 or float16, got int32"),
        ({"labels": ints(4)}, ValueError, r"labels: expected logits' leading dimensions \[3\], got \[4\]"),
        ({"labels": floats(3)}, ValueError, r"labels: expected class probabilities of the logits' shape \[3, 5\], got \[3\]"),
        ({"implementation": "rocm"}, ValueError, "implementation: expected names among cpu, cuda, pallas_tpu, xla, got rocm"),
        ({"temperature": 0.0}, ValueError, "temperature: expected"),
        ({"reduction": "max"}, ValueError, "reduction: expected one of none, sum, mean, got 'max'"),
        ({"reduction": "none"} | ONE_PASS, ValueError, NOT_PER_ROW),
        ({"valid_vocab": 6}, ValueError, "valid_vocab: expected"),
        ({"valid_vocab": 0}, ValueError, "^valid_vocab: expected a number >= 1, or None, got 0"),
        ({"weight": np.ones(4, np.float32)}, ValueError, r"^weight\.size: expected 5, got 4"),
        ({"weight": np.ones((5, 1), np.float32)}, ValueError, r"weight: expected one dimension, got \[5, 1\]"),
        ({"logits": floats(3, 5, 7), "labels": ints(3, 5), "token_weights": np.ones((5, 3))}, ValueError,
         "token_weights: expected labels' shape"),
        ({"where": 1}, TypeError, f"{UNEXPECTED} 'where'; here that is mask"),
        ({"workspace_bytes": 1}, TypeError, f"{UNEXPECTED} 'workspace_bytes'; nothing is held here that it could cap"),
        ({"allowed": jnp.ones((3, 5), bool)}, TypeError, "allowed: expected int32 words .*got bool"),
        ({"allowed": ints(2, 1)}, ValueError, r"allowed: expected shape \[1\], .*got \[2, 1\]"),
        ({"allowed": ints(3, 1)} | NO_PALLAS, ValueError, "implementation: none of those .*pallas_tpu"),
        # Class probabilities.
        ({"labels": floats(3, 5), "z_loss": 0.1}, ValueError, "z_loss: expected 0 with class probabilities, got 0.1"),
        ({"labels": floats(3, 5), "vocab_axis": "tp"}, ValueError, "vocab_axis: expected None with class probabilities"),
        ({"labels": floats(3, 5), "temperature_on": "logprob"}, ValueError, "temperature_on: expected logits, got logprob"),
        ({"labels": floats(3, 5), "weight": jnp.zeros(7)}, ValueError, r"^weight\.size: expected 5, got 7"),
    ],
    "logprobs": [
        ({"labels": floats(2, 3)}, TypeError, "labels: expected integers, got float32"),
        ({"outputs": ("probability",)}, ValueError, "outputs: expected names among"),
        # Several labels a row.
        ({"labels": ints(2, 3, 1025)}, ValueError, "labels: expected at most 1024 a row, got 1025"),
        ({"labels": ints(2, 4, 2)}, ValueError,
         r"labels: expected logits' leading dimensions \[2, 3\] or \[2, 3, K\], got \[2, 4, 2\]"),
        ({"labels": ints(2)}, ValueError, r"labels: expected logits' leading dimensions \[2, 3\] or \[2, 3, K\], got \[2\]"),
        ({"labels": ints(2, 3, 2), "outputs": ("correct",)}, ValueError,
         "outputs: expected none of one label with several labels a row, got correct"),
        ({"labels": ints(2, 3, 2)} | OTHERS, ValueError, "pallas_tpu takes one label a row; cuda .*"),
    ],
    "policy_loss": [
        *POLICIES,
        ({"advantages": None}, TypeError, "^advantages: expected an array, got None"),
        ({"epsilon": 0.2}, TypeError, "policy_loss.*unexpected keyword argument"),
        ({"token_weights": 1}, TypeError, f"{UNEXPECTED} 'token_weights'; multiply by them what is made of each row"),
        ({"clip_ratio_high": 1}, TypeError, f"{UNEXPECTED} 'clip_ratio_high'; here that is epsilon_high"),
        ({"logits": floats(3, 5), "labels": ints(3)}, ValueError, r"labels: expected \[B, T\] without sequence_offsets"),
        # Of the same number of elements: they would go to other rows than meant.
        ({"mask": np.ones((5, 3))}, ValueError, r"mask: expected labels' shape \[3, 5\], or \[15\], got \[5, 3\]"),
        ({"old_logp": np.zeros((5, 3))}, ValueError, r"old_logp: expected labels' shape \[3, 5\]"),
        ({"ref_logp": np.zeros((3, 5, 1))}, ValueError, r"ref_logp: expected labels' shape \[3, 5\]"),
        ({"sampler_logp": np.zeros(())}, ValueError, r"sampler_logp: expected .*, got \[\]"),
        ({"advantages": np.ones((5, 3))}, ValueError, r"advantages: expected \[B\] or \[B, 1\] of sequences, or labels'"),
        ({"mask": np.ones(15, complex)}, TypeError, "mask: expected numbers, got complex"),
        ({"sequence_offsets": [0.0, 15.0]}, TypeError, "sequence_offsets: expected integers, got float32"),
        ({"sequence_offsets": [[0, 15]]}, ValueError, r"sequence_offsets: expected one dimension, got \[1, 2\]"),
        ({"sequence_offsets": [1, 5, 9, 15]}, ValueError, r"sequence_offsets\[0\]: expected 0, got 1"),
        ({"sequence_offsets": [0, 9, 4, 15]}, ValueError, r"sequence_offsets\[2\]: expected >= the one before it, 9, got 4"),
        ({"sequence_offsets": [0, 5, 9, 12]}, ValueError, r"sequence_offsets\[3\]: expected the number of rows, 15, got 12"),
    ],
    "distillation": [
        ({"teacher": None}, TypeError, "^teacher: expected an array, got None"),
        ({"teacher": floats(2, 5, 7)}, ValueError, r"teacher: expected logits' shape \[2, 5, 13\], got \[2, 5, 7\]"),
        ({"teacher": jnp.zeros((2, 5, 13), jnp.bfloat16)}, TypeError, "teacher: expected logits' dtype float32, got bfloat16"),
        ({"teacher": ints(2, 5, 13)}, TypeError, "teacher: expected float32, bfloat16 or float16, got int32"),
        ({"labels": ints(5, 2)}, ValueError, r"labels: expected logits' leading dimensions \[2, 5\], got"),
        ({"labels": floats(2, 5)}, TypeError, "labels: expected integers, got float32"),
        ({"mask": floats(3)}, ValueError, r"mask: expected labels' shape \[2, 5\], or \[10\], got \[3\]"),
        ({"token_weights": floats(5, 2)}, ValueError, r"token_weights: expected labels' shape \[2, 5\], or \[10\]"),
        ({"label_weight": 0.5}, ValueError, "labels: expected a vector, as label_weight is not 0, got none"),
        ({"label_weight": jnp.float32(0.5)}, ValueError, "labels: expected a vector, as label_weight is not 0, got none"),
        ({"divergence_weight": -1.5}, ValueError, "divergence_weight: expected a number >= 0, got -1.5"),
        ({"label_weight": -0.5, "labels": ints(2, 5)}, ValueError, "label_weight: expected"),
        ({"outputs": "logp"}, ValueError, "labels: expected a vector, for logp, got none"),
        ({"outputs": ("margin",)}, ValueError, "outputs: expected names among divergence, .*, got margin"),
        ({"divergence": "kl"}, ValueError, "divergence: expected one of forward_kl, .*, got 'kl'"),
        ({"divergence": "jsd", "beta": 1.0}, ValueError, "beta: expected a number > 0 and < 1 with this divergence"),
        ({"temperature": 0.0}, ValueError, "temperature: expected"),
        ({"teacher_temperature": -1.0}, ValueError, "teacher_temperature: expected"),
        ({"valid_vocab": 14}, ValueError, "valid_vocab: expected"),
        ({"reduction": "none"} | ONE_PASS, ValueError, NOT_PER_ROW),
        ({"implementation": "rocm"}, ValueError, "implementation: expected names among cpu, cuda, pallas_tpu, xla, got rocm"),
    ],
    "sparse_distillation": [
        ({"teacher_ids": floats(2, 2)}, TypeError, "teacher_ids: expected integers, got float32"),
        ({"teacher_ids": ints(1, 2)}, ValueError, r"teacher_ids: expected shape \[2, K\], got \[1, 2\]"),
        ({"teacher_ids": ints(2, 0)}, ValueError, r"teacher_ids: expected shape \[2, K\], got \[2, 0\]"),
        ({"teacher_logprobs": floats(2, 3)}, ValueError, r"teacher_logprobs: expected teacher_ids' shape \[2, 2\], got"),
        ({"teacher_logprobs": ints(2, 2)}, TypeError, "teacher_logprobs: expected float32, bfloat16 or float16"),
        ({"tail": "drop"}, ValueError, "tail: expected one of lump, ignore, renormalise, got 'drop'"),
        ({"divergence_weight": -0.5}, ValueError, "divergence_weight: expected a number"),
        ({"reduction": "none"} | ONE_PASS, ValueError, NOT_PER_ROW),
    ],
    "linear_cross_entropy": [
        ({"head": None}, TypeError, "^head: expected an array, got None"),
        ({"hidden": ints(12, 5)}, TypeError, "hidden: expected float32, bfloat16 or float16, got int"),
        ({"head": ints(5, 40)}, TypeError, "head: expected float32, bfloat16 or float16, got int"),
        ({"bias": ints(40)}, TypeError, "bias: expected float32, bfloat16 or float16, got int"),
        ({"labels": floats(12)}, ValueError, r"labels: expected class probabilities of the logits' shape \[12, 40\], got \[12\]"),
        ({"reduction": "none"} | ONE_PASS, ValueError, NOT_PER_ROW),
        ({"hidden": floats()}, ValueError, r"labels: expected hidden's leading dimensions \[\], got \[12\]"),
        ({"hidden": floats(3, 5)}, ValueError, r"labels: expected hidden's leading dimensions \[3\]"),
        ({"hidden": floats(12, 0)}, ValueError, "hidden: expected a last dimension of at least 1"),
        ({"head": floats(40, 5)}, ValueError, r"head: expected shape \[5, V\] .*'HV', got \[40, 5\]"),
        ({"head_layout": "VH"}, ValueError, r"head: expected shape \[V, 5\] of head_layout 'VH', got \[5, 40\]"),
        ({"head": floats(5)}, ValueError, r"head: expected shape \[5, V\]"),
        ({"head_layout": "VHV"}, ValueError, "head_layout: expected one of HV, VH, got 'VHV'"),
        ({"bias": floats(5)}, ValueError, r"bias: expected shape \[40\], got \[5\]"),
        ({"compute_dtype": jnp.float16}, ValueError, "compute_dtype: expected float32 or bfloat16, got"),
        ({"compute_dtype": "half"}, ValueError, "compute_dtype: expected float32 or bfloat16, got half"),
        ({"valid_vocab": 41}, ValueError, "valid_vocab: expected"),
        ({"weight": floats(5)}, ValueError, r"^weight\.size: expected 40, got 5"),
        ({"low_rank": "text"}, TypeError, r"low_rank: expected None or two arrays, \[..., R\] and \[R, V\], got str"),
        ({"low_rank": (floats(12, 2), None)}, TypeError,
         "low_rank: expected None or two arrays, .* got tuple of .*, NoneType"),
        ({"low_rank": (floats(13, 2), floats(2, 40))}, ValueError, r"low_rank\[0\]: expected shape \[12, R\], got \[13, 2\]"),
        ({"low_rank": (floats(12, 2), floats(40, 2))}, ValueError,
         r"low_rank\[1\]: expected shape \[2, 40\] of head_layout 'HV', got \[40, 2\]"),
        ({"low_rank": (ints(12, 2), floats(2, 40))}, TypeError, r"low_rank\[0\]: expected float32"),
        ({"low_rank": (floats(12, 513), floats(513, 40))}, ValueError,
         r"low_rank\[0\]: expected a last dimension of 1 to 512, got 513"),
        ({"low_rank": (floats(12, 2), floats(2, 40))} | OTHERS, ValueError, "pallas_tpu .*; cuda .*"),
    ],
    "linear_policy_loss": [
        *POLICIES,
        ({"accumulate": True}, TypeError, "linear_policy_loss.*unexpected keyword argument 'accumulate'"),
    ],
    "linear_distillation": [
        ({"teacher_hidden": floats(2, 4, 16)}, ValueError, r"teacher_hidden: expected shape \[2, 5, G\], got \[2, 4, 16\]"),
        ({"teacher_hidden": ints(2, 5, 16)}, TypeError, "teacher_hidden: expected float32, bfloat16 or"),
        ({"teacher_head": floats(24, 203)}, ValueError, r"teacher_head: expected shape \[16, 203\] of head_layout 'HV', got"),
        ({"teacher_bias": floats(5)}, ValueError, r"teacher_bias: expected shape \[203\], got \[5\]"),
        ({"head": floats(16, 203)}, ValueError, r"head: expected shape \[24, V\]"),
        ({"head_layout": "VV"}, ValueError, "head_layout: expected one of HV, VH, got 'VV'"),
        ({"labels": ints(5, 2)}, ValueError, r"labels: expected hidden's leading dimensions \[2, 5\], got"),
        ({"mask": floats(3)}, ValueError, r"mask: expected labels' shape \[2, 5\], or \[10\], got \[3\]"),
        ({"compute_dtype": "int8"}, ValueError, "compute_dtype: expected float32 or bfloat16, got int8"),
        ({"label_weight": 0.5}, ValueError, "labels: expected a vector, as label_weight is not 0, got none"),
        ({"outputs": ("entropie",)}, ValueError, "outputs: expected names among divergence"),
        (NO_PALLAS, ValueError, "can do this: pallas_tpu has no kernels of this loss"),
    ],
}  # fmt: skip
ROWS = [(name, *row) for name, rows in WRONG.items() for row in rows]


@pytest.mark.parametrize(("name", "change", "error", "message"), ROWS, ids=lambda v: str(v)[:40])
def test_what_is_wrong_is_named(
    name: str, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = RIGHT[name] | change
    arrays = {n: jnp.asarray(x) if isinstance(x, list) else x for n, x in given.items()}
    with pytest.raises(error, match=message):
        getattr(tileloss.jax, name)(**arrays)
