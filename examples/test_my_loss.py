"""Losses of one's own in one's own tests: value and gradient against an oracle in double precision."""

import pytest
import torch.nn.functional as F

from tileloss.testing import check


def my_loss(logits, labels):
    return F.cross_entropy(logits.float(), labels, label_smoothing=0.1)


def my_fused_loss(hidden, head, labels):
    """Of which the logits are never there all at once."""
    parts = zip(hidden.split(10), labels.split(10), strict=True)
    total = sum(F.cross_entropy(h @ head.T, y, reduction="sum") for h, y in parts)
    return total / (labels != -100).sum()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_my_loss(dtype):
    check(my_loss, "cross_entropy", dtype=dtype, label_smoothing=0.1)


def test_my_loss_far_from_zero():
    source = {"distribution": "offset_plus"}
    check(my_loss, "cross_entropy", source=source, label_smoothing=0.1)


def test_my_fused_loss():
    check(my_fused_loss, "linear_cross_entropy")
