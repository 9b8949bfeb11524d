"""What a step reports of itself: means of the token records, as tileloss.h's TILELOSS_METRIC_* define them."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from tileloss.jax._rows.options import Options
from tileloss.jax._rows.policy.factors import corrected
from tileloss.jax._rows.policy.kinds import Numbers
from tileloss.jax._rows.policy.sequences import Sequences


class TokenRecords(NamedTuple):
    """[N] each, float32 unless said."""

    used: Array  # bool
    kl: Array | None  # with its importance factor; None without ref_logp
    entropy: Array
    ratio: Array
    sampler_ratio: Array
    phi: Array
    advantage: Array
    is_dropped: Array  # bool: by the off-policy mask


class _Means:
    """Means over the tokens, and over the sequences of each one's token mean."""

    def __init__(self, used: Array, sequences: Sequences) -> None:
        self.used, self.sequences = used, sequences
        self.tokens = sequences.sum(used.astype(jnp.float32))
        self.total = jnp.sum(self.tokens)

    def masked(self, x: Array) -> Array:
        return jnp.where(self.used, x.astype(jnp.float32), 0.0)

    def over_tokens(self, x: Array) -> Array:
        return jnp.sum(self.masked(x)) / jnp.maximum(self.total, 1.0)

    def over_sequences(self, x: Array, empty: Array | float) -> Array:
        """``empty`` stands for a sequence without tokens."""
        means = self.sequences.sum(self.masked(x)) / jnp.maximum(self.tokens, 1.0)
        return jnp.sum(jnp.where(self.tokens > 0, means, empty)) / max(self.sequences.count, 1)


# Of one kind alone.
_KINDS = {
    "clip_low_fraction": "clip",
    "clip_high_fraction": "clip",
    "clip_fraction": "clip",
    "cispo_clip_fraction": "cispo",
    "phi_mean": "vespo",
}


def applicable(options: Options, has_ref: bool) -> list[str]:
    """The library's names of those that apply, in its order."""
    kind, has_sampler = options.choice("kind"), options.choice("sampler_correction") != "off"

    def applies(name: str) -> bool:
        if name.startswith("sampler_"):
            return has_sampler
        return has_ref if name == "kl" else _KINDS.get(name, kind) == kind

    return [name for name in options.function.metrics if applies(name)]


def metrics(r: TokenRecords, numbers: Numbers, sequences: Sequences, options: Options) -> Array:
    """float32 [M], in the order of the library's names. NaN: does not apply; a mean over nothing is 0."""
    means = _Means(r.used, sequences)
    by_sequence = options.choice("ratio_level") == "sequence"

    def mean(x: Array, empty: float = 0.0) -> Array:
        return means.over_sequences(x, empty) if by_sequence else means.over_tokens(x)

    found = {"entropy": means.over_tokens(r.entropy), "ratio_mean": mean(r.ratio, 1.0)}
    names = applicable(options, has_ref=r.kl is not None)
    if r.kl is not None:
        found["kl"] = means.over_tokens(r.kl)
    if "clip_fraction" in names:
        is_low = (r.ratio < numbers.low) & (r.advantage < 0)
        is_high = (r.ratio > numbers.high) & (r.advantage > 0)
        found["clip_low_fraction"] = mean(is_low)
        found["clip_high_fraction"] = mean(is_high)
        found["clip_fraction"] = mean(is_low | is_high)
    if "cispo_clip_fraction" in names:
        found["cispo_clip_fraction"] = mean((r.ratio > numbers.cap) & (r.advantage > 0))
    if "phi_mean" in names:
        found["phi_mean"] = means.over_sequences(r.phi, 1.0)
    if "sampler_ratio_mean" in names:
        found |= _sampler_metrics(r, means, options)
    is_dropped = sequences.sum(means.masked(r.is_dropped)) > 0
    found["dropped_sequences"] = jnp.sum(is_dropped, dtype=jnp.float32)
    found["tokens"] = means.total
    absent = jnp.float32(jnp.nan)
    return jnp.stack([found.get(name, absent) for name in options.function.metrics])


def _sampler_metrics(r: TokenRecords, means: _Means, options: Options) -> dict[str, Array]:
    by_sequence = options.choice("sampler_level") == "sequence"
    # The ratio of a sequence without tokens: what its empty sum gives, truncated or masked like any other.
    empty = corrected(jnp.float32(1), options)
    mean = means.over_tokens(r.sampler_ratio)
    least = jnp.min(jnp.where(r.used, r.sampler_ratio, jnp.inf), initial=jnp.inf)
    largest = jnp.max(jnp.where(r.used, r.sampler_ratio, 0.0), initial=0.0)
    is_any = means.total > 0
    if by_sequence:
        mean = means.over_sequences(r.sampler_ratio, empty)
        has_empty = jnp.any(means.tokens == 0)
        least = jnp.where(has_empty, jnp.minimum(least, empty), least)
        largest = jnp.where(has_empty, jnp.maximum(largest, empty), largest)
        is_any = jnp.bool_(means.sequences.count > 0)
    return {
        "sampler_ratio_mean": mean,
        "sampler_ratio_min": jnp.where(is_any, least, 0.0),
        "sampler_ratio_max": jnp.where(is_any, largest, 0.0),
    }
