"""The kinds of policy loss: one token's loss and its partial derivatives (src/losses/policy/kinds.h and its neighbours)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from tileloss.jax._rows.arithmetic import Number, clamp
from tileloss.jax._rows.options import Options


class Numbers(NamedTuple):
    """The numbers of the options that kinds and metrics compare with; NaN, or None: off."""

    low: Number  # clip's bounds of rho: formed in double where the options are plain, rounded once
    high: Number
    delta: Number
    dual_clip: Number | None
    cap_low: Number  # cispo's
    cap: Number
    tau_pos: float
    tau_neg: float


def read_numbers(options: Options) -> Numbers:
    epsilon_low = options.number("epsilon_low")
    given = epsilon_high = options.number("epsilon_high")
    if not options.is_given("epsilon_high"):
        epsilon_high = epsilon_low
    return Numbers(
        low=1 - epsilon_low,
        high=1 + epsilon_high,
        delta=options.number("delta"),
        dual_clip=options.number("dual_clip") if options.is_given("dual_clip") else None,
        cap_low=options.number("cap_low"),
        cap=given if options.choice("cispo_cap") == "raw" else 1 + given,
        tau_pos=options.plain("tau_pos"),
        tau_neg=options.plain("tau_neg"),
    )


class Token(NamedTuple):
    """float32 [N] each."""

    logp: Array
    ratio: Array  # rho: the token's, or its sequence's
    advantage: Array
    phi: Array  # vespo's weight


class TokenLoss(NamedTuple):
    """float32 [N] each."""

    loss: Array
    dratio: Array  # dl / drho
    dlogp: Array  # dl / dlogp besides the path through rho


def clip(t: Token, n: Numbers) -> TokenLoss:
    """PPO's and GRPO's clipped objective, with delta (an upper bound of rho) and the dual clip c > 1:

        l = -min(min(rho, delta) A, clip(rho, 1 - epsilon_low, 1 + epsilon_high) A);  where A < 0: at most -c A
        dl/drho = -A where the smaller of the two branches follows rho, bounds included, and 0 where a bound rules.

    Sources: Schulman et al. 2017 (PPO); Ye et al. 2020 (dual clip); delta as in TRL. Ties are ours: the full gradient on a bound.
    """
    a = t.advantage
    is_below_delta = ~(t.ratio > n.delta)
    plain = jnp.where(is_below_delta, t.ratio, n.delta) * a
    clipped = clamp(t.ratio, n.low, n.high) * a
    takes_plain = plain <= clipped
    is_within = (t.ratio >= n.low) & (t.ratio <= n.high)
    follows = jnp.where(takes_plain, is_below_delta, is_within)
    loss = -jnp.where(takes_plain, plain, clipped)
    if n.dual_clip is not None:
        bound = -n.dual_clip * a
        is_bounded = (a < 0) & (loss > bound)
        loss, follows = jnp.where(is_bounded, bound, loss), follows & ~is_bounded
    return TokenLoss(loss, jnp.where(follows, -a, 0.0), jnp.zeros_like(a))


def cispo(t: Token, n: Numbers) -> TokenLoss:
    """l = -stop(clip(rho, cap_low, cap)) A logp. Source: MiniMax-M1 (2025); the raw cap as in TRL, 1 + epsilon_high and cap_low
    as in verl."""
    return _weighted(-clamp(t.ratio, n.cap_low, n.cap) * t.advantage, t)


def sapo(t: Token, n: Numbers) -> TokenLoss:
    """l = -(4 / tau) s A, s = sigmoid(tau (rho - 1)), tau by the sign of A; dl/drho = -4 s (1 - s) A. Source: "Soft Adaptive
    Policy Optimization" (2025), defaults as in TRL."""
    tau = jnp.where(t.advantage > 0, jnp.float32(n.tau_pos), jnp.float32(n.tau_neg))
    x = tau * (t.ratio - 1)
    e = jnp.exp(-jnp.abs(x))  # s and 1 - s from e <= 1: neither overflows, neither cancels
    gate = jnp.where(x >= 0, 1.0, e) / (1 + e)
    slope = e / ((1 + e) * (1 + e))
    return TokenLoss(
        loss=-(4 / tau) * gate * t.advantage,
        dratio=-4 * slope * t.advantage,
        dlogp=jnp.zeros_like(x),
    )


def vespo(t: Token, n: Numbers) -> TokenLoss:
    """l = -stop(phi) A logp, phi a gamma weight of the sequence's importance weight (`vespo_phi`). Source: TRL."""
    return _weighted(-t.phi * t.advantage, t)


def reinforce(t: Token, n: Numbers) -> TokenLoss:
    """l = -A logp. Source: Williams 1992; GPG 2025."""
    return _weighted(-t.advantage, t)


def _weighted(weight: Array, t: Token) -> TokenLoss:
    return TokenLoss(loss=weight * t.logp, dratio=jnp.zeros_like(weight), dlogp=weight)


KINDS: dict[str, Callable[[Token, Numbers], TokenLoss]] = {
    "clip": clip,
    "cispo": cispo,
    "sapo": sapo,
    "vespo": vespo,
    "reinforce": reinforce,
}


def uses_ratio(kind: str) -> bool:
    return kind in ("clip", "cispo", "sapo")


def token_loss(kind: str, t: Token, n: Numbers) -> TokenLoss:
    """A token without advantage has neither loss nor gradient, at whatever ratio; NaN is passed on by every kind."""
    is_nan = jnp.isnan(t.logp)
    if uses_ratio(kind):
        is_nan |= jnp.isnan(t.ratio)

    def decided(x: Array) -> Array:
        return jnp.where(is_nan, jnp.nan, jnp.where(t.advantage == 0, 0.0, x))

    return TokenLoss(*(decided(x) for x in KINDS[kind](t, n)))


# The bounds of log w, TRL's (GRPOTrainer.get_gamma_weights): log 1e-8 and 20.
VESPO_LOWEST = -18.420680743952367
VESPO_HIGHEST = 20.0


def vespo_log_weight(log_ratio: Array, sampler_ratio: Array) -> Array:
    """A token's share of log w, before the sum is clamped."""
    of_sampler = clamp(jnp.log(sampler_ratio), VESPO_LOWEST, VESPO_HIGHEST)
    return clamp(log_ratio, -VESPO_HIGHEST, VESPO_HIGHEST) + of_sampler


def vespo_phi(log_weight_sum: Array, advantage: Array, options: Options) -> Array:
    """phi = exp(lambda + k log w - lambda w), (k, lambda) by the sign of A, so that phi(1) = 1; 0 where that is not finite."""

    def by_sign(name: str, floor: float) -> Array:
        pos, neg = (max(options.plain(f"vespo_{name}_{sign}"), floor) for sign in ("pos", "neg"))
        return jnp.where(advantage >= 0, jnp.float32(pos), jnp.float32(neg))

    k, rate = by_sign("k", 0.0), by_sign("lambda", 1e-4)
    log_w = clamp(log_weight_sum, VESPO_LOWEST, VESPO_HIGHEST)
    # lambda (1 - w) from expm1: near w = 1 the two terms cancel.
    phi = jnp.exp(k * log_w - rate * jnp.expm1(log_w))
    return jnp.where(jnp.isfinite(phi), phi, 0.0)
