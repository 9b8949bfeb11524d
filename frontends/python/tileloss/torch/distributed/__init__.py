"""The functions of `tileloss.torch` with the vocabulary cut over a torch.distributed process group (tensor parallelism).

Each rank has some columns of the logits, or some rows of the LM head; labels are those of the whole vocabulary. What travels are
row states of a few floats a row, and the gradient of the hidden states: nothing of the vocabulary's size. The promises are in
docs/users/distributed.md; `adapters` has the calls that others make, with their signatures.
"""

from tileloss.torch.distributed.distillation import distillation, linear_distillation
from tileloss.torch.distributed.functions import (
    cross_entropy,
    linear_cross_entropy,
    linear_logprobs,
    logprobs,
)
from tileloss.torch.distributed.policy import linear_policy_loss, policy_loss

__all__ = [
    "cross_entropy",
    "distillation",
    "linear_cross_entropy",
    "linear_distillation",
    "linear_logprobs",
    "linear_policy_loss",
    "logprobs",
    "policy_loss",
]
