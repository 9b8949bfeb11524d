"""The losses as modules: options once; tensors, and what changes from batch to batch, at every call."""

from tileloss.torch.modules.cross_entropy import CrossEntropyLoss, LinearCrossEntropyLoss
from tileloss.torch.modules.distillation import (
    DistillationLoss,
    LinearDistillationLoss,
    LinearSparseDistillationLoss,
    SparseDistillationLoss,
)
from tileloss.torch.modules.policy import LinearPolicyLoss, PolicyLoss

__all__ = [
    "CrossEntropyLoss",
    "DistillationLoss",
    "LinearCrossEntropyLoss",
    "LinearDistillationLoss",
    "LinearPolicyLoss",
    "LinearSparseDistillationLoss",
    "PolicyLoss",
    "SparseDistillationLoss",
]
