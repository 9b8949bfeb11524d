"""The GRPO family (src/losses/policy_loss.h, src/losses/policy; losses.md, "Policy losses").

kinds.py        one token's loss and its two partial derivatives, by kind
kl.py           estimators of the KL to the reference policy
sequences.py    how the rows fall into sequences, sums over them, and from per-token losses to one
factors.py      what a token's term is multiplied by: the sampler's correction; 0 of off-policy sequences and low entropy
metrics.py      what a step reports of itself
loss.py         the parts put together: loss and coefficients
"""
