"""When gradients are computed and where they are written: grad_in_forward, inplace_backward, retained graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from tileloss import torch as tl
from torch_problems import (
    ALL_FUNCTIONS,
    ALL_LOGIT_FUNCTIONS,
    allocations,
    assert_same,
    gradients,
    plain,
    problem,
    run,
)  # fmt: skip

LOSSES = [f for f in ALL_FUNCTIONS if not f.endswith("logprobs")]
OVERWRITTEN: list[tuple[str, dict[str, Any]]] = [
    (f, {"inplace_backward": True, "grad_in_forward": True})
    for f in ALL_LOGIT_FUNCTIONS
    if f in LOSSES
]
IN_PLACE = [*((f, {"inplace_backward": True}) for f in ALL_LOGIT_FUNCTIONS), *OVERWRITTEN]
ONE_PASS = [(f, {"grad_in_forward": True}) for f in LOSSES]
TWO_PASSES = [(f, {"grad_in_forward": False} if f in LOSSES else {}) for f in ALL_FUNCTIONS]
MODES = [*TWO_PASSES, *ONE_PASS, *IN_PLACE]
UPSTREAMS = [1.0, -1.0, 0.37, 0.0, 65536.0, 1 / 65528]
SAVED = {
    "copies": lambda: saved_tensors_hooks(Tensor.clone, lambda saved: saved),
    "on_cpu": save_on_cpu,
}


def mode_id(value: Any) -> str | None:
    return (
        "-".join(n for n, v in value.items() if v) or "two passes"
        if isinstance(value, dict)
        else None
    )


def non_leaves(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, tuple[Tensor, ...]]:
    """A problem, and what its leaves become by an operation that does not need its result again."""
    p = problem(dtype)
    return p, tuple(x * 1 for x in p.leaves(name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "mode"), MODES, ids=mode_id)
def test_every_mode_gives_the_loss_and_gradients_of_plain_torch(
    name: str, mode: dict[str, Any], dtype: torch.dtype
) -> None:
    p = problem(dtype)
    expected = gradients(name, p, plain)
    # The products with the head round dlogits to bfloat16, of which 2^-8 is one unit in the last place.
    rtol = 2e-5 if dtype == torch.float32 else 2.0**-7
    assert_same(
        gradients(name, p, **mode), tuple(e.to(dtype) if e.dim() else e for e in expected), rtol
    )


@pytest.mark.parametrize("upstream", UPSTREAMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "mode"), [*ONE_PASS, *OVERWRITTEN], ids=mode_id)
def test_one_pass_scales_by_the_upstream_gradient(
    name: str, mode: dict[str, Any], dtype: torch.dtype, upstream: float
) -> None:
    """A second rounding: half a unit in the last place more. float16's largest number is 65504."""
    p, inputs = non_leaves(name, dtype)
    loss = run(name, p, *inputs, **mode)
    scaled = torch.autograd.grad(loss, inputs, torch.tensor(upstream))
    ones = gradients(name, p, **mode)[1:]
    for ours, one in zip(scaled, ones, strict=True):
        torch.testing.assert_close(ours, (one.float() * upstream).to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize(("name", "mode"), [*TWO_PASSES, *ONE_PASS], ids=mode_id)
def test_gradients_of_leaves_accumulate_over_a_retained_graph(
    name: str, mode: dict[str, Any]
) -> None:
    """Changed between two backwards too."""
    p = problem()
    expected = gradients(name, p, **mode)[1:]
    loss = run(name, p, *p.leaves(name), **mode)
    loss.backward(retain_graph=True)
    for x in p.leaves(name):
        x.grad.mul_(-3)
    loss.backward(retain_graph=True)
    loss.backward()
    for x, one in zip(p.leaves(name), expected, strict=True):
        torch.testing.assert_close(x.grad, -one, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize(("name", "mode"), MODES, ids=mode_id)
def test_what_is_saved_may_be_kept_elsewhere(name: str, mode: dict[str, Any], saved: str) -> None:
    p, inputs = non_leaves(name)
    expected = gradients(name, p, **mode)
    with SAVED[saved]():
        loss = run(name, p, *inputs, **mode)
        found = torch.autograd.grad(loss, inputs)
    for ours, one in zip((loss, *found), expected, strict=True):
        assert torch.equal(ours, one)


@pytest.mark.parametrize(("name", "mode"), MODES, ids=mode_id)
def test_a_second_backward_raises(name: str, mode: dict[str, Any]) -> None:
    p, inputs = non_leaves(name)
    loss = run(name, p, *inputs, **mode)
    torch.autograd.grad(loss, inputs)
    with pytest.raises(RuntimeError, match="(?i)backward"):
        torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize(
    "factors", [(1.0, 0.5), (0.0, 1.0), (0.5, 0.0, 1.0), (1.0, 2.0, 1.0)], ids=str
)
@pytest.mark.parametrize(("name", "mode"), [*TWO_PASSES, *ONE_PASS, *OVERWRITTEN], ids=mode_id)
def test_what_a_retained_graph_hands_over_is_the_callers(
    name: str, mode: dict[str, Any], factors: tuple[float, ...]
) -> None:
    """A later backward leaves it as it is, and a change to it does not reach a later backward."""
    p = problem()
    plainly = {} if mode.get("inplace_backward") else mode
    expected = gradients(name, p, **plainly)[1:]
    for changed in (False, True):
        inputs = tuple(x * 1 for x in p.leaves(name))
        loss = run(name, p, *inputs, **mode)
        handed = []
        for i, factor in enumerate(factors):
            keep = i + 1 < len(factors)
            handed.append(torch.autograd.grad(factor * loss, inputs, retain_graph=keep))
            if changed and keep:
                for g in handed[-1]:
                    g.fill_(7)
        for found, factor in list(zip(handed, factors, strict=True))[-1 if changed else 0 :]:
            for g, one in zip(found, expected, strict=True):
                assert torch.equal(g, factor * one)


@pytest.mark.parametrize(("name", "mode"), OVERWRITTEN, ids=mode_id)
def test_logits_that_hold_the_gradient_may_not_be_changed(name: str, mode: dict[str, Any]) -> None:
    p, (logits,) = non_leaves(name)
    loss = run(name, p, logits, **mode)
    with torch.no_grad():
        logits.zero_()
    with pytest.raises(RuntimeError, match=r"^tileloss: .* call without inplace_backward"):
        loss.backward()


@pytest.mark.parametrize("name", ["linear_cross_entropy", "linear_policy_loss"])
@pytest.mark.parametrize("float16", ["hidden", "weight", "bias"])
def test_float16_gradients_are_rounded_after_amps_scale(name: str, float16: str) -> None:
    """A mean over 10^9 rows: below float16's smallest number before the scale, well above after it."""
    p = problem()
    setattr(p, float16, getattr(p, float16).detach().half().requires_grad_())
    options: dict[str, Any] = {"num_items": 1e9}
    if "policy" in name:
        options["aggregation"] = "token_mean"
    scale = torch.tensor(2.0**24)

    def scaled(**mode: Any) -> tuple[Tensor, ...]:
        loss = run(name, p, *p.leaves(name), **options, **mode)
        return torch.autograd.grad(loss, p.leaves(name), scale)

    ours, two_passes, one_pass = (
        scaled(),
        scaled(grad_in_forward=False),
        scaled(grad_in_forward=True),
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, two_passes, strict=True))
    number = ("hidden", "weight", "bias").index(float16)
    assert ours[number].count_nonzero() > ours[number].numel() / 4
    assert not torch.equal(ours[number], one_pass[number])
    getattr(p, float16).requires_grad_(False)  # of a frozen one nothing is stored
    before = tl.call_counts().get(f"{name}/value_and_grad", 0)
    run(name, p, *p.leaves(name), **options)
    assert tl.call_counts()[f"{name}/value_and_grad"] == before + 1


@pytest.mark.parametrize("name", ["cross_entropy", "soft_labels"])
def test_how_often_a_gradient_is_rounded(name: str) -> None:
    """Twice where the forward made it and the upstream gradient is no power of two: off by up to one unit in the last place."""
    p = problem(torch.bfloat16)
    wide = p.logits.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(plain(name, p, wide), wide)
    for upstream, in_forward, least, most in (
        (1 / 3, False, 0.4, 0.51),
        (0.25, True, 0.4, 0.51),
        (1 / 3, True, 0.6, 1.01),
    ):
        loss = upstream * run(name, p, p.logits, grad_in_forward=in_forward)
        found = torch.autograd.grad(loss, p.logits)[0].double()
        unit = torch.exp2(torch.floor(torch.log2((upstream * exact).abs())) - 7)
        worst = float(((found - upstream * exact) / unit)[exact.abs() > 1e-6].abs().max())
        assert least < worst < most, (upstream, in_forward)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "mode"), IN_PLACE, ids=mode_id)
def test_in_place_the_gradient_is_where_the_logits_were(
    name: str, mode: dict[str, Any], dtype: torch.dtype
) -> None:
    p, (logits,) = non_leaves(name, dtype)
    expected = gradients(name, p)[1]
    address = logits.data_ptr()
    (gradient,) = torch.autograd.grad(run(name, p, logits, **mode), logits)
    assert gradient.data_ptr() == address
    assert logits.data_ptr() == address
    assert torch.equal(gradient, expected)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(("name", "mode"), IN_PLACE, ids=mode_id)
def test_the_forward_writes_over_logits_only_with_grad_in_forward(
    name: str, mode: dict[str, Any]
) -> None:
    p, (logits,) = non_leaves(name)
    loss = run(name, p, logits, **mode)
    assert torch.equal(logits, p.logits) != mode.get("grad_in_forward", False)
    assert loss.requires_grad


@pytest.mark.parametrize(("name", "mode"), IN_PLACE, ids=mode_id)
def test_logits_that_their_producer_needs_raise_torchs_own_error(
    name: str, mode: dict[str, Any]
) -> None:
    p = problem()
    logits = p.logits.sigmoid()  # its formula reads its result
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(name, p, logits, **mode).backward()


@pytest.mark.parametrize(("name", "mode"), IN_PLACE, ids=mode_id)
def test_in_place_works_through_a_slice(name: str, mode: dict[str, Any]) -> None:
    """[:, :-1] of [B, T + 1, V]: rows in groups, written where they lie, the last position untouched."""
    p = problem()
    expected = gradients(name, p)[1]
    longer = torch.cat([p.logits.detach(), torch.full((3, 1, 67), 7.0)], 1).requires_grad_()
    whole = longer * 1
    run(name, p, whole[:, :-1], **mode).backward()
    assert torch.equal(whole[:, :-1], expected)
    assert (whole[:, -1] == 7).all()
    assert torch.equal(longer.grad[:, :-1], expected)
    assert (longer.grad[:, -1] == 0).all()


@pytest.mark.parametrize(("name", "mode"), IN_PLACE, ids=mode_id)
def test_which_views_torch_finds_in_the_graph(name: str, mode: dict[str, Any]) -> None:
    """docs/users/pytorch.md: not those that the forward has written to; their base is always found."""
    p, (base,) = non_leaves(name)
    expected = gradients(name, p)[1]
    (gradient,) = torch.autograd.grad(run(name, p, base[:], **mode), base)
    assert torch.equal(gradient, expected)
    p, (base,) = non_leaves(name)
    view = base[:]
    loss = run(name, p, view, **mode)
    if mode.get("grad_in_forward"):
        with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
            torch.autograd.grad(loss, view)
    else:
        assert torch.autograd.grad(loss, view)[0].data_ptr() == base.data_ptr()


@pytest.mark.parametrize("name", ALL_LOGIT_FUNCTIONS)
def test_in_place_refuses_logits_that_would_be_copied(name: str) -> None:
    p = problem()
    logits = (p.logits * 1).transpose(0, 2).contiguous().transpose(0, 2)
    with pytest.raises(
        ValueError, match="^inplace_backward: expected logits whose rows can be written"
    ):
        run(name, p, logits, inplace_backward=True).backward()


@pytest.mark.parametrize(("name", "mode"), [*ONE_PASS, *OVERWRITTEN], ids=mode_id)
def test_an_upstream_gradient_of_one_costs_no_copy(name: str, mode: dict[str, Any]) -> None:
    p, inputs = non_leaves(name)
    loss = run(name, p, *inputs, **mode)
    blocks = allocations(lambda: torch.autograd.grad(loss, inputs))
    assert sum(blocks) <= 64, blocks


@pytest.mark.parametrize(("name", "mode"), ONE_PASS, ids=mode_id)
def test_another_upstream_gradient_is_multiplied_in_place(name: str, mode: dict[str, Any]) -> None:
    p, inputs = non_leaves(name)
    loss = run(name, p, *inputs, **mode)
    upstream = torch.tensor(0.3)
    blocks = allocations(lambda: torch.autograd.grad(loss, inputs, upstream))
    assert sum(blocks) <= 64, blocks
    loss = run(name, p, *(x * 1 for x in p.leaves(name)), **mode)
    assert sum(allocations(lambda: loss.backward(upstream, retain_graph=True))) > p.bias.nbytes


@pytest.mark.parametrize(("name", "mode"), ONE_PASS, ids=mode_id)
def test_leaves_take_the_gradient_over_without_a_copy(name: str, mode: dict[str, Any]) -> None:
    p = problem()
    loss = run(name, p, *p.leaves(name), **mode)
    blocks = allocations(loss.backward)
    assert sum(blocks) <= 64, blocks


@pytest.mark.parametrize(("name", "mode"), MODES, ids=mode_id)
def test_a_second_derivative_is_never_a_zero(name: str, mode: dict[str, Any]) -> None:
    """allow_unused=True makes zeros of what is not in the graph: torch.autograd.functional does so unless it is strict."""
    p, inputs = non_leaves(name)
    once = torch.autograd.grad(run(name, p, *inputs, **mode), inputs, create_graph=True)
    for gradient in once:
        for x in inputs:
            with pytest.raises(RuntimeError, match="^tileloss: double backward is not supported"):
                torch.autograd.grad(gradient.sum(), x, retain_graph=True, allow_unused=True)
        with torch.no_grad():
            gradient.mul_(2)  # as clipping does
    if (name, mode) in IN_PLACE:  # the functions below would see what they differentiate by change
        return

    def first_input_loss(x: Tensor) -> Tensor:
        return run(name, p, x, *inputs[1:], **mode)

    for second in (torch.autograd.functional.hessian, torch.autograd.functional.jvp):
        with pytest.raises(RuntimeError, match="^tileloss: double backward is not supported"):
            second(first_input_loss, inputs[0], *([inputs[0]] if "jvp" in second.__name__ else []))


@pytest.mark.parametrize("name", ALL_FUNCTIONS)
def test_transforms_of_torch_func_are_refused(name: str) -> None:
    p = problem()
    first, *rest = (x.detach() for x in p.leaves(name))

    def loss(x: Tensor) -> Tensor:
        return run(name, p, x, *rest)

    batch = first.expand(2, *first.shape)
    for transform in (
        lambda: torch.vmap(loss)(batch),
        lambda: torch.func.grad(loss)(first),
        lambda: torch.func.jacrev(loss)(first),
        lambda: torch.func.jvp(loss, (first,), (first,)),
    ):
        with pytest.raises(NotImplementedError, match=r"^tileloss: the transforms of torch.func"):
            transform()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(first, first)
        with pytest.raises(NotImplementedError, match="^tileloss: forward-mode"):
            loss(dual)
        loss(first)


@pytest.mark.parametrize("outputs", [("logp",), ("logp", "lse", "entropy")])
def test_per_row_upstream_gradients_in_place(outputs: tuple[str, ...]) -> None:
    p, (logits,) = non_leaves("logprobs")
    upstream = [torch.randn(p.labels.shape) for _ in outputs]
    rows = tl.logprobs(p.logits, p.labels, outputs=outputs)
    (expected,) = torch.autograd.grad([getattr(rows, n) for n in outputs], p.logits, upstream)
    rows = tl.logprobs(logits, p.labels, outputs=outputs, inplace_backward=True)
    (gradient,) = torch.autograd.grad([getattr(rows, n) for n in outputs], logits, upstream)
    assert torch.equal(gradient, expected)
    assert gradient.data_ptr() == logits.data_ptr()
