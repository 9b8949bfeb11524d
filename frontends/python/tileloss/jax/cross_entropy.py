"""Cross-entropy and log-probabilities, from logits and fused with the LM head."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from tileloss._core.arguments import CrossEntropyArguments, LogprobsArguments
from tileloss._core.functions import OF_PROBABILITIES, options_of_probabilities
from tileloss._core.other_names import explains_names
from tileloss.jax._apply import apply
from tileloss.jax._arguments import named
from tileloss.jax._rows.stats import RowOutputs


@explains_names
def cross_entropy(
    logits: Array, labels: Array, weight: Array | None = None, *, grad_in_forward: bool | None = None,
    implementation: str | Iterable[str] | None = None, vocab_axis: str | None = None,
    ignore_index: int = -100,
    **options: Unpack[CrossEntropyArguments[Array]],
) -> Array:  # fmt: skip
    """Cross-entropy of logits and labels over the flattened leading dimensions.

    With z = softcap(logit_scale * x) / temperature and p = softmax(z), a row's loss is

        w_i [(1-s) c_y (-log p_y) + (s/V) sum_j c_j (-log p_j)] + z_loss w_i lse^2

    ``reduction="mean"`` divides the first part by the sum of w_i c_y and the second by the sum of w_i over the rows that are not
    ignored, both by ``num_items`` if given; with every row ignored the mean is 0. docs/users/losses.md has the rest, and what
    class probabilities make of it: they go without z_loss, temperature_on="logprob" and vocab_axis.

    Args:
        logits: x, [..., V] float32, bfloat16 or float16. The only argument that is differentiated, in reverse mode; a gradient
            of another one is refused.
        labels: y, [...] integers, or class probabilities, [..., V] of a float type, which have no gradient. Rows with
            ``ignore_index`` are not read: they may hold NaN.
        weight: [V] or [valid_vocab] class weights c.
        mask: [...] or flat [N]; rows with 0 are neither read nor counted.
        token_weights: [...] or flat [N] w.
        grad_in_forward: compute the gradient with the loss where one is asked for (scalar losses): it is held from the forward
            on, and the backward only scales it, which under jit costs nothing where the upstream gradient is 1. A low-precision
            gradient is rounded a second time where it is scaled (not by powers of 2), and with a label out of range all of it may
            be NaN. Default None: False from logits; fused with the LM head True where "cpu" or "cuda" runs, which saves a
            product, but for float16; with class probabilities True wherever no tensor of the student is float16.
        implementation: a name, or names in order of preference; the first that can do the call on the platform at hand runs.
            "cpu": the C++ kernels; "cuda": the CUDA kernels; "pallas_tpu": kernels for TPUs, not of float16; "xla": tiles over
            the vocabulary in plain XLA, on any platform. Default: in this order. "pallas_tpu" takes no class probabilities.
        vocab_axis: inside `jax.shard_map`: the mesh axis over which the vocabulary is cut. V is then that of a shard; labels,
            valid_vocab and weight are those of the whole vocabulary, and the result is the same on every shard.

    Options; a traceable one may be an array of one element, traced or not, and makes all rows NaN where it is out of its range:
        logit_scale: multiplies the logits; > 0; default 1; static.
        softcap: c of c * tanh(x / c); 0 is off; >= 0; default 0; static.
        temperature: T, divides the logits; > 0; default 1; traceable.
        temperature_on: what T divides: the logits, or the log-probabilities that the softmax gives at T = 1; one of logits,
            logprob; default logits; static.
        valid_vocab: columns from here on are padding: not in the softmax, gradient 0; >= 1; None: all are valid; static.
        ignore_index: rows with this label are neither read nor counted; default -100; static.
        label_smoothing: s, spread over all classes; in [0, 1]; default 0; static.
        z_loss: zeta: adds zeta * lse^2; >= 0; default 0; static.
        num_items: mean's denominator; >= 0; None: the weights are summed; only with reduction mean; traceable.
        reduction: how the rows' losses become the loss; one of none, sum, mean; default mean; static.

    Returns:
        float32: a scalar, or [...] with reduction "none". A row whose label is outside [0, valid_vocab) is NaN, and so are its
        gradient and what it is reduced to: a traced program cannot raise.

    Raises:
        TypeError, ValueError: while tracing, naming the argument, what was expected and what was given.
    """
    return _cross_entropy(locals())


@explains_names
def linear_cross_entropy(
    hidden: Array, head: Array, labels: Array, *, bias: Array | None = None, low_rank: tuple[Array, Array] | None = None,
    head_layout: str = "HV", weight: Array | None = None,
    compute_dtype: DTypeLike | None = None, grad_in_forward: bool | None = None,
    implementation: str | Iterable[str] | None = None, vocab_axis: str | None = None,
    ignore_index: int = -100,
    **options: Unpack[CrossEntropyArguments[Array]],
) -> Array:  # fmt: skip
    """`cross_entropy` of the logits hidden @ head + bias, which are never held: they exist a tile of columns at a time.

    Args:
        hidden: hidden states, [..., H] float32, bfloat16 or float16. Rows with ``ignore_index`` may hold NaN.
        head: the LM head, [H, V] as Flax's kernels, or [V, H] with ``head_layout="VH"``; float32, bfloat16 or float16. Taken as
            it lies: no copy of it is made.
        labels: [...] integers, or class probabilities, [..., V].
        bias: [V] float32, bfloat16 or float16.
        low_rank: two arrays of float types, x [..., R] and B, [R, V] or [V, R] as the head lies, R up to 512: x @ B is added to
            the logits, in one sum with hidden's, and nothing of the head's size is copied. LoRA on the head:
            ``low_rank=(scaling * (hidden @ A), B)``. Both are differentiated. Not by "pallas_tpu".
        weight: [V] or [valid_vocab] class weights, as `cross_entropy`'s.
        compute_dtype: what the products see, bfloat16 or float32: hidden, head, low_rank's two and the logits' gradient are
            rounded to it once; sums are float32 either way. Default: bfloat16 if hidden and head are that, else float32.

    The other arguments, the result and the errors: `cross_entropy`. Gradients are those of hidden, head, bias and low_rank, in
    their dtypes; one that is not asked for costs nothing. Those of head, bias and B are summed in float32 and rounded once; a row
    whose label is out of range makes them NaN.
    """
    return _cross_entropy(locals())


@explains_names
def logprobs(
    logits: Array, labels: Array, *, outputs: Iterable[str] = ("logp",), implementation: str | Iterable[str] | None = None,
    vocab_axis: str | None = None,
    ignore_index: int = -100,
    **options: Unpack[LogprobsArguments[Array]],
) -> RowOutputs:  # fmt: skip
    """Row outputs of the softmax at the labels: log-probability, log-sum-exp, entropy and more.

    Args:
        outputs: names of `RowOutputs`. logp, lse, entropy and the mean are differentiable: dL/dz_j = g_logp [j = y] + p_j
            (-g_logp + g_lse - g_H (H + log p_j)) + g_M / V, so any loss written on top of them differentiates exactly.
        labels: [...] or [..., K], several labels a row, up to 1024: logp is [..., K] then, with sum_k g_logp_k [j = y_k] and
            sum_k g_logp_k in the gradient; the other outputs are a row's, without correct. A label that is ignore_index is an
            empty slot, its logp 0; a row of these alone is ignored. Not by "pallas_tpu", over shards of the vocabulary by
            "xla" alone.

    The other arguments and the errors: `cross_entropy`.

    Options, static or traceable as `cross_entropy`'s:
        logit_scale: multiplies the logits; > 0; default 1; static.
        softcap: c of c * tanh(x / c); 0 is off; >= 0; default 0; static.
        temperature: T, divides the logits; > 0; default 1; traceable.
        temperature_on: what T divides: the logits, or the log-probabilities that the softmax gives at T = 1; one of logits,
            logprob; default logits; static.
        valid_vocab: columns from here on are padding: not in the softmax, gradient 0; >= 1; None: all are valid; static.
        ignore_index: rows with this label are neither read nor counted; default -100; static.

    Returns:
        RowOutputs: arrays of the rows' shape, logp of the labels', None for what was not asked for.
    """
    operand, given = named(locals())
    return RowOutputs(**apply("logprobs", operand, **given))


@explains_names
def linear_logprobs(
    hidden: Array, head: Array, labels: Array, *, bias: Array | None = None, low_rank: tuple[Array, Array] | None = None,
    head_layout: str = "HV",
    outputs: Iterable[str] = ("logp",), compute_dtype: DTypeLike | None = None, implementation: str | Iterable[str] | None = None,
    vocab_axis: str | None = None,
    ignore_index: int = -100,
    **options: Unpack[LogprobsArguments[Array]],
) -> RowOutputs:  # fmt: skip
    """`logprobs` of the logits hidden @ head + bias, which are never held.

    Arguments and gradients: `linear_cross_entropy`, `logprobs`.
    """
    operand, given = named(locals())
    return RowOutputs(**apply("logprobs", operand, **given))


def _cross_entropy(arguments: dict[str, Any]) -> Array:
    """With class probabilities in place of labels, as optax and `torch.nn.functional.cross_entropy` take them, a function of its
    own."""
    operand, given = named(arguments)
    labels = given["labels"]
    if labels is None or not jnp.issubdtype(jnp.asarray(labels).dtype, jnp.floating):
        found: Array = apply("cross_entropy", operand, **given)["loss"]
        return found
    if (axis := given["vocab_axis"]) is not None:
        raise ValueError(f"vocab_axis: expected None with class probabilities, got {axis!r}")
    given = {**options_of_probabilities(given), "labels": None, "target_probs": labels}
    found = apply(OF_PROBABILITIES, operand, **given)["loss"]
    return found
