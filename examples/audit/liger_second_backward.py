"""Liger: the backward scales a saved gradient in place, so that a second one (retain_graph=True) scales it twice."""

import os
from importlib.metadata import version

os.environ.setdefault("TRITON_INTERPRET", "1")  # its Triton kernels on a CPU

import torch
from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

torch.manual_seed(0)
hidden, labels = torch.randn(16, 32, requires_grad=True), torch.randint(0, 100, (16,))
head = torch.randn(100, 32, requires_grad=True)
loss = 2 * liger_fused_linear_cross_entropy(hidden, head, labels)
first = torch.autograd.grad(loss, [head], retain_graph=True)[0].clone()
second = torch.autograd.grad(loss, [head])[0]
print(
    f"liger-kernel {version('liger-kernel')}: second gradient / first = {second.norm() / first.norm():.4f}"
)
