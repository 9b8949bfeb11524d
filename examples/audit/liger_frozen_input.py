"""Liger: with hidden states that need no gradient (a frozen body) the head gets none, and training it does nothing."""

import os
from importlib.metadata import version

os.environ.setdefault("TRITON_INTERPRET", "1")  # its Triton kernels on a CPU

import torch
import torch.nn.functional as F
from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

torch.manual_seed(0)
hidden, labels = torch.randn(16, 32), torch.randint(0, 100, (16,))
head = torch.randn(100, 32, requires_grad=True)
loss = liger_fused_linear_cross_entropy(hidden, head, labels)
loss.backward()
(expected,) = torch.autograd.grad(F.cross_entropy(hidden @ head.T, labels), [head])
print(f"liger-kernel {version('liger-kernel')}: loss {loss:.4f}, gradient of the head {head.grad}")
print(f"expected a gradient with norm {expected.norm():.4f}")
