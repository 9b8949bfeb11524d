"""The audit's cases: configs of gradcheck after the shapes and options of public suites, small enough for an interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tileloss.testing._drawn import GIVEN, Drawn, draw, usual

Settings = dict[str, Any]
DTYPES: dict[str, Any] = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}


class AuditCase(NamedTuple):
    name: str  # "ce/confident"
    shows: str
    settings: Settings  # keys of gradcheck's config
    backwards: int = 1
    # Changes drawn logits, given their labels, for what no distribution draws.
    logits: Callable[[np.ndarray, np.ndarray], None] | None = None
    calls: str = ""  # how often, and with what, an implementation is called: calls.py
    judged: tuple[str, ...] = ()  # the outputs that the judge sees; all

    def draw(self) -> Drawn:
        settings, given = dict(self.settings), None
        if self.logits is not None:
            given = _draw(settings, self.logits)
            for key in ("ignore_prob", "dtype", "vocab_size"):
                settings.pop(key, None)
            settings["source"] = {"kind": "safetensors", "path": GIVEN}
        return draw(self.name, settings, given)


def _draw(
    settings: Settings, change: Callable[[np.ndarray, np.ndarray], None]
) -> dict[str, np.ndarray]:
    random = np.random.default_rng(settings["seed"])
    batch = (settings["batch_size"], settings["seq_len"])
    logits = 3 * random.standard_normal((*batch, settings["vocab_size"]), np.float32)
    labels = random.integers(0, settings["vocab_size"] // 2, batch)
    change(logits, labels)
    labels[0, 1] = -100
    return {"logits": logits.astype(DTYPES[settings["dtype"]]), "labels": labels}


def confident_labels(logits: np.ndarray, labels: np.ndarray) -> None:
    """p of the label is 0.999."""
    at = labels[..., None]
    np.put_along_axis(logits, at, -np.inf, -1)
    others = np.log(np.exp(logits).sum(-1, keepdims=True))
    np.put_along_axis(logits, at, others + np.log(np.float32(999)), -1)


def _masked_columns(logits: np.ndarray, labels: np.ndarray) -> None:
    """As constrained decoding leaves them: labels are in the lower half, so that no label's logit is -inf."""
    logits[..., logits.shape[-1] // 2 :: 3] = -np.inf


# Float32 unless the dtype is the point: a loss that rounds to bfloat16 shows in few cases, and hides nothing in the others.
_LOW: Settings = {"tolerances": {"ulp": 1}}
BF16: Settings = {"dtype": "bf16", **_LOW}
# One that is below 0, as of a loss that is subtracted: a gradient scaled by its absolute value has to fail.
_NEGATIVE: Settings = {"upstream": "random", "seed": 7}


def drawn(distribution: str, **more: Any) -> Settings:
    return {"kind": "synthetic", "distribution": distribution, **more}


def _family(prefix: str, common: Settings) -> Callable[..., AuditCase]:
    def case(
        name: str, shows: str, preset: str = "", backwards: int = 1, **settings: Any
    ) -> AuditCase:
        settings |= {"preset": preset} if preset else {}
        return AuditCase(f"{prefix}/{name}", shows, {**common, **settings}, backwards)

    return case


KL: Settings = {"beta": 0.1, "ref_logp_noise_scale": 0.2}
CROSS_ENTROPY: Settings = usual("cross_entropy")
LOGPROBS: Settings = usual("logprobs")
POLICY: Settings = usual("policy_loss")
LINEAR: Settings = usual("linear_cross_entropy")
LINEAR_LOGPROBS: Settings = usual("linear_logprobs")
LINEAR_POLICY: Settings = usual("linear_policy_loss")
DISTILLATION: Settings = {
    **usual("distillation"),
    "source": drawn("normal", std=3, teacher="near"),
}
SOFT: Settings = {**usual("soft_cross_entropy"),
                  "source": drawn("normal", std=3, special_rows=["doubled"])}  # fmt: skip
SPARSE: Settings = {
    **usual("sparse_distillation"),
    "source": drawn("normal", std=3, teacher_columns=8),
}
_ce = _family("ce", CROSS_ENTROPY)
_rows = _family("logprobs", LOGPROBS)
_policy = _family("policy", POLICY)
_linear = _family("linear", LINEAR)
_linear_policy = _family("linear-policy", LINEAR_POLICY)
CASES = (
    _ce("fp32", "1000 classes, a fifth of the rows ignored"),
    _ce("bf16", "the same in bfloat16", dtype="bf16", **_LOW),
    _ce("fp16", "the same in float16", dtype="fp16", **_LOW),
    _ce("ragged", "447 classes: 63 after a multiple of 64", vocab_size=447),
    _ce("confident", "p of the label above 1 - 1e-6", source=drawn("confident"), expect_mostly_zero=True),
    _ce("offset-plus", "logits around 1e4", source=drawn("offset_plus"), expect_mostly_zero=True),
    _ce("offset-minus", "logits around -1e4", source=drawn("offset_minus"), expect_mostly_zero=True),
    _ce("large", "logits with a deviation of 30", source=drawn("wide"), expect_mostly_zero=True),
    _ce("spike", "the last class 80 above the rest", source=drawn("spike_last"), expect_mostly_zero=True),
    AuditCase("ce/minus-inf", "columns of -inf beside finite labels",
              CROSS_ENTROPY, logits=_masked_columns),
    _ce("sum", "reduction sum, a negative upstream gradient", reduction="sum", **_NEGATIVE),
    _ce("none", "a loss and an upstream gradient a row", reduction="none", upstream="per_row"),
    _ce("all-ignored", "no row in use: 0, and gradients of 0", ignore_prob=1, expect_mostly_zero=True),
    _ce("second-backward", "the gradient of a second backward, upstream not 1", backwards=2, upstream="random"),
    _ce("smoothing", "label smoothing 0.1", label_smoothing=0.1),
    _ce("class-weights", "a weight a class", class_weights="random"),
    _ce("token-weights", "a weight a row", token_weights="random"),
    _ce("z-loss", "1e-3 lse^2", z_loss=1e-3),
    _ce("softcap", "logits capped at 5", softcap=5),
    _ce("temperature", "temperature 0.7, scale 0.5", temperature=0.7, logit_scale=0.5),
    _ce("padding", "the last 56 columns are padding", valid_vocab=944),
    _ce("num-items", "the mean's denominator given", num_items=100),
    _ce("allowed", "each row over half of the classes", allowed="half"),
    _rows("fp32", "log-probabilities, an upstream gradient a row"),
    _rows("bf16", "the same in bfloat16", dtype="bf16", **_LOW),
    _rows("confident", "log-probabilities of 0 minus 1e-11", source=drawn("confident"), expect_mostly_zero=True),
    _rows("temperature", "temperature 0.7", temperature=0.7),
    _rows("entropy", "log-probabilities and entropy", outputs=["logp", "entropy"]),
    _rows("several", "those of eight labels a row, some twice, some slots empty", labels_per_row=8),
    _policy("grpo", "clipped ratios, some tokens masked", "grpo"),
    _policy("grpo-bf16", "the same in bfloat16", "grpo", dtype="bf16", **_LOW),
    _policy("grpo-kl", "with a KL term", "grpo", **KL),
    _policy("dapo", "asymmetric bounds, num_items, an entropy bonus", "dapo", epsilon_high=0.28, num_items=40, entropy_coef=0.01),
    _policy("gspo", "one ratio a sequence, with a KL term", "gspo", epsilon_low=0.08, epsilon_high=0.1, **KL),
    _policy("luspo", "sums over a sequence, with a KL term", "luspo", epsilon_low=0.08, epsilon_high=0.1, **KL),
    _policy("dr-grpo", "over a constant, one epsilon, negative upstream", "dr_grpo", epsilon_low=0.1, max_length=20, **_NEGATIVE),
    _policy("cispo", "capped, detached ratios", "cispo", epsilon_high=1.2),
    _policy("cispo-low", "the same, from below too", "cispo", cispo_cap="one_plus", epsilon_high=0.2, cap_low=0.8),
    _policy("sapo", "soft gates", "sapo"),
    _policy("vespo", "a gamma weight of the sequence's ratio", "vespo"),
    _policy("delta", "two-sided clipping: a bound where the advantage is negative", "grpo", delta=1.4),
    _policy("delta-low", "delta below 1 + epsilon: a bound where it is positive", "grpo", delta=1.1),
    _policy("allowed", "clipped ratios of softmaxes over a few columns each", "grpo", allowed="sparse"),
    _policy("dual-clip", "at most 1.3 times a negative advantage", "grpo", dual_clip=1.3),
    _linear("fp32", "32 hidden, 447 classes, a fifth of the rows ignored"),
    _linear("bf16", "the same in bfloat16", dtype="bf16"),
    _linear("all-used", "no row ignored", ignore_prob=0),
    _linear("sum", "no row ignored, reduction sum, a negative upstream gradient", ignore_prob=0, reduction="sum", **_NEGATIVE),
    _linear("none", "a loss and an upstream gradient a row", reduction="none", upstream="per_row"),
    _linear("only-dhidden", "a frozen head", gradients=["dhidden"]),
    _linear("only-dhead", "frozen hidden states", gradients=["dhead"]),
    _linear("second-backward", "the gradient of a second backward, upstream not 1", backwards=2, upstream="random"),
    _linear("bias", "a bias and its gradient", bias="random", gradients=["dhidden", "dhead", "dbias"]),
    _linear("softcap", "logits capped at 5", softcap=5),
    _linear("smoothing", "label smoothing 0.1", label_smoothing=0.1),
    _linear("class-weights", "a weight a class", class_weights="random"),
    _linear("z-loss", "1e-3 lse^2", z_loss=1e-3),
    _linear("all-ignored", "no row in use: 0, and gradients of 0", ignore_prob=1),
    _linear("low-rank", "a frozen head with LoRA: a part of rank 4", rank=4, gradients=["dhidden", "dhidden_r", "dhead_r"]),
    _linear("logprobs", "log-probabilities, an upstream gradient a row", **LINEAR_LOGPROBS),
    _linear_policy("grpo", "clipped ratios, some tokens masked, a negative upstream gradient", "grpo", **_NEGATIVE),
    _linear_policy("grpo-bf16", "the same in bfloat16", "grpo", dtype="bf16"),
    _linear_policy("dapo-kl", "num_items, with a KL term", "dapo", epsilon_high=0.28, num_items=40, **KL),
    _linear_policy("gspo-kl", "one ratio a sequence, with a KL term", "gspo", epsilon_low=0.08, epsilon_high=0.1, **KL),
    _linear_policy("luspo", "one ratio and a sum a sequence", "luspo", epsilon_low=0.08, epsilon_high=0.1),
    _linear_policy("luspo-kl", "the same with a KL term", "luspo", epsilon_low=0.08, epsilon_high=0.1, **KL),
    _linear_policy("vespo", "a gamma weight of the sequence's ratio", "vespo"),
    _linear_policy("only-dhead", "frozen hidden states", "grpo", gradients=["dhead"]),
)  # fmt: skip
