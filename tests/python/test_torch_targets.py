"""tileloss.torch's losses whose target is not labels: a teacher's logits, two LM heads, class probabilities, sparse teachers;
against float64 autograd, torch's own losses, and TRL's and Liger's generalised JSD."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tileloss.torch as tl
from checks import check, leaf
from tileloss._core.functions import FUNCTIONS

KINDS = FUNCTIONS["distillation"].options["divergence"].choices
MIXTURES = ("jsd", "skew_forward_kl", "skew_reverse_kl")
V, H, G = 1003, 40, 24


# ------------------------------------------------------------------------------------------------------- a teacher's logits


def batch(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """[2, 5, V] logits of a student and of a teacher, whose rows come in groups, and labels of which one is ignored."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(2, 5, V, generator=generator) * 3).to(dtype)
    teacher = (torch.randn(2, 6, V, generator=generator) * 2).to(dtype)[:, :-1]
    labels = torch.randint(0, V, (2, 5), generator=generator)
    labels[1, 2] = -100
    return x, teacher, labels


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_value_and_gradient_are_autograd_s(dtype: torch.dtype, kind: str, reduction: str) -> None:
    logits, teacher, labels = batch(dtype)
    for in_forward in (None, False):
        for in_place in (False, True):
            # A power of two: a gradient that the forward has rounded is not rounded again.
            check(
                "distillation",
                leaf(logits),
                teacher,
                labels,
                view=lambda x: x * 1,
                upstream=torch.randn(2, 5) if reduction == "none" else torch.tensor(-2.0),
                divergence=kind,
                **({"beta": 0.3} if kind in MIXTURES else {}),
                label_weight=0.25,
                divergence_weight=0.75,
                label_temperature={"none": None, "sum": 0.7, "mean": 1.0}[reduction],
                temperature=2.0,
                scale_by_temperature_squared=True,
                token_weights=torch.linspace(0.5, 1.5, 10).view(2, 5),
                reduction=reduction,
                grad_in_forward=in_forward,
                inplace_backward=in_place,
            )


@pytest.mark.parametrize(
    "given", [{}, {"teacher_softcap": 0.0}, {"teacher_logit_scale": 1.0}], ids=str
)
def test_the_teacher_s_transform_is_the_student_s_unless_given(given: dict[str, float]) -> None:
    logits, teacher, labels = batch(torch.float32)
    both = {"softcap": 4.0, "logit_scale": 0.6, "temperature": 1.5}
    check("distillation", leaf(logits), teacher, labels, **both, **given)


def hold(
    of: Callable[[Tensor], Tensor], *pair: Tensor, relative: float = 2e-6, **options: Any
) -> None:
    """distillation of a student and a teacher (and labels) against another's loss ``of`` the student's logits in float64."""
    x, *rest = pair
    exact, ours = x.double().requires_grad_(), leaf(x)
    wanted, loss = of(exact), tl.distillation(ours, *rest, **options)
    wanted.backward()
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=2e-6)
    error = (ours.grad.double() - exact.grad).norm()
    assert error < relative * exact.grad.norm()


def divergence_options(beta: float) -> dict[str, Any]:
    """A generalised JSD's ends are KLs."""
    return {0.0: {"divergence": "forward_kl"}, 1.0: {"divergence": "reverse_kl"}}.get(
        beta, {"divergence": "jsd", "beta": beta}
    )


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_is_liger_s_jsd(beta: float) -> None:
    liger = pytest.importorskip("liger_kernel.chunked_loss.jsd_loss", reason="NOT RUN: no Liger")
    pair = batch(torch.float32, 2)
    theirs = liger.LigerFusedLinearJSDFunction.distillation_loss_fn
    _, teacher, labels = pair
    hold(
        lambda x: theirs(x, teacher.double(), beta, labels, -100),
        *pair, reduction="sum", **divergence_options(beta),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_is_torch_s_kl_div(kind: str) -> None:
    logits, teacher, _ = batch(torch.float32, 3)
    log_q = teacher.double().log_softmax(-1)

    def wanted(x: Tensor) -> Tensor:
        pair = (x.log_softmax(-1), log_q)
        pair = pair if kind == "forward_kl" else pair[::-1]
        return torch.nn.functional.kl_div(*pair, reduction="sum", log_target=True)

    hold(wanted, logits, teacher, divergence=kind, reduction="sum")


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
def test_is_trl_s_generalised_jsd(beta: float) -> None:
    gkd = pytest.importorskip("trl.experimental.gkd", reason="NOT RUN: no TRL")
    pair = batch(torch.float32, 1)
    theirs = gkd.GKDTrainer.generalized_jsd_loss
    _, teacher, labels = pair
    hold(
        lambda x: theirs(x, teacher.double(), labels=labels, beta=beta, temperature=0.7),
        *pair, relative=1e-5, temperature=0.7, **divergence_options(beta),
    )  # fmt: skip


def test_row_outputs() -> None:
    logits, teacher, labels = batch(torch.float32)
    names = ("divergence", "entropy", "teacher_entropy", "agreement", "logp")
    found = check("distillation", leaf(logits), teacher, labels, divergence="jsd", outputs=names)
    assert found.keys() == {"loss", *names}
    assert found["agreement"].dtype == torch.bool


def test_a_mask_and_no_labels() -> None:
    logits, teacher, _ = batch(torch.float32)
    mask = torch.rand(2, 5, generator=torch.Generator().manual_seed(3)) < 0.5
    check("distillation", leaf(logits), teacher, mask=mask, divergence="reverse_kl")


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
