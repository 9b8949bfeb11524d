"""Liger: with loss_type "luspo" and a KL term, masked tokens count: the loss moves with what they hold."""

from importlib.metadata import version

import torch
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

torch.manual_seed(0)
hidden, head = torch.randn(2, 6, 32), 0.1 * torch.randn(100, 32)
labels, advantages = torch.randint(0, 100, (2, 6)), torch.tensor([1.0, -1.0])
mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]])
for loss_type in ("grpo", "luspo"):
    loss = LigerFusedLinearGRPOLoss(
        beta=0.1, compiled=False, loss_type=loss_type, importance_sampling_level="sequence"
    )
    found = []
    for ref_of_masked in (-5.0, 0.0):
        ref = torch.where(mask == 1, -5.0, ref_of_masked)
        value, _ = loss(hidden, head, labels, mask, advantages, ref_per_token_logps=ref)
        found.append(value.item())
    print(
        f"liger-kernel {version('liger-kernel')} {loss_type}: {found[0]:.4f}, and with other masked tokens {found[1]:.4f}"
    )
