"""logprobs: row outputs, and the gradient of whatever is built on them (src/losses/logprobs.h)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from tileloss.jax._rows.coefficients import RowCoefficients, from_upstream, masked_coefficients
from tileloss.jax._rows.inputs import read, read_rows
from tileloss.jax._rows.options import Options
from tileloss.jax._rows.slots import Slots
from tileloss.jax._rows.state import RowState
from tileloss.jax._rows.stats import RowOutputs, row_outputs


def logprobs(
    state: RowState,
    labels: Array,
    options: Options,
    *,
    classes: int,
    allowed: Array | None = None,
    slots: Slots | None = None,
) -> RowOutputs:
    """The row outputs that the arrays of ``state`` allow.

    Args:
        state: of the rows' transformed logits, [N].
        labels: integers [N]; rows with ignore_index give 0.
        options: of "logprobs".
        classes: of the whole vocabulary, padding excluded.
        allowed: float32 [N], how many classes are in each row's softmax; needed for the mean alone; default: all.
        slots: of rows with several labels, of which ``labels`` has the likeliest: logp is theirs then, [N, K].
    """
    rows = read_rows(state, labels, options, classes=classes)
    found = row_outputs(
        rows.stats,
        rows.used,
        rows.labels,
        classes=classes,
        allowed=allowed,
        logp_divisor=rows.logp_divisor,
    )
    return found if slots is None else found._replace(logp=slots.logp(rows))


def logprobs_coefficients(
    state: RowState,
    labels: Array,
    options: Options,
    *,
    classes: int,
    allowed: Array | None = None,
    slots: Slots | None = None,
    logp_grad: Array | None = None,
    lse_grad: Array | None = None,
    entropy_grad: Array | None = None,
    mean_logit_grad: Array | None = None,
) -> RowCoefficients:
    """dL/dz_j = g_logp [j = y] + p_j (-g_logp + g_lse - g_H (H + log p_j)) + g_M / V as coefficients.

    The upstream gradients are float32 [N]; None: 0. entropy_grad needs state.entropy_sum. With temperature_on = logprob
    g_logp' / T stands for g_logp. Of several labels, ``slots`` and logp_grad [N, K], sum_k g_k stands for the second g_logp, and
    for the first the sum over the slots of the likeliest: what the others add to their columns is the sweep's.
    """
    rows = read_rows(state, labels, options, classes=classes)

    def upstream(grad: Array | None) -> Array:
        return jnp.zeros(labels.shape, jnp.float32) if grad is None else read(grad, rows.used)

    others: Array | float = 0.0
    if slots is None:
        target = upstream(logp_grad) / rows.logp_divisor
    else:
        grads = slots.upstream(logp_grad, rows.logp_divisor)
        target = jnp.sum(jnp.where(slots.is_known, grads, 0.0), axis=1)
        others = jnp.sum(jnp.where(slots.is_known, 0.0, grads), axis=1)
    entropy = rows.stats.entropy if entropy_grad is not None else None
    coefficients = from_upstream(
        target,
        upstream(lse_grad) - others,
        upstream(entropy_grad),
        entropy,
    )
    if mean_logit_grad is not None:
        divisor = classes if allowed is None else jnp.maximum(allowed, 1)
        coefficients = coefficients._replace(uniform=upstream(mean_logit_grad) / divisor)
    return masked_coefficients(coefficients, rows.used, rows.wrong)
