"""The losses as docs/users/losses.md defines them, in float64 with numpy: what each planted bug is a variation of.

Each step is a method, and a bug replaces one of them. `Right` itself passes every case of the bugs.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from tileloss.testing.case import Case

Array = np.ndarray
TILE = 128  # columns of a tile, where a bug has tiles


class Right:
    """Of a case with numbers (`Case.with_numbers`). z [N,V] holds -inf in the columns that are no classes, where p is 0."""

    functions: ClassVar[tuple[str, ...]] = ("cross_entropy", "logprobs")
    options: ClassVar[tuple[str, ...]] = (
        "reduction", "label_smoothing", "softcap", "temperature", "num_items", "logit_scale", "ignore_index",
    )  # fmt: skip
    tensors: ClassVar[tuple[str, ...]] = ("bias",)

    def __init__(self, case: Case) -> None:
        own = [*self.functions, *(f"linear_{name}" for name in self.functions)]
        case.refuse_unless(own, self.options, self.tensors, ("loss", "logp", "entropy"))
        self.case, self.option = case, case.options
        self.used = case.in_use
        self.y = np.where(self.used, case.tensors["labels"], 0)
        self.rows = np.arange(len(self.y))
        self.x = self.logits()
        self.z = self.transform(self.x)
        self.m = self.maximum()
        self.log_sum = np.log(self.sum())
        self.log_p = self.z - self.m[:, None] - self.log_sum[:, None]
        self.p = self.probabilities()
        self.logp = self.label_logp()
        with np.errstate(invalid="ignore"):
            self.entropy = -np.where(self.p > 0, self.p * self.log_p, 0).sum(-1)

    # ------------------------------------------------------------------------------------------------ logits and their sum

    def wide(self, name: str) -> Array:
        return self.case.tensors[name].astype(np.float64)

    @property
    def is_linear(self) -> bool:
        return self.case.function.startswith("linear_")

    @property
    def operand(self) -> Array:
        """What is of the logits' type."""
        return self.case.tensors["hidden" if self.is_linear else "logits"]

    def logits(self) -> Array:
        if not self.is_linear:
            return self.wide("logits")
        bias = self.wide("bias") if "bias" in self.case.tensors else 0
        return self.wide("hidden") @ self.wide("head").T + bias

    def softcap(self, u: Array) -> Array:
        cap = self.option.get("softcap")
        return cap * np.tanh(u / cap) if cap else u

    def temperature(self) -> float:
        return float(self.option.get("temperature", 1))

    def transform(self, x: Array) -> Array:
        return self.softcap(x * self.option.get("logit_scale", 1)) / self.temperature()

    def slope(self) -> Array | float:
        """dz/dx."""
        cap, scale = self.option.get("softcap"), self.option.get("logit_scale", 1)
        bent = 1 - np.tanh(self.x * scale / cap) ** 2 if cap else 1.0
        return bent * scale / self.temperature()

    def maximum(self) -> Array:
        return self.z.max(-1)

    def sum(self) -> Array:
        return np.exp(self.z - self.m[:, None]).sum(-1)

    def probabilities(self) -> Array:
        return np.exp(self.log_p)

    def label_logp(self) -> Array:
        return self.log_p[self.rows, self.y]

    # ----------------------------------------------------------------------------------------------------- loss, gradients

    def row_losses(self) -> Array:
        s = self.smoothing()
        smooth = -self.log_p.mean(-1) if s else 0
        return np.where(self.used, -(1 - s) * self.logp + s * smooth, 0)

    def smoothing(self) -> float:
        return float(self.option.get("label_smoothing", 0))

    @property
    def reduction(self) -> str:
        return str(self.option.get("reduction", "mean"))

    def denominator(self) -> float:
        """Of the mean; what is 0 makes everything 0."""
        return float(self.option.get("num_items", self.used.sum()))

    def weights(self) -> Array:
        """[N]: of each row's loss in the loss."""
        if self.reduction != "mean":
            return self.used.astype(np.float64)
        number = self.denominator()
        return self.used / number if number else np.zeros(len(self.used))

    def reduced(self, rows: Array) -> Any:
        return rows if self.reduction == "none" else (self.weights() * rows).sum()

    def upstream(self) -> Array:
        """[N]: of each row's loss."""
        return self.weights() * self.case.upstream("loss").astype(np.float64)

    def gradient(self) -> Array:
        """dL/dz, [N,V]."""
        if not self.case.function.endswith("logprobs"):
            return self.upstream()[:, None] * self.loss_gradient()
        return self.logprobs_gradient(
            *(self.used * self.grad(name) for name in ("logp", "entropy"))
        )

    def grad(self, name: str) -> Array:
        return self.case.tensors.get(f"{name}_grad", np.zeros(1)).astype(np.float64)

    def loss_gradient(self) -> Array:
        """dl/dz of each row's loss l."""
        dz, s = self.p - s_over_v(self), self.smoothing()
        dz[self.rows, self.y] -= 1 - s
        return dz

    def logprobs_gradient(self, g_logp: Array, g_entropy: Array) -> Array:
        """dL/dz of upstream gradients of logp and entropy."""
        log_p = np.where(self.p > 0, self.log_p, 0)
        slope = -(g_logp + g_entropy * self.entropy)[:, None] - g_entropy[:, None] * log_p
        dz = self.p * slope
        dz[self.rows, self.y] += g_logp
        return dz

    def run(self) -> dict[str, Any]:
        """The outputs that the case asks for, gradients rounded once."""
        case, found = self.case, {}
        if not case.function.endswith("logprobs"):
            found["loss"] = self.loss()
        rows = {"logp": self.logp, "entropy": self.entropy, "lse": self.m + self.log_sum}
        found |= case.asked({name: np.where(self.used, row, 0) for name, row in rows.items()})
        return found | self.gradients()

    def loss(self) -> Any:
        return self.reduced(self.row_losses())

    def gradients(self) -> dict[str, Any]:
        dx = np.where(self.moving()[:, None], self.gradient() * self.slope(), 0)
        found = self.projected(dx) if self.is_linear else {"dlogits": dx}
        found = {name: x for name, x in found.items() if name in self.case.gradients}
        return {name: self.stored(name, x) for name, x in found.items()}

    def moving(self) -> Array:
        """[N] bool: the rows that have a gradient."""
        return self.used

    def projected(self, dx: Array) -> dict[str, Any]:
        dhidden, dhead = dx @ self.wide("head"), dx.T @ self.wide("hidden")
        return {"dhidden": dhidden, "dhead": dhead, "dbias": dx.sum(0)}

    def stored(self, name: str, x: Array) -> Array:
        return x.astype(self.case.tensors[name[1:]].dtype)


def s_over_v(right: Right) -> float:
    """The share of label smoothing that each class has."""
    return right.smoothing() / right.p.shape[-1]


def rounded(x: Array, like: Array) -> Array:
    """To the type of `like`, and back."""
    return x.astype(like.dtype).astype(np.float64)
