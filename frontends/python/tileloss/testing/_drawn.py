"""A case from the keys of a gradcheck config (docs/users/gradcheck.md), and outputs held against the oracle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tileloss.testing._judge import Answer, Tensors, ask, ask_apart
from tileloss.testing.case import Case

Settings = Mapping[str, Any]
GIVEN = "inputs"  # as a config's path: the tensors that were given
_NORMWISE = "dlogits/normwise"

# A float32 gradient may be eight times as far off as gradcheck allows: a log-softmax in plain float32 needs four.
_LOGITS: dict[str, Any] = {
    "batch_size": 2, "seq_len": 16, "vocab_size": 1000, "dtype": "fp32", "seed": 3, "ignore_prob": 0.2,
    "source": {"kind": "synthetic", "distribution": "normal", "std": 3}, "outputs": [], "tolerances": {"ulp": 8},
}  # fmt: skip
_HIDDEN: dict[str, Any] = _LOGITS | {
    "level": "linear", "hidden_size": 32, "vocab_size": 447, "dhead_dtype": "head", "source": {"kind": "synthetic", "std": 3},
    "tolerances": {},
}  # fmt: skip
# So far from old_logp, and from this seed, every branch of every kind has tokens: below, within and above the bounds for either
# sign of the advantage, and an advantage of 0 (tests/python/test_audit_policy.py counts them).
_POLICY: dict[str, Any] = {
    "batch_size": 16, "seq_len": 8, "mask_prob": 0.1, "old_logp_noise_scale": 0.3, "seed": 4,
}  # fmt: skip
_ROWS: dict[str, Any] = {"outputs": ["logp"], "upstream": "per_row"}


def usual(function: str) -> dict[str, Any]:
    """Small, with ignored or masked rows, in float32."""
    loss = function.removeprefix("linear_")
    own = _POLICY if loss == "policy_loss" else _ROWS if loss == "logprobs" else {}
    return (_HIDDEN if function != loss else _LOGITS) | own | {"loss": loss}


class Gate(NamedTuple):
    """It has passed if ``value`` is no larger than ``limit``; NaN never does."""

    name: str
    value: float
    limit: float
    passed: bool
    where: str = ""  # the row and column of the value, where they are known

    def __str__(self) -> str:
        relation = "<=" if self.passed else ">"
        where = f", {self.where}" if self.where else ""
        return f"{self.name} {self.value:.4g} {relation} {self.limit:.4g}{where}"


@dataclass(frozen=True)
class Report:
    """What the judge found. Its text has a line a gate that failed. ``line``: all figures, as in gradcheck's results file."""

    line: dict[str, Any] = field(repr=False)
    failures: list[str]  # gates, and mutants that no gate caught

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def gates(self) -> list[Gate]:
        row, column = self.line.get("dlogits_worst_off_target_at", ("", ""))
        worst = {"dlogits/ulp_off_target": f"row {row}, column {column}"}
        return [
            Gate(
                gate["name"],
                float("nan") if gate["value"] is None else gate["value"],
                gate["limit"],
                gate["pass"],
                worst.get(gate["name"], ""),
            )
            for gate in self.line["gates"]
        ]

    @property
    def mutants(self) -> list[dict[str, Any]]:
        """Each planted bug: its name, whether it could be planted, and the gates that caught it."""
        return list(self.line.get("mutants", []))

    def with_normwise(self, factor: float) -> Report:
        """With so many times the limit of dlogits/normwise."""
        gates = [dict(gate) for gate in self.line["gates"]]
        for gate in gates:
            if gate["name"] == _NORMWISE:
                gate["limit"] *= factor
                gate["pass"] = gate["value"] is not None and gate["value"] <= gate["limit"]
        passed = {gate["name"] for gate in gates if gate["pass"]}
        failures = [name for name in self.failures if name not in passed]
        if self.failures == [_NORMWISE] and not failures and "mutants" in self.line:
            failures = [f"mutants (none were planted: {_NORMWISE} is above the judge's own limit)"]
        return Report({**self.line, "gates": gates, "pass": not failures}, failures)

    def __str__(self) -> str:
        sizes = ", ".join(str(self.line[f"shape/{x}"]) for x in ("rows", "vocab_size"))
        what = f"{self.line['loss']}, {self.line['dtype']} [{sizes}]"
        if self.passed:
            return f"{what}: {len(self.gates)} gates passed"
        failed = {gate.name: str(gate) for gate in self.gates}
        return "\n  ".join([f"{what}:", *(failed.get(name, name) for name in self.failures)])


@dataclass(frozen=True)
class Drawn:
    """A case, and what the judge is to be told of it to find the same one again."""

    case: Case
    name: str  # in errors
    settings: Settings
    given: Tensors
    normwise: float

    def judged(self, outputs: Tensors, mutants: bool = False) -> Report:
        """In a child process, as all that runs long.

        Raises JudgeError, with code 2 for outputs that are none of this case.
        """
        report = _report(self._ask("judge", self.settings, outputs, mutants=mutants))
        return report if self.normwise == 1 else report.with_normwise(self.normwise)

    def checked(self, strict: bool, device: str, seconds: float) -> Report:
        """The library's own kernels.

        Raises JudgeError, Crashed, TimeoutError.
        """
        settings = {**self.settings, "kernel": {"device": device}}
        return _report(self._ask("gradcheck", settings, {}, seconds, strict=strict))

    def _ask(
        self,
        request: str,
        settings: Settings,
        outputs: Tensors,
        seconds: float | None = None,
        **more: Any,
    ) -> Answer:
        asked = _request(request, self.name, settings) | more
        return ask_apart(asked, {GIVEN: self.given}, outputs, seconds=seconds)


def draw(name: str, settings: Settings, given: Tensors | None = None) -> Drawn:
    """``given``: the tensors of a source that names the file GIVEN. ``settings``: of tolerances ``normwise`` too, which no config
    has: so many times the judge's limit of dlogits/normwise.

    Raises JudgeError.
    """
    tolerances = dict(settings["tolerances"])
    normwise = tolerances.pop("normwise", 1)
    settings, given = {**settings, "tolerances": tolerances}, given or {}
    answer = ask(_request("draw", name, settings), {GIVEN: given})
    case = Case(answer.tensors, **answer.event("case")["case"])
    return Drawn(case, name, settings, given, normwise)


def _report(answer: Answer) -> Report:
    result = answer.event("result")
    return Report(result["line"], result["failures"])


def _request(request: str, name: str, settings: Settings) -> dict[str, Any]:
    return {"do": request, "name": name, "config": _node("", settings, name)}


def _node(key: str, value: Any, name: str) -> dict[str, Any]:
    """A value as the judge reads a config (src/support/config.h)."""
    found: dict[str, Any] = {"key": key, "origin": name, "directory": ""}
    if isinstance(value, Mapping):
        children = [_node(str(k), x, name) for k, x in value.items()]
        return found | {"kind": "map", "children": children}
    if isinstance(value, (list, tuple)):
        return found | {"kind": "list", "children": [_node("", x, name) for x in value]}
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return found | {"kind": "scalar", "text": text, "quoted": isinstance(value, str)}
