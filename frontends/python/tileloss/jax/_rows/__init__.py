"""The row stage: what a loss does with [N] row states once a sweep has seen the vocabulary, and what the backward sweep needs.

All of it is jnp in float32 on [N] arrays, elementwise but for sums over the tokens of a sequence: it runs on any platform, under
jit, vmap and shard_map. Formulas and rounding rules are those of src/core and src/losses, the same numbers that the C++ library
computes in double. Nothing here is meant to be differentiated by JAX: gradients are the row coefficients.

state.py          the row state and its merge
stats.py          log-probabilities and their like from a row's state; the row outputs
coefficients.py   a row's gradient in four numbers
options.py        options by name, from the library's schema, and the library's check of a call
arithmetic.py     the few operations with rules for 0, inf and NaN
inputs.py         which rows count, which are wrong, the inputs of those that count
logprobs.py       no loss of its own: upstream gradients of row outputs
cross_entropy.py  label smoothing, class and token weights, z-loss
distillation.py   weights, losses and coefficients of rows with a teacher; their sweeps compute the divergence
policy/           the GRPO family
"""
