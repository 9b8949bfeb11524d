"""Shapes and options of other projects' own suites for losses fused with the LM head, under our metric: at most
1.5 times the error of an implementation that rounds each dlogit once and is exact otherwise.

Where a shape is large, tokens are left out, and of the largest heads classes too: CAP products a case, so
that the whole file takes some 20 s on one core. Hidden sizes are never changed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from checks import leaf
from linear_checks import check_linear_cross_entropy, check_linear_logprobs, check_linear_policy
from oracle import Policy, Transform
from test_third_party_shapes import some_ignored
from tileloss.torch import linear_cross_entropy

CAP = 1 << 26
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def capped(tokens: int, hidden: int, vocab: int) -> int:
    return min(tokens, max(2, CAP // (hidden * vocab)))


# ------------------------------------------------------------------------------------------------ PyTorch
# module_inputs_torch_nn_LinearCrossEntropyLoss and sample_inputs_linear_cross_entropy in torch.testing.


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("ignore_index", [-100, 1, 9])  # (C - 1) // 2 and C + 5
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(8, 5, 4), (1, 8, 4), (8, 3, 4), (8, 8, 8)], ids=str)
def test_torch_linear(
    shape: tuple[int, int, int],
    weighted: bool,
    smoothing: float,
    ignore_index: int,
    reduction: str,
    dtype: torch.dtype,
) -> None:
    tokens, hidden, vocab = shape
    labels = torch.randint(0, vocab, (tokens,))
    if ignore_index < vocab:
        labels = some_ignored(labels, ignore_index)
    check_linear_cross_entropy(
        leaf(torch.randn(tokens, hidden).to(dtype)),
        leaf(torch.randn(vocab, hidden).to(dtype)),
        labels,
        leaf(torch.randn(vocab)) if shape == (8, 5, 4) else None,
        class_weights=torch.exp(torch.randn(vocab)) if weighted else None,
        ignore_index=ignore_index,
        label_smoothing=smoothing,
        reduction=reduction,
        upstream=torch.randn(tokens) if reduction == "none" else None,
    )


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("peaked", [False, True])
def test_torch_large_logits(peaked: bool, dtype: torch.dtype) -> None:
    """A bias of 256 on all classes; a head of -8 to 8 whose largest logit is the label's."""
    hidden = (2 * torch.rand(16, 8) - 1) * (9 if peaked else 1)
    head = (2 * torch.rand(64, 8) - 1) * (8 if peaked else 1)
    hidden, head = leaf(hidden.to(dtype)), leaf(head.to(dtype))
    labels = (hidden.detach().float() @ head.detach().float().T).argmax(1)
    bias = None if peaked else leaf(torch.full((64,), 256.0))
    check_linear_cross_entropy(hidden, head, labels, bias)


def test_torch_all_ignored() -> None:
    """512 tokens, H 16, V 128, every label ignored: gradients of 0, and a mean of 0 (torch's is NaN)."""
    hidden, head = leaf(torch.randn(512, 16)), leaf(torch.randn(128, 16))
    for reduction in ("mean", "sum", "none"):
        loss = linear_cross_entropy(
            hidden, head, torch.full((512,), -1), ignore_index=-1, reduction=reduction
        )
        loss.sum().backward()
        assert (loss == 0).all()
    assert (hidden.grad == 0).all()
    assert (head.grad == 0).all()


# -------------------------------------------------------------------------------------------------- Liger
# test/transformers/test_fused_linear_cross_entropy.py: heads of rand (all logits of a row lie far from 0,
# close together), standard normal hidden states.

LIGER = [(8 * 128, 1024, 4096), (4 * 47, 31, 123)]
ALL_OPTIONS = {
    "label_smoothing": 0.1,
    "ignore_index": 42,
    "z_loss": 1e-4,
    "transform": Transform(softcap=30.0),
}


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("options", [{}, ALL_OPTIONS], ids=["plain", "all options"])
@pytest.mark.parametrize(("tokens", "hidden", "vocab"), LIGER)
def test_liger_linear(
    tokens: int,
    hidden: int,
    vocab: int,
    options: dict,
    bias: bool,
    reduction: str,
    dtype: torch.dtype,
) -> None:
    tokens = capped(tokens, hidden, vocab)
    labels = some_ignored(torch.randint(0, vocab, (tokens,)), options.get("ignore_index", -100))
    check_linear_cross_entropy(
        leaf(torch.randn(tokens, hidden).to(dtype)),
        leaf(torch.rand(vocab, hidden).to(dtype)),
        labels,
        leaf(torch.rand(vocab)) if bias else None,
        class_weights=torch.rand(vocab) if options else None,
        reduction=reduction,
        **options,
    )


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(2 * 2, 8, 8), (9 * 7, 41, 41)], ids=str)
def test_liger_functional(
    shape: tuple[int, int, int], bias: bool, weighted: bool, dtype: torch.dtype
) -> None:
    """Class weights there are normal; of both signs they may sum to about 0, so here they are not."""
    tokens, hidden, vocab = shape
    check_linear_cross_entropy(
        leaf(torch.randn(tokens, hidden).to(dtype)),
        leaf(torch.randn(vocab, hidden).to(dtype)),
        torch.randint(0, vocab, (tokens,)),
        leaf(torch.randn(vocab)) if bias else None,
        class_weights=torch.rand(vocab) + 0.1 if weighted else None,
        z_loss=1e-4,
        label_smoothing=0.1,
        transform=Transform(softcap=30.0),
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(2 * 16, 32, 64), (32, 64, 128)], ids=str)
def test_liger_a_gradient_per_token(shape: tuple[int, int, int], bias: bool) -> None:
    tokens, hidden, vocab = shape
    check_linear_cross_entropy(
        leaf(0.1 * torch.randn(tokens, hidden)),
        leaf(0.1 * torch.randn(vocab, hidden)),
        torch.randint(0, vocab, (tokens,)),
        leaf(0.1 * torch.randn(vocab)) if bias else None,
        reduction="none",
        upstream=torch.rand(tokens) + 0.5,
    )


# --------------------------------------------------------------------------------- Apple's cut cross-entropy
# tests/test_cce_loss_forward.py and test_cce_loss_backward.py: (tokens, V, H), in 4 sequences; half of the
# head's rows are hidden states, so that some labels are confident.

CCE = [(256, 512, 128), (252, 507, 128), (252, 507, 123)]


def cce_inputs(
    shape: tuple[int, int, int], dtype: torch.dtype, bias: bool, invalids: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    tokens, vocab, width = shape
    hidden = (torch.randn(tokens, width) / width**0.5).to(dtype)
    head = torch.randn(vocab, width).to(dtype)
    half = min(tokens, vocab) // 2
    head[:half] = hidden[:half]
    labels = torch.randint(0, vocab, (tokens,))
    if invalids:
        labels = some_ignored(labels, -100, 0.2)
    offset = leaf(0.02 * torch.randn(vocab)) if bias else None
    return leaf(hidden.view(4, -1, width)), leaf(head), labels.view(4, -1), offset


def without_last(count: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x[:, : x.shape[1] - count]


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shape", CCE, ids=str)
def test_cce(
    shape: tuple[int, int, int],
    reduction: str,
    shift: int,
    bias: bool,
    softcap: float,
    dtype: torch.dtype,
) -> None:
    hidden, head, labels, offset = cce_inputs(shape, dtype, bias, invalids=shift != 1)
    labels = labels[:, shift:]
    count = (labels != -100).sum()
    check_linear_cross_entropy(
        hidden,
        head,
        labels,
        offset,
        transform=Transform(softcap=softcap),
        reduction=reduction,
        shift=without_last(shift),
        upstream={"none": torch.full(labels.shape, 1 / labels.numel()), "sum": 1 / count}.get(
            reduction
        ),
        # A gradient that the forward made and rounded would be rounded again by that upstream gradient.
        grad_in_forward=reduction == "mean",
    )


@pytest.mark.parametrize(
    "wanted", [(True, False, True), (False, True, False), (False, False, True)]
)
def test_cce_partial_gradients(wanted: tuple[bool, bool, bool]) -> None:
    hidden, head, labels, offset = cce_inputs(CCE[0], BF16, True, False)
    assert offset is not None
    for tensor, needed in zip((hidden, head, offset), wanted, strict=True):
        tensor.requires_grad_(needed)
    check_linear_cross_entropy(hidden, head, labels, offset)


# ---------------------------------------------------------------------------------------------------- TRL
# tests/test_utils.py: TestChunkedLogProbFunction.


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy", [False, True])
def test_trl_chunked(entropy: bool, temperature: float, dtype: torch.dtype) -> None:
    upstream = {"logp": torch.ones(64)} | ({"entropy": torch.randn(64)} if entropy else {})
    check_linear_logprobs(
        leaf(torch.randn(64, 32).to(dtype)),
        leaf(torch.randn(128, 32).to(dtype)),
        torch.randint(0, 128, (64,)),
        upstream,
        transform=Transform(temperature=temperature),
    )


# --------------------------------------------------------------------------------------------------- verl
# tests/utils/test_linear_cross_entropy.py: uniform operands, temperature 1.5, gradients of logp and entropy.
# The heads have 3e8 elements and more there: a 64th of the classes, and 4 tokens.

VERL = [
    (1937, 3584, 152064),
    (2169, 896, 151936),
    (1530, 2048, 32256),
    (1388, 4096, 102400),
    (8192, 4096, 102400),
]


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(("tokens", "hidden", "vocab"), VERL)
def test_verl(tokens: int, hidden: int, vocab: int, dtype: torch.dtype) -> None:
    vocab //= 64
    tokens = min(4, tokens)

    def uniform(*shape: int) -> Tensor:
        return leaf((torch.rand(shape) - 0.5).to(dtype))

    upstream = {"logp": 2 * torch.rand(1, tokens) - 1, "entropy": torch.rand(1, tokens) - 0.5}
    check_linear_logprobs(
        uniform(1, tokens, hidden),
        uniform(vocab, hidden),
        torch.randint(0, vocab, (1, tokens)),
        upstream,
        transform=Transform(temperature=1.5),
    )


# ------------------------------------------------------------------------------------------ Liger's GRPO
# test/chunked_loss/test_grpo_loss.py.

KINDS = {
    "bnpo": Policy(aggregation="token_mean"),
    "grpo": Policy(),
    "dr_grpo": Policy(aggregation="seq_mean_token_sum_norm"),
    "dapo": Policy(aggregation="token_mean"),
    "cispo": Policy(kind="cispo", aggregation="token_mean", epsilon_high=2.0),
    "sapo": Policy(kind="sapo"),
    "luspo": Policy(aggregation="seq_mean_token_sum", ratio_level="sequence"),
    "vespo": Policy(kind="vespo", aggregation="token_mean"),
}


@pytest.mark.parametrize("dtype", [BF16, F32])
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
    chosen = vars(KINDS[name]) | {"ratio_level": level, "beta": beta, "epsilon_low": epsilon}
    if chosen["kind"] == "clip":
        chosen |= {"delta": delta, "epsilon_high": epsilon}
    check_rollout(Policy(**chosen), (3, 47, 31, 123), dtype, temperature, bias, ref, old)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("name", ["grpo", "dapo"])
@pytest.mark.parametrize(
    "shape", [(8, 128, 1024, 4096), (1, 4096, 256, 5000), (3, 17, 31, 123)], ids=str
)
def test_liger_chunked_grpo_shapes(
    shape: tuple[int, int, int, int], name: str, dtype: torch.dtype
) -> None:
    policy = Policy(**(vars(KINDS[name]) | {"beta": 0.04}))
    check_rollout(policy, shape, dtype, 0.9, bias=True, ref=True, old=True)


def check_rollout(
    policy: Policy,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    temperature: float,
    bias: bool,
    ref: bool,
    old: bool,
) -> None:
    """Old and reference logps within 0.01 of the policy's own, half of the tokens masked at random."""
    batch, tokens, width, vocab = shape
    tokens = max(1, capped(batch * tokens, width, vocab) // batch)
    hidden = leaf(torch.randn(batch, tokens, width).to(dtype))
    head = leaf(torch.randn(vocab, width).to(dtype))
    offset = leaf(torch.randn(vocab)) if bias else None
    labels = torch.randint(0, vocab, (batch, tokens))
    logits = hidden.detach().float() @ head.detach().float().T
    logits = logits if offset is None else logits + offset.detach()
    logp = torch.log_softmax(logits / temperature, -1).gather(-1, labels[..., None])[..., 0]
    advantages = torch.randn(batch)
    advantages[0] = -advantages[0].abs()
    check_linear_policy(
        hidden,
        head,
        labels,
        advantages,
        offset,
        policy=policy,
        mask=torch.rand(batch, tokens) < 0.75,
        old_logp=logp + 0.01 * torch.randn(logp.shape) if old else None,
        ref_logp=logp + 0.01 * torch.randn(logp.shape) if ref else None,
        temperature=temperature,
    )
