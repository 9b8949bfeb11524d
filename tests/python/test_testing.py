"""`tileloss.testing`: right functions pass, wrong ones fail with the gate's name, and what is asked wrongly is said."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import audit_losses
import tileloss.jax
import tileloss.torch
from tileloss.testing import Refused, check, judge
from tileloss.tools.audit.bugs.targets import SoftLabels

EXAMPLE = Path(__file__).parents[2] / "examples" / "test_my_loss.py"
Function = Callable[..., Any]


def widened(logits: Tensor, labels: Tensor, class_weights: Tensor | None = None) -> Tensor:
    return F.cross_entropy(logits.float(), labels, class_weights)


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    """Float32's sum over the columns, of numbers that are all alike, is off by some units."""
    return F.cross_entropy(logits, labels, label_smoothing=0.1)


def over_sets(logits: Tensor, labels: Tensor, allowed: Tensor) -> Tensor:
    bits = np.unpackbits(allowed.numpy().view(np.uint8), axis=-1, bitorder="little")
    outside = torch.from_numpy(bits[..., : logits.shape[-1]] == 0)
    return F.cross_entropy(logits.masked_fill(outside, -torch.inf), labels)


def fused(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden.float() @ head.float().T), labels)


def token_logp(logits: Tensor, labels: Tensor) -> Tensor:
    log_p = logits.float().log_softmax(-1)
    logp = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return torch.where(labels == -100, 0, logp)


def several_logp(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.where(labels == -100, 0, logits.log_softmax(-1).gather(-1, labels.clamp(min=0)))


def once_each(logits: Tensor, labels: Tensor) -> Tensor:
    """Without a gradient of labels that the row has already."""
    logp = several_logp(logits, labels)
    before = (labels[:, :, None] == labels[:, None]).tril(-1).any(-1)
    return torch.where(before, logp.detach(), logp)


def clipped(
    logits: Tensor,
    labels: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor,
    old_logp: Tensor,
    low: float = 0.2,
) -> Tensor:
    """GRPO's, of [B, T, V]."""
    ratio = (token_logp(logits, labels) - old_logp).exp()
    gain = torch.min(ratio * advantages[:, None], ratio.clamp(1 - low, 1.2) * advantages[:, None])
    used = mask.float() * (labels != -100)
    return -((gain * used).sum(-1) / used.sum(-1).clamp(min=1)).mean()


def on_policy(logits: Tensor, labels: Tensor, advantages: Tensor) -> Tensor:
    ratio = (token_logp(logits, labels) - token_logp(logits, labels).detach()).exp()
    return -(ratio * advantages[:, None]).mean()


def forward_kl(logits: Tensor, teacher_logits: Tensor, labels: Tensor) -> Tensor:
    q, log_p = teacher_logits.log_softmax(-1), logits.log_softmax(-1)
    rows = (q.exp() * (q - log_p)).sum(-1)
    used = labels != -100
    return (rows * used).sum() / used.sum()


def in_jax(logits: jax.Array, labels: jax.Array) -> jax.Array:
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32), -1)
    rows = -jnp.take_along_axis(log_p, jnp.maximum(labels, 0)[:, None], -1)[:, 0]
    return jnp.where(labels == -100, 0, rows).sum() / (labels != -100).sum()


def in_numpy(
    logits: np.ndarray, labels: np.ndarray, loss_grad: np.ndarray | float = 1.0
) -> dict[str, Any]:
    """With its gradient, as of a kernel that is called through ctypes."""
    z, used = logits.astype(np.float64), labels != -100
    log_p = z - z.max(-1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
    at = np.arange(len(z)), np.where(used, labels, 0)
    loss = -(log_p[at] * used).sum() / used.sum()
    gradient = np.exp(log_p)
    gradient[at] -= 1
    weight = used * loss_grad / used.sum()
    return {"loss": loss, "dlogits": (gradient * weight[:, None]).astype(logits.dtype)}


def logp_in_numpy(logits: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    found = in_numpy(logits, labels)
    used = labels != -100
    z = logits.astype(np.float64)
    logp = np.take_along_axis(
        z - np.log(np.exp(z).sum(-1, keepdims=True)), labels[:, None] * used[:, None], -1
    )[:, 0]
    return {"logp": logp * used, "dlogits": -found["dlogits"] * used.sum()}


class Right(NamedTuple):
    fn: Function
    function: str
    settings: dict[str, Any]


RIGHT = {
    "torch": Right(F.cross_entropy, "cross_entropy", {}),
    "torch bf16": Right(widened, "cross_entropy", {"dtype": torch.bfloat16}),
    "torch fp16": Right(widened, "cross_entropy", {"dtype": np.float16, "upstream": "ones"}),
    "class weights": Right(widened, "cross_entropy", {"class_weights": "random"}),
    "smoothing": Right(summed, "cross_entropy", {"label_smoothing": 0.1}),
    "rows": Right(
        lambda x, y: F.cross_entropy(x, y, reduction="none"), "cross_entropy", {"reduction": "none"}
    ),
    "sets": Right(over_sets, "cross_entropy", {"allowed": "half"}),
    "a set": Right(over_sets, "cross_entropy", {"allowed": "shared"}),
    "logprobs": Right(token_logp, "logprobs", {"dtype": "bfloat16"}),
    "several labels": Right(several_logp, "logprobs", {"labels_per_row": 8}),
    "head": Right(fused, "linear_cross_entropy", {}),
    "head bf16": Right(fused, "linear_cross_entropy", {"dtype": "bf16"}),
    "frozen head": Right(fused, "linear_cross_entropy", {"gradients": ["dhidden"]}),
    "policy": Right(clipped, "policy_loss", {"preset": "grpo"}),
    "policy alone": Right(on_policy, "policy_loss", {"old_logp_noise_scale": None, "mask_prob": 0, "ignore_prob": 0}),
    "distillation": Right(forward_kl, "distillation", {}),
    "jax": Right(in_jax, "cross_entropy", {"framework": "jax"}),
    "jax bf16": Right(in_jax, "cross_entropy", {"framework": "jax", "dtype": jnp.bfloat16}),
    "jax head": Right(
        lambda h, w, y: in_jax(h @ w.T, y), "linear_cross_entropy", {"framework": "jax"}
    ),
    "numpy": Right(in_numpy, "cross_entropy", {"framework": "numpy"}),
    "numpy bf16": Right(
        in_numpy, "cross_entropy", {"framework": "numpy", "dtype": ml_dtypes.bfloat16, "upstream": "random"}
    ),
    "numpy logp": Right(logp_in_numpy, "logprobs", {"framework": "numpy"}),
    "case": Right(audit_losses.right, "cross_entropy", {"framework": "case"}),
    "case soft": Right(lambda case: SoftLabels(case).run(), "soft_cross_entropy", {"framework": "case"}),
    "tileloss": Right(tileloss.torch.linear_cross_entropy, "linear_cross_entropy", {}),
    "tileloss rows": Right(tileloss.torch.logprobs, "logprobs", {}),
    "tileloss low rank": Right(tileloss.torch.linear_cross_entropy, "linear_cross_entropy", {"rank": 5, "dtype": "bf16"}),
    "tileloss several": Right(tileloss.torch.linear_logprobs, "linear_logprobs", {"labels_per_row": 8, "dtype": "bf16"}),
    "tileloss policy": Right(tileloss.torch.policy_loss, "policy_loss", {"dtype": "bf16"}),
    "tileloss offsets": Right(tileloss.torch.policy_loss, "policy_loss", {"sequences": "offsets"}),
    "tileloss soft": Right(tileloss.torch.cross_entropy, "soft_cross_entropy", {}),
    "tileloss sparse": Right(tileloss.torch.sparse_distillation, "sparse_distillation", {}),
    "tileloss heads": Right(tileloss.torch.linear_distillation, "linear_distillation", {}),
    "tileloss jax": Right(tileloss.jax.policy_loss, "policy_loss", {"framework": "jax"}),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes(name: str) -> None:
    fn, function, settings = RIGHT[name]
    report = check(fn, function, **settings)
    assert report.passed and not report.failures and str(report).endswith(" gates passed")
    assert all(gate.passed and gate.value <= gate.limit for gate in report.gates)
    gradients = {gate.name.partition("/")[0] for gate in report.gates}
    head = {"dhidden"} if "gradients" in settings else {"dhidden", "dhead"}
    assert gradients >= (head if function.startswith("linear_") else {"dlogits"})


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 2


class ScaledInPlace(torch.autograd.Function):
    """A loss whose backward writes over what it has saved."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        with torch.enable_grad():
            x = logits.detach().requires_grad_()
            loss = F.cross_entropy(x, labels)
        (ctx.gradient,) = torch.autograd.grad(loss, x)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient.mul_(upstream), None


def numpy_with(**changes: Function) -> Function:
    def wrong(*arguments: Any, **named: Any) -> dict[str, Any]:
        found = in_numpy(*arguments, **named)
        return found | {name: change(found[name]) for name, change in changes.items()}

    return wrong


def into_ignored(gradient: np.ndarray) -> np.ndarray:
    return np.where((gradient == 0).all(-1, keepdims=True), np.float32(1e-30), gradient)


NUMPY = {"framework": "numpy"}
WRONG = {
    "gradient": (lambda x, y: F.cross_entropy(Halved.apply(x), y), "cross_entropy", {}, "dlogits/ulp_target"),
    "loss": (lambda x, y: 1.0001 * F.cross_entropy(x, y), "cross_entropy", {}, "loss"),
    "rounded loss": (F.cross_entropy, "cross_entropy", {"dtype": "bfloat16"}, "loss"),
    "an option": (F.cross_entropy, "cross_entropy", {"label_smoothing": 0.1}, "loss"),
    "an upstream gradient": (
        lambda x, y: F.cross_entropy(x + (x - x.detach()), y, reduction="none"), "cross_entropy", {"reduction": "none"},
        "dlogits/ulp_target",
    ),
    "sets": (lambda x, y, allowed: F.cross_entropy(x, y), "cross_entropy", {"allowed": "half"}, "dlogits/nonzero_where_ignored"),
    "what is ignored": (numpy_with(dlogits=into_ignored), "cross_entropy", NUMPY, "dlogits/nonzero_where_ignored"),
    "NaN": (numpy_with(loss=lambda x: x * np.nan), "cross_entropy", NUMPY, "loss/nonfinite"),
    "logp": (lambda x, y: token_logp(x, y) - 1e-3, "logprobs", {}, "logp"),
    "a label that is there twice": (once_each, "logprobs", {"labels_per_row": 8}, "dlogits/ulp_target"),
    "rounded logp": (lambda x, y: token_logp(x, y).bfloat16(), "logprobs", {}, "logp"),
    "an output": (lambda x, y: {"loss": F.cross_entropy(x, y), "logp": token_logp(x, y) - 1e-3}, "cross_entropy",
                  {"outputs": ["logp"]}, "logp"),
    "head": (lambda h, w, y: F.cross_entropy(h @ Halved.apply(w).T, y), "linear_cross_entropy", {}, "dhead/frobenius"),
    "head's rounding": (lambda h, w, y: F.cross_entropy((h @ w.T).float(), y), "linear_cross_entropy", {"dtype": "bf16"},
                        "loss"),
    "a bound": (lambda *a, **k: clipped(*a, **k, low=9.0), "policy_loss", {"preset": "grpo"}, "loss"),
    "mask": (lambda x, y, a, mask, **k: clipped(x, y.clamp(min=0), a, **k, mask=torch.ones_like(mask)), "policy_loss",
             {"preset": "grpo"}, "loss"),
    "divergence": (lambda x, t, y: forward_kl(t, x, y), "distillation", {}, "loss"),
    "jax": (lambda x, y: 1.01 * in_jax(x, y), "cross_entropy", {"framework": "jax"}, "dlogits/normwise"),
    "a second backward": (ScaledInPlace.apply, "cross_entropy", {"backwards": 2}, "dlogits/ulp_target"),
    "case": (audit_losses.halved, "cross_entropy", {"framework": "case"}, "dlogits/ulp_target"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_fails_with_the_gates_name(name: str) -> None:
    fn, function, settings, gate = WRONG[name]
    with pytest.raises(AssertionError) as failure:
        check(fn, function, **settings)
    first, *lines = str(failure.value).splitlines()
    assert first.startswith(f"{function}, ") and first.endswith("]:")
    failed = {line.split()[0]: line.split()[1:4] for line in lines}
    value, relation, limit = failed[gate]
    assert relation == ">" and not float(value) <= float(limit.rstrip(","))


def test_a_failure_names_the_worst_place() -> None:
    def wrong(x: np.ndarray) -> np.ndarray:
        x[7, 123] += 1
        return x

    with pytest.raises(
        AssertionError, match=r"\n  dlogits/ulp_off_target .* > 8, row 7, column 123\n"
    ):
        check(numpy_with(dlogits=wrong), "cross_entropy", framework="numpy", seed=5, ignore_prob=0)


@pytest.mark.parametrize(
    ("fn", "settings", "message"),
    [
        (lambda x, y: F.cross_entropy(x.detach(), y), {}, "dlogits: the case asks for it, got none"),
        (F.cross_entropy, {"outputs": ["entropy"]}, "entropy: the case asks for it, got none"),
        (lambda x, y: {"dlogits": x}, NUMPY, "loss: the case asks for it, got none"),
        (numpy_with(dlogits=np.transpose), NUMPY, "dlogits: expected [32, 1000] or [2, 16, 1000], got [1000, 32]"),
        (numpy_with(loss=lambda x: [x, x]), NUMPY, "loss: expected [] or [1], got [2]"),
    ],
)  # fmt: skip
def test_what_is_not_there_fails(fn: Function, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError) as failure:
        check(fn, "cross_entropy", **settings)
    assert message in str(failure.value)


def test_a_gradient_is_not_asked_for_without_a_backward() -> None:
    for framework, fn in (("torch", lambda x, y: F.cross_entropy(x.detach(), y)), ("jax", in_jax)):
        report = check(fn, "cross_entropy", backwards=0, framework=framework)
        assert {gate.name.partition("/")[0] for gate in report.gates} == {"loss", "inputs"}


def test_tolerances_are_of_plain_float32_unless_they_are_given() -> None:
    report = check(summed, "cross_entropy", label_smoothing=0.1)
    limits = {gate.name: gate.limit for gate in report.gates}
    assert limits["dlogits/normwise"] == limits["dlogits/ulp_target"] == 8
    for tolerances in ({"normwise": 1}, {"normwise": 1.0, "ulp": 1e9}):
        with pytest.raises(AssertionError, match=r"\n  dlogits/normwise .* > 1$"):
            check(summed, "cross_entropy", label_smoothing=0.1, tolerances=tolerances)
    with pytest.raises(AssertionError, match="mutants .none were planted: dlogits/normwise"):
        check(summed, "cross_entropy", label_smoothing=0.1, mutants=True)
    with pytest.raises(ValueError, match="check: tolerances.upl: unknown key; did you mean"):
        check(summed, "cross_entropy", tolerances={"upl": 1})


def test_mutants_of_what_passes_are_caught() -> None:
    report = check(F.cross_entropy, "cross_entropy", mutants=True)
    planted = [mutant for mutant in report.mutants if mutant["planted"]]
    assert len(planted) > 5 and all(mutant["caught_by"] for mutant in planted)
    assert check(F.cross_entropy, "cross_entropy").mutants == []


# ---------------------------------------------------------------------------------------------------------------- its inputs


def test_several_labels_that_are_there_are_judged() -> None:
    logits, labels = torch.randn(2, 5, 100, requires_grad=True), torch.randint(0, 100, (2, 5, 4))
    labels[0, 3], labels[1, 2, :2] = -100, 7
    inputs = {"logits": logits, "labels": labels}
    logp = several_logp(logits, labels)
    (gradient,) = torch.autograd.grad(logp.sum(), logits)
    assert judge("logprobs", inputs, {"logp": logp, "dlogits": gradient}, mutants=True).passed
    with pytest.raises(
        AssertionError, match=r"logp: expected \[10, 4\] or \[2, 5, 4\], got \[2, 5\]"
    ):
        judge("logprobs", inputs, {"logp": logp[..., 0]})
    # Rows of labels may be flat, and have one label each.
    for logits_rows, rows in (((10,), (10,)), ((2, 5), (10,)), ((2, 5), (2, 5))):
        for count in (1, 4):
            given = {
                "logits": logits.reshape(*logits_rows, 100),
                "labels": labels[..., :count].reshape(*rows, count),
            }
            found = logp[..., :count].reshape(*rows, count)
            assert judge("logprobs", given, {"logp": found}).passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_that_are_there_are_judged(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 5, 100).to(dtype).requires_grad_()
    labels = torch.randint(0, 100, (2, 5))
    labels[0, 3] = -100
    inputs = {"logits": logits, "labels": labels}
    loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
    (gradient,) = torch.autograd.grad(loss, logits)
    report = judge("cross_entropy", inputs, {"loss": loss, "dlogits": gradient}, mutants=True)
    assert report.passed and any(mutant["planted"] for mutant in report.mutants)
    assert judge("cross_entropy", inputs, {"loss": loss.item()}).passed
    with pytest.raises(AssertionError, match="dlogits/normwise"):
        judge("cross_entropy", inputs, {"loss": loss, "dlogits": 1.01 * gradient})
    with pytest.raises(AssertionError, match=r"\n  loss "):
        judge("cross_entropy", inputs, {"loss": loss}, label_smoothing=0.1)
    check(widened, "cross_entropy", inputs=inputs)
    logp = token_logp(logits, labels)
    (gradient,) = torch.autograd.grad(logp.sum(), logits)
    judge("logprobs", inputs, {"logp": logp, "dlogits": gradient})
    with pytest.raises(ValueError, match="^judge: inputs: expected loss_grad, got none$"):
        judge("cross_entropy", inputs, {"loss": loss}, upstream="random")


def test_a_policy_loss_of_inputs_of_ones_own() -> None:
    inputs = {
        "logits": torch.randn(3, 4, 50),
        "labels": torch.randint(0, 50, (3, 4)),
        "mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]),
        "advantages": torch.tensor([1.0, -1.0, 0.5]),
        "old_logp": -4 + torch.randn(3, 4),
    }
    check(clipped, "policy_loss", inputs=inputs, preset="grpo")
    loss = clipped(**inputs)
    judge("policy_loss", inputs, {"loss": loss}, preset="grpo")
    del inputs["old_logp"], inputs["advantages"]
    with pytest.raises(ValueError, match="^judge: inputs: expected advantages, got none$"):
        judge("policy_loss", inputs, {"loss": loss})


# --------------------------------------------------------------------------------------------------------------- wrong usage


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"label_smothing": 0.1}, ValueError, "check: label_smothing: unknown key; did you mean label_smoothing?"),
        ({"label_smoothing": 2}, ValueError, "check: label_smoothing: "),
        ({"dtype": torch.float64}, ValueError, "check: dtype: 'float64' is none of "),
        ({"vocab_size": 0}, ValueError, "check: vocab_size: "),
        ({"framework": "tf"}, ValueError, "framework: expected one of torch, jax, numpy, case, got 'tf'"),
        ({"kernel": {"threads": 1}}, ValueError, "check: kernel: expected none, got {'threads': 1}"),
        ({"inputs": {"logits": [[1.0]]}, "source": {}}, ValueError, "check: source: expected none, got {}"),
        ({"inputs": {"logits": np.ones((1, 2), np.float32)}}, ValueError, "labels"),
        ({"inputs": {"class_weights": [1]}}, ValueError, "check: inputs: expected head, "),
    ],
)  # fmt: skip
def test_wrong_usage_is_said(settings: dict[str, Any], kind: type, message: str) -> None:
    with pytest.raises(kind) as failure:
        check(F.cross_entropy, "cross_entropy", **settings)
    assert message in str(failure.value)


def test_an_unknown_function_is_said() -> None:
    with pytest.raises(ValueError, match="^check: loss: 'cross_entrop' is none of cross_entropy, "):
        check(F.cross_entropy, "cross_entrop")


@pytest.mark.parametrize(
    ("returned", "what"), [((1.0, 2.0), "tuple"), (None, "NoneType"), (1.5, "float")]
)
def test_what_returns_no_array_is_said(returned: Any, what: str) -> None:
    with pytest.raises(TypeError, match=f"^expected an array, or a dict .*, got {what}$"):
        check(lambda x, y: returned, "cross_entropy")


def test_what_an_implementation_raises_is_raised() -> None:
    with pytest.raises(Refused, match="^not today$"):
        check(audit_losses.refusing, "cross_entropy", framework="case")
    with pytest.raises(Refused, match="^label_smoothing: not offered$"):
        check(audit_losses.right, "cross_entropy", framework="case", label_smoothing=0.1)
    with pytest.raises(ValueError, match="no such"):
        check(audit_losses.raising, "cross_entropy", framework="case")


# ------------------------------------------------------------------------------------------------------------- the package


def test_it_needs_numpy_and_ml_dtypes_alone() -> None:
    code = "import tileloss.testing as t, sys; print(*{m.partition('.')[0] for m in sys.modules}, *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert {"numpy", "ml_dtypes"} <= imported
    assert (
        not {"torch", "jax", "yaml", "safetensors", "rich", "pytest", "tileloss.tools"} & imported
    )


def test_the_example() -> None:
    """Each of its tests passes, and fails for what is wrong with the loss."""
    text = EXAMPLE.read_text()
    wrong = text.replace("logits.float()", "logits.bfloat16()")
    wrong = wrong.replace("(labels != -100).sum()", "len(labels)")
    for code in (text, wrong):
        example: dict[str, Any] = {}
        exec(compile(code, str(EXAMPLE), "exec"), example)
        for name, arguments in (
            ("test_my_loss", ["float32"]),
            ("test_my_loss", ["bfloat16"]),
            ("test_my_loss_far_from_zero", []),
            ("test_my_fused_loss", []),
        ):
            if code == text:
                example[name](*arguments)
            else:
                with pytest.raises(AssertionError, match=" > "):
                    example[name](*arguments)
