"""tileloss.torch's losses whose target is not labels, but for `distillation`: two LM heads, class probabilities, sparse
teachers; against float64 autograd and torch's own cross-entropy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tileloss.torch as tl
from checks import check, leaf
from tileloss._core.functions import FUNCTIONS

KINDS = FUNCTIONS["distillation"].options["divergence"].choices
V, H, G = 1003, 40, 24


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


STUDENT = ("input", "linear_weight", "linear_bias")


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_heads_are_autograd_s(dtype: torch.dtype, kind: str, reduction: str) -> None:
    tensors = heads(dtype)
    labels = torch.randint(0, V, (2, 7), generator=torch.Generator().manual_seed(4))
    labels[0, :3] = -100
    for in_forward in (None, False):
        found = check(
            "linear_distillation",
            [leaf(tensors[name]) for name in STUDENT],
            tensors["teacher_input"],
            tensors["teacher_weight"],
            labels,
            teacher_bias=tensors["teacher_bias"],
            upstream=torch.randn(2, 7) if reduction == "none" else None,
            divergence=kind,
            label_weight=0.3,
            divergence_weight=0.7,
            label_temperature=0.5 if kind == "jsd" else None,
            reduction=reduction,
            outputs=("divergence", "agreement"),
            grad_in_forward=in_forward,
        )
        assert found["agreement"].dtype == torch.bool


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
        (
            {"label_weight": 0.5},
            ValueError,
            "target: expected a vector, as label_weight is not 0, got none",
        ),
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
    x = (torch.randn(2, 6, V, generator=generator) * 3).to(dtype)
    q = torch.rand(2, 6, V, generator=generator).softmax(-1).to(probs_dtype)[:, :-1]
    weight = torch.rand(V, generator=generator)
    for smoothing, c in ((0.0, None), (0.1, None), (0.2, weight)):
        check(
            "cross_entropy",
            leaf(x),
            q,
            c,
            view=lambda x: x[:, :-1],  # rows in groups
            upstream=torch.randn(2, 5) if reduction == "none" else torch.tensor(-2.0),
            label_smoothing=smoothing,
            reduction=reduction,
        )


@pytest.mark.parametrize("classes", [1, 2, 17, V])
def test_sure_rows_of_one_class_keep_their_digits(classes: int) -> None:
    x = leaf(20 * torch.randn(40, classes, generator=torch.Generator().manual_seed(3)))
    q = torch.nn.functional.one_hot(x.argmax(1), classes).float()
    loss = tl.cross_entropy(x, q, reduction="none")
    loss.sum().backward()
    exact = x.detach().double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(exact, q.double(), reduction="none")
    wanted.sum().backward()
    # In float64, too, 1 - p of a sure class is what log p says better.
    sure = -torch.expm1(-wanted.detach())
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=1e-15)
    torch.testing.assert_close(-x.grad[q > 0].double(), sure, rtol=1e-6, atol=1e-15)


def test_one_class_has_no_entropy() -> None:
    x, teacher = torch.randn(2, 5, 1)
    _, rows = tl.distillation(3 * x, teacher, outputs=("entropy", "teacher_entropy"))
    assert not rows.entropy.any() and not rows.teacher_entropy.any()


def test_class_probabilities_with_a_head() -> None:
    tensors = heads(torch.float32)
    leaves = [leaf(tensors[name]) for name in STUDENT[:2]]
    check("linear_cross_entropy", leaves, torch.rand(2, 7, V).softmax(-1))


def test_class_probabilities_that_cannot_be_are_named() -> None:
    x = torch.zeros(3, V)
    expected = r"labels of an integer type, or class probabilities of the logits' shape \[3, 1003\]"
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(ValueError, match=rf"target: expected {expected}, got {dtype}"):
            tl.cross_entropy(x, torch.zeros(3, dtype=dtype))
    with pytest.raises(ValueError, match="z_loss: expected 0 with class probabilities, got 0.1"):
        tl.cross_entropy(x, torch.zeros(3, V), z_loss=0.1)
    with pytest.raises(ValueError, match="target: expected a tensor without gradient"):
        tl.cross_entropy(x, torch.zeros(3, V, requires_grad=True))


# --------------------------------------------------------------------------------------------------------- sparse teachers


@pytest.mark.parametrize("tail", FUNCTIONS["sparse_distillation"].options["tail"].choices)
@pytest.mark.parametrize("kind", KINDS)
def test_sparse_teachers_are_autograd_s(kind: str, tail: str) -> None:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(2, 5, V, generator=generator) * 2
    log_q, ids = torch.randn(2, 5, V, generator=generator).mul(3).log_softmax(-1).topk(20)
    labels = torch.randint(0, V, (2, 5), generator=generator)
    labels[0] = ids[0, :, 2]
    for in_place in (False, True):
        check(
            "sparse_distillation",
            leaf(x),
            ids.int(),
            log_q,
            labels,
            view=lambda x: x * 1,
            tail=tail,
            divergence=kind,
            label_weight=0.25,
            divergence_weight=0.75,
            label_temperature=0.5,
            outputs="divergence",
            inplace_backward=in_place,
        )
    tensors = heads(torch.float32)
    leaves = [leaf(tensors["input"][:, :5]), leaf(tensors["linear_weight"])]
    check("linear_sparse_distillation", leaves, ids, log_q, tail=tail, divergence=kind)


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
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-7)
