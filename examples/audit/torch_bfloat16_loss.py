"""PyTorch: a loss of bfloat16 logits is rounded to bfloat16, 8 bits, and so are the log-probabilities it is made of."""

import torch
import torch.nn.functional as F

torch.manual_seed(0)
logits = (3 * torch.randn(256, 32000)).bfloat16()
labels = torch.randint(0, 32000, (256,))
rows = F.cross_entropy(logits, labels, reduction="none")
exact = F.cross_entropy(logits.double(), labels, reduction="none")
print(
    f"torch {torch.__version__}: {rows.dtype}, mean {F.cross_entropy(logits, labels):.6f}, exact {exact.mean():.6f}"
)
print(f"worst row off by {(rows - exact).abs().max():.4f}")
