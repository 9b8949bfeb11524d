"""What JAX users have: jax.nn.log_softmax, optax, tokamax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tileloss.testing.case import Case, Refused

_TRANSFORM = ("logit_scale", "softcap", "temperature", "valid_vocab", "ignore_index")
_HEAD = ("bias", "hidden_r", "head_r")
_LOSSES = ("cross_entropy", "linear_cross_entropy")
_ROWS = ("logprobs", "linear_logprobs")


def plain(case: Case) -> dict[str, Array]:
    """log_softmax of the logits in float32, gather, mean: with the LM head of its product in the inputs' dtype."""
    options = case.options
    rows = ("loss", "logp", "lse", "entropy")
    case.refuse_unless(
        (*_LOSSES, *_ROWS), (*_TRANSFORM, "reduction"), _HEAD, rows, several_labels=True
    )
    labels, used = case.jax("labels"), jnp.asarray(case.in_use)
    slots = jnp.maximum(labels, 0).reshape(len(used), -1)

    def compute(operands: dict[str, Array]) -> dict[str, Array]:
        x = _logits(operands).astype(jnp.float32)[:, : case.valid_vocab]
        z = x * options.get("logit_scale", 1.0)
        if "softcap" in options:
            z = options["softcap"] * jnp.tanh(z / options["softcap"])
        z = z / options.get("temperature", 1.0)
        log_p = jax.nn.log_softmax(z, -1)
        p = jnp.exp(log_p)
        rows = {
            "logp": jnp.take_along_axis(log_p, slots, -1).reshape(labels.shape),
            "lse": jax.nn.logsumexp(z, -1),
            "entropy": -jnp.where(p > 0, p * jnp.where(p > 0, log_p, 0), 0).sum(-1),
        }
        is_in = {"logp": labels != case.ignore_index} if case.labels_per_row > 1 else {}
        rows = {name: jnp.where(is_in.get(name, used), row, 0) for name, row in rows.items()}
        return case.asked(rows) | _loss(case, -rows["logp"], used)

    return case.jax_outputs(compute)


def optax(case: Case) -> dict[str, Array]:
    import optax as package

    case.refuse_unless(_LOSSES, ("reduction", "ignore_index"), _HEAD)
    labels, used = jnp.maximum(case.jax("labels"), 0), jnp.asarray(case.in_use)

    def compute(operands: dict[str, Array]) -> dict[str, Array]:
        loss_of = package.softmax_cross_entropy_with_integer_labels
        rows = loss_of(_logits(operands), labels, where=used[:, None])
        return _loss(case, jnp.where(used, rows, 0), used)

    return case.jax_outputs(compute)


def tokamax(case: Case) -> dict[str, Array]:
    import tokamax as package
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # or it parses this process's command line
    case.refuse_unless(["linear_cross_entropy"], ["reduction"])
    reduction = case.options.get("reduction", "mean")
    if reduction == "none":
        raise Refused("reduction none: not offered")
    if not case.in_use.all():
        raise Refused("ignored rows: not offered")
    labels = case.jax("labels").astype(np.int32)

    def compute(operands: dict[str, Array]) -> dict[str, Array]:
        hidden, head = operands["hidden"], operands["head"]
        loss = package.linear_softmax_cross_entropy_loss(
            hidden, labels, head.T, reduction=reduction
        )
        return {"loss": loss}

    return case.jax_outputs(compute)


def _logits(operands: dict[str, Array]) -> Array:
    if "logits" in operands:
        return operands["logits"]
    logits = operands["hidden"] @ operands["head"].T
    if "head_r" in operands:
        logits += operands["hidden_r"] @ operands["head_r"].T
    return logits + operands["bias"].astype(logits.dtype) if "bias" in operands else logits


def _loss(case: Case, rows: Array, used: Array) -> dict[str, Any]:
    if case.function in _ROWS:
        return {}
    reduction = case.options.get("reduction", "mean")
    if reduction == "none":
        return {"loss": rows}
    total = rows.sum()
    return {"loss": total / jnp.maximum(used.sum(), 1) if reduction == "mean" else total}
