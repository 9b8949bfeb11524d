"""How fast TileLoss has to be, and whether it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from comparison.inputs import Shape
from comparison.measure import Measurement

# What the bars are stated for: the logits and the LM head of Qwen2.5-1.5B.
SHAPE = Shape(tokens=2048, vocab=151936, hidden=1536)


@dataclass(frozen=True)
class Bar:
    """The contestant has to be `at_least` times as fast as the fastest of `peers`, and `goal` times would be
    good. `memory_share`: with at most this share of that peer's peak memory. All of one group, but for peers of `peer_group`.
    `needs_amx`: stated for AMX's product rate, and checked where TileLoss runs on it."""

    group: str
    contestant: str
    peers: tuple[str, ...]
    at_least: float
    goal: float | None = None
    memory_share: float | None = None
    needs_amx: bool = False
    peer_group: str | None = None

    @property
    def peer_keys(self) -> list[str]:
        return [f"{self.peer_group or self.group}/{peer}" for peer in self.peers]


AMX = "avx512_amx"  # the library's name of the instruction set
EAGER = ("torch eager",)
COMPILED = ("torch.compile", "torch.compile, float32 logits")
QUARTER = "TileLoss, a quarter of torch.compile's memory"
OWN_CHOICE = "TileLoss"
IN_PLACE = "TileLoss, in place"
DISTILLATION_BARS = tuple(
    bar
    for group in ("distillation_kl", "distillation_jsd")
    for bar in (
        Bar(group, IN_PLACE, ("torch.compile",), 6, 10),
        # At most 2.6 times the time of one matrix of logits, 2 would be good: two are read.
        Bar(group, IN_PLACE, (IN_PLACE,), 1 / 2.6, 1 / 2, peer_group="cross_entropy"),
    )
)
BARS = (
    Bar("cross_entropy", IN_PLACE, COMPILED, 7, 10),
    Bar("cross_entropy", IN_PLACE, EAGER, 9, 13),
    Bar("cross_entropy", "TileLoss, gradient in the forward", COMPILED, 10, 14),
    Bar("cross_entropy", "TileLoss, gradient in the forward", EAGER, 12, 18),
    Bar("cross_entropy", "TileLoss, fresh gradient", COMPILED, 4),
    Bar("cross_entropy", "TileLoss, fresh gradient", EAGER, 5),
    Bar("grpo", IN_PLACE, COMPILED, 8, 12),
    Bar(
        "linear_cross_entropy", QUARTER, ("torch.compile",), 2, 3, memory_share=0.25, needs_amx=True
    ),
    Bar("linear_cross_entropy", OWN_CHOICE, ("torch.compile",), 2.8, 3.5, needs_amx=True),
    Bar("linear_cross_entropy", OWN_CHOICE, EAGER, 4, 5, needs_amx=True),
    Bar("linear_cross_entropy", OWN_CHOICE, ("TRL chunked",), 18, 22, needs_amx=True),
    # At most 1.25 times the time of one process with as many threads, 1.1 would be good.
    Bar("linear_cross_entropy", "TileLoss, 2 gloo ranks", (OWN_CHOICE,), 0.8, 0.91),
    *DISTILLATION_BARS,
    # At most 1.6 times the time of one head, 1.4 would be good: four products beside three.
    Bar(
        "linear_distillation",
        OWN_CHOICE,
        (OWN_CHOICE,),
        1 / 1.6,
        1 / 1.4,
        peer_group="linear_cross_entropy",
    ),
)


@dataclass(frozen=True)
class Verdict:
    """`peer`: its name, of another group its key. `ratio`: the peer's median time over the contestant's. `memory`: the share of
    the peer's peak. `checked`: whether the bar is stated for this machine; one that is not neither passes nor fails."""

    bar: Bar
    peer: str
    ratio: float
    memory: float | None
    checked: bool
    passed: bool
    reached_goal: bool

    @property
    def failed(self) -> bool:
        return self.checked and not self.passed

    def __str__(self) -> str:
        if self.bar.at_least >= 1:
            power, than = 1, f"{self.ratio:.2f} x"
        else:  # how much longer it may take
            power, than = -1, f"takes {1 / self.ratio:.2f} x the time of"
        goal = "" if self.bar.goal is None else f", goal {self.bar.goal**power:.3g}"
        memory = (
            ""
            if self.memory is None
            else f" with {self.memory:.2f} of its memory (bar {self.bar.memory_share:g})"
        )
        outcome = "FAIL" if self.failed else "pass" if self.checked else "needs AMX"
        return (
            f"{outcome} {self.bar.group}: {self.bar.contestant} {than} {self.peer}"
            f"{memory} (bar {self.bar.at_least**power:.3g}{goal})"
        )

    def as_json(self) -> dict[str, object]:
        fields = asdict(self)
        return fields.pop("bar") | fields


def judge(measurements: Mapping[str, Measurement], isa: str) -> list[Verdict]:
    """Of the bars whose contestant and at least one peer were measured; measurements by "group/name". `isa`: the instruction set
    that TileLoss ran on."""
    verdicts = []
    for bar in BARS:
        own = measurements.get(f"{bar.group}/{bar.contestant}")
        peers = [measurements.get(key) for key in bar.peer_keys]
        measured = [peer for peer in peers if peer is not None]
        if own is None or not measured:
            continue
        peer = min(measured, key=lambda each: each.median)
        ratio = peer.median / own.median
        memory = None if bar.memory_share is None else own.peak_bytes / max(peer.peak_bytes, 1)
        fits = bar.memory_share is None or memory is None or memory <= bar.memory_share
        checked = isa == AMX or not bar.needs_amx
        passed = checked and ratio >= bar.at_least and fits
        reached = passed and bar.goal is not None and ratio >= bar.goal
        name = peer.contestant.name if bar.peer_group is None else peer.contestant.key
        verdicts.append(Verdict(bar, name, ratio, memory, checked, passed, reached))
    return verdicts


def last_line(verdicts: list[Verdict], shape: Shape) -> str:
    """Every bar, passed, failed or not for this machine, in one line."""
    if not verdicts:
        return "bars: none was measured"
    elsewhere = (
        ""
        if shape == SHAPE
        else f" (they are stated for N={SHAPE.tokens} V={SHAPE.vocab} H={SHAPE.hidden})"
    )
    checked = sum(verdict.checked for verdict in verdicts)
    others = {"need AMX": len(verdicts) - checked, "not measured": len(BARS) - len(verdicts)}
    left_out = "".join(f", {count} {what}" for what, count in others.items() if count)
    passed = sum(verdict.passed for verdict in verdicts)
    return f"bars{elsewhere}: {passed} of {checked} pass{left_out}: " + "; ".join(
        map(str, verdicts)
    )
