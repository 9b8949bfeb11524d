"""definitions.py against torch in float64, and checks.py against wrong gradients: it has to refuse each one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import definitions
from checks import Exact, hold_dlogits, hold_gradients, hold_outputs, solve

N, V, H = 12, 300, 48
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
COMPUTE = pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32])


def same(ours: Tensor, theirs: Tensor, x: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    pair = (torch.autograd.grad(loss.sum(), x, retain_graph=True)[0] for loss in (ours, theirs))
    torch.testing.assert_close(*pair, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("transform", [(1.0, 0.0, 1.0), (1.5, 20.0, 0.7)])
def test_cross_entropy_is_torchs(
    reduction: str, smoothing: float, weighted: bool, transform: tuple[float, float, float]
) -> None:
    x = (4 * torch.randn(N, V)).double().requires_grad_()
    labels, probs = torch.randint(0, V, (N,)), torch.randn(N, V).double().softmax(-1)
    labels[3] = -100
    weight = torch.rand(V).double() + 0.1 if weighted else None
    scale, softcap, temperature = transform
    z = softcap * torch.tanh(scale * x / softcap) if softcap else scale * x
    options = {"reduction": reduction, "label_smoothing": smoothing}
    of_logits = dict(zip(("logit_scale", "softcap", "temperature"), transform, strict=True))
    for target in (labels, probs):
        theirs = F.cross_entropy(z / temperature, target, weight, **options)
        same(definitions.cross_entropy(x, target, weight, **options, **of_logits), theirs, x)


def test_row_outputs_are_torchs() -> None:
    x, labels = (3 * torch.randn(N, V)).double().requires_grad_(), torch.randint(0, V, (N,))
    rows = definitions.logprobs(x, labels, outputs=("lse", "entropy"))
    same(rows.lse, torch.logsumexp(x, -1), x)
    same(rows.entropy, torch.distributions.Categorical(logits=x).entropy(), x)


# ----------------------------------------------------------------------------------------- wrong gradients


def example() -> tuple[Tensor, Tensor, Tensor]:
    """p, the label's column and dL/dx of a mean cross-entropy, of which two rows are confident."""
    x = (3 * torch.randn(N, V)).bfloat16()
    labels = torch.randint(0, V, (N,))
    x[:2] = x[:2].scatter(1, labels[:2, None], 25.0)
    gradient = solve("cross_entropy", [x], labels).gradients[0]
    assert gradient is not None
    return x.double().softmax(-1), F.one_hot(labels, V).bool(), gradient


def truncated(x: Tensor) -> Tensor:
    """To bfloat16, towards 0."""
    return (x.float().view(torch.int32) & -0x10000).view(torch.float32).bfloat16()


WRONG: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "zero": lambda g, p, label: torch.zeros_like(g),
    "halved": lambda g, p, label: 0.5 * g,
    "negated": lambda g, p, label: -g,
    "off label zeroed": lambda g, p, label: torch.where(label, g, 0.0),
    "label not subtracted": lambda g, p, label: torch.where(label, p / N, g),
    "last tile dropped": lambda g, p, label: torch.cat([g[:, :256], torch.zeros(N, V - 256)], 1),
    "first row's coefficients": lambda g, p, label: g * (1 + 0.02 * torch.arange(N)[:, None]),
    "columns shifted by one": lambda g, p, label: g.roll(1, 1),
    "probabilities rounded before the subtraction": lambda g, p, label: torch.where(
        label, (p.bfloat16().double() - 1) / N, g
    ),
}


@DTYPES
@pytest.mark.parametrize("name", WRONG)
def test_wrong_gradients_are_refused(name: str, dtype: torch.dtype) -> None:
    p, label, right = example()
    hold_dlogits(right.to(dtype), right)
    with pytest.raises(AssertionError, match="is off by"):
        hold_dlogits(WRONG[name](right, p, label).to(dtype), right)


def test_a_store_that_truncates_is_refused() -> None:
    *_, right = example()
    with pytest.raises(AssertionError, match="is off by"):
        hold_dlogits(truncated(right), right)


OTHER_POLICIES: dict[str, dict[str, Any]] = {
    "another bound": {"epsilon_low": 0.2 + 2e-3},
    "no KL": {"beta": 0.0},
    "KL without its ratio": {"kl_importance": False},
    "no clipping": {"epsilon_low": 1.0, "epsilon_high": 100.0},
    "another aggregation": {"aggregation": "token_mean"},
    "sequence level": {"ratio_level": "sequence"},
}


@DTYPES
@pytest.mark.parametrize("name", OTHER_POLICIES)
def test_another_policys_gradient_is_refused(name: str, dtype: torch.dtype) -> None:
    x, labels = 3 * torch.randn(3, 4, V), torch.randint(0, V, (3, 4))
    mask = torch.ones(3, 4).bool()
    mask[1, 2:] = False
    # Ratios on both sides of both bounds, one between the two lower bounds.
    old = definitions.logprobs(x.double(), labels).logp - torch.tensor([-0.2244, 0.05, 0.3, -0.5])
    given = (x, labels, torch.tensor([-0.8, 1.0, 0.5]))
    options = {"mask": mask, "old_logp": old, "ref_logp": old + 0.2, "beta": 0.1}
    options["kl_importance"] = True
    right, wrong = (
        solve("policy_loss", given[:1], *given[1:], **options | changed).gradients[0]
        for changed in ({}, OTHER_POLICIES[name])
    )
    hold_dlogits(right.to(dtype), right)
    with pytest.raises(AssertionError, match="is off by"):
        hold_dlogits(wrong.to(dtype), right)


@DTYPES
def test_off_label_components_of_a_large_vocabulary_are_held(dtype: torch.dtype) -> None:
    """Each is a hundred thousandth of the label's."""
    x, labels = 0.1 * torch.randn(1, 1 << 17), torch.tensor([5])
    right = solve("cross_entropy", [x], labels).gradients[0]
    wrong = torch.where(F.one_hot(labels, x.shape[1]).bool(), right, 1.01 * right)
    hold_dlogits(right.to(dtype), right)
    with pytest.raises(AssertionError, match="is off by"):
        hold_dlogits(wrong.to(dtype), right)


# -------------------------------------------------------------------------------------- with the LM head


def ideal(compute: torch.dtype) -> tuple[Exact, list[Tensor]]:
    """An example, and the gradients of an implementation that rounds each dlogit to ``compute`` and is exact otherwise."""
    hidden, head = torch.randn(64, H).bfloat16(), (torch.randn(V, H) / 4).bfloat16()
    labels = torch.randint(0, V, (64,))
    exact = solve("linear_cross_entropy", [hidden, head, torch.randn(V)], labels)
    dlogits = exact.logits.grad.to(compute).double()
    return exact, [dlogits @ head.double(), dlogits.T @ hidden.double(), dlogits.sum(0)]


@COMPUTE
@DTYPES
def test_the_ideal_implementation_passes(compute: torch.dtype, dtype: torch.dtype) -> None:
    exact, gradients = ideal(compute)
    hold_gradients([g.to(dtype) for g in gradients], exact, compute)


@COMPUTE
@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("factor", [0.0, 0.5, -1.0, 0.97])
def test_wrong_products_are_refused(compute: torch.dtype, index: int, factor: float) -> None:
    exact, gradients = ideal(compute)
    gradients[index] *= factor
    with pytest.raises(AssertionError, match="is off by"):
        hold_gradients([g.float() for g in gradients], exact, compute)


@COMPUTE
@pytest.mark.parametrize("index", [0, 1])
def test_products_that_are_truncated_are_refused(compute: torch.dtype, index: int) -> None:
    exact, gradients = ideal(compute)
    with pytest.raises(AssertionError, match="is off by"):
        hold_gradients(
            [truncated(g) if i == index else None for i, g in enumerate(gradients)], exact, compute
        )


def test_sums_in_bfloat16_dropped_tiles_and_other_values_are_refused() -> None:
    exact, _ = ideal(torch.bfloat16)
    dlogits, hidden, head = exact.logits.grad, *(x.detach() for x in exact.operands[:2])
    dhead = torch.zeros(V, H).bfloat16()
    for row, each in zip(dlogits, hidden, strict=True):
        dhead = (dhead.double() + row[:, None] * each).bfloat16()
    dhidden = (dlogits[:, :256].bfloat16().double() @ head[:256]).float()
    for wrong in ([None, dhead, None], [dhidden, None, None]):
        with pytest.raises(AssertionError, match="is off by"):
            hold_gradients(wrong, exact, torch.bfloat16)
    loss = exact.outputs["loss"].float()
    hold_outputs({"loss": loss}, exact)
    with pytest.raises(AssertionError, match="loss is off by"):
        hold_outputs({"loss": loss * (1 + 2e-4)}, exact)
