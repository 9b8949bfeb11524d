"""TileLoss for PyTorch: cross-entropy, log-probabilities, policy losses and distillation over a vocabulary, with autograd and
torch.compile.

From logits [..., V]: `cross_entropy`, `logprobs`, `policy_loss`, with a teacher's logits `distillation`, with some of a teacher's
columns `sparse_distillation`. Fused with the LM head, hidden states [..., H] and linear_weight [V, H], so that the logits are
never held, each as `linear_...`, `linear_distillation` with two heads. Arguments have torch's names where it has one.
"""

from tileloss._core.calls import call_counts
from tileloss.torch._call import check_errors
from tileloss.torch._outputs import DistillationRows, RowOutputs
from tileloss.torch._pages import empty_cache
from tileloss.torch.allowed import allowed_from
from tileloss.torch.cross_entropy import (
    cross_entropy,
    linear_cross_entropy,
    linear_logprobs,
    logprobs,
)
from tileloss.torch.distillation import distillation, linear_distillation
from tileloss.torch.modules import (
    CrossEntropyLoss,
    DistillationLoss,
    LinearCrossEntropyLoss,
    LinearDistillationLoss,
    LinearPolicyLoss,
    LinearSparseDistillationLoss,
    PolicyLoss,
    SparseDistillationLoss,
)
from tileloss.torch.policy import linear_policy_loss, policy_loss
from tileloss.torch.sparse_distillation import linear_sparse_distillation, sparse_distillation

__all__ = [
    "CrossEntropyLoss",
    "DistillationLoss",
    "DistillationRows",
    "LinearCrossEntropyLoss",
    "LinearDistillationLoss",
    "LinearPolicyLoss",
    "LinearSparseDistillationLoss",
    "PolicyLoss",
    "RowOutputs",
    "SparseDistillationLoss",
    "allowed_from",
    "call_counts",
    "check_errors",
    "cross_entropy",
    "distillation",
    "empty_cache",
    "linear_cross_entropy",
    "linear_distillation",
    "linear_logprobs",
    "linear_policy_loss",
    "linear_sparse_distillation",
    "logprobs",
    "policy_loss",
    "sparse_distillation",
]
