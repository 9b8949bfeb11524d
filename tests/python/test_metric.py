"""The oracle against torch in float64, and the metric against wrong gradients: it has to refuse each one."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from metric import LinearCase, judge_dlogits, judge_linear
from oracle import CrossEntropy, Gradient, Policy, SoftmaxRows, Transform, softmax_rows, solve

N, V, H = 12, 300, 48
HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("transform", [Transform(), Transform(1.5, 20.0, 0.7)])
def test_oracle_is_torch_in_float64(
    reduction: str, smoothing: float, weighted: bool, transform: Transform
) -> None:
    x = (4 * torch.randn(N, V)).double().requires_grad_()
    labels = torch.randint(0, V, (N,))
    weight = torch.rand(V).double() + 0.1 if weighted else None
    z = transform.logit_scale * x
    z = transform.softcap * torch.tanh(z / transform.softcap) if transform.softcap else z
    loss = F.cross_entropy(
        z / transform.temperature, labels, weight, reduction=reduction, label_smoothing=smoothing
    )
    loss.sum().backward()
    rows = softmax_rows(x.detach(), labels, transform)
    options = CrossEntropy(reduction=reduction, label_smoothing=smoothing)
    upstream = torch.ones(N).double() if reduction == "none" else None
    answer = solve(
        rows, options.loss_of(labels, weight, V, None), class_weights=weight, upstream=upstream
    )
    torch.testing.assert_close(answer.loss, loss.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(answer.dlogits.gradient, x.grad, rtol=1e-10, atol=1e-16)


def test_oracle_of_z_loss_and_entropy_is_autograd() -> None:
    x = (3 * torch.randn(N, V)).double().requires_grad_()
    labels = torch.randint(0, V, (N,))
    lse = torch.logsumexp(x, -1)
    entropy = torch.distributions.Categorical(logits=x).entropy()
    (0.01 * lse.square().sum() - 0.3 * entropy.sum()).backward()
    rows = softmax_rows(x.detach(), labels)
    answer = solve(rows, lambda v: 0.01 * v.lse.square().sum() - 0.3 * v.entropy.sum())
    torch.testing.assert_close(answer.dlogits.gradient, x.grad, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("kind", ["clip", "cispo", "sapo", "vespo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_oracle_of_policies_is_autograd(kind: str, level: str) -> None:
    x = (2 * torch.randn(N, V)).double().requires_grad_()
    labels, mask = torch.randint(0, V, (N,)), torch.rand(3, N // 3) < 0.8
    logp = F.log_softmax(x, -1).gather(1, labels[:, None])[:, 0].view(3, -1)
    old = logp.detach() + 0.3 * torch.randn(mask.shape)
    policy = Policy(kind=kind, ratio_level=level, beta=0.1, kl_importance=True)
    advantages = torch.randn(3, 1).double()
    used = mask.reshape(-1)
    rows = softmax_rows(x.detach()[used], labels[used])
    answer = solve(rows, policy.loss_of(mask, advantages, old, old - 0.1))
    per_token, rho = policy.per_token(logp, old, advantages, mask, None)
    d = old - 0.1 - logp
    total = policy.aggregate(per_token + 0.1 * (torch.exp(d) - d - 1) * rho, mask)
    total.backward()
    torch.testing.assert_close(answer.loss, total.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(answer.dlogits.gradient, x.grad[used], rtol=1e-9, atol=1e-15)


# ----------------------------------------------------------------------------------------- wrong gradients


def example(smoothing: float = 0.0) -> tuple[SoftmaxRows, Gradient]:
    x = (3 * torch.randn(N, V)).bfloat16().double()
    labels = torch.randint(0, V, (N,))
    x[:2] = x[:2].scatter(1, labels[:2, None], 25.0)  # confident
    rows = softmax_rows(x, labels)
    options = CrossEntropy(label_smoothing=smoothing)
    return rows, solve(rows, options.loss_of(labels, None, V, None)).dlogits


def truncated(x: Tensor) -> Tensor:
    """To bfloat16, towards 0."""
    return (x.float().view(torch.int32) & -0x10000).view(torch.float32).bfloat16()


Wrong = Callable[[Tensor, SoftmaxRows], Tensor]
WRONG: dict[str, Wrong] = {
    "zero": lambda g, rows: torch.zeros_like(g),
    "halved": lambda g, rows: 0.5 * g,
    "negated": lambda g, rows: -g,
    "off label zeroed": lambda g, rows: torch.where(onehot(rows), g, 0.0),
    "label not subtracted": lambda g, rows: torch.where(onehot(rows), rows.p / N, g),
    "last tile dropped": lambda g, rows: torch.cat([g[:, :256], torch.zeros(N, V - 256)], 1),
    "first row's coefficients": lambda g, rows: g * (1 + 0.02 * torch.arange(N)[:, None]),
    "columns shifted by one": lambda g, rows: g.roll(1, 1),
    "probabilities rounded before the subtraction": lambda g, rows: torch.where(
        onehot(rows), ((1 - rows.others).bfloat16().double()[:, None] - 1) / N, g
    ),
}


def onehot(rows: SoftmaxRows) -> Tensor:
    return F.one_hot(rows.labels, V).bool()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_a_gradient_rounded_once_passes(dtype: torch.dtype, smoothing: float) -> None:
    rows, reference = example(smoothing)
    figures = judge_dlogits(reference.gradient.to(dtype), rows, reference)
    assert max(figures.values()) <= 1, figures


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_gradients_are_refused(name: str, dtype: torch.dtype) -> None:
    rows, reference = example()
    wrong = WRONG[name](reference.gradient, rows).to(dtype)
    assert max(judge_dlogits(wrong, rows, reference).values()) > 1


OTHER_POLICIES = {
    "another bound": {"epsilon_low": 0.2 + 2e-3},
    "no KL": {"beta": 0.0},
    "KL without its ratio": {"kl_importance": False},
    "no clipping": {"epsilon_low": 1.0, "epsilon_high": 100.0},
    "another aggregation": {"aggregation": "token_mean"},
    "sequence level": {"ratio_level": "sequence"},
}


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("name", OTHER_POLICIES)
def test_another_policys_gradient_is_refused(name: str, dtype: torch.dtype) -> None:
    x, labels = (3 * torch.randn(N, V)).double(), torch.randint(0, V, (N,))
    mask = torch.ones(3, N // 3).bool()
    mask[1, 2:] = False
    rows = softmax_rows(x[mask.reshape(-1)], labels[mask.reshape(-1)])
    old = torch.zeros(mask.shape).double().masked_scatter(mask, rows.logp)
    # Ratios on both sides of both bounds, one between the two lower bounds.
    old -= torch.tensor([-0.2244, 0.05, 0.3, -0.5]).double()
    advantages = torch.tensor([[-0.8], [1.0], [0.5]]).double()
    policy = Policy(beta=0.1, kl_importance=True)
    other = Policy(**(vars(policy) | OTHER_POLICIES[name]))
    right, wrong = (
        solve(rows, each.loss_of(mask, advantages, old, old + 0.2)).dlogits
        for each in (policy, other)
    )
    passed = judge_dlogits(right.gradient.to(dtype), rows, right)
    assert max(passed.values()) <= 1, passed
    assert max(judge_dlogits(wrong.gradient.to(dtype), rows, right).values()) > 1


def test_a_store_that_truncates_is_refused() -> None:
    rows, reference = example()
    figures = judge_dlogits(truncated(reference.gradient), rows, reference)
    assert max(figures["row norm"], figures["row norm off label"]) > 1
    assert figures["off label"] <= 1  # under one ULP each: only the norm tells


# -------------------------------------------------------------------------------------- with the LM head


def linear_example(compute: torch.dtype) -> LinearCase:
    hidden = torch.randn(64, H).bfloat16().double()
    head = (torch.randn(V, H) / 4).bfloat16().double()
    bias = torch.randn(V).double()
    labels = torch.randint(0, V, (64,))
    rows = softmax_rows(hidden @ head.T + bias, labels)
    answer = solve(rows, CrossEntropy().loss_of(labels, None, V, None))
    return LinearCase(hidden, head, bias, compute, rows, answer.dlogits)


def ideal(case: LinearCase, dlogits: Tensor | None = None) -> list[Tensor]:
    rounded = (case.dlogits.gradient if dlogits is None else dlogits).to(case.compute).double()
    return [rounded @ case.head, rounded.T @ case.hidden, rounded.sum(0)]


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_ideal_implementation_passes(compute: torch.dtype, dtype: torch.dtype) -> None:
    case = linear_example(compute)
    figures = judge_linear(case, *(g.to(dtype) for g in ideal(case)))
    assert max(figures.values()) <= 1, figures
    assert "dhidden frobenius" in figures


def accumulated_in_bfloat16(case: LinearCase) -> Tensor:
    total = torch.zeros(V, H).bfloat16()
    for row, hidden in zip(case.dlogits.gradient, case.hidden, strict=True):
        total = (total.double() + row[:, None] * hidden).bfloat16()
    return total


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("factor", [0.0, 0.5, -1.0, 0.97])
def test_wrong_products_are_refused(compute: torch.dtype, index: int, factor: float) -> None:
    case = linear_example(compute)
    gradients = [g.float() for g in ideal(case)]
    gradients[index] = factor * gradients[index]
    assert max(judge_linear(case, *gradients).values()) > 1


def test_sums_in_bfloat16_and_dropped_tiles_are_refused() -> None:
    case = linear_example(torch.bfloat16)
    dhidden, dhead, dbias = ideal(case)
    assert max(judge_linear(case, None, accumulated_in_bfloat16(case), None).values()) > 1
    dropped = case.dlogits.gradient.clone()
    dropped[:, 256:] = 0
    assert max(judge_linear(case, ideal(case, dropped)[0].float(), None, None).values()) > 1
    figures = judge_linear(case, dhidden.float(), dhead.bfloat16(), dbias.float())
    assert max(figures.values()) <= 1, figures
