"""The tokens that a row's softmax runs over."""

from __future__ import annotations

import torch
from torch import Tensor

from tileloss._core.views import WORD, check_sets, words_of

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def allowed_from(
    tokens: Tensor, offsets: Tensor | None = None, vocab_size: int | None = None
) -> Tensor:
    """Sets of tokens as every function's ``allowed`` takes them: int32 [..., ceil(V / 32)], of which bit j mod 32 of word j
    div 32 says whether token j is in the set. On the tensor's own device.

    Args:
        tokens: bool [..., V]; or the tokens of all rows' sets back to back, integers [M]. One that is there twice counts once.
        offsets: with integers: row i's are tokens[offsets[i]:offsets[i + 1]]; integers [N + 1], from 0 to M.
        vocab_size: with integers: V, of all columns of the logits, padding included.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what was given. A GPU is waited for, as it alone knows
            the integers.
    """
    if not isinstance(tokens, Tensor):
        raise TypeError(f"tokens: expected a Tensor, got {type(tokens).__name__}")
    is_bool = tokens.dtype == torch.bool
    if not is_bool and tokens.dtype not in _INTEGERS:
        raise TypeError(f"tokens: expected bool or integers, got {tokens.dtype}")
    if offsets is not None and getattr(offsets, "dtype", None) not in _INTEGERS:
        kind = offsets.dtype if isinstance(offsets, Tensor) else type(offsets).__name__
        raise TypeError(f"offsets: expected a Tensor of integers, got {kind}")
    check_sets(tokens.shape, is_bool, None if offsets is None else offsets.shape, vocab_size)
    if offsets is None or vocab_size is None:
        return _packed(tokens)
    tokens, offsets = tokens.long(), offsets.to(tokens.device, torch.int64)
    _check(tokens, offsets, vocab_size)
    rows, width = offsets.numel() - 1, words_of(vocab_size) * WORD
    of_rows = torch.arange(rows, device=tokens.device).repeat_interleave(offsets.diff())
    bits = torch.unique(of_rows * width + tokens)  # a bit that is added twice would be another
    ones = torch.ones_like(bits, dtype=torch.int32) << (bits % WORD).int()
    words = torch.zeros(rows * width // WORD, dtype=torch.int32, device=tokens.device)
    return words.scatter_add_(0, bits // WORD, ones).view(rows, width // WORD)


def _check(tokens: Tensor, offsets: Tensor, vocab_size: int) -> None:
    first, last, steps = int(offsets[0]), int(offsets[-1]), offsets.diff()
    if first != 0 or last != tokens.numel() or bool((steps < 0).any()):
        step_back = " with a step back" * bool((steps < 0).any())
        raise ValueError(
            f"offsets: expected ascending from 0 to the number of tokens, {tokens.numel()}, got {first} to {last}{step_back}"
        )
    wrong = (tokens < 0) | (tokens >= vocab_size)
    if wrong.any():
        place = int(wrong.int().argmax())
        raise ValueError(
            f"tokens[{place}]: expected 0 to {vocab_size - 1}, got {int(tokens[place])}"
        )


def _packed(mask: Tensor) -> Tensor:
    words, columns = words_of(mask.shape[-1]), mask.shape[-1]
    padded = torch.nn.functional.pad(mask, (0, words * WORD - columns))
    octets = padded.view(torch.uint8).view(*mask.shape[:-1], words, WORD // 8, 8)
    bits = 1 << torch.arange(8, dtype=torch.uint8, device=mask.device)
    found: Tensor = (octets * bits).sum(-1, dtype=torch.uint8)
    return found.view(torch.int32).squeeze(-1)
