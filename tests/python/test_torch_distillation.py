"""tileloss.torch.distillation against float64 autograd and TRL's own generalised JSD."""

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
V = 1003


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


def test_compiled_gives_the_same_bits() -> None:
    logits, teacher, labels = batch(torch.float32)

    def eager(x: Tensor) -> Tensor:
        loss = tl.distillation(
            x,
            teacher,
            labels,
            divergence="skew_reverse_kl",
            label_weight=0.5,
            divergence_weight=0.5,
        )
        assert isinstance(loss, Tensor)
        return loss

    gradients = []
    for function in (eager, torch.compile(eager)):
        leaf = logits.clone().requires_grad_()
        function(leaf).backward()
        gradients.append(leaf.grad)
    assert torch.equal(gradients[0], gradients[1])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"teacher": torch.zeros(2, 5, 7)}, ValueError, r"teacher: expected input's shape \[2, 5, 1003\], got"),
        ({"teacher": torch.zeros(2, 5, V).bfloat16()}, TypeError, "teacher: expected input's dtype torch.float32, got"),
        ({"label_weight": 0.5}, ValueError, "target: expected a vector, as label_weight is not 0, got none"),
        ({"divergence": "jsd", "beta": 1.0}, ValueError, "beta: expected a number > 0 and < 1 with this divergence"),
        ({"divergence": "kl"}, ValueError, "divergence: expected one of forward_kl, .*, got 'kl'"),
        ({"outputs": ("margin",)}, ValueError, r"outputs: expected names among divergence, .*, got \['margin'\]"),
        ({"teacher": torch.zeros(2, 5, V, requires_grad=True)}, ValueError, "teacher: expected a tensor without gradient"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_named(
    change: dict[str, object], error: type[Exception], message: str
) -> None:
    logits, teacher, _ = batch(torch.float32)
    arguments: dict[str, object] = {"teacher": teacher} | change
    with pytest.raises(error, match=message):
        tl.distillation(logits, **arguments)  # type: ignore[arg-type]
