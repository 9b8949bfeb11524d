"""Cross-entropy with label smoothing s, class weights c, token weights w and z-loss zeta (src/losses/cross_entropy.h):

    loss_i = w_i [ (1-s) c_y (-logp_i) + (s/V) sum_j c_j (-log p_ij) ] + zeta w_i lse_i^2
    target = -(1-s) c_y w,  prob = w [(1-s) c_y + s mean(c)] + 2 zeta w lse,  uniform = -(s/V) w  on u_j = c_j

mean divides the cross-entropy part by the sum of w_i c_y (as PyTorch), the z-loss part by the sum of w_i (as Liger), both by
num_items when given; a denominator of 0 gives 0.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from tileloss.jax._rows.arithmetic import Number, inverse_or_zero
from tileloss.jax._rows.coefficients import RowCoefficients, RowResult, masked_coefficients
from tileloss.jax._rows.inputs import read, read_rows
from tileloss.jax._rows.options import Options
from tileloss.jax._rows.state import RowState


def cross_entropy(
    state: RowState,
    labels: Array,
    options: Options,
    *,
    classes: int,
    allowed: Array | None = None,
    mask: Array | None = None,
    class_weights: Array | None = None,
    token_weights: Array | None = None,
    loss_grad: Array | None = None,
) -> RowResult:
    """The loss and the rows' coefficients.

    Args:
        state: of the rows' transformed logits, [N]; label smoothing needs smoothing_sum, made with the class weights.
        labels: integers [N]; rows with ignore_index count nowhere.
        options: of "cross_entropy".
        classes: V, of the whole vocabulary, padding excluded.
        allowed: float32 [N], how many classes are in each row's softmax, which stands for V; the state's smoothing_weight is
            then theirs. Needed with label smoothing alone; default: all.
        mask: [N]; rows with 0 count nowhere, whatever the other inputs hold there.
        class_weights: c, float32 [classes]; default 1.
        token_weights: w, float32 [N]; default 1.
        loss_grad: the upstream gradient, of the loss's shape; default 1.
    """
    rows = read_rows(state, labels, options, classes=classes, mask=mask)
    ones = jnp.ones(labels.shape, jnp.float32)
    weights = ones if token_weights is None else read(token_weights, rows.used)
    of_label, weight_sum = ones, jnp.float32(classes)
    divisor: Number = classes
    if class_weights is not None:
        of_label = class_weights.astype(jnp.float32)[rows.labels]
        weight_sum = jnp.sum(class_weights, dtype=jnp.float32)

    ce_scale, z_scale = _scales(options, rows.used, weights, of_label)
    ce, z = weights * ce_scale, weights * z_scale
    if allowed is not None and state.smoothing_weight is not None:
        divisor, weight_sum = jnp.maximum(allowed, 1), state.smoothing_weight
    c_y = of_label / rows.logp_divisor
    stats, mean_weight = rows.stats, weight_sum / divisor
    s, zeta = options.plain("label_smoothing"), options.plain("z_loss")

    # A part whose denominator is 0 is left out, whatever its rows hold.
    loss = jnp.where(ce_scale != 0, ce * ((1 - s) * c_y * -stats.logp), 0.0)
    if s > 0:
        assert stats.smoothing_sum is not None, "label smoothing needs state.smoothing_sum"
        smoothed = mean_weight * stats.log_sum - stats.smoothing_sum / divisor
        loss += jnp.where(ce_scale != 0, ce * s * smoothed, 0.0)
    if zeta > 0:
        loss += jnp.where(z_scale != 0, zeta * z * stats.lse * stats.lse, 0.0)

    upstream = jnp.float32(1) if loss_grad is None else loss_grad.astype(jnp.float32)
    z_term = 2 * zeta * z * stats.lse if zeta > 0 else jnp.zeros_like(z)
    coefficients = RowCoefficients(
        target=upstream * (-(1 - s) * c_y * ce),
        prob_plus_target=upstream * (s * ce * mean_weight + z_term),
        prob_logp=jnp.zeros_like(ce),
        uniform=upstream * (-(s / divisor) * ce),
    )
    loss = jnp.where(rows.used, loss, 0.0)
    if options.choice("reduction") != "none":
        loss = jnp.sum(loss)
    return RowResult(loss, masked_coefficients(coefficients, rows.used, rows.wrong))


def _scales(options: Options, used: Array, weights: Array, of_label: Array) -> tuple[Array, Array]:
    """1 / the denominators of the cross-entropy part and of the z-loss part."""
    if options.choice("reduction") != "mean":
        return jnp.float32(1), jnp.float32(1)
    if options.is_given("num_items"):
        scale = inverse_or_zero(jnp.asarray(options.number("num_items"), jnp.float32))
        return scale, scale
    ce = jnp.sum(jnp.where(used, weights * of_label, 0.0))
    z = jnp.sum(jnp.where(used, weights, 0.0))
    return inverse_or_zero(ce), inverse_or_zero(z)
