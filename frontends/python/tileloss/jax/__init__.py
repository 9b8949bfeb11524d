"""TileLoss for JAX: cross-entropy, log-probabilities and policy losses over a vocabulary, from logits [..., V].

The vocabulary is swept in tiles of columns, forward and backward, so that no softmax of the logits' size is held. So far there
is one implementation, "xla", which runs on any platform; it has been run on CPUs alone.
"""

from tileloss.jax._rows.stats import RowOutputs
from tileloss.jax.cross_entropy import cross_entropy, logprobs
from tileloss.jax.policy import policy_loss

__all__ = ["RowOutputs", "cross_entropy", "logprobs", "policy_loss"]
