"""No hidden copies: what torch's allocator is asked for, block by block; autocast and the head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tileloss import torch as tl
from torch_problems import ROWS, allocations

N, V, H = 64, 8192, 32
SMALL = 4096  # of a call: 12 or 16 bytes a row, the scalars, the loss
LOGITS = N * V * 2


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(N, V).bfloat16().requires_grad_(), torch.randint(0, V, (N,))


LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": lambda x, y, **mode: tl.cross_entropy(x, y, **mode),
    "logprobs": lambda x, y, **mode: sum(tl.logprobs(x, y, outputs=ROWS, **mode)[:3]).sum(),
    "policy_loss": lambda x, y, **mode: tl.policy_loss(x, y, torch.ones(1), **mode),
    "policy_loss of sequences": lambda x, y, **mode: tl.policy_loss(
        x.view(8, 8, V), y.view(8, 8), torch.ones(8), preset="gspo", **mode
    ),
}
ONE_PASS = [name for name in LOSSES if name != "logprobs"]


@pytest.mark.parametrize("name", LOSSES)
def test_a_forward_holds_no_logits(name: str) -> None:
    x, labels = batch()
    assert sum(allocations(lambda: LOSSES[name](x, labels))) <= SMALL
    with torch.no_grad():
        assert sum(allocations(lambda: LOSSES[name](x, labels))) <= SMALL


@pytest.mark.parametrize("name", LOSSES)
def test_a_fresh_gradient_is_one_block(name: str) -> None:
    x, labels = batch()
    loss = LOSSES[name](x, labels)
    blocks = allocations(lambda: torch.autograd.grad(loss, x))
    assert blocks[0] == LOGITS
    assert sum(blocks[1:]) <= SMALL, blocks


@pytest.mark.parametrize("name", ONE_PASS)
def test_one_pass_is_one_block(name: str) -> None:
    x, labels = batch()
    blocks = allocations(lambda: LOSSES[name](x, labels, grad_in_forward=True).backward())
    assert blocks[0] == LOGITS
    assert sum(blocks[1:]) <= SMALL, blocks


@pytest.mark.parametrize("name", LOSSES)
def test_in_place_is_none(name: str) -> None:
    modes: list[dict[str, Any]] = [{"inplace_backward": True}]
    if name in ONE_PASS:
        modes.append({"inplace_backward": True, "grad_in_forward": True})
    for mode in modes:
        x, labels = batch()
        logits = x * 1

        def step(logits: Tensor = logits, labels: Tensor = labels, mode: Any = mode) -> Any:
            return torch.autograd.grad(LOSSES[name](logits, labels, **mode), logits)

        assert sum(allocations(step)) <= 2 * SMALL


def test_the_measure_sees_a_copy() -> None:
    x, labels = batch()
    blocks = allocations(lambda: tl.cross_entropy(x.detach().T.contiguous().T, labels))
    assert blocks[:2] == [LOGITS, LOGITS]


@pytest.mark.parametrize("name", LOSSES)
def test_row_state_is_kept_for_a_backward_only(name: str) -> None:
    x, labels = batch()
    arrays = 4 if name == "logprobs" else 3  # the entropy's sum besides
    trained = sum(allocations(lambda: LOSSES[name](x, labels)))
    with torch.no_grad():
        evaluated = sum(allocations(lambda: LOSSES[name](x, labels)))
    assert trained - evaluated == arrays * 4 * N
    with torch.inference_mode():
        assert sum(allocations(lambda: LOSSES[name](x, labels))) == evaluated
    assert sum(allocations(lambda: LOSSES[name](x.detach(), labels))) == evaluated


# ---------------------------------------------------------------------------------------- with the LM head


def head(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    weight = (0.1 * torch.randn(V, H)).to(dtype).requires_grad_()
    return torch.randn(N, H).to(dtype).requires_grad_(), weight, torch.randint(0, V, (N,))


@pytest.mark.parametrize("name", ["linear_cross_entropy", "linear_logprobs"])
def test_row_state_of_the_head_is_kept_for_a_backward_only(name: str) -> None:
    hidden, weight, labels = head()
    options = {} if name.endswith("logprobs") else {"grad_in_forward": False}
    function = getattr(tl, name)
    trained = sum(allocations(lambda: function(hidden, weight, labels, **options)))
    with torch.no_grad():
        evaluated = sum(allocations(lambda: function(hidden, weight, labels, **options)))
    assert trained - evaluated == 3 * 4 * N


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("frozen", [None, 0, 1], ids=["", "frozen head", "frozen hidden"])
def test_gradients_of_what_needs_them_are_all_that_is_held(
    frozen: int | None, one_pass: bool
) -> None:
    hidden, weight, labels = head()
    trained = [weight, hidden]
    if frozen is not None:
        trained.pop(frozen).requires_grad_(False)
    blocks = allocations(
        lambda: tl.linear_cross_entropy(hidden, weight, labels, grad_in_forward=one_pass).backward()
    )
    assert blocks[: len(trained)] == [x.nbytes for x in trained]
    assert sum(blocks[len(trained) :]) <= SMALL, blocks
    with torch.no_grad():
        assert sum(allocations(lambda: tl.linear_cross_entropy(hidden, weight, labels))) <= SMALL


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["linear_cross_entropy", "linear_logprobs", "linear_policy_loss"])
def test_a_heads_gradient_that_is_added_takes_no_memory(name: str, dtype: torch.dtype) -> None:
    hidden, weight, labels = head(dtype)
    head_grad, extra = torch.zeros(V, H), (torch.ones(1),) if "policy" in name else ()

    def step() -> None:
        out = getattr(tl, name)(hidden, weight, labels, *extra, linear_weight_grad=head_grad)
        (out.logp.sum() if isinstance(out, tl.RowOutputs) else 0.5 * out).backward()

    blocks = allocations(step)
    assert blocks[0] == hidden.nbytes
    assert sum(blocks[1:]) <= SMALL, blocks


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["linear_cross_entropy", "linear_logprobs", "linear_policy_loss"])
def test_autocast_is_compute_dtype_without_a_copy_of_the_head(
    name: str, hidden_dtype: torch.dtype
) -> None:
    hidden, weight, labels = head()
    hidden = hidden.detach().to(hidden_dtype).requires_grad_()
    results: list[Tensor] = []

    def step(**options: Any) -> None:
        for x in (hidden, weight):
            x.grad = None
        extra = (torch.ones(1),) if "policy" in name else ()
        out = getattr(tl, name)(hidden, weight, labels, *extra, **options)
        loss = out.logp.sum() if isinstance(out, tl.RowOutputs) else out
        loss.backward()
        results.extend([loss.detach(), hidden.grad, weight.grad])

    with torch.autocast("cpu", torch.bfloat16):
        blocks = allocations(step)
    assert blocks[:2] == [weight.nbytes, hidden.nbytes]
    assert sum(blocks[2:]) <= SMALL, blocks
    step(compute_dtype=torch.bfloat16)
    step(compute_dtype=torch.float32)
    cast, bfloat16, float32 = results[:3], results[3:6], results[6:]
    assert all(torch.equal(a, b) for a, b in zip(cast, bfloat16, strict=True))
    assert not torch.equal(cast[2], float32[2])
    assert [x.dtype for x in cast] == [torch.float32, hidden_dtype, torch.float32]


def test_autocast_needs_no_room_for_a_copy_of_the_head() -> None:
    """Nor inside the library, whose own scratch is what workspace_bytes caps."""
    weight = (0.1 * torch.randn(V, 256)).requires_grad_()
    hidden, labels = torch.randn(N, 256).requires_grad_(), torch.randint(0, V, (N,))
    with torch.autocast("cpu", torch.bfloat16):
        loss = tl.linear_cross_entropy(hidden, weight, labels, workspace_bytes=V * 256 * 2 // 4)
        expected = tl.linear_cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert not torch.equal(loss, tl.linear_cross_entropy(hidden, weight, labels))
    assert loss.requires_grad


def test_compute_dtype_overrules_autocast() -> None:
    hidden, weight, labels = head()
    plain = tl.linear_cross_entropy(hidden, weight, labels)
    with torch.autocast("cpu", torch.bfloat16):
        forced = tl.linear_cross_entropy(hidden, weight, labels, compute_dtype=torch.float32)
        with torch.autocast("cpu", enabled=False):
            off = tl.linear_cross_entropy(hidden, weight, labels)
    with torch.autocast("cpu", torch.float16):  # the products know bfloat16 and float32
        wider = tl.linear_cross_entropy(hidden, weight, labels)
    assert torch.equal(plain, forced)
    assert torch.equal(plain, off)
    assert torch.equal(plain, wider)


def test_autocast_leaves_logits_as_they_are() -> None:
    x, labels = batch()
    plain = tl.cross_entropy(x, labels)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(tl.cross_entropy(x, labels), plain)


def test_a_smaller_workspace_gives_the_same_gradients_or_says_what_it_needs() -> None:
    hidden, weight, labels = head()
    with pytest.raises(ValueError, match="^workspace_bytes: expected") as raised:
        tl.linear_cross_entropy(hidden, weight, labels, workspace_bytes=1000)
    least = max(int(n) for n in str(raised.value).replace(",", " ").split() if n.isdigit())
    assert least > 1000
    loss = tl.linear_cross_entropy(hidden, weight, labels, workspace_bytes=least)
    small = torch.autograd.grad(loss, (hidden, weight))
    large = torch.autograd.grad(tl.linear_cross_entropy(hidden, weight, labels), (hidden, weight))
    torch.testing.assert_close(small, large, rtol=1e-4, atol=1e-6)
