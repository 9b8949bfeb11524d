"""Shapes and options of other projects' own suites for losses on logits, under our metric and tolerances.

Those suites allow much (bfloat16 gradients to 5e-2 and more); here every component is held to about one unit
in the last place (metric.py). Where a shape is large, tokens are left out and never a class: CAP
elements a case, so that the whole file takes some 20 s on one core.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from checks import check_cross_entropy, check_logprobs, check_policy, leaf
from oracle import Policy, Transform

CAP = 1 << 18
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def capped(tokens: int, vocab: int) -> int:
    return min(tokens, max(2, CAP // vocab))


def some_ignored(labels: Tensor, ignore_index: int, share: float = 0.25) -> Tensor:
    """A copy in which about `share` of the labels are ignored, the first one never."""
    ignored = torch.rand(labels.shape) < share
    ignored.view(-1)[0] = False
    if 0 <= ignore_index:
        labels = torch.where(labels == ignore_index, ignore_index + 1, labels)
    return labels.masked_fill(ignored, ignore_index)


# ------------------------------------------------------------------------------------------------ PyTorch
# module_inputs_torch_nn_CrossEntropyLoss and sample_inputs_cross_entropy in torch.testing: the class is
# dimension 1 there, so that our [..., V] is a view whose last stride is not 1.

TORCH_SHAPES = [
    (3,), (2, 3), (2, 3, 5), (2, 3, 5, 5), (2, 3, 5, 5, 2, 2), (2, 3, 1), (2, 3, 1, 2), (2, 3, 1, 2, 3)
]  # fmt: skip
TORCH_OPTIONS = [
    {},
    {"weight": torch.tensor([0.5, 2.0, 1.25])},
    {"ignore_index": 1},
    {"label_smoothing": 0.15},
    {"ignore_index": 1, "label_smoothing": 0.15},
]


def class_last(x: Tensor) -> Tensor:
    return x if x.dim() == 1 else x.movedim(1, -1)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", TORCH_OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("shape", TORCH_SHAPES, ids=str)
def test_torch_cross_entropy(shape: tuple[int, ...], options: dict, reduction: str) -> None:
    x = leaf(9 * torch.randn(shape))
    rows = class_last(x).shape[:-1]
    labels = torch.randint(0, 3, rows)
    if "ignore_index" in options and (labels == 1).all():
        labels.view(-1)[0] = 2  # an ignored batch has a mean of 0 here and of NaN in torch
    upstream = torch.randn(rows) if reduction == "none" else None
    check_cross_entropy(
        x, labels, view=class_last, reduction=reduction, upstream=upstream, **options
    )


# -------------------------------------------------------------------------------------------------- Liger
# test/transformers/test_cross_entropy.py: (2, 4096, 32000) and (3, 423, 32000), standard normal logits,
# bfloat16 and float32.

LIGER = [(2 * 4096, 32000), (3 * 423, 32000)]
LIGER_SMALL = [
    (2 * 2, 8),
    (9 * 7, 41),
    (2 * 128, 512),
    (3 * 47, 31),
]  # functional, predicted tokens
LIGER_OPTIONS = [
    {},
    {"ignore_index": 2},
    {"ignore_index": -123},
    {"label_smoothing": 0.1},
    {"ignore_index": 1, "label_smoothing": 0.1},
    {"ignore_index": -300, "label_smoothing": 0.2},
    {"transform": Transform(softcap=30.0)},
    {"z_loss": 1e-4},
    {"z_loss": 1e-5},
    {"z_loss": 1e-4, "label_smoothing": 0.1, "ignore_index": 42},
    {"z_loss": 1e-5, "label_smoothing": 0.2, "ignore_index": -42},
    {"weight": True},
    {"weight": True, "z_loss": 1e-4, "label_smoothing": 0.1, "transform": Transform(softcap=30.0)},
    {
        "weight": True,
        "ignore_index": 42,
        "z_loss": 1e-5,
        "label_smoothing": 0.2,
        "transform": Transform(softcap=40.0),
    },
]


def name_of(options: dict) -> str:
    return "-".join(f"{k}={getattr(v, 'softcap', v)}" for k, v in options.items()) or "plain"


def liger_case(
    tokens: int, vocab: int, dtype: torch.dtype, options: dict
) -> tuple[Tensor, Tensor, dict]:
    x = leaf(torch.randn(capped(tokens, vocab), vocab).to(dtype))
    ignore_index = options.get("ignore_index", -100)
    labels = some_ignored(torch.randint(0, vocab, (len(x),)), ignore_index)
    if options.get("weight"):
        options = options | {"weight": torch.rand(vocab)}
    return x, labels, options


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("options", LIGER_OPTIONS, ids=name_of)
@pytest.mark.parametrize(("tokens", "vocab"), LIGER[1:])
def test_liger_cross_entropy(
    tokens: int, vocab: int, options: dict, reduction: str, dtype: torch.dtype
) -> None:
    x, labels, options = liger_case(tokens, vocab, dtype, options)
    # "not last layer": the upstream gradient is not 1.
    upstream = torch.randn(labels.shape) if reduction == "none" else torch.tensor(-2.5)
    check_cross_entropy(x, labels, reduction=reduction, upstream=upstream, **options)


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("options", [{}, LIGER_OPTIONS[-2]], ids=name_of)
@pytest.mark.parametrize(("tokens", "vocab"), [LIGER[0], *LIGER_SMALL])
def test_liger_cross_entropy_in_one_pass(
    tokens: int, vocab: int, options: dict, dtype: torch.dtype
) -> None:
    x, labels, options = liger_case(tokens, vocab, dtype, options)
    check_cross_entropy(x, labels, grad_in_forward=True, **options)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_liger_confident_predictions(dtype: torch.dtype, smoothing: float, reduction: str) -> None:
    """test_correctness_true_class_grad_confident_predictions: labels 10 above all others."""
    x = torch.randn(2 * 64, 4096)
    labels = torch.randint(0, 4096, (len(x),))
    x.scatter_(1, labels[:, None], x.amax(-1, keepdim=True) + 10)
    check_cross_entropy(leaf(x.to(dtype)), labels, reduction=reduction, label_smoothing=smoothing)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(
    "options", [{}, {"ignore_index": 0}, {"label_smoothing": 0.1}], ids=name_of
)
@pytest.mark.parametrize("shape", [(8, 2, 128), (16, 4, 4096), (32, 1, 32000)], ids=str)
def test_liger_megatron(shape: tuple[int, int, int], options: dict, dtype: torch.dtype) -> None:
    """test/megatron/test_cross_entropy.py: [sequence, batch, vocabulary], a loss a token."""
    sequence = capped(shape[0] * shape[1], shape[2]) // shape[1]
    x = leaf(torch.randn(sequence, *shape[1:]).to(dtype))
    labels = some_ignored(
        torch.randint(0, shape[2], x.shape[:2]), options.get("ignore_index", -100)
    )
    check_cross_entropy(x, labels, reduction="none", upstream=torch.randn(labels.shape), **options)


# -------------------------------------------------------------------------------------------------- quack
# tests/test_cross_entropy.py and test_cross_entropy_weight.py: logits 0.1 * normal, upstream normal a row.

QUACK_VOCABS = [
    192, 256, 512, 760, 1024, 1128, 2048, 4096, 8192, 16384, 32768, 65536, 128256, 131072, 256128, 262144
]  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("tokens", [1, 77, 289])
@pytest.mark.parametrize("vocab", QUACK_VOCABS)
def test_quack_cross_entropy(vocab: int, tokens: int, dtype: torch.dtype) -> None:
    if tokens > 1 and capped(289, vocab) < 77 and dtype == F16:
        tokens = 1  # the capped shape was 77's and 289's alike
    x = leaf((0.1 * torch.randn(capped(tokens, vocab), vocab)).to(dtype))
    labels = torch.randint(0, vocab, (len(x),))
    check_cross_entropy(x, labels, reduction="none", upstream=torch.randn(len(x)))


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("last_ignored", [False, True])
@pytest.mark.parametrize(("tokens", "vocab"), [(1, 192), (77, 1024), (289, 32768), (77, 128256)])
def test_quack_class_weights(
    tokens: int, vocab: int, last_ignored: bool, reduction: str, dtype: torch.dtype
) -> None:
    x = leaf((0.1 * torch.randn(capped(tokens, vocab), vocab)).to(dtype))
    labels = torch.randint(0, vocab - 1, (len(x),))
    ignore_index = vocab - 1 if last_ignored else -100
    if last_ignored:
        labels = some_ignored(labels, ignore_index, 0.3)
    check_cross_entropy(
        x,
        labels,
        weight=torch.rand(vocab) + 0.1,
        ignore_index=ignore_index,
        reduction=reduction,
        upstream=torch.randn(len(x)) if reduction == "none" else None,
    )


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("tokens", [1, 77, 289])
@pytest.mark.parametrize("vocab", [192, 1024, 32768, 128256])
def test_quack_gradient_in_forward(
    vocab: int, tokens: int, in_place: bool, dtype: torch.dtype
) -> None:
    """test_cross_entropy_fwd_with_grad_weight; in place the logits are a copy that is not looked at again."""
    x = leaf((0.1 * torch.randn(capped(tokens, vocab), vocab)).to(dtype))
    check_cross_entropy(
        x,
        torch.randint(0, vocab, (len(x),)),
        view=Tensor.clone,
        weight=torch.rand(vocab) + 0.1,
        reduction="sum",
        grad_in_forward=True,
        inplace_backward=in_place,
    )


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("what", ["10", "-10", "one-hot", "+100", "first", "last"])
def test_quack_values(what: str, dtype: torch.dtype) -> None:
    """Equal logits, one class 20 above the rest, a common offset, labels at both ends."""
    x, labels = 0.1 * torch.randn(16, 1024), torch.randint(0, 1024, (16,))
    if what in ("10", "-10"):
        x = torch.full_like(x, float(what))
    elif what == "one-hot":
        x = torch.full_like(x, -10.0).scatter_(1, labels[:, None], 10.0)
    elif what == "+100":
        x += 100
    else:
        labels = torch.full_like(labels, 0 if what == "first" else 1023)
    check_cross_entropy(leaf(x.to(dtype)), labels, reduction="none", upstream=torch.ones(16))


# ---------------------------------------------------------------------------------------------------- TRL
# tests/test_utils.py: selective_log_softmax.


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_trl_selective_log_softmax(dtype: torch.dtype) -> None:
    x = leaf(torch.randn(4, 32, 1024).to(dtype))
    labels = torch.randint(0, 1024, (4, 32))
    check_logprobs(x, labels, {"logp": torch.randn(4, 32), "entropy": torch.randn(4, 32)})


# ------------------------------------------------------------------------------------------ Liger's GRPO
# test/transformers/test_grpo_loss.py. The logits are [B, T + 1, V], of which the last position is left out.

LIGER_GRPO = [(1, 1024, 151936), (2, 128, 1000)]


def all_but_last(x: Tensor) -> Tensor:
    return x[:, :-1]


class Rollout:
    """Labels, mask, logps near the logits' own and advantages of both signs, for [B, T + 1, V] logits."""

    def __init__(
        self, batch: int, tokens: int, vocab: int, dtype: torch.dtype, temperature: float
    ) -> None:
        tokens = capped(batch * tokens, vocab) // batch
        self.x = leaf(torch.randn(batch, tokens + 1, vocab).to(dtype))
        self.labels = torch.randint(0, vocab - 1, (batch, tokens))
        z = all_but_last(self.x.detach()).float() / temperature
        logp = torch.log_softmax(z, -1).gather(-1, self.labels[..., None])[..., 0]
        self.old_logp = logp + 0.3 * torch.randn_like(logp)
        self.ref_logp = logp + 0.2 * torch.randn_like(logp)
        self.mask = torch.ones(batch, tokens, dtype=torch.int32)
        self.mask[:, tokens - tokens // 8 :] = 0
        self.advantages = torch.randn(batch)
        self.advantages[:2] = torch.tensor([-0.7, 1.3])[:batch]
        self.temperature = temperature

    def check(self, policy: Policy, *, old: bool = True, ratio: Tensor | None = None) -> None:
        check_policy(
            self.x,
            self.labels,
            self.advantages,
            view=all_but_last,
            policy=policy,
            mask=self.mask,
            old_logp=self.old_logp if old else None,
            ref_logp=self.ref_logp if policy.beta else None,
            sampler_ratio=ratio,
            temperature=self.temperature,
        )


@pytest.mark.parametrize("temperature, vocab", [(0.9, 64000), (0.7, 151936)])
def test_liger_selective_log_softmax(temperature: float, vocab: int) -> None:
    x = leaf(torch.randn(1, 5, vocab).to(BF16))
    labels = torch.randint(0, vocab - 1, (1, 4))
    check_logprobs(
        x,
        labels,
        {"logp": torch.randn(1, 4)},
        view=all_but_last,
        transform=Transform(temperature=temperature),
    )


@pytest.mark.parametrize("iterations", [1, 5])  # 1: no old_logp
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize(
    "policy",
    [
        Policy(epsilon_high=0.4),
        Policy(epsilon_high=0.4, delta=1.5),
        Policy(epsilon_high=0.4, delta=2.0),
        Policy(kind="cispo", epsilon_high=5.0, aggregation="token_mean"),
        Policy(kind="sapo"),
    ],
    ids=["grpo", "delta 1.5", "delta 2", "cispo", "sapo"],
)
@pytest.mark.parametrize("shape", LIGER_GRPO, ids=str)
def test_liger_grpo(
    shape: tuple[int, int, int], policy: Policy, beta: float, iterations: int
) -> None:
    policy = Policy(**{**vars(policy), "beta": beta})
    Rollout(*shape, BF16, 0.7).check(policy, old=iterations > 1)


AGGREGATIONS = {
    "grpo": Policy(),
    "bnpo": Policy(aggregation="token_mean"),
    "dr_grpo": Policy(aggregation="seq_mean_token_sum_norm", max_length=128),
    "dapo": Policy(aggregation="token_mean", num_items=200.0),
    "luspo": Policy(aggregation="seq_mean_token_sum", ratio_level="sequence"),
    "vespo": Policy(kind="vespo", aggregation="token_mean"),
}


@pytest.mark.parametrize("beta, importance", [(0.0, False), (0.04, False), (0.04, True)])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("delta", [None, 1.5])
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_liger_against_trl(
    name: str, delta: float | None, level: str, beta: float, importance: bool
) -> None:
    """test_grpo_loss_vs_trl: float32 logits, temperature 0.9. Its skipped pairs work here as well."""
    chosen = vars(AGGREGATIONS[name]) | {"epsilon_high": 0.4, "beta": beta}
    chosen |= {"kl_importance": importance, "ratio_level": level}
    if chosen["kind"] == "clip":
        chosen["delta"] = delta
    Rollout(2, 128, 1000, F32, 0.9).check(Policy(**chosen))


@pytest.mark.parametrize("low", [0.5, 0.001])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["clip", "cispo", "sapo"])
def test_liger_sampler_ratio(kind: str, level: str, beta: float, low: float) -> None:
    """test_grpo_loss_with_vllm_is_ratio: 0.5 to 1.5, and 0.001 to 1, a token."""
    rollout = Rollout(2, 128, 1000, BF16, 0.7)
    ratio = low + torch.rand(rollout.labels.shape) * (1 if low == 0.5 else 0.999)
    high = 5.0 if kind == "cispo" else 0.4
    rollout.check(Policy(kind=kind, ratio_level=level, beta=beta, epsilon_high=high), ratio=ratio)


# --------------------------------------------------------------------------------------------------- verl
# tests/trainer/ppo/test_core_algos_on_cpu.py: 2 sequences of 4, a normal advantage a token, any old logp.


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(
    "policy",
    [
        Policy(kind="cispo", cispo_cap="one_plus", cap_low=0.8, aggregation="token_mean"),
        Policy(dual_clip=3.0, aggregation="token_mean"),
    ],
    ids=["cispo", "dual clip"],
)
def test_verl_policy_losses(policy: Policy, dtype: torch.dtype) -> None:
    x = leaf(torch.randn(2, 4, 152).to(dtype))
    labels = torch.randint(0, 152, (2, 4))
    logp = torch.log_softmax(x.detach().float(), -1).gather(-1, labels[..., None])[..., 0]
    old = logp + torch.randn(2, 4)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    check_policy(x, labels, torch.randn(2, 4), policy=policy, mask=mask, old_logp=old)
