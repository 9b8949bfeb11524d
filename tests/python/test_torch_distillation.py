"""tileloss.torch.distillation against float64 autograd and TRL's own generalised JSD."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tileloss.torch as tl
from tileloss._core.functions import FUNCTIONS

KINDS = FUNCTIONS["distillation"].options["divergence"].choices
V = 1003


def reference(
    x: Tensor, teacher: Tensor, kind: str, beta: float, temperature: float = 1.0
) -> Tensor:
    """D of each row, in float64."""
    log_p = (x.double() / temperature).log_softmax(-1)
    log_q = (teacher.double() / temperature).log_softmax(-1)

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a.exp() * (a - b)).sum(-1)

    def mixed(share_of_q: float) -> Tensor:
        return (share_of_q * log_q.exp() + (1 - share_of_q) * log_p.exp()).log()

    if kind == "forward_kl":
        return kl(log_q, log_p)
    if kind == "reverse_kl":
        return kl(log_p, log_q)
    if kind == "jeffreys":
        return kl(log_q, log_p) + kl(log_p, log_q)
    if kind == "jsd":
        return beta * kl(log_q, mixed(beta)) + (1 - beta) * kl(log_p, mixed(beta))
    if kind == "skew_forward_kl":
        return kl(log_q, mixed(beta))
    if kind == "skew_reverse_kl":
        return kl(log_p, mixed(1 - beta))
    return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2


def batch(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """[2, 5, V] logits of a student and of a teacher, whose rows come in groups, and labels of which one is ignored."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(2, 5, V, generator=generator) * 3).to(dtype)
    teacher = (torch.randn(2, 6, V, generator=generator) * 2).to(dtype)[:, :-1]
    labels = torch.randint(0, V, (2, 5), generator=generator)
    labels[1, 2] = -100
    return x, teacher, labels


def relative(got: Tensor, wanted: Tensor) -> float:
    return ((got.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_value_and_gradient_are_autograd_s(dtype: torch.dtype, kind: str, reduction: str) -> None:
    logits, teacher, labels = batch(dtype)
    weights = torch.linspace(0.5, 1.5, 10).view(2, 5)
    used = labels != -100
    wide = logits.double().requires_grad_()
    label_temperature = {"none": None, "sum": 0.7, "mean": 1.0}[reduction]
    cross_entropy = (
        -(wide / (label_temperature or 2))
        .log_softmax(-1)
        .gather(-1, labels.clamp(0)[..., None])[..., 0]
    )
    divergence = reference(wide, teacher, kind, 0.3, 2.0)
    rows = weights * used * (0.25 * cross_entropy + 0.75 * 4 * divergence)
    wanted = rows if reduction == "none" else rows.sum()
    if reduction == "mean":
        wanted = wanted / (weights * used).sum()
    (wanted.sum() * 3).backward()
    for in_forward in (None, False):
        for in_place in (False, True):
            leaf = logits.clone().requires_grad_()
            loss = tl.distillation(
                leaf * 1,
                teacher,
                labels,
                divergence=kind,
                beta=0.3,
                alpha=0.25,
                label_temperature=label_temperature,
                temperature=2.0,
                scale_by_temperature_squared=True,
                token_weights=weights,
                reduction=reduction,
                grad_in_forward=in_forward,
                inplace_backward=in_place,
            )
            assert isinstance(loss, Tensor)
            (loss.sum() * 3).backward()
            assert leaf.grad is not None and wide.grad is not None
            assert torch.allclose(loss.double(), wanted.detach(), rtol=1e-5, atol=1e-6)
            limit = 2e-6 if dtype == torch.float32 else 4e-3
            assert relative(leaf.grad, wide.grad) < limit, (in_forward, in_place)
            assert not leaf.grad[1, 2].any()


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_is_liger_s_jsd(beta: float) -> None:
    liger = pytest.importorskip("liger_kernel.chunked_loss.jsd_loss", reason="NOT RUN: no Liger")
    logits, teacher, labels = batch(torch.float32, 2)
    leaf = logits.double().requires_grad_()
    wanted = liger.LigerFusedLinearJSDFunction.distillation_loss_fn(
        leaf, teacher.double(), beta, labels, -100
    )
    wanted.backward()
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    ours = logits.clone().requires_grad_()
    mixture = beta if kind == "jsd" else 0.5
    loss = tl.distillation(ours, teacher, labels, divergence=kind, beta=mixture, reduction="sum")
    assert isinstance(loss, Tensor)
    loss.backward()
    assert ours.grad is not None and leaf.grad is not None
    assert abs(loss.item() - wanted.item()) < 1e-5 * abs(wanted.item())
    assert relative(ours.grad, leaf.grad) < 2e-6


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_is_torch_s_kl_div(kind: str) -> None:
    logits, teacher, _ = batch(torch.float32, 3)
    leaf, ours = logits.double().requires_grad_(), logits.clone().requires_grad_()
    log_p, log_q = leaf.log_softmax(-1), teacher.double().log_softmax(-1)
    pair = (log_p, log_q) if kind == "forward_kl" else (log_q, log_p)
    wanted = torch.nn.functional.kl_div(*pair, reduction="sum", log_target=True)
    wanted.backward()
    loss = tl.distillation(ours, teacher, divergence=kind, reduction="sum")
    assert isinstance(loss, Tensor)
    loss.backward()
    assert ours.grad is not None and leaf.grad is not None
    assert abs(loss.item() - wanted.item()) < 1e-5 * abs(wanted.item())
    assert relative(ours.grad, leaf.grad) < 2e-6


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
def test_is_trl_s_generalised_jsd(beta: float) -> None:
    gkd = pytest.importorskip("trl.experimental.gkd", reason="NOT RUN: no TRL")
    logits, teacher, labels = batch(torch.float32, 1)
    leaf = logits.double().requires_grad_()
    wanted = gkd.GKDTrainer.generalized_jsd_loss(
        leaf, teacher.double(), labels=labels, beta=beta, temperature=0.7
    )
    wanted.backward()
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    ours = logits.clone().requires_grad_()
    loss = tl.distillation(
        ours, teacher, labels, divergence=kind, beta=beta or 0.5, temperature=0.7
    )
    assert isinstance(loss, Tensor)
    loss.backward()
    assert leaf.grad is not None and ours.grad is not None
    assert loss.item() == pytest.approx(wanted.item(), rel=2e-6)
    assert relative(ours.grad, leaf.grad) < 1e-5


def test_row_outputs() -> None:
    logits, teacher, labels = batch(torch.float32)
    names = ("divergence", "entropy", "teacher_entropy", "agreement", "logp")
    loss, rows = tl.distillation(logits, teacher, labels, divergence="jsd", outputs=names)
    used = labels != -100
    log_q = teacher.double().log_softmax(-1)
    entropy = -(log_q.exp() * log_q).sum(-1) * used
    assert rows.divergence is not None and rows.teacher_entropy is not None
    assert torch.allclose(rows.divergence.double(), reference(logits, teacher, "jsd", 0.5) * used)
    assert torch.allclose(rows.teacher_entropy.double(), entropy)
    assert rows.agreement is not None and rows.agreement.dtype == torch.bool
    assert torch.equal(rows.agreement, (logits.argmax(-1) == teacher.argmax(-1)) & used)
    assert rows.lse is None
    assert loss.item() == pytest.approx(rows.divergence.sum().item() / int(used.sum()))


def test_a_mask_and_no_labels() -> None:
    logits, teacher, _ = batch(torch.float32)
    mask = torch.rand(2, 5, generator=torch.Generator().manual_seed(3)) < 0.5
    loss = tl.distillation(logits, teacher, mask=mask, divergence="reverse_kl")
    wanted = reference(logits, teacher, "reverse_kl", 0.5)[mask].mean()
    assert isinstance(loss, Tensor)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_compiled_gives_the_same_bits() -> None:
    logits, teacher, labels = batch(torch.float32)

    def eager(x: Tensor) -> Tensor:
        loss = tl.distillation(x, teacher, labels, divergence="skew_reverse_kl", alpha=0.5)
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
        ({"alpha": 0.5}, ValueError, "target: expected a vector, as alpha is not 0, got none"),
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
