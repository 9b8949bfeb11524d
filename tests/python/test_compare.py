"""benchmarks/compare.py at a size where it takes seconds: every contestant is right, and table, JSON, page and bars
say what was measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import compare as program
from comparison import bars, contestants, measure, on_device, report
from comparison.contestants import GROUPS, Contestant, by_key
from comparison.inputs import Inputs, Shape, make_inputs, make_truth
from tileloss.torch import cross_entropy

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compare.py"
SHAPE = Shape(tokens=8, vocab=500, hidden=16)
contestants.register_for("cpu")
EVERYONE = [entry for group in GROUPS.values() for entry in group.contestants]


def compare(*options: str) -> subprocess.CompletedProcess[str]:
    sizes = ("--tokens=8", "--vocab=500", "--hidden=16", "--threads=1")
    command = [sys.executable, str(SCRIPT), *sizes, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def inputs() -> dict[str, Inputs]:
    return {name: measure.group_inputs(group, SHAPE) for name, group in GROUPS.items()}


@pytest.mark.parametrize("entry", EVERYONE, ids=lambda entry: entry.key)
def test_every_contestant_is_right(
    entry: Contestant, inputs: dict[str, Inputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Traced as for a measurement, but not put through a C++ compiler, which takes 10 s each.
    compiled = partial(torch.compile, dynamic=False, backend="aot_eager")
    monkeypatch.setattr(contestants, "compiled", compiled)
    mine = inputs[entry.group]
    mine.workspace_bytes = measure.LEAST_BUDGET if entry.quarter_of else None
    measurement = measure.Measurement(entry, 0)
    truth = measure.group_truth(GROUPS[entry.group], mine)
    step = measure.checked_step(measurement, mine, truth)
    assert measurement.errors is not None
    step()
    mine.restore()
    if mine.logits is not None:
        assert torch.equal(mine.logits, mine.pristine)


def test_donated_logits_are_given_away_and_put_back(inputs: dict[str, Inputs]) -> None:
    mine = inputs["cross_entropy"]
    step = by_key("cross_entropy/JAX: optax, donated").setup(mine)
    assert mine.own_logits is not None
    first, place = step()[0].item(), mine.own_logits.place
    assert mine.own_logits.is_given_away and place in mine.places()
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        step()
    mine.restore()
    assert step()[0].item() == first
    mine.restore()


@pytest.mark.parametrize("wrong", ["loss", "gradient", "place"])
def test_wrong_answers_are_not_timed(wrong: str, inputs: dict[str, Inputs]) -> None:
    def setup(given: Inputs) -> measure.Step:
        step = by_key("cross_entropy/torch eager, float32 logits").setup(given)

        def changed() -> measure.Output:
            loss, (gradient,) = step()
            if wrong == "gradient":
                gradient[:, 10:] *= 0.9
            return loss * (0.9 if wrong == "loss" else 1), (gradient,)

        return changed

    entry = Contestant("changed", "cross_entropy", setup, in_place=wrong == "place")
    mine = inputs["cross_entropy"]
    truth = make_truth(mine, GROUPS["cross_entropy"].loss_of_logp)
    with pytest.raises(measure.WrongAnswer, match="lay" if wrong == "place" else wrong):
        measure.checked_step(measure.Measurement(entry, 0), mine, truth)


@pytest.mark.parametrize("wrong", ["loss", "head", "rare rows of the head", "a layer"])
def test_a_wrong_training_step_is_not_timed(wrong: str, inputs: dict[str, Inputs]) -> None:
    mine = inputs["training_step"]

    def setup(given: Inputs) -> measure.Step:
        step = by_key("training_step/transformers").setup(given)

        def changed() -> measure.Output:
            loss, (head, *body) = step()
            if wrong == "head":
                head *= 0.9
            elif wrong == "rare rows of the head":
                rare = torch.ones(SHAPE.vocab, dtype=torch.bool)
                rare[mine.labels.flatten()] = False
                head[rare] = 0
            elif wrong == "a layer":
                body[3] *= 0.9
            return loss * (1.1 if wrong == "loss" else 1), (head, *body)

        return changed

    entry = measure.Measurement(Contestant("changed", "training_step", setup), 0)
    truth = measure.group_truth(GROUPS["training_step"], mine)
    with pytest.raises(measure.WrongAnswer):
        measure.checked_step(entry, mine, truth)


def test_truth_is_autograd_in_float64() -> None:
    mine = make_inputs(SHAPE, linear=True, policy=True)
    assert mine.hidden is not None
    assert mine.head is not None
    hidden, head = (x.detach().double().requires_grad_() for x in (mine.hidden, mine.head))
    logp = torch.log_softmax(hidden @ head.T, -1).gather(1, mine.labels[:, None])[:, 0]
    loss = GROUPS["grpo"].loss_of_logp(mine, logp)
    loss.backward()
    truth = make_truth(mine, GROUPS["grpo"].loss_of_logp)
    assert truth.loss == pytest.approx(loss.item(), abs=1e-6)
    assert truth.scale >= abs(truth.loss)
    torch.testing.assert_close(truth.dhidden, hidden.grad[truth.rows], rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(truth.dhead, head.grad[truth.classes], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("group", ["distillation_kl", "distillation_jsd", "linear_distillation"])
def test_truth_of_a_divergence_is_autograd_in_float64(
    group: str, inputs: dict[str, Inputs]
) -> None:
    """As F.kl_div has it: of the teacher's probabilities and the logarithms of the student's, or of the mixture's."""
    mine = inputs[group]
    assert mine.teacher is not None
    is_linear = mine.hidden is not None
    leaves = [mine.hidden, mine.head] if is_linear else [mine.pristine]
    others = [mine.teacher.hidden, mine.teacher.head] if is_linear else [mine.teacher.pristine]
    leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    p, q = (
        torch.softmax(side[0] @ side[1].T if is_linear else side[0], -1)
        for side in (leaves, [other.double() for other in others])
    )
    if group == "distillation_jsd":
        m = (p + q) / 2
        parts = [F.kl_div(m.log(), side, reduction="batchmean") for side in (p, q)]
        loss = (parts[0] + parts[1]) / 2
    else:
        loss = F.kl_div(p.log(), q, reduction="batchmean")
    gradients = torch.autograd.grad(loss, leaves)
    truth = measure.group_truth(GROUPS[group], mine)
    assert truth.loss == pytest.approx(loss.item(), abs=1e-6)
    expected = (truth.dhidden, truth.dhead) if is_linear else (truth.dlogits,)
    for found, gradient, places in zip(
        expected, gradients, (truth.rows, truth.classes), strict=False
    ):
        torch.testing.assert_close(found, gradient[places], rtol=1e-5, atol=1e-8)


# ------------------------------------------------------------------------------------------- from end to end


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict, int]:
    """Output, JSON and exit code of a run of two groups with one peer each."""
    path = tmp_path_factory.mktemp("compare") / "figures.json"
    lines = path.with_suffix(".jsonl")
    chosen = [
        "cross_entropy/TileLoss, in place",
        "cross_entropy/torch eager",
        "linear_cross_entropy/TileLoss",
        "linear_cross_entropy/torch eager",
    ]
    files = (f"--json={path}", f"--output={lines}")
    done = compare("--rounds=3", *files, *(f"--only={name}" for name in chosen))
    assert done.returncode in (0, 1), done.stderr
    figures = json.loads(path.read_text()) | {"lines": lines.read_text()}
    return done.stdout, figures, done.returncode


def test_table_and_json_have_every_contestant(run: tuple[str, dict, int]) -> None:
    output, figures, _ = run
    names = [(each["group"], each["name"]) for each in figures["contestants"]]
    assert ("cross_entropy", "TileLoss, in place") in names
    assert ("linear_cross_entropy", "torch eager") in names
    rows = [
        line for line in output.splitlines() if line.startswith("| T") or line.startswith("| t")
    ]
    assert [line.split(" | ")[0].lstrip("| ") for line in rows] == [name for _, name in names]
    for each in figures["contestants"]:
        assert len(each["times_s"]) == 3
        assert each["median_s"] == sorted(each["times_s"])[1]
        assert each["peak_bytes"] >= 0
        assert each["errors"]["gradient"] < 0.05
    assert figures["shape"] == {"tokens": 8, "vocab": 500, "hidden": 16}
    assert figures["threads"] == 1


def test_a_line_a_contestant_says_the_same(run: tuple[str, dict, int]) -> None:
    _, figures, _ = run
    lines = [json.loads(line) for line in figures["lines"].splitlines()]
    for line, each in zip(lines, figures["contestants"], strict=True):
        assert line["tool"] == "compare" and line["title"] == GROUPS[each["group"]].title
        for part in (each, {name: figures[name] for name in ("shape", "machine", "versions")}):
            assert part.items() <= line.items()


def test_last_line_states_every_bar(run: tuple[str, dict, int]) -> None:
    output, figures, code = run
    last = output.splitlines()[-1]
    checked = [bar for bar in figures["bars"] if bar["checked"]]
    passed = sum(bar["passed"] for bar in checked)
    assert last.startswith("bars (they are stated for N=2048 V=151936 H=1536): ")
    assert f"{passed} of {len(checked)} pass" in last
    assert last.count("(bar ") == len(figures["bars"]) >= 2
    assert last.count("needs AMX") == len(figures["bars"]) - len(checked)
    assert (len(checked) == len(figures["bars"])) == (figures["isa"] == bars.AMX)
    assert code == (0 if passed == len(checked) else 1)


def test_bad_usage_names_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "use_threads", lambda count: None)  # this process keeps its own
    for options, message in (
        (("--only=nobody/*",), "no contestant matches"),
        (("--rounds=0",), "expected an integer from 1 to 1000000"),
        (("--page=page.md", "--only=grpo/*"), "leave out --only"),
        (("--output=/dev/full",), "--output: expected a regular file, got /dev/full, a device"),
        (("--json=x", "--output=./x"), "expected different files, got one twice"),
        (("--json=x", "--device=host"), "--json is for --device cpu"),
        (("--device=host", "--only=nobody/*"), "no contestant matches"),
    ):
        try:
            code = program.main(list(options))
        except SystemExit as exit:  # argparse's
            code = exit.code
        assert code == 2
        assert message in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------ on a device


def test_on_a_device_each_contestant_is_a_line_whatever_becomes_of_it(tmp_path: Path) -> None:
    """On the host in a GPU's place. QuACK is nowhere without a GPU."""
    chosen = (
        "roofs*",
        "cross_entropy/TileLoss, in place",
        "cross_entropy/QuACK",
        "linear*/torch eager",
    )
    lines = tmp_path / "lines.jsonl"
    only = [f"--only={pattern}" for pattern in chosen]
    done = compare("--device=host", "--rounds=1", f"--output={lines}", *only)
    assert done.returncode == 0, done.stderr
    found = {
        (line["group"], line["name"]): line
        for line in map(json.loads, lines.read_text().splitlines())
    }
    assert [group for group, _ in found] == [
        *["roofs"] * 2,
        *["roofs_linear"] * 3,
        *["cross_entropy"] * 2,
        "linear_cross_entropy",
    ]
    for (group, name), line in found.items():
        assert (
            line["device"] == "host"
            and "threads" not in line
            and line["title"] == GROUPS[group].title
        )
        if name == "QuACK":
            assert line["failed"].startswith("ModuleNotFoundError: No module named")
            assert "median_s" not in line and f"| QuACK | failed: {line['failed']} |" in done.stdout
            continue
        assert 1 <= len(line["times_s"]) <= on_device.MOST_RUNS and line["host_s"] > 0
        assert line["timed_by"] == "calls again"
        if group.startswith("roofs"):
            assert line["rate"].split()[1] == ("GB/s" if group == "roofs" else "TFLOP/s")
            assert line["errors"] is None
        else:
            assert 0 < line["errors"]["gradient"] < 0.05


@pytest.mark.parametrize("wrong", ["step", "capture"])
def test_on_a_device_nothing_wrong_is_timed(
    wrong: str, inputs: dict[str, Inputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step whose answer is wrong, and one that is wrong in a replay alone, as it cannot be captured."""
    entry = by_key("cross_entropy/TileLoss, in place")
    mine = inputs["cross_entropy"]
    truth = measure.group_truth(GROUPS["cross_entropy"], mine)
    device = on_device.Host()
    if wrong == "step":
        with pytest.raises(measure.WrongAnswer, match="lay"):
            on_device.measure(
                replace(by_key("cross_entropy/torch eager"), in_place=True), mine, truth, device, 1
            )
        return
    nothing = torch.zeros(()), (torch.zeros_like(mine.logits),)
    monkeypatch.setattr(device, "captured", lambda step: (lambda: None, nothing))
    found = on_device.measure(entry, mine, truth, device, 1)
    assert found.timed_by == "calls" and "WrongAnswer" in found.not_captured
    assert found.times and torch.equal(mine.logits, mine.pristine)


# What tells of the keys that it is given: one line each; at "hangs" it does, at "ends" it ends, after "spoils" it wants to end.
TELLS = """
import json, sys, time
for key in sys.argv[1:]:
    if key == "hangs": time.sleep(60)
    if key == "ends": sys.exit(5)
    print(json.dumps({"key": key, "ends": key == "spoils"}), flush=True)
    if key == "spoils": break
"""


def test_a_contestant_that_hangs_or_crashes_costs_the_others_nothing() -> None:
    keys = ["a", "hangs", "b", "spoils", "ends", "c"]
    started: list[list[str]] = []

    def command(left: Sequence[str]) -> list[str]:
        started.append(list(left))
        return [sys.executable, "-c", TELLS, *left]

    found = dict(on_device.lines_of(keys, command, limit_s=0.5, start_s=10))
    assert list(found) == keys
    assert all(found[key] == {"key": key} for key in ("a", "b", "spoils", "c"))
    assert found["hangs"] == {"failed": "took more than 0.5 s"}
    assert found["ends"] == {"failed": "its process ended, 5"}
    assert started == [keys, keys[2:], keys[4:], keys[5:]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = compare("--device=cuda")
    assert (done.returncode, done.stderr) == (3, "compare: no CUDA device\n")


# ---------------------------------------------------------------------------------------------- memory and bars


@pytest.mark.parametrize("kept", [False, True], ids=["", "in memory that TileLoss kept"])
def test_peak_memory_counts_scratch_and_not_outputs(kept: bool) -> None:
    """A step that holds 96 MB beside the 64 MB it returns."""
    shape = Shape(tokens=8, vocab=4_000_000, hidden=1)

    def setup(given: Inputs) -> measure.Step:
        def step() -> measure.Output:
            scratch = torch.ones(24_000_000)
            if kept:
                loss = cross_entropy(given.logits, given.labels)
                gradient = torch.autograd.grad(loss, given.logits)[0]
            else:
                gradient = torch.ones_like(given.logits) * scratch[0].bfloat16()
            return scratch.sum(), (gradient,)

        return step

    peak = measure.peak_of_step(Contestant("scratch", "cross_entropy", setup), shape, None)
    assert 90e6 < peak < 170e6  # ones_like's own 64 MB come and go


def test_a_quarter_of_the_peers_memory_is_the_budget() -> None:
    ours, peer = (
        by_key(f"linear_cross_entropy/{bars.QUARTER}"),
        "linear_cross_entropy/torch.compile",
    )
    calls: list[tuple[str, int | None]] = []

    def peak_of(entry: Contestant, budget: int | None) -> int:
        calls.append((entry.key, budget))
        return 1 << 30

    (measured,) = measure.measure_peaks([ours], peak_of)
    assert calls == [(peer, None), (ours.key, (1 << 28) - measure.RESERVE)]
    assert measured.workspace_bytes == (1 << 28) - measure.RESERVE


def measured(key: str, seconds: Sequence[float], peak: int = 0) -> measure.Measurement:
    entry = measure.Measurement(by_key(key), peak, errors=measure.Errors(0.0, 0.001))
    entry.times.extend(seconds)
    return entry


def test_bars_are_held_against_the_fastest_peer() -> None:
    entries = [
        measured("grpo/TileLoss, in place", [1.0, 5.0, 1.0]),
        measured("grpo/torch.compile", [20.0]),
        measured("grpo/torch.compile, float32 logits", [9.0, 9.0]),
    ]
    (verdict,) = bars.judge({each.contestant.key: each for each in entries}, "avx2")
    assert (verdict.ratio, verdict.passed, verdict.reached_goal) == (9.0, True, False)
    assert verdict.peer == "torch.compile, float32 logits"
    line = bars.last_line([verdict], bars.SHAPE)
    assert line == (
        "bars: 1 of 1 pass, 16 not measured: pass grpo: TileLoss, in place 9.00 x torch.compile, float32 logits "
        "(bar 8, goal 12)"
    )
    assert "FAIL" in bars.last_line([replace(verdict, passed=False)], bars.SHAPE)


@pytest.mark.parametrize(("seconds", "outcome"), [(2.5, "pass"), (2.7, "FAIL")])
def test_a_bar_against_another_group_says_how_much_longer_it_takes(
    seconds: float, outcome: str
) -> None:
    peer, ours = (f"{name}/{bars.IN_PLACE}" for name in ("cross_entropy", "distillation_kl"))
    entries = {ours: measured(ours, [seconds])}
    assert bars.judge(entries, "avx2") == []
    (verdict,) = bars.judge(entries | {peer: measured(peer, [1.0])}, "avx2")
    assert str(verdict) == (
        f"{outcome} distillation_kl: TileLoss, in place takes {seconds:.2f} x the time of cross_entropy/TileLoss, in place "
        "(bar 2.6, goal 2)"
    )


@pytest.mark.parametrize(("peak", "passed"), [(250, True), (260, False)])
def test_too_much_memory_fails_a_bar(peak: int, passed: bool) -> None:
    peer, ours = "linear_cross_entropy/torch.compile", f"linear_cross_entropy/{bars.QUARTER}"
    entries = {peer: measured(peer, [3.0], 1000), ours: measured(ours, [1.0], peak)}
    (verdict,) = bars.judge(entries, bars.AMX)
    assert verdict.passed == passed


@pytest.mark.parametrize(
    ("isa", "seconds", "outcome"),
    [
        (bars.AMX, 1.0, "1 of 1 pass, 16 not measured: pass "),
        (bars.AMX, 2.0, "0 of 1 pass, 16 not measured: FAIL "),
        ("avx512_bf16", 1.0, "0 of 0 pass, 1 need AMX, 16 not measured: needs AMX "),
        ("avx512_bf16", 2.0, "0 of 0 pass, 1 need AMX, 16 not measured: needs AMX "),
    ],
)
def test_bars_of_the_head_are_for_amx(isa: str, seconds: float, outcome: str) -> None:
    peer, ours = "linear_cross_entropy/torch eager", "linear_cross_entropy/TileLoss"
    (verdict,) = bars.judge({peer: measured(peer, [4.5]), ours: measured(ours, [seconds])}, isa)
    assert bars.last_line([verdict], bars.SHAPE).startswith(
        f"bars: {outcome}linear_cross_entropy: "
    )
    assert verdict.failed == ("FAIL" in outcome)
    assert f"TileLoss {4.5 / seconds:.2f} x torch eager (bar 4" in str(verdict)


@pytest.mark.parametrize("forced", [None, "baseline"])
def test_the_instruction_set_is_the_librarys_own_choice(forced: str | None) -> None:
    """Also where TILELOSS_ISA forbids the AMX that a machine has."""
    environment = {k: v for k, v in os.environ.items() if k != "TILELOSS_ISA"}
    environment |= {"TILELOSS_ISA": forced} if forced else {}
    program = "from tileloss._core.calls import chosen_isa; print(chosen_isa())"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    names = ("baseline", "avx2", "avx512", "avx512_bf16", bars.AMX)
    assert done.stdout.strip() in ([forced] if forced else names), done.stderr


def test_a_page_gets_the_table_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    settings = report.settings(SHAPE, machine="A processor", threads=2)
    table = report.table([measured("grpo/torch eager", [0.5])], SHAPE, settings, 5)
    report.write_page(page, table)
    text = page.read_text()
    assert text == f"before\n{report.BEGIN}\n{table}{report.END}\nafter\n"
    assert "| torch eager | 500 ms | 1 | 0 MB | 0e+00 | 1e-03 |" in text
    page.write_text("no markers")
    with pytest.raises(report.NoMarkers, match="compare: begin"):
        report.write_page(page, table)
