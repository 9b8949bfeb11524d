"""What the bits of an implementation's results depend on besides the case: as it declares it, or nothing that is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Contract = dict[
    str, list[str]
]  # by quantity: "logp" (of a loss a row's too), "dlogits", "dhidden", "dhead"
QUANTITIES = ("logp", "dlogits", "dhidden", "dhead")
# "split": which rows come in one call; "tile": how many rows or columns are worked on at a time; "exp": whose exponential.
DEPENDS = ("instruction set", "exp", "tile", "split", "order", "threads", "shards")

_EVERYWHERE = ["instruction set", "exp"]
OF_TILELOSS: Contract = {
    "logp": _EVERYWHERE,
    "dlogits": _EVERYWHERE,
    "dhidden": [*_EVERYWHERE, "tile", "shards"],
    "dhead": [*_EVERYWHERE, "split", "order"],
}


def declared(name: str, contract: Any) -> Contract | None:
    """Of a user's function, whose attribute `contract` it is. Raises ValueError where it is none."""
    if contract is None:
        return None
    fits = isinstance(contract, Mapping) and all(
        quantity in QUANTITIES and not set(words) - set(DEPENDS)
        for quantity, words in contract.items()
    )
    if not fits:
        raise ValueError(
            f"--impl {name}: contract: expected a dict from {', '.join(QUANTITIES)} to lists of {', '.join(DEPENDS)}, "
            f"got {contract!r}"
        )
    return {quantity: list(words) for quantity, words in contract.items()}


def in_words(contract: Contract | None) -> str:
    """ "logp, dlogits: instruction set, exp; dhead: ..." """
    if contract is None:
        return "unknown"
    by_words: dict[str, list[str]] = {}
    for quantity, words in contract.items():
        by_words.setdefault(", ".join(words) or "nothing", []).append(quantity)
    return "; ".join(f"{', '.join(quantities)}: {words}" for words, quantities in by_words.items())
