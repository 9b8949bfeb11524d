"""TileLoss for JAX: cross-entropy, log-probabilities and policy losses over a vocabulary, from logits [..., V] or, as linear_*,
from hidden states [..., H] and the LM head, whose logits are never held; distillation from a teacher's logits, its LM head, or
some of its columns.

The vocabulary is swept in tiles of columns, forward and backward, so that no softmax of the logits' size is held. There are four
implementations: "cpu", the C++ kernels, "cuda", the CUDA kernels, "pallas_tpu", kernels for TPUs, and "xla", which runs on any
platform. They have been run on CPUs alone, those for TPUs in Pallas' interpreter, those for CUDA as g++ makes them.
"""

from typing import Any

from tileloss.jax._rows.distillation import DistillationRows
from tileloss.jax._rows.stats import RowOutputs
from tileloss.jax.allowed import allowed_from
from tileloss.jax.cross_entropy import (
    cross_entropy,
    linear_cross_entropy,
    linear_logprobs,
    logprobs,
)
from tileloss.jax.distillation import (
    distillation,
    linear_distillation,
    linear_sparse_distillation,
    sparse_distillation,
)
from tileloss.jax.policy import linear_policy_loss, policy_loss

__all__ = [
    "DistillationRows",
    "RowOutputs",
    "allowed_from",
    "cross_entropy",
    "distillation",
    "linear_cross_entropy",
    "linear_distillation",
    "linear_logprobs",
    "linear_policy_loss",
    "linear_sparse_distillation",
    "logprobs",
    "policy_loss",
    "sparse_distillation",
    "tune",
]


def __getattr__(name: str) -> Any:
    """Pallas may be missing where nobody tunes."""
    if name == "tune":
        from tileloss.jax._sweeps.tpu.tuning import tune

        return tune
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
