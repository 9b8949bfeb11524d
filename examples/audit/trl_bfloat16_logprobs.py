"""TRL: log-probabilities of bfloat16 logits are bfloat16 on a CPU, so that the ratio to an exact old_logp is not 1."""

import torch
import trl
from trl.trainer.utils import selective_log_softmax

torch.manual_seed(0)
logits = (4 * torch.randn(2, 128, 32000)).bfloat16()
labels = torch.randint(0, 32000, (2, 128))
logp = selective_log_softmax(logits, labels)
exact = logits.double().log_softmax(-1).gather(-1, labels[..., None])[..., 0]
print(
    f"trl {trl.__version__}: {logp.dtype}, log-probabilities off by up to {(logp - exact).abs().max():.4f}"
)
print(
    f"ratios between {(logp - exact).exp().min():.4f} and {(logp - exact).exp().max():.4f}, where 1 is right"
)
