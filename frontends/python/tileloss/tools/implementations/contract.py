"""What the bits of an implementation's results depend on besides the case: as it declares it, or nothing that is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tileloss
from tileloss._core.calls import chosen_isa

# By quantity ("logp", of a loss a row's too, "dlogits", "dhidden", "dhead") a list of DEPENDS; and "kernels", a name: who gives
# the same name and the same list for a quantity claims the same bits.
Contract = dict[str, Any]
QUANTITIES = ("logp", "dlogits", "dhidden", "dhead")
# "split": which rows come in one call; "tile": how many rows or columns are worked on at a time; "exp": whose exponential.
DEPENDS = ("instruction set", "exp", "tile", "split", "order", "threads", "shards")

_EVERYWHERE = ["instruction set", "exp"]


def tileloss_contract(device: str = "cpu", row_stage: str = "") -> Contract:
    """``row_stage``: whose it is, where it is not the library's own."""
    kernels = [f"tileloss {tileloss.__version__}", chosen_isa() if device == "cpu" else device]
    return {
        "kernels": ", ".join([*kernels, *([row_stage] if row_stage else [])]),
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
        isinstance(value, str) and value
        if key == "kernels"
        else key in QUANTITIES and not set(value) - set(DEPENDS)
        for key, value in contract.items()
    )
    if not fits:
        raise ValueError(
            f"--impl {name}: contract: expected a dict from {', '.join(QUANTITIES)} to lists of {', '.join(DEPENDS)}, "
            f"and from kernels to a name, got {contract!r}"
        )
    return {key: value if key == "kernels" else list(value) for key, value in contract.items()}


def in_words(contract: Contract | None) -> str:
    """ "logp, dlogits: instruction set, exp; dhead: ..." """
    if contract is None:
        return "unknown"
    by_words: dict[str, list[str]] = {}
    for key, value in contract.items():
        words = value if key == "kernels" else ", ".join(value) or "nothing"
        by_words.setdefault(words, []).append(key)
    return "; ".join(f"{', '.join(keys)}: {words}" for words, keys in by_words.items())
