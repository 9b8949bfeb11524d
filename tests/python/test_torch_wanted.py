"""tileloss.torch's losses that are told more than labels, but for `distillation`: two LM heads, class probabilities, sparse
teachers; against float64 autograd and torch's own cross-entropy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tileloss.torch as tl
from tileloss._core.functions import FUNCTIONS

KINDS = FUNCTIONS["distillation"].options["divergence"].choices
V, H, G = 1003, 40, 24


def relative(got: Tensor, wanted: Tensor) -> float:
    return ((got.double() - wanted).norm() / wanted.norm()).item()


def divergence_of(log_p: Tensor, log_q: Tensor, kind: str, beta: float = 0.5) -> Tensor:
    """Over the last dimension, in the tensors' own dtype."""
    p, q = log_p.exp(), log_q.exp()

    def mixed(share_of_q: float) -> Tensor:
        return (share_of_q * q + (1 - share_of_q) * p).log()

    m = mixed(beta)
    forward, reverse = q * (log_q - log_p), p * (log_p - log_q)
    terms = {
        "forward_kl": forward,
        "reverse_kl": reverse,
        "jeffreys": forward + reverse,
        "jsd": beta * q * (log_q - m) + (1 - beta) * p * (log_p - m),
        "skew_forward_kl": q * (log_q - m),
        "skew_reverse_kl": p * (log_p - mixed(1 - beta)),
        "total_variation": (p - q).abs() / 2,
    }
    return terms[kind].sum(-1)


# ------------------------------------------------------------------------------------------------------------ two LM heads


def heads(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(dtype)

    return {
        "input": draw(2, 7, H),
        "linear_weight": draw(V, H, std=0.3),
        "linear_bias": draw(V),
        "teacher_input": draw(2, 7, G),
        "teacher_weight": draw(V, G, std=0.3),
        "teacher_bias": draw(V),
    }


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_heads_are_autograd_s(dtype: torch.dtype, kind: str, reduction: str) -> None:
    tensors = heads(dtype)
    labels = torch.randint(0, V, (2, 7), generator=torch.Generator().manual_seed(4))
    labels[0, :3] = -100
    student = ("input", "linear_weight", "linear_bias")
    wide = {name: t.double() for name, t in tensors.items()}
    for name in student:
        wide[name].requires_grad_()
    z = wide["input"] @ wide["linear_weight"].T + wide["linear_bias"]
    teacher = wide["teacher_input"] @ wide["teacher_weight"].T + wide["teacher_bias"]
    log_p = z.log_softmax(-1)
    rows = 0.7 * divergence_of(log_p, teacher.log_softmax(-1), kind)
    label_temperature = 0.5 if kind == "jsd" else None
    at_label = (z / (label_temperature or 1)).log_softmax(-1)
    rows = (rows - 0.3 * at_label.gather(-1, labels.clamp(0)[..., None])[..., 0]) * (labels != -100)
    wanted = rows if reduction == "none" else rows.sum() / (labels != -100).sum()
    gradients = torch.autograd.grad(wanted.sum(), [wide[name] for name in student])
    for in_forward in (None, False):
        leaves = {n: t.clone().requires_grad_(n in student) for n, t in tensors.items()}
        loss, found = tl.linear_distillation(
            **leaves,
            target=labels,
            divergence=kind,
            alpha=0.3,
            label_temperature=label_temperature,
            reduction=reduction,
            outputs=("divergence", "agreement"),
            grad_in_forward=in_forward,
        )
        assert torch.allclose(loss.double(), wanted.detach(), rtol=2e-5, atol=2e-6)
        assert found.agreement is not None and found.agreement.dtype == torch.bool
        ours = torch.autograd.grad(loss.sum(), [leaves[name] for name in student])
        for name, got, right in zip(student, ours, gradients, strict=True):
            assert got.dtype == dtype
            limit = 3e-6 if dtype == torch.float32 else 6e-3
            assert relative(got, right) < limit, (name, in_forward)


def test_two_heads_within_a_budget() -> None:
    tensors = heads(torch.bfloat16)
    wanted = tl.linear_distillation(**tensors)
    assert torch.equal(tl.linear_distillation(**tensors, workspace_bytes=4 << 20), wanted)
    with pytest.raises(ValueError, match="workspace_bytes: expected at least"):
        tl.linear_distillation(**tensors, workspace_bytes=1000)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"teacher_input": torch.zeros(2, 6, G)},
            ValueError,
            r"teacher_input: expected shape \[2, 7, G\], got \[2, 6, 24\]",
        ),
        (
            {"teacher_weight": torch.zeros(V, H)},
            ValueError,
            r"teacher_weight: expected shape \[1003, 24\], got \[1003, 40\]",
        ),
        (
            {"teacher_bias": torch.zeros(5)},
            ValueError,
            r"teacher_bias: expected shape \[1003\], got \[5\]",
        ),
        (
            {"teacher_input": torch.zeros(2, 7, G, dtype=torch.int64)},
            TypeError,
            "teacher_input: expected float32, bfloat16 or",
        ),
        (
            {"teacher_input": torch.zeros(2, 7, G, requires_grad=True)},
            ValueError,
            "teacher_input: expected a tensor without",
        ),
        ({"alpha": 0.5}, ValueError, "target: expected a vector, as alpha is not 0, got none"),
        ({"outputs": ("entropie",)}, ValueError, "outputs: expected names among divergence"),
    ],
)
def test_two_heads_that_do_not_fit_are_named(
    change: dict[str, Tensor], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tl.linear_distillation(**{**heads(torch.float32), **change})


# ------------------------------------------------------------------------------------------------------------- soft labels


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("probs_dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_class_probabilities_are_torch_s(
    dtype: torch.dtype, probs_dtype: torch.dtype, reduction: str
) -> None:
    generator = torch.Generator().manual_seed(5)
    x = (torch.randn(2, 6, V, generator=generator) * 3).to(dtype)[:, :-1]  # rows in groups
    q = torch.rand(2, 6, V, generator=generator).softmax(-1).to(probs_dtype)[:, :-1]
    weight = torch.rand(V, generator=generator)
    for smoothing, c in ((0.0, None), (0.1, None), (0.2, weight)):
        leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
        loss = tl.cross_entropy(leaf, q, c, label_smoothing=smoothing, reduction=reduction)
        wanted = F.cross_entropy(
            wide.reshape(-1, V),
            q.double().reshape(-1, V),
            None if c is None else c.double(),
            label_smoothing=smoothing,
            reduction=reduction,
        )
        (loss.sum() * 5).backward()
        (wanted.sum() * 5).backward()
        assert leaf.grad is not None and wide.grad is not None
        assert torch.allclose(loss.double().reshape(-1), wanted.detach().reshape(-1), rtol=1e-5)
        limit = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}[dtype]
        assert relative(leaf.grad, wide.grad) < limit


def test_class_probabilities_with_a_head() -> None:
    tensors = heads(torch.float32)
    q = torch.rand(2, 7, V).softmax(-1)
    leaves = [tensors[n].clone().requires_grad_() for n in ("input", "linear_weight")]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    loss = tl.linear_cross_entropy(leaves[0], leaves[1], q)
    wanted = F.cross_entropy((wide[0] @ wide[1].T).reshape(-1, V), q.double().reshape(-1, V))
    gradients = zip(
        torch.autograd.grad(loss, leaves), torch.autograd.grad(wanted, wide), strict=True
    )
    assert abs(loss.item() - wanted.item()) < 1e-5
    assert all(relative(got, right) < 3e-6 for got, right in gradients)


def test_class_probabilities_that_cannot_be_are_named() -> None:
    x = torch.zeros(3, V)
    with pytest.raises(
        ValueError,
        match=r"target: expected labels of an integer type, or class probabilities of the logits' shape \[3, 1003\], got",
    ):
        tl.cross_entropy(x, torch.zeros(3))
    with pytest.raises(ValueError, match="z_loss: expected 0 with class probabilities, got 0.1"):
        tl.cross_entropy(x, torch.zeros(3, V), z_loss=0.1)
    with pytest.raises(ValueError, match="target: expected a tensor without gradient"):
        tl.cross_entropy(x, torch.zeros(3, V, requires_grad=True))


# --------------------------------------------------------------------------------------------------------- sparse teachers


def sparse_reference(z: Tensor, ids: Tensor, log_q: Tensor, tail: str, kind: str) -> Tensor:
    """D of each row of z in float64; no id is missing."""
    log_p, log_q = z.log_softmax(-1).gather(-1, ids), log_q.double()
    if tail == "renormalise":
        return divergence_of(log_p.log_softmax(-1), log_q.log_softmax(-1), kind)
    if tail == "lump":
        others = torch.ones_like(z, dtype=torch.bool).scatter(-1, ids, False)
        rest = z.masked_fill(~others, -1e300).logsumexp(-1) - z.logsumexp(-1)
        log_p = torch.cat([log_p, rest[..., None]], -1)
        log_q = torch.cat([log_q, torch.log1p(-log_q.exp().sum(-1, keepdim=True))], -1)
    return divergence_of(log_p, log_q, kind)


@pytest.mark.parametrize("tail", FUNCTIONS["sparse_distillation"].options["tail"].choices)
@pytest.mark.parametrize("kind", KINDS)
def test_sparse_teachers_are_autograd_s(kind: str, tail: str) -> None:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(2, 5, V, generator=generator) * 2
    log_q, ids = torch.randn(2, 5, V, generator=generator).mul(3).log_softmax(-1).topk(20)
    wide = x.double().requires_grad_()
    labels = torch.randint(0, V, (2, 5), generator=generator)
    labels[0] = ids[0, :, 2]
    logp = (wide / 0.5).log_softmax(-1).gather(-1, labels[..., None])
    wanted = 0.75 * sparse_reference(wide, ids, log_q, tail, kind).mean() - 0.25 * logp.mean()
    wanted.backward()
    for in_place in (False, True):
        leaf = x.clone().requires_grad_()
        loss, rows = tl.sparse_distillation(
            leaf * 1,
            ids.int(),
            log_q,
            labels,
            tail=tail,
            divergence=kind,
            alpha=0.25,
            label_temperature=0.5,
            outputs="divergence",
            inplace_backward=in_place,
        )
        loss.backward()
        assert rows.divergence is not None and leaf.grad is not None and wide.grad is not None
        assert abs(loss.item() - wanted.item()) < 1e-5
        assert relative(leaf.grad, wide.grad) < 2e-6
    tensors = heads(torch.float32)
    hidden, head = (tensors[n].clone().requires_grad_() for n in ("input", "linear_weight"))
    hidden_wide, head_wide = (t.detach().double().requires_grad_() for t in (hidden, head))
    loss = tl.linear_sparse_distillation(
        hidden[:, :5], head, ids, log_q, tail=tail, divergence=kind
    )
    wanted = sparse_reference(hidden_wide[:, :5] @ head_wide.T, ids, log_q, tail, kind).mean()
    ours = torch.autograd.grad(loss, (hidden, head))
    right = torch.autograd.grad(wanted, (hidden_wide, head_wide))
    assert all(relative(a, b) < 4e-6 for a, b in zip(ours, right, strict=True))


def test_a_teacher_of_all_columns_is_a_teacher_of_logits() -> None:
    x, teacher = torch.randn(3, 50), torch.randn(3, 50)
    ids = torch.arange(50).expand(3, 50)
    for tail in ("lump", "ignore", "renormalise"):
        sparse = tl.sparse_distillation(
            x, ids, teacher.log_softmax(-1), tail=tail, divergence="jsd"
        )
        assert torch.allclose(sparse, tl.distillation(x, teacher, divergence="jsd"), atol=1e-6)


def test_rows_may_have_fewer_columns() -> None:
    x, log_q = torch.randn(2, V), torch.tensor([[-1.0, -2.0, -3.0], [-1.5, -0.5, 0.0]])
    ids = torch.tensor([[5, 9, -1], [-1, 7, -1]])
    both = tl.sparse_distillation(x, ids, log_q, reduction="none")
    first = tl.sparse_distillation(x[:1], ids[:1, :2], log_q[:1, :2], reduction="none")
    second = tl.sparse_distillation(x[1:], ids[1:, 1:2], log_q[1:, 1:2], reduction="none")
    assert torch.equal(both, torch.cat([first, second]))


@pytest.mark.parametrize(
    ("ids", "log_q", "error", "message"),
    [
        (
            torch.tensor([[1, V], [1, 2]]),
            torch.zeros(2, 2),
            ValueError,
            r"teacher_ids\[0,1\]: expected a column < 1003",
        ),
        (
            torch.tensor([[1, 2], [3, 3]]),
            torch.zeros(2, 2),
            ValueError,
            r"teacher_ids\[1\]: expected distinct columns, got 3 twice",
        ),
        (
            torch.zeros(2, 2),
            torch.zeros(2, 2),
            TypeError,
            "teacher_ids: expected int64 or int32, got torch.float32",
        ),
        (
            torch.tensor([[1, 2]]),
            torch.zeros(2, 2),
            ValueError,
            r"teacher_ids: expected shape \[2, K\], got \[1, 2\]",
        ),
        (
            torch.tensor([[1], [2]]),
            torch.zeros(2, 2),
            ValueError,
            r"teacher_logprobs: expected teacher_ids' shape \[2, 1\]",
        ),
    ],
)
def test_sparse_teachers_that_cannot_be_are_named(
    ids: Tensor, log_q: Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tl.sparse_distillation(torch.zeros(2, V), ids, log_q)


def test_a_vocabulary_of_nothing_is_named() -> None:
    x, hidden, head, ids = torch.zeros(3, 0), torch.zeros(3, H), torch.zeros(0, H), torch.ones(3, 1)
    labels = torch.zeros(3).long()
    for call in (
        lambda: tl.cross_entropy(x, labels),
        lambda: tl.cross_entropy(x, x),
        lambda: tl.distillation(x, x),
        lambda: tl.distillation(x, x, labels),
        lambda: tl.sparse_distillation(x, ids.long(), ids),
    ):
        with pytest.raises(
            ValueError, match=r"input: expected a last dimension of at least 1, got"
        ):
            call()
    for call in (
        lambda: tl.linear_cross_entropy(hidden, head, labels),
        lambda: tl.linear_cross_entropy(hidden, head, x),
        lambda: tl.linear_distillation(hidden, head, hidden, head),
        lambda: tl.linear_sparse_distillation(hidden, head, ids.long(), ids),
    ):
        with pytest.raises(ValueError, match=r"linear_weight.rows: expected >= 1, got 0"):
            call()


# ---------------------------------------------------------------------------------------------------------------- compiled


def test_compiled_as_eager() -> None:
    tensors = heads(torch.float32)
    q = torch.rand(2, 7, V).softmax(-1)
    log_q, ids = q.log().topk(8)

    def losses(hidden: Tensor, weight: Tensor) -> Tensor:
        rest = {n: t for n, t in tensors.items() if n.startswith("teacher")}
        two = tl.linear_distillation(hidden, weight, **rest, divergence="jsd")
        soft = tl.linear_cross_entropy(hidden, weight, q) + tl.cross_entropy(hidden @ weight.T, q)
        return two + soft + tl.sparse_distillation(hidden @ weight.T, ids, log_q)

    leaves = [tensors[n].clone().requires_grad_() for n in ("input", "linear_weight")]
    eager = losses(*leaves)
    wanted = torch.autograd.grad(eager, leaves)
    compiled = torch.compile(losses, fullgraph=True)(*leaves)
    assert torch.allclose(compiled, eager, rtol=1e-5)
    for got, right in zip(torch.autograd.grad(compiled, leaves), wanted, strict=True):
        assert relative(got, right.double()) < 1e-5
