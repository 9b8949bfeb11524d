"""TileLoss for JAX: cross-entropy, log-probabilities and policy losses over a vocabulary, from logits [..., V] or, as linear_*,
from hidden states [..., H] and the LM head, whose logits are never held.

The vocabulary is swept in tiles of columns, forward and backward, so that no softmax of the logits' size is held. So far there
is one implementation, "xla", which runs on any platform; it has been run on CPUs alone.
"""

from tileloss.jax._rows.stats import RowOutputs
from tileloss.jax.cross_entropy import (
    cross_entropy,
    linear_cross_entropy,
    linear_logprobs,
    logprobs,
)
from tileloss.jax.policy import linear_policy_loss, policy_loss

__all__ = [
    "RowOutputs",
    "cross_entropy",
    "linear_cross_entropy",
    "linear_logprobs",
    "linear_policy_loss",
    "logprobs",
    "policy_loss",
]
