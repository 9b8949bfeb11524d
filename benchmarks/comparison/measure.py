"""Time, peak memory, and whether an answer is right."""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import torch

from comparison import distillation, training
from comparison.contestants import GROUPS, Contestant, Group, Output, Step, by_key
from comparison.inputs import Inputs, Shape, Truth, make_inputs, make_truth, relative
from tileloss.tools.timing import Timed, peak_bytes, time_in_turns
from tileloss.torch import empty_cache

MEASURE_PEAK = "--measure-peak"  # what the child process is told
MEBIBYTE = 1 << 20
# What a process needs besides a workspace: thread stacks, Python, the allocator's slack.
RESERVE = 8 * MEBIBYTE
# No budget is smaller: at shapes where a quarter of nothing much is asked for, the bar fails, not the run.
LEAST_BUDGET = 16 * MEBIBYTE
WARM_UP_TOKENS = 64


class WrongAnswer(Exception):
    """A contestant computes something else: its time would mean nothing."""


@dataclass(frozen=True)
class Errors:
    """Relative errors against float64: of the loss, and of the worst gradient in the Frobenius norm."""

    loss: float
    gradient: float


@dataclass
class Measurement:
    """`peak_bytes`: above inputs and outputs, of a model above it. Times in seconds, in the order of the rounds. On a GPU: what
    was timed, why no graph was, the host's seconds for a step; `failed`: why there is nothing else."""

    contestant: Contestant
    peak_bytes: int = 0
    workspace_bytes: int | None = None
    errors: Errors | None = None
    times: list[float] = field(default_factory=list)
    timed_by: str = ""
    not_captured: str = ""
    host_s: float | None = None
    failed: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.times)


def group_inputs(group: Group, shape: Shape) -> Inputs:
    if group.whole_model:
        return training.make_inputs(shape)
    distils = group.beta is not None
    return make_inputs(shape, linear=group.linear, policy=group.policy, distils=distils)


def group_truth(group: Group, inputs: Inputs) -> Truth:
    if group.whole_model:
        return training.make_truth(inputs)
    if group.beta is not None:
        return distillation.make_truth(inputs, group.beta)
    assert group.loss_of_logp is not None
    return make_truth(inputs, group.loss_of_logp)


# ------------------------------------------------------------------------------------------------------------ answers


def dlogits_error(output: torch.Tensor, truth: Truth, labels: torch.Tensor) -> float:
    """Of sampled rows, the labels' entries and all others apart: those weigh more than these together."""
    assert truth.dlogits is not None
    rows = torch.arange(len(truth.rows))
    sampled = output.reshape(len(labels), -1)[truth.rows].double()
    labels, expected = labels[truth.rows], truth.dlogits.clone()
    on_label = relative(sampled[rows, labels], expected[rows, labels])
    sampled[rows, labels] = 0
    expected[rows, labels] = 0
    return max(on_label, relative(sampled, expected))


def check(contestant: Contestant, output: Output, truth: Truth, inputs: Inputs) -> Errors:
    """Raises WrongAnswer."""
    loss, gradients = output
    if truth.body is not None:
        gradient = training.gradient_error(gradients, truth)
    elif truth.dlogits is not None:
        gradient = dlogits_error(gradients[0], truth, inputs.labels)
    else:
        assert truth.dhidden is not None and truth.dhead is not None
        gradient = max(
            relative(gradients[0][truth.rows], truth.dhidden),
            relative(gradients[1][truth.classes], truth.dhead),
        )
    errors = Errors(abs(loss.item() - truth.loss) / truth.scale, gradient)
    tolerance = Errors(contestant.loss_tolerance or contestant.tolerance, contestant.tolerance)
    if not (errors.loss <= tolerance.loss and errors.gradient <= tolerance.gradient):
        raise WrongAnswer(f"{contestant.key}: {errors}, tolerance {tolerance}")
    if contestant.in_place and gradients[0].data_ptr() not in inputs.places():
        raise WrongAnswer(f"{contestant.key}: the gradient does not lie where the logits lay")
    return errors


# --------------------------------------------------------------------------------------------------------------- time


def checked_step(measurement: Measurement, inputs: Inputs, truth: Truth) -> Step:
    """A contestant that is set up, warm and right."""
    step = measurement.contestant.setup(inputs)
    measurement.errors = check(measurement.contestant, step(), truth, inputs)
    inputs.restore()
    return step


def time_group(
    group: Group,
    shape: Shape,
    rounds: int,
    measurements: Sequence[Measurement],
    log: Callable[[str], None],
) -> None:
    """Fills errors and times."""
    inputs = group_inputs(group, shape)
    truth = group_truth(group, inputs)
    calls = []
    for measurement in measurements:
        entry = measurement.contestant
        inputs.workspace_bytes = measurement.workspace_bytes
        call = Timed(checked_step(measurement, inputs, truth), most=entry.max_rounds)
        call.times = measurement.times
        if entry.in_place:
            call.restore = inputs.restore
        # Timed on its second step in a row, as in training. Idle pages go back to a virtual machine's host after some
        # seconds: after another contestant's turn a fresh 622 MB gradient costs 0.9 s instead of 0.08.
        if not group.linear and not group.whole_model:
            call.calls = 2
        calls.append(call)
        log(f"{entry.key}: right ({measurement.errors})")
    time_in_turns(calls, rounds, lambda done: log(f"{group.name}: round {done} of {rounds}"))


# ------------------------------------------------------------------------------------------------------------- memory


def peak_of_step(contestant: Contestant, shape: Shape, workspace_bytes: int | None) -> int:
    """What a step needs above its inputs and outputs (of a model: above the model), bytes, in this process. A first
    step compiles and starts threads; it does not count. The slow ones compile nothing: few tokens do there."""
    warm_up = shape
    if contestant.max_rounds is not None:
        warm_up = Shape(min(shape.tokens, WARM_UP_TOKENS), shape.vocab, shape.hidden)
        contestant.setup(group_inputs(GROUPS[contestant.group], warm_up))()
    group = GROUPS[contestant.group]
    inputs = group_inputs(group, shape)
    inputs.workspace_bytes = workspace_bytes
    step = contestant.setup(inputs)
    if warm_up == shape:
        step()
    inputs.restore()
    gc.collect()
    empty_cache()

    def outputs_bytes(output: Output) -> int:
        held = inputs.places()
        fresh = [gradient for gradient in output[1] if gradient.data_ptr() not in held]
        return 0 if group.whole_model else sum(gradient.nbytes for gradient in fresh)

    return peak_bytes(step, outputs_bytes)


def peak_in_child(
    contestant: Contestant, shape: Shape, threads: int, workspace_bytes: int | None
) -> int:
    """The same in a process of its own, where no other contestant has left anything."""
    order = {
        "key": contestant.key,
        "shape": asdict(shape),
        "threads": threads,
        "workspace_bytes": workspace_bytes,
    }
    command = [sys.executable, sys.argv[0], MEASURE_PEAK, json.dumps(order)]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return int(child.stdout.split()[-1])


def measure_peaks(
    contestants: Sequence[Contestant], peak_of: Callable[[Contestant, int | None], int]
) -> list[Measurement]:
    """In order. A contestant that is to have a quarter of another's memory gets that as its budget."""
    peaks: dict[str, int] = {}

    def peak(contestant: Contestant, budget: int | None) -> int:
        if contestant.key not in peaks:
            peaks[contestant.key] = peak_of(contestant, budget)
        return peaks[contestant.key]

    measurements = []
    for contestant in contestants:
        budget = None
        if contestant.quarter_of is not None:
            budget = max(peak(by_key(contestant.quarter_of), None) // 4 - RESERVE, LEAST_BUDGET)
        measurements.append(Measurement(contestant, peak(contestant, budget), budget))
    return measurements


# --------------------------------------------------------------------------------------------------------------- both


def measure(
    contestants: Sequence[Contestant],
    shape: Shape,
    threads: int,
    rounds: int,
    log: Callable[[str], None],
) -> list[Measurement]:
    """Memory first: the children have the machine for themselves. Then time, a group after the other."""

    def peak_of(contestant: Contestant, budget: int | None) -> int:
        log(f"{contestant.key}: measuring its memory")
        return peak_in_child(contestant, shape, threads, budget)

    measurements = measure_peaks(contestants, peak_of)
    for group in GROUPS.values():
        members = [each for each in measurements if each.contestant.group == group.name]
        if members:
            time_group(group, shape, rounds, members, log)
    return measurements
