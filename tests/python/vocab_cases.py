"""What every rank of vocab_ranks.py runs: each case against tileloss.torch on the same tensors in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tileloss import torch as tl
from vocab_cut import Whole

B, T, H = 2, 7, 5
ROWS = ("logp", "lse", "entropy", "argmax", "correct", "log_sum_sq_probs", "mean_logit")
OF_SEVERAL = ("logp", "lse", "entropy", "argmax", "mean_logit")
Found = dict[str, Tensor]


@dataclass
class Case:
    function: str
    options: dict[str, Any] = field(default_factory=dict)
    vocab: int = 64
    dtype: torch.dtype = torch.float32
    bias: bool = False
    low_rank: bool = False
    per_row: int = 0  # labels [..., K], some of them twice, empty slots, and a row whose labels lie together; 0: [...]
    uneven: bool = False
    change: Callable[[Tensor], None] | None = None  # of the logits

    def tensors(self) -> tuple[list[Tensor], Tensor]:
        """Leaves (logits, or hidden, head and bias), and labels, some of which do not count."""
        torch.manual_seed(0)
        v = self.vocab
        shapes = [(B, T, H), (v, H), (v,)] if "linear" in self.function else [(B, T, v)]
        leaves = [torch.randn(shape).to(self.dtype) for shape in shapes]
        if "linear" in self.function and not self.bias:
            leaves.pop()
        if self.low_rank:
            leaves += [torch.randn(shape).to(self.dtype) for shape in ((B, T, 3), (v, 3))]
        if self.change is not None:
            self.change(leaves[0])
        labels = torch.randint(0, self.options.get("valid_vocab", v), (B, T, self.per_row or 1))
        if self.per_row > 1:
            labels[0, 3:5, 1] = labels[0, 3:5, 0]
            labels[1, ::2, 0] = labels[0, 6, 1:] = -100
            labels[1, 3] = 20 + torch.arange(self.per_row) % 5
        if not self.per_row:
            labels = labels[..., 0]
        labels[0, 2] = -100
        return [x.requires_grad_() for x in leaves], labels

    def run(self, function: Callable[..., Any]) -> tuple[Found, Found]:
        """What it gives, and the gradients of a scalar in which every number has a weight of its own."""
        leaves, given = self.tensors()
        labels: Tensor | None = given
        heads = leaves[:2] if "linear" in self.function else leaves
        options = dict(self.options)
        if options.pop("sets", False):
            is_in = torch.rand(B, T, self.vocab) < 0.4
            is_in.scatter_(-1, given.clamp(min=0).view(B, T, -1)[..., :3], True)
            options["allowed"] = tl.allowed_from(is_in)
        if self.bias:
            options["linear_bias"] = leaves[2]
        if self.low_rank:
            options["low_rank"] = tuple(leaves[-2:])
        if self.function.endswith("policy_loss"):
            torch.manual_seed(5)
            advantages = torch.tensor([1.0, -0.7])
            for name in ("old_logp", "ref_logp", "sampler_logp"):
                if options.pop(name, False):
                    options[name] = torch.randn(B, T) / 4 - 4
            result = function(*heads, labels, advantages, **options)
        elif self.function.endswith("distillation"):
            if not options.pop("labels", True):
                labels = None
            result = function(*heads, *self.teacher(), labels, **options)
        elif options.pop("probabilities", False):
            (teacher,) = self.teacher(False)
            result = function(*heads, (2 * teacher.float()).softmax(-1), **options)
        else:
            result = function(*heads, labels, **options)
        found = named(result)
        total = sum(
            (torch.linspace(0.5, 2, x.numel()).view(x.shape) * x.float()).sum()
            for x in found.values()
            if x.requires_grad
        )
        assert isinstance(total, Tensor)
        total.backward()
        gradients = {f"d{number}": x.grad for number, x in enumerate(leaves) if x.grad is not None}
        assert len(gradients) == len(leaves)
        return {name: x.detach() for name, x in found.items()}, gradients

    def teacher(self, is_linear: bool | None = None) -> list[Tensor]:
        torch.manual_seed(11)
        linear = "linear" in self.function if is_linear is None else is_linear
        shapes = [(B, T, H + 2), (self.vocab, H + 2)] if linear else [(B, T, self.vocab)]
        return [torch.randn(shape).to(self.dtype) for shape in shapes]

    def widths(self, count: int) -> list[int] | None:
        """Of uneven shards the second is empty, if there are three."""
        if not self.uneven:
            return None
        widths = [self.vocab // (2 * count)] * count
        if count > 2:
            widths[1] = 0
        widths[-1] += self.vocab - sum(widths)
        return widths

    def check(self, count: int, of_one_process: tuple[Found, Found]) -> tuple[Found, Found]:
        """Of the vocabulary cut over the ranks: as `run`, once it was compared with one process."""
        cut, gradients = self.run(Whole(self.function, self.widths(count)))
        whole, expected = of_one_process
        coarse = self.dtype != torch.float32
        for name, value in whole.items():
            torch.testing.assert_close(
                cut[name], value, rtol=2e-5, atol=2e-6, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )  # fmt: skip
        for name, exact in expected.items():
            largest = float(exact.float().nan_to_num().abs().max())
            torch.testing.assert_close(
                gradients[name].float(),
                exact.float(),
                rtol=2**-7 if coarse else 2e-5,
                atol=(2**-8 if coarse else 2e-6) * largest,
                equal_nan=True,
                msg=lambda m, n=name: f"{n}: {m}",
            )
        return cut, gradients


def named(result: Any) -> Found:
    if isinstance(result, Tensor):
        return {"loss": result}
    if isinstance(result, tl.RowOutputs):
        return {name: x for name, x in result._asdict().items() if x is not None}
    loss, more = result
    if isinstance(more, tl.DistillationRows):
        return {"loss": loss, **{n: x for n, x in more._asdict().items() if x is not None}}
    return {"loss": loss, **more}


def put_specials(x: Tensor) -> None:
    x[0, 0, 3] = float("nan")
    x[0, 1, :40] = float("-inf")
    x[1, 0, 17] = float("inf")
    x[1, 1] = float("-inf")


def class_weights(classes: int) -> Tensor:
    return torch.linspace(0.5, 2, classes)


POLICIES: dict[str, dict[str, Any]] = {
    "grpo": {"preset": "grpo", "return_metrics": True, "old_logp": True},
    "gspo, entropy": {"preset": "gspo", "old_logp": True, "entropy_coef": 0.1},
    "quantile": {"preset": "dapo", "epsilon_high": 0.28, "old_logp": True, "entropy_quantile": 0.6},
    "vespo": {"preset": "vespo", "old_logp": True},
    "KL, per token": {
        "aggregation": "none", "beta": 0.1, "old_logp": True, "ref_logp": True,
        "sampler_logp": True, "sampler_correction": "truncate", "sampler_max": 2.0,
    },
}  # fmt: skip
CROSS_ENTROPIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 9.0},
    "per row": {"reduction": "none", "temperature": torch.tensor([1.3]), "valid_vocab": 60,
                "mask": torch.arange(B * T).view(B, T) % 3 > 0},
    # Of eight shards the last two hold nothing but padding.
    "padded": {"valid_vocab": 43, "label_smoothing": 0.1, "weight": class_weights(43)},
    "weighted": {
        "weight": class_weights(64), "token_weights": torch.linspace(0, 1, B * T), "num_items": 7.0,
        "reduction": "mean", "temperature": 0.7, "temperature_on": "logprob",
    },
}  # fmt: skip
PAIR_ROWS = ("divergence", "entropy", "teacher_entropy", "agreement", "logp", "lse")
DISTILLATIONS: dict[str, dict[str, Any]] = {
    "plain": {"labels": False},
    "jsd, padded": {"divergence": "jsd", "beta": 0.3, "valid_vocab": 43, "softcap": 6.0, "outputs": PAIR_ROWS},
    "mixed": {
        "divergence": "reverse_kl", "label_weight": 0.3, "divergence_weight": 0.7, "temperature": 2.0, "label_temperature": 0.8,
        "scale_by_temperature_squared": True, "teacher_softcap": 9.0, "outputs": ("teacher_entropy",),
    },
    "per row": {
        "divergence": "skew_forward_kl", "reduction": "none", "label_weight": torch.tensor([0.2]),
        "divergence_weight": torch.tensor([0.8]),
        "mask": torch.arange(B * T).view(B, T) % 3 > 0,
    },
}  # fmt: skip
SOFT_LABELS: dict[str, dict[str, Any]] = {
    "plain": {"probabilities": True},
    "smoothed": {
        "probabilities": True, "label_smoothing": 0.1, "weight": class_weights(64), "softcap": 9.0,
    },
}  # fmt: skip
# By function: what makes it look at the number of tokens of a row.
WITH_SETS: dict[str, dict[str, Any]] = {
    "cross_entropy": {"label_smoothing": 0.1, "z_loss": 0.1, "weight": class_weights(512)},
    "linear_cross_entropy": {"label_smoothing": 0.1, "valid_vocab": 500},
    "logprobs": {"outputs": ROWS},
    "linear_logprobs": {"outputs": ROWS},
    "policy_loss": {"old_logp": True, "entropy_coef": 0.1},
    "distillation": {"divergence": "jsd"},
}
CASES: dict[str, Case] = {
    **{f"{f}, sets": Case(f, {**o, "sets": True}, vocab=512) for f, o in WITH_SETS.items()},
    **{f"distillation, {n}": Case("distillation", o) for n, o in DISTILLATIONS.items()},
    "distillation, bfloat16": Case("distillation", dtype=torch.bfloat16),
    "distillation, uneven": Case("distillation", vocab=61, uneven=True),
    "distillation, specials": Case("distillation", {"reduction": "none"}, change=put_specials),
    **{
        f"linear_distillation, {n}": Case("linear_distillation", o)
        for n, o in DISTILLATIONS.items()
    },
    "linear_distillation, bfloat16": Case(
        "linear_distillation", vocab=4096, bias=True, dtype=torch.bfloat16
    ),
    **{
        f"{f}, soft labels, {n}": Case(f, o)
        for n, o in SOFT_LABELS.items()
        for f in ("cross_entropy", "linear_cross_entropy")
    },
    **{f"cross_entropy, {n}": Case("cross_entropy", o) for n, o in CROSS_ENTROPIES.items()},
    "cross_entropy, bfloat16": Case("cross_entropy", dtype=torch.bfloat16),
    "cross_entropy, uneven": Case("cross_entropy", vocab=61, uneven=True),
    "cross_entropy, specials": Case("cross_entropy", {"reduction": "none"}, change=put_specials),
    "logprobs": Case("logprobs", {"outputs": ROWS, "valid_vocab": 43}),
    "logprobs, specials": Case("logprobs", {"outputs": ROWS}, change=put_specials),
    "logprobs, uneven": Case("logprobs", {"outputs": ROWS}, vocab=61, uneven=True),
    **{
        f"{f}, {k} labels": Case(f, {"outputs": OF_SEVERAL, "valid_vocab": 43}, per_row=k)
        for f in ("logprobs", "linear_logprobs")
        for k in (1, 5, 64)
    },
    "logprobs, 5 labels, specials": Case(
        "logprobs", {"outputs": OF_SEVERAL}, per_row=5, change=put_specials
    ),
    "logprobs, 5 labels, sets": Case("logprobs", {"sets": True}, vocab=512, per_row=5),
    "linear_logprobs, 5 labels, sets": Case(
        "linear_logprobs", {"sets": True, "softcap": 9.0}, vocab=512, per_row=5
    ),
    "logprobs, 5 labels, uneven": Case(
        "logprobs", {"temperature": 0.7, "softcap": 9.0}, vocab=61, per_row=5, uneven=True
    ),
    "linear_logprobs, 5 labels, bfloat16": Case(
        "linear_logprobs",
        {"temperature": 2.0, "temperature_on": "logprob"},
        vocab=4096,
        bias=True,
        low_rank=True,
        per_row=5,
        dtype=torch.bfloat16,
    ),
    **{f"policy_loss, {n}": Case("policy_loss", o) for n, o in POLICIES.items()},
    **{
        f"linear_cross_entropy, {n}{', two passes' * two}": Case(
            "linear_cross_entropy", {**o, "grad_in_forward": not two}, bias=n != "plain"
        )
        for n, o in CROSS_ENTROPIES.items()
        for two in (False, True)
    },
    "linear_cross_entropy, many columns": Case("linear_cross_entropy", vocab=4096, bias=True),
    "linear_cross_entropy, bfloat16": Case(
        "linear_cross_entropy", vocab=4096, bias=True, dtype=torch.bfloat16
    ),
    "linear_cross_entropy, uneven": Case("linear_cross_entropy", vocab=61, uneven=True),
    "linear_cross_entropy, budget": Case("linear_cross_entropy", {"workspace_bytes": 1 << 20}),
    **{
        f"{f}, low rank{', two passes' * two}": Case(f, {"grad_in_forward": not two}, low_rank=True)
        for f in ("linear_cross_entropy", "linear_policy_loss")
        for two in (False, True)
    },
    "linear_cross_entropy, low rank, uneven": Case(
        "linear_cross_entropy", vocab=61, bias=True, low_rank=True, uneven=True
    ),
    "linear_logprobs, low rank, bfloat16": Case(
        "linear_logprobs", {"valid_vocab": 1000}, vocab=1024, low_rank=True, dtype=torch.bfloat16
    ),
    "linear_distillation, low rank": Case("linear_distillation", low_rank=True),
    "linear_logprobs": Case("linear_logprobs", {"outputs": ROWS, "valid_vocab": 43}, bias=True),
    **{f"linear_policy_loss, {n}": Case("linear_policy_loss", o) for n, o in POLICIES.items()},
    "linear_policy_loss, two passes": Case(
        "linear_policy_loss", {**POLICIES["gspo, entropy"], "grad_in_forward": False}
    ),
}
