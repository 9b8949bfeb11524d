"""Shapes and options of other projects' own suites, of losses on logits and fused with the LM head, under our tolerances.

Those suites allow much (bfloat16 gradients to 5e-2 and more); here every component of a gradient of logits is held to about one
unit in the last place, and a product with the head to 1.5 times the error of one whose terms are rounded once (checks.py).
Where a shape is large, tokens are left out, and of the largest heads classes too; hidden sizes are never changed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from checks import check, leaf
from tileloss.torch import linear_cross_entropy

CAP = 1 << 18  # elements a case
PRODUCTS = 1 << 26  # with a head
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [BF16, F16, F32])
TWO_DTYPES = pytest.mark.parametrize("dtype", [BF16, F32])
REDUCTIONS = pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
BIAS = pytest.mark.parametrize("bias", [True, False])
Options = dict[str, Any]


def capped(tokens: int, vocab: int) -> int:
    return min(tokens, max(2, CAP // vocab))


def capped_with_head(tokens: int, hidden: int, vocab: int) -> int:
    return min(tokens, max(2, PRODUCTS // (hidden * vocab)))


def some_ignored(labels: Tensor, ignore_index: int, share: float = 0.25) -> Tensor:
    """A copy in which about `share` of the labels are ignored, the first one never."""
    ignored = torch.rand(labels.shape) < share
    ignored.view(-1)[0] = False
    if 0 <= ignore_index:
        labels = torch.where(labels == ignore_index, ignore_index + 1, labels)
    return labels.masked_fill(ignored, ignore_index)


def per_row(reduction: str, labels: Tensor) -> Tensor | None:
    """The upstream gradient of a loss a row."""
    return torch.randn(labels.shape) if reduction == "none" else None


def name_of(options: Options) -> str:
    return "-".join(f"{k}={v}" for k, v in options.items()) or "plain"


def normal(dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    return leaf((scale * torch.randn(shape)).to(dtype))


# ------------------------------------------------------------------------------------------------ PyTorch
# module_inputs_torch_nn_CrossEntropyLoss and sample_inputs_cross_entropy in torch.testing: the class is
# dimension 1 there, so that our [..., V] is a view whose last stride is not 1.

TORCH_SHAPES = [
    (3,), (2, 3), (2, 3, 5), (2, 3, 5, 5), (2, 3, 5, 5, 2, 2), (2, 3, 1), (2, 3, 1, 2), (2, 3, 1, 2, 3)
]  # fmt: skip
TORCH_OPTIONS: list[Options] = [
    {},
    {"weight": torch.tensor([0.5, 2.0, 1.25])},
    {"ignore_index": 1},
    {"label_smoothing": 0.15},
    {"ignore_index": 1, "label_smoothing": 0.15},
]


def class_last(x: Tensor) -> Tensor:
    return x if x.dim() == 1 else x.movedim(1, -1)


@REDUCTIONS
@pytest.mark.parametrize("options", TORCH_OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("shape", TORCH_SHAPES, ids=str)
def test_torch_cross_entropy(shape: tuple[int, ...], options: Options, reduction: str) -> None:
    x = normal(F32, *shape, scale=9)
    labels = torch.randint(0, 3, class_last(x).shape[:-1])
    if "ignore_index" in options and (labels == 1).all():
        labels.view(-1)[0] = 2  # an ignored batch has a mean of 0 here and of NaN in torch
    upstream = per_row(reduction, labels)
    given = {"reduction": reduction, "upstream": upstream, "view": class_last, **options}
    check("cross_entropy", x, labels, **given)


# module_inputs_torch_nn_LinearCrossEntropyLoss and sample_inputs_linear_cross_entropy.
@DTYPES
@REDUCTIONS
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
    bias = normal(F32, vocab) if shape == (8, 5, 4) else None
    check(
        "linear_cross_entropy",
        (normal(dtype, tokens, hidden), normal(dtype, vocab, hidden), bias),
        labels,
        weight=torch.exp(torch.randn(vocab)) if weighted else None,
        ignore_index=ignore_index,
        label_smoothing=smoothing,
        reduction=reduction,
        upstream=per_row(reduction, labels),
    )


@DTYPES
@pytest.mark.parametrize("peaked", [False, True])
def test_torch_large_logits(peaked: bool, dtype: torch.dtype) -> None:
    """A bias of 256 on all classes; a head of -8 to 8 whose largest logit is the label's."""
    hidden = (2 * torch.rand(16, 8) - 1) * (9 if peaked else 1)
    head = (2 * torch.rand(64, 8) - 1) * (8 if peaked else 1)
    hidden, head = leaf(hidden.to(dtype)), leaf(head.to(dtype))
    labels = (hidden.detach().float() @ head.detach().float().T).argmax(1)
    bias = None if peaked else leaf(torch.full((64,), 256.0))
    check("linear_cross_entropy", (hidden, head, bias), labels)


def test_torch_all_ignored() -> None:
    """512 tokens, H 16, V 128, every label ignored: gradients of 0, and a mean of 0 (torch's is NaN)."""
    hidden, head = normal(F32, 512, 16), normal(F32, 128, 16)
    for reduction in ("mean", "sum", "none"):
        loss = linear_cross_entropy(
            hidden, head, torch.full((512,), -1), ignore_index=-1, reduction=reduction
        )
        loss.sum().backward()
        assert (loss == 0).all()
    assert (hidden.grad == 0).all()
    assert (head.grad == 0).all()


# -------------------------------------------------------------------------------------------------- Liger
# test/transformers/test_cross_entropy.py: (2, 4096, 32000) and (3, 423, 32000), standard normal logits,
# bfloat16 and float32; functional: predicted tokens.

LIGER = [(2 * 4096, 32000), (3 * 423, 32000)]
LIGER_SMALL = [(2 * 2, 8), (9 * 7, 41), (2 * 128, 512), (3 * 47, 31)]
LIGER_OPTIONS: list[Options] = [
    {},
    {"ignore_index": 2},
    {"ignore_index": -123},
    {"label_smoothing": 0.1},
    {"ignore_index": 1, "label_smoothing": 0.1},
    {"ignore_index": -300, "label_smoothing": 0.2},
    {"softcap": 30.0},
    {"z_loss": 1e-4},
    {"z_loss": 1e-5},
    {"z_loss": 1e-4, "label_smoothing": 0.1, "ignore_index": 42},
    {"z_loss": 1e-5, "label_smoothing": 0.2, "ignore_index": -42},
    {"weight": True},
    {"weight": True, "z_loss": 1e-4, "label_smoothing": 0.1, "softcap": 30.0},
    {
        "weight": True,
        "ignore_index": 42,
        "z_loss": 1e-5,
        "label_smoothing": 0.2,
        "softcap": 40.0,
    },
]


def check_liger(
    tokens: int, vocab: int, dtype: torch.dtype, options: Options, upstream: bool = True
) -> None:
    x = normal(dtype, capped(tokens, vocab), vocab)
    labels = torch.randint(0, vocab, (len(x),))
    labels = some_ignored(labels, options.get("ignore_index", -100))
    if options.get("weight"):
        options = options | {"weight": torch.rand(vocab)}
    if upstream:  # "not last layer": the upstream gradient is not 1
        given = per_row(options["reduction"], labels)
        options = options | {"upstream": torch.tensor(-2.5) if given is None else given}
    check("cross_entropy", x, labels, **options)


@TWO_DTYPES
@REDUCTIONS
@pytest.mark.parametrize("options", LIGER_OPTIONS, ids=name_of)
@pytest.mark.parametrize(("tokens", "vocab"), LIGER[1:])
def test_liger_cross_entropy(
    tokens: int, vocab: int, options: Options, reduction: str, dtype: torch.dtype
) -> None:
    check_liger(tokens, vocab, dtype, options | {"reduction": reduction})


@DTYPES
@pytest.mark.parametrize("options", [{}, LIGER_OPTIONS[-2]], ids=name_of)
@pytest.mark.parametrize(("tokens", "vocab"), [LIGER[0], *LIGER_SMALL])
def test_liger_cross_entropy_in_one_pass(
    tokens: int, vocab: int, options: Options, dtype: torch.dtype
) -> None:
    check_liger(tokens, vocab, dtype, options | {"grad_in_forward": True}, upstream=False)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_liger_confident_predictions(dtype: torch.dtype, smoothing: float, reduction: str) -> None:
    """test_correctness_true_class_grad_confident_predictions: labels 10 above all others."""
    x = torch.randn(2 * 64, 4096)
    labels = torch.randint(0, 4096, (len(x),))
    x.scatter_(1, labels[:, None], x.amax(-1, keepdim=True) + 10)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    check("cross_entropy", leaf(x.to(dtype)), labels, **options)


@TWO_DTYPES
@pytest.mark.parametrize(
    "options", [{}, {"ignore_index": 0}, {"label_smoothing": 0.1}], ids=name_of
)
@pytest.mark.parametrize("shape", [(8, 2, 128), (16, 4, 4096), (32, 1, 32000)], ids=str)
def test_liger_megatron(shape: tuple[int, int, int], options: Options, dtype: torch.dtype) -> None:
    """test/megatron/test_cross_entropy.py: [sequence, batch, vocabulary], a loss a token."""
    sequence = capped(shape[0] * shape[1], shape[2]) // shape[1]
    x = normal(dtype, sequence, *shape[1:])
    labels = torch.randint(0, shape[2], x.shape[:2])
    labels = some_ignored(labels, options.get("ignore_index", -100))
    check(
        "cross_entropy", x, labels, reduction="none", upstream=torch.randn(labels.shape), **options
    )


# test/transformers/test_fused_linear_cross_entropy.py: heads of rand (all logits of a row lie far from 0,
# close together), standard normal hidden states.
@DTYPES
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@BIAS
@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing": 0.1, "ignore_index": 42, "z_loss": 1e-4, "softcap": 30.0}],
    ids=["plain", "all options"],
)
@pytest.mark.parametrize(("tokens", "hidden", "vocab"), [(8 * 128, 1024, 4096), (4 * 47, 31, 123)])
def test_liger_linear(
    tokens: int,
    hidden: int,
    vocab: int,
    options: Options,
    bias: bool,
    reduction: str,
    dtype: torch.dtype,
) -> None:
    tokens = capped_with_head(tokens, hidden, vocab)
    labels = some_ignored(torch.randint(0, vocab, (tokens,)), options.get("ignore_index", -100))
    head, added = leaf(torch.rand(vocab, hidden).to(dtype)), leaf(torch.rand(vocab))
    check(
        "linear_cross_entropy",
        (normal(dtype, tokens, hidden), head, added if bias else None),
        labels,
        weight=torch.rand(vocab) if options else None,
        reduction=reduction,
        **options,
    )


# -------------------------------------------------------------------------------------------------- quack
# tests/test_cross_entropy.py and test_cross_entropy_weight.py: logits 0.1 * normal, upstream normal a row.

QUACK_VOCABS = [
    192, 256, 512, 760, 1024, 1128, 2048, 4096, 8192, 16384, 32768, 65536, 128256, 131072, 256128, 262144
]  # fmt: skip


@DTYPES
@pytest.mark.parametrize("tokens", [1, 77, 289])
@pytest.mark.parametrize("vocab", QUACK_VOCABS)
def test_quack_cross_entropy(vocab: int, tokens: int, dtype: torch.dtype) -> None:
    if tokens > 1 and capped(289, vocab) < 77 and dtype == F16:
        tokens = 1  # the capped shape was 77's and 289's alike
    x = normal(dtype, capped(tokens, vocab), vocab, scale=0.1)
    labels = torch.randint(0, vocab, (len(x),))
    check("cross_entropy", x, labels, reduction="none", upstream=torch.randn(len(x)))


@DTYPES
@REDUCTIONS
@pytest.mark.parametrize("last_ignored", [False, True])
@pytest.mark.parametrize(("tokens", "vocab"), [(1, 192), (77, 1024), (289, 32768), (77, 128256)])
def test_quack_class_weights(
    tokens: int, vocab: int, last_ignored: bool, reduction: str, dtype: torch.dtype
) -> None:
    x = normal(dtype, capped(tokens, vocab), vocab, scale=0.1)
    labels = torch.randint(0, vocab - 1, (len(x),))
    ignore_index = vocab - 1 if last_ignored else -100
    if last_ignored:
        labels = some_ignored(labels, ignore_index, 0.3)
    check(
        "cross_entropy",
        x,
        labels,
        weight=torch.rand(vocab) + 0.1,
        ignore_index=ignore_index,
        reduction=reduction,
        upstream=per_row(reduction, labels),
    )


@DTYPES
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("tokens", [1, 77, 289])
@pytest.mark.parametrize("vocab", [192, 1024, 32768, 128256])
def test_quack_gradient_in_forward(
    vocab: int, tokens: int, in_place: bool, dtype: torch.dtype
) -> None:
    """test_cross_entropy_fwd_with_grad_weight; in place the logits are a copy that is not looked at again."""
    x = normal(dtype, capped(tokens, vocab), vocab, scale=0.1)
    labels = torch.randint(0, vocab, (len(x),))
    modes = {"grad_in_forward": True, "inplace_backward": in_place, "reduction": "sum"}
    check("cross_entropy", x, labels, view=Tensor.clone, weight=torch.rand(vocab) + 0.1, **modes)


@DTYPES
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
    check("cross_entropy", leaf(x.to(dtype)), labels, reduction="none", upstream=torch.ones(16))


# --------------------------------------------------------------------------------- Apple's cut cross-entropy
# tests/test_cce_loss_forward.py and test_cce_loss_backward.py: (tokens, V, H), in 4 sequences; half of the
# head's rows are hidden states, so that some labels are confident.

CCE = [(256, 512, 128), (252, 507, 128), (252, 507, 123)]


def cce_inputs(
    shape: tuple[int, int, int], dtype: torch.dtype, bias: bool, invalids: bool
) -> tuple[list[Tensor], Tensor]:
    tokens, vocab, width = shape
    hidden = (torch.randn(tokens, width) / width**0.5).to(dtype)
    head = torch.randn(vocab, width).to(dtype)
    half = min(tokens, vocab) // 2
    head[:half] = hidden[:half]
    labels = torch.randint(0, vocab, (tokens,))
    if invalids:
        labels = some_ignored(labels, -100, 0.2)
    leaves = [leaf(hidden.view(4, -1, width)), leaf(head)]
    return leaves + [normal(F32, vocab, scale=0.02)] * bias, labels.view(4, -1)


@DTYPES
@pytest.mark.parametrize("softcap", [0.0, 20.0])
@BIAS
@pytest.mark.parametrize("shift", [0, 1, 2])
@REDUCTIONS
@pytest.mark.parametrize("shape", CCE, ids=str)
def test_cce(
    shape: tuple[int, int, int],
    reduction: str,
    shift: int,
    bias: bool,
    softcap: float,
    dtype: torch.dtype,
) -> None:
    leaves, labels = cce_inputs(shape, dtype, bias, invalids=shift != 1)
    labels = labels[:, shift:]
    count = (labels != -100).sum()
    upstream = {"none": torch.full(labels.shape, 1 / labels.numel()), "sum": 1 / count}
    check(
        "linear_cross_entropy",
        leaves,
        labels,
        softcap=softcap,
        reduction=reduction,
        view=lambda x: x[:, : x.shape[1] - shift],
        upstream=upstream.get(reduction),
        # A gradient that the forward made and rounded would be rounded again by that upstream gradient.
        grad_in_forward=reduction == "mean",
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


@TWO_DTYPES
@pytest.mark.parametrize(("tokens", "hidden", "vocab"), VERL)
def test_verl(tokens: int, hidden: int, vocab: int, dtype: torch.dtype) -> None:
    vocab, tokens = vocab // 64, min(4, tokens)
    leaves = [
        leaf((torch.rand(shape) - 0.5).to(dtype))
        for shape in ((1, tokens, hidden), (vocab, hidden))
    ]
    labels = torch.randint(0, vocab, (1, tokens))
    upstream = {"logp": 2 * torch.rand(1, tokens) - 1, "entropy": torch.rand(1, tokens) - 0.5}
    given = {"outputs": ("logp", "entropy"), "upstream": upstream, "temperature": 1.5}
    check("linear_logprobs", leaves, labels, **given)
