"""The sweeps over the vocabulary, by implementation.

operands.py   what they go over and against what, and what they are told and give
transform.py  the logit transform
divergence.py the divergences, column by column
xla.py        "xla", compared with labels
xla_targets.py  "xla" from logits, compared with a teacher's logits, some of its columns, or class probabilities
xla_targets_head.py  the same with the LM head
library.py    "cpu" and "cuda", by XLA FFI calls of the C++ library
by_rows.py    custom calls that may be cut by rows over devices
tpu/          "pallas_tpu"
"""
