"""As test_third_party_shapes.py, of policy losses: Liger's GRPO, from logits and with the head, and verl's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from checks import VESPO, check
from test_third_party_shapes import BF16, F32, TWO_DTYPES, Options, capped, capped_with_head, normal

# An epsilon_high of its own is cispo's to be given.
CISPO: Options = {"preset": "cispo", "epsilon_high": 0.2}


def all_but_last(x: Tensor) -> Tensor:
    return x[:, :-1]


def label_logp(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    log_p = torch.log_softmax(logits.detach().float() / temperature, -1)
    return log_p.gather(-1, labels[..., None])[..., 0]


# ------------------------------------------------------------------------------------ Liger's GRPO from logits
# test/transformers/test_grpo_loss.py. The logits are [B, T + 1, V], of which the last position is left out.

LIGER_GRPO = [(1, 1024, 151936), (2, 128, 1000)]


def check_logits(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    temperature: float,
    options: Options,
    *,
    old: bool = True,
    sampler: tuple[float, float] | None = None,
) -> None:
    """Labels, mask, logps near the logits' own and advantages of both signs. sampler: the least ratio to it, and their range."""
    batch, tokens, vocab = shape
    tokens = capped(batch * tokens, vocab) // batch
    x = normal(dtype, batch, tokens + 1, vocab)
    labels = torch.randint(0, vocab - 1, (batch, tokens))
    logp = label_logp(all_but_last(x), labels, temperature)
    given: Options = {"old_logp": logp + 0.3 * torch.randn_like(logp)}
    ref_logp = logp + 0.2 * torch.randn_like(logp)
    if options.get("beta"):
        given["ref_logp"] = ref_logp
    mask = torch.ones(batch, tokens, dtype=torch.int32)
    mask[:, tokens - tokens // 8 :] = 0
    advantages = torch.randn(batch)
    advantages[:2] = torch.tensor([-0.7, 1.3])[:batch]
    if sampler is not None:
        low, span = sampler
        ratio = low + torch.rand(labels.shape) * span
        given |= {"sampler_logp": given["old_logp"] - ratio.log(), "sampler_correction": "truncate"}
    if not old:
        del given["old_logp"]
    given |= {"mask": mask, "temperature": temperature, **options}
    check("policy_loss", x, labels, advantages, view=all_but_last, **given)


@pytest.mark.parametrize("temperature, vocab", [(0.9, 64000), (0.7, 151936)])
def test_liger_selective_log_softmax(temperature: float, vocab: int) -> None:
    labels, upstream = torch.randint(0, vocab - 1, (1, 4)), {"logp": torch.randn(1, 4)}
    given = {"upstream": upstream, "view": all_but_last, "temperature": temperature}
    check("logprobs", normal(BF16, 1, 5, vocab), labels, **given)


@pytest.mark.parametrize("iterations", [1, 5])  # 1: no old_logp
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize(
    "options",
    [
        {"epsilon_high": 0.4},
        {"epsilon_high": 0.4, "delta": 1.5},
        {"epsilon_high": 0.4, "delta": 2.0},
        {"preset": "cispo", "epsilon_high": 5.0},
        {"preset": "sapo"},
    ],
    ids=["grpo", "delta 1.5", "delta 2", "cispo", "sapo"],
)
@pytest.mark.parametrize("shape", LIGER_GRPO, ids=str)
def test_liger_grpo(
    shape: tuple[int, int, int], options: Options, beta: float, iterations: int
) -> None:
    check_logits(shape, BF16, 0.7, options | {"beta": beta}, old=iterations > 1)


AGGREGATIONS: dict[str, Options] = {
    "grpo": {},
    "bnpo": {"aggregation": "token_mean"},
    "dr_grpo": {"aggregation": "seq_mean_token_sum_norm", "max_length": 128},
    "dapo": {"aggregation": "token_mean", "num_items": 200.0},
    "luspo": {"aggregation": "seq_mean_token_sum"},
    "vespo": {"kind": "vespo", "aggregation": "token_mean"},
}


@pytest.mark.parametrize("beta, importance", [(0.0, False), (0.04, False), (0.04, True)])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("delta", [None, 1.5])
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_liger_against_trl(
    name: str, delta: float | None, level: str, beta: float, importance: bool
) -> None:
    """test_grpo_loss_vs_trl: float32 logits, temperature 0.9. Its skipped pairs work here as well."""
    options = AGGREGATIONS[name] | {"beta": beta}
    options |= {"kl_importance": importance, "ratio_level": level}
    if name == "vespo":  # e to a sum over 128 tokens
        options |= {"relative": 5e-4, "whole": 5e-4}
    else:
        options |= {"delta": delta, "epsilon_high": 0.4}
    check_logits((2, 128, 1000), F32, 0.9, options)


@pytest.mark.parametrize("low", [0.5, 0.001])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["clip", "cispo", "sapo"])
def test_liger_sampler_ratio(kind: str, level: str, beta: float, low: float) -> None:
    """test_grpo_loss_with_vllm_is_ratio: 0.5 to 1.5, and 0.001 to 1, a token."""
    options = {"kind": kind, "ratio_level": level, "beta": beta}
    if kind != "sapo":
        options["epsilon_high"] = 5.0 if kind == "cispo" else 0.4
    ratios = (low, 1.0 if low == 0.5 else 0.999)
    check_logits((2, 128, 1000), BF16, 0.7, options, sampler=ratios)


# tests/trainer/ppo/test_core_algos_on_cpu.py of verl: 2 sequences of 4, a normal advantage a token, any old logp.
@TWO_DTYPES
@pytest.mark.parametrize(
    "options",
    [CISPO | {"cispo_cap": "one_plus", "cap_low": 0.8}, {"preset": "dapo", "dual_clip": 3.0}],
    ids=["cispo", "dual clip"],
)
def test_verl_policy_losses(options: Options, dtype: torch.dtype) -> None:
    x, labels = normal(dtype, 2, 4, 152), torch.randint(0, 152, (2, 4))
    old = label_logp(x, labels, 1.0) + torch.randn(2, 4)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    check("policy_loss", x, labels, torch.randn(2, 4), mask=mask, old_logp=old, **options)


# ------------------------------------------------------------------------------------ Liger's GRPO with the head
# test/chunked_loss/test_grpo_loss.py.

KINDS: dict[str, Options] = {
    **{name: {"preset": name} for name in ("bnpo", "grpo", "dr_grpo", "dapo", "sapo")},
    "cispo": CISPO,
    "luspo": {"preset": "luspo"},
    "vespo": {"preset": "vespo", **VESPO},
}


def check_head(
    options: Options,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    temperature: float,
    bias: bool,
    ref: bool,
    old: bool,
) -> None:
    """Old and reference logps within 0.01 of the policy's own, a quarter of the tokens masked at random."""
    batch, tokens, width, vocab = shape
    tokens = max(1, capped_with_head(batch * tokens, width, vocab) // batch)
    hidden, head = normal(dtype, batch, tokens, width), normal(dtype, vocab, width)
    offset = normal(F32, vocab) if bias else None
    labels = torch.randint(0, vocab, (batch, tokens))
    logits = F.linear(hidden.float(), head.float(), offset)
    logp = label_logp(logits, labels, temperature)
    advantages = torch.randn(batch)
    advantages[0] = -advantages[0].abs()
    near = {
        name: logp + 0.01 * torch.randn(logp.shape)
        for name, is_given in (("old_logp", old), ("ref_logp", ref))
        if is_given
    }
    given = {"mask": torch.rand(batch, tokens) < 0.75, "temperature": temperature, **near}
    leaves = (hidden, head, offset)
    check("linear_policy_loss", leaves, labels, advantages, **given, **options)


@TWO_DTYPES
@pytest.mark.parametrize(
    "beta, epsilon, temperature, bias, ref, old",
    [
        (0.1, 0.2, 1.0, True, True, True),
        (0.1, 0.2, 1.0, False, True, False),
        (0.0, 0.1, 2.0, True, False, True),
    ],
)
@pytest.mark.parametrize("level, delta", [("token", None), ("token", 2.0), ("sequence", None)])
@pytest.mark.parametrize("name", KINDS)
def test_liger_chunked_grpo(
    name: str,
    level: str,
    delta: float | None,
    beta: float,
    epsilon: float,
    temperature: float,
    bias: bool,
    ref: bool,
    old: bool,
    dtype: torch.dtype,
) -> None:
    options = {"ratio_level": level, "beta": beta, **KINDS[name]}
    if name not in ("cispo", "sapo", "vespo"):
        options |= {"delta": delta, "epsilon_low": epsilon, "epsilon_high": epsilon}
    if name == "cispo":
        options["epsilon_high"] = 2.0
    check_head(options, (3, 47, 31, 123), dtype, temperature, bias, ref, old)


@TWO_DTYPES
@pytest.mark.parametrize("name", ["grpo", "dapo"])
@pytest.mark.parametrize(
    "shape", [(8, 128, 1024, 4096), (1, 4096, 256, 5000), (3, 17, 31, 123)], ids=str
)
def test_liger_chunked_grpo_shapes(
    shape: tuple[int, int, int, int], name: str, dtype: torch.dtype
) -> None:
    check_head({"preset": name, "beta": 0.04}, shape, dtype, 0.9, bias=True, ref=True, old=True)
