"""Problems whose logits are hidden states times a head, and how far the head's gradients may be from the witness's."""

from __future__ import annotations

import numpy as np

from jax_problems import Arrays, Head, Problem, Witness, plain_problem
from jax_stage import RELATIVE, product_rounding

HIDDEN = 32


def as_seen(x: np.ndarray, compute_dtype: str) -> np.ndarray:
    """x rounded to what the products see, to nearest even."""
    if compute_dtype == "float32":
        return x
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), x, rounded.view(np.float32))


def with_head(problem: Problem, compute_dtype: str = "float32", bias: bool = True) -> Problem:
    """A head of orthonormal rows, and the hidden states with which it makes the problem's logits, up to a rounding."""
    random, vocabulary = np.random.default_rng(5), problem.logits.shape[1]
    size = max(HIDDEN, vocabulary)
    directions = np.linalg.qr(random.standard_normal((size, size)))[0][:vocabulary]
    added = random.standard_normal(vocabulary).astype(np.float32) if bias else None
    hidden = (problem.logits - (0 if added is None else added)) @ directions
    # Values that the products see as they are: then a rounding too many is one of the gradients.
    operands = [as_seen(x.astype(np.float32), compute_dtype) for x in (hidden, directions)]
    logits = operands[0].astype(np.float64) @ operands[1].T + (0 if added is None else added)
    return problem.but(logits=logits.astype(np.float32), head=Head(*operands, added, compute_dtype))


def even_problem(compute_dtype: str) -> Problem:
    """Many gradients of about equal size: where float32's errors decide a rounding to bfloat16 otherwise, that counts for little.
    With the soft-cap the witness keeps no number in 16 bits besides."""
    random = np.random.default_rng(11)
    logits = (0.3 * random.standard_normal((64, 75))).astype(np.float32)
    labels = random.integers(0, 75, 64)
    plain = plain_problem("cross_entropy", temperature=0.7, softcap=30.0)
    return with_head(plain.but(logits=logits, labels=labels), compute_dtype)


def head_differences(problem: Problem, ours: Witness, theirs: Witness) -> dict[str, float]:
    """By gradient: its distance from the witness's over what is allowed.

    A product's terms are dlogits times the other factor. Each may be off by what float32 does to dlogits, and where the products
    see bfloat16 by the 2^-7 between two neighbours, and the 2^-10 that the witness's p may have lost (docs/users/memory.md).
    """
    assert problem.head is not None
    relative = RELATIVE + 4 * product_rounding(problem).max()
    if problem.head.compute_dtype == "bfloat16":
        relative += 2.0**-7 + 2.0**-10
    return {
        name: _worst(ours.head_grads[name], array, relative * terms)
        for (name, array), terms in zip(
            theirs.head_grads.items(), _terms(problem, theirs), strict=True
        )
    }


def distances(ours: Arrays, theirs: Arrays) -> dict[str, float]:
    """By gradient: ||ours - theirs|| / ||theirs||, which a rounding too many to bfloat16 makes 1e-3."""
    return {
        name: float(np.linalg.norm(ours[name] - array) / np.linalg.norm(array))
        for name, array in theirs.items()
    }


def _terms(problem: Problem, theirs: Witness) -> list[np.ndarray]:
    """Of each gradient of a head: the sum of its terms without their signs."""
    assert problem.head is not None
    dlogits, hidden = np.abs(theirs.dlogits), np.abs(np.nan_to_num(problem.head.hidden))
    found = [dlogits @ np.abs(problem.head.weight), dlogits.T @ hidden]
    return [*found, dlogits.sum(axis=0)][: len(theirs.head_grads)]


def _worst(ours: np.ndarray, theirs: np.ndarray, allowed: np.ndarray) -> float:
    assert ours.shape == theirs.shape
    error = np.abs(ours.astype(np.float64) - theirs)
    same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
    with np.errstate(all="ignore"):
        return float(np.where(same, 0, np.nan_to_num(error / allowed, nan=np.inf)).max())
