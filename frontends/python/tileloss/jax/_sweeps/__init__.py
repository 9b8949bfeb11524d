"""The sweeps over the vocabulary, by implementation.

operands.py   what they go over, and what they are told and give
transform.py  the logit transform
xla.py        "xla" from logits
cpu.py        "cpu", by XLA FFI calls of the C++ library
by_rows.py    custom calls that may be cut by rows over devices
xla_head.py   "xla" from hidden states and the LM head
pairs.py      what sweeps over a student and what it is held against are told and give
divergence.py the divergences, column by column
xla_pairs.py  "xla" over a student's and a teacher's logits
xla_pair_rows.py  "xla" over pairs with the student's LM head
xla_known_columns.py  "xla" over logits and some columns of a teacher
xla_soft_labels.py  "xla" over logits and class probabilities
cpu_pairs.py  "cpu" over pairs
tpu/          "pallas_tpu"
"""
