"""policy_loss against its definition in plain torch: presets, options, layouts of sequences, metrics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from checks import VESPO, check, leaf
from policy_definition import PRESETS
from tileloss.torch import linear_policy_loss, policy_loss

B, T, V = 4, 9, 67
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WITH_KL = {"beta": 0.1}
SAMPLED = {"sampler_correction": "truncate", "sampler_max": 1.1}
OPTIONS: dict[str, dict[str, Any]] = {
    "one bound": {"epsilon_low": 0.02},
    "bounds": {"epsilon_low": 0.02, "epsilon_high": 0.4},
    "delta": {"delta": 1.1},
    "dual clip": {"dual_clip": 1.2},
    "cispo raw": {"kind": "cispo", "epsilon_high": 1.3, "cap_low": 0.9},
    "cispo one plus": {"kind": "cispo", "epsilon_high": 0.3, "cispo_cap": "one_plus"},
    "sapo": {"kind": "sapo", "tau_pos": 0.8, "tau_neg": 1.5},
    "vespo": {"kind": "vespo", "vespo_k_pos": 1.5, "vespo_lambda_neg": 1.0},
    "vespo sampled": {"kind": "vespo", **SAMPLED},
    "log ratio clamp": {"log_ratio_clamp": 0.2},
    "log ratio clamp of sequences": {"log_ratio_clamp": 0.2, "ratio_level": "sequence"},
    "sum": {"aggregation": "sum"},
    "sum of items": {"aggregation": "sum", "num_items": 11.0},
    "token mean of items": {"aggregation": "token_mean", "num_items": 11.0},
    "max length": {"aggregation": "seq_mean_token_sum_norm", "max_length": 20},
    "per token": {"aggregation": "none"},
    "sampler truncate": SAMPLED,
    "sampler truncate below": {"sampler_correction": "truncate", "sampler_min": 1.05},
    "sampler mask": {"sampler_correction": "mask", "sampler_min": 0.9, "sampler_max": 1.2},
    "sampler of sequences": {**SAMPLED, "sampler_level": "sequence"},
    "off-policy": {"off_policy_threshold": 0.0},
    "entropy quantile": {"entropy_quantile": 0.4},
    "entropy threshold": {"entropy_threshold": 3.3},
    "kl": WITH_KL,
    "k1": {**WITH_KL, "kl_estimator": "k1"},
    "k2": {**WITH_KL, "kl_estimator": "k2"},
    "kl importance": {**WITH_KL, "kl_importance": True},
    "kl importance of sequences": {**WITH_KL, "kl_importance": True, "ratio_level": "sequence"},
    "kl log ratio clamp": {**WITH_KL, "kl_log_ratio_clamp": 0.3},
    "kl clamp": {**WITH_KL, "kl_clamp": 0.03},
    "entropy bonus": {"entropy_coef": 0.3},
    "entropy bonus in the loss": {"entropy_coef": 0.3, "entropy_reduction": "as_loss"},
    "entropy bonus of a quantile": {"entropy_coef": 0.3, "entropy_quantile": 0.4},
    "everything": {
        "ratio_level": "sequence", "aggregation": "token_mean", "log_ratio_clamp": 0.25,
        "sampler_correction": "mask", "sampler_max": 1.1, "off_policy_threshold": 0.01,
        "entropy_quantile": 0.7, "beta": 0.2, "kl_estimator": "k2", "kl_importance": True,
        "entropy_coef": 0.05,
    },
}  # fmt: skip


class Rollout:
    """[B, T] tokens: ratios on both sides of the bounds, masked ends, one empty sequence, one ignored label."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(1)
        self.x = leaf((1.5 * torch.randn(B, T, V)).to(dtype))
        self.labels = torch.randint(0, V, (B, T))
        log_p = torch.log_softmax(self.x.detach().float(), -1)
        logp = log_p.gather(-1, self.labels[..., None])[..., 0]
        self.old = logp + 0.4 * torch.randn(B, T)
        self.ref = logp + 0.4 * torch.randn(B, T)
        self.sampler = self.old + 0.2 * torch.randn(B, T)
        self.advantages = torch.tensor([0.8, -1.1, 0.5, -0.4])
        self.mask = torch.arange(T) < torch.tensor([T, 6, 0, 8])[:, None]
        self.labels[0, 2] = -100
        self.used = self.mask & (self.labels != -100)

    def tensors(self, options: dict[str, Any]) -> dict[str, Tensor]:
        """What policy_loss takes besides, of what the options use."""
        chosen = {"mask": self.mask, "old_logp": self.old}
        if "beta" in options:
            chosen["ref_logp"] = self.ref
        if "sampler_correction" in options:
            chosen["sampler_logp"] = self.sampler
        return chosen

    def check(self, options: dict[str, Any], **more: Any) -> None:
        """policy_loss of the rollout, or with `more` in place of its own tensors, against the definition."""
        upstream = torch.randn(B, T) if options.get("aggregation") == "none" else torch.tensor(0.7)
        advantages = more.pop("advantages", self.advantages)
        given = {**self.tensors(options), **options, **more}
        if "vespo" in (options.get("kind"), more.get("preset")):
            given |= VESPO
        check("policy_loss", self.x, self.labels, advantages, upstream=upstream, **given)


def options_of(preset: str) -> dict[str, Any]:
    return {"epsilon_high": 1.2} if preset == "cispo" else {}


@pytest.mark.parametrize("old", [True, False], ids=["", "on policy"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset(preset: str, dtype: torch.dtype, old: bool) -> None:
    rollout = Rollout(dtype)
    given = {"old_logp": rollout.old if old else None}
    rollout.check(options_of(preset), preset=preset, **given)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name: str, dtype: torch.dtype) -> None:
    Rollout(dtype).check(OPTIONS[name])


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_matters(name: str) -> None:
    """On this rollout each option changes the gradient: test_every_option would see one that is ignored."""
    rollout, options = Rollout(), OPTIONS[name]
    tensors = rollout.tensors({**options, "beta": 0, "sampler_correction": ""})

    def gradient(options: dict[str, Any]) -> Tensor:
        loss = policy_loss(rollout.x, rollout.labels, rollout.advantages, **tensors, **options)
        return torch.autograd.grad(loss.sum(), rollout.x)[0]

    assert not torch.equal(gradient(options), gradient({}))
    for left_out in options if len(options) > 1 else ():
        needed = left_out in ("kind", "sampler_correction") or {"num_items", "max_length"} & {
            *options
        }
        if not needed and "cispo" not in options.values():
            rest = {k: v for k, v in options.items() if k != left_out}
            assert not torch.equal(gradient(options), gradient(rest)), left_out


@pytest.mark.parametrize("preset", PRESETS)
def test_options_go_on_top_of_a_preset(preset: str) -> None:
    Rollout().check({"beta": 0.1, **options_of(preset), "aggregation": "sum"}, preset=preset)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_advantages_of_tokens(level: str) -> None:
    Rollout().check({"ratio_level": level}, advantages=torch.randn(B, T))


@pytest.mark.parametrize("shape", [(B,), (B, 1)], ids=str)
def test_advantages_of_sequences(shape: tuple[int, ...]) -> None:
    rollout = Rollout()
    given = [rollout.advantages.view(shape), rollout.advantages[:, None].expand(B, T)]
    losses = [policy_loss(rollout.x, rollout.labels, a, mask=rollout.mask) for a in given]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
@pytest.mark.parametrize("name", ["kl importance of sequences", "entropy quantile", "everything"])
def test_sequences_by_offsets(name: str, dtype: torch.dtype) -> None:
    """The [B, T] batch without its padding, back to back in [N, V] rows, an empty sequence included."""
    rollout, options = Rollout(), OPTIONS[name]
    kept = rollout.mask
    offsets = torch.cat([torch.zeros(1), kept.sum(-1).cumsum(0)]).to(dtype)
    tensors = {n: t[kept] for n, t in rollout.tensors(options).items() if n != "mask"}
    given = (rollout.labels[kept], rollout.advantages)
    check(
        "policy_loss", leaf(rollout.x.detach()[kept]), *given, upstream=torch.tensor(0.7),
        sequence_offsets=offsets, **tensors, **options,
    )  # fmt: skip


INTEGERS = [torch.bool, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


@pytest.mark.parametrize("value", [1, 1e-6])
@pytest.mark.parametrize(
    "dtype", [*INTEGERS, torch.float32, torch.float64, torch.bfloat16, torch.float16]
)
def test_masks_of_every_type(dtype: torch.dtype, value: float) -> None:
    rollout, value = Rollout(), value if dtype.is_floating_point else 1
    rollout.check({}, old_logp=None, mask=rollout.mask.to(dtype) * value)


def test_masked_tokens_are_never_read() -> None:
    rollout = Rollout()
    out = ~rollout.used
    with torch.no_grad():
        for tensor in (rollout.x, rollout.old, rollout.ref, rollout.sampler):
            tensor[out] = float("nan")
    rollout.labels[~rollout.mask] = 10**9
    rollout.check(OPTIONS["everything"])


@pytest.mark.parametrize(
    "name", ["epsilon_low", "epsilon_high", "beta", "num_items", "temperature"]
)
def test_numbers_that_change_may_be_tensors(name: str) -> None:
    rollout = Rollout()
    options: dict[str, Any] = {
        "epsilon_low": 0.125,
        "epsilon_high": 0.25,
        "beta": 0.5,
        "num_items": 5.0,
    }
    options |= {"aggregation": "token_mean", "temperature": 1.5}
    tensors = rollout.tensors(options)

    def gradient(options: dict[str, Any]) -> Tensor:
        loss = policy_loss(rollout.x, rollout.labels, rollout.advantages, **tensors, **options)
        return torch.autograd.grad(loss, rollout.x)[0]

    expected = gradient(options)
    assert torch.equal(gradient({**options, name: torch.tensor(options[name])}), expected)
    assert not torch.equal(gradient({**options, name: torch.tensor(1.9)}), expected)


def test_metrics() -> None:
    rollout = Rollout()
    options = {"beta": 0.1, **SAMPLED}
    loss, metrics = policy_loss(
        rollout.x, rollout.labels, rollout.advantages, return_metrics=True,
        **rollout.tensors(options), **options,
    )  # fmt: skip
    log_p = torch.log_softmax(rollout.x.detach().double(), -1)
    logp = log_p.gather(-1, rollout.labels.clamp(min=0)[..., None])[..., 0]
    rho = (logp - rollout.old).exp()[rollout.used]
    d = (rollout.ref - logp)[rollout.used]
    a = rollout.advantages[:, None].expand(B, T)[rollout.used]
    low, high = (rho < 0.8) & (a < 0), (rho > 1.2) & (a > 0)
    r = (rollout.old - rollout.sampler).exp().clamp(max=1.1)[rollout.used]
    expected = {
        "kl": (d.exp() - d - 1).mean(),
        "entropy": -(log_p.exp() * log_p).sum(-1)[rollout.used].mean(),
        "clip_low_fraction": low.double().mean(),
        "clip_high_fraction": high.double().mean(),
        "clip_fraction": (low | high).double().mean(),
        "ratio_mean": rho.mean(),
        "sampler_ratio_mean": r.mean(),
        "sampler_ratio_min": r.min(),
        "sampler_ratio_max": r.max(),
        "tokens": rollout.used.sum().double(),
    }
    assert low.any()
    assert high.any()
    for name, value in expected.items():
        assert metrics[name].shape == ()
        assert not metrics[name].requires_grad
        torch.testing.assert_close(metrics[name].double(), value.double(), rtol=1e-5, atol=1e-7)
    for name in metrics.keys() - expected.keys() - {"dropped_sequences"}:
        assert metrics[name].isnan(), name
    plain = policy_loss(
        rollout.x, rollout.labels, rollout.advantages, **rollout.tensors(options), **options
    )
    assert torch.equal(loss, plain)


@pytest.mark.parametrize("grad_in_forward", [False, True])
def test_the_head_gives_the_loss_and_metrics_of_its_logits(grad_in_forward: bool) -> None:
    rollout, options = Rollout(), OPTIONS["everything"]
    hidden, weight = leaf(torch.randn(B, T, 16)), leaf(0.3 * torch.randn(V, 16))
    tensors = rollout.tensors(options) | {"return_metrics": True}
    loss, metrics = linear_policy_loss(
        hidden, weight, rollout.labels, rollout.advantages, grad_in_forward=grad_in_forward,
        **tensors, **options,
    )  # fmt: skip
    gradients = torch.autograd.grad(loss, (hidden, weight))
    logits = hidden @ weight.T
    same, same_metrics = policy_loss(
        logits, rollout.labels, rollout.advantages, **tensors, **options
    )
    torch.testing.assert_close(loss, same, rtol=1e-5, atol=1e-6)
    expected = torch.autograd.grad(same, (hidden, weight))
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(metrics, same_metrics, rtol=1e-4, atol=1e-5, equal_nan=True)
