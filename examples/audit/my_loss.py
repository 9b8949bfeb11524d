"""A loss of one's own, as `tileloss gradcheck --impl` and `tileloss audit --impl` take it."""

import torch.nn.functional as F

from tileloss.testing import Case


def cross_entropy(case: Case):
    case.refuse_unless(functions=["cross_entropy"], options=["reduction", "label_smoothing"])
    logits, labels = case.torch("logits"), case.torch("labels")
    loss = F.cross_entropy(logits.float(), labels, **case.options)
    return case.torch_outputs(loss=loss)
