"""`tileloss sweep`: its cases, every way in which one can end, the results file, the report, kills and stops."""

from __future__ import annotations

import errno
import faulthandler
import json
import multiprocessing
import os
import pty
import random
import re
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tileloss
from processes import children_of, is_gone, spawn, wait_for
from tileloss.testing._judge import Answer, Crashed, ask_apart
from tileloss.tools import progress, sweep
from tileloss.tools.command import run
from tileloss.tools.config import Config
from tileloss.tools.sweep_cases import read_sweep
from tileloss.tools.sweep_report import print_report

ON_HOST = tileloss.library_path().with_name("cuda_on_host")  # two devices that are the host
ROOT = Path(__file__).parents[2]
BASE = "loss: cross_entropy\nshape: 2x64\ndtype: bf16\n"
# 24 cases of some milliseconds.
CHEAP = """\
loss: [cross_entropy, logprobs]
shape: [3x256, 5x512]
dtype: bf16
threads: [1, 2, 3]
vocab_block: [64, 128]
iters: 1
warmup: 0
time_limit_s: 60
output: r.jsonl
"""
LINEAR = """\
loss: linear_cross_entropy
shape: 64x2000
hidden: 64
dtype: bf16
workspace: [1MiB, 0]
iters: 1
warmup: 0
output: r.jsonl
"""
# One case that a test does not see the end of: about a minute, so that a failed test leaves nothing behind for long.
LONG = """\
loss: cross_entropy
shape: 256x32000
dtype: bf16
iters: 50000
warmup: 0
time_limit_s: 3600
output: r.jsonl
"""
# Every figure that the report reads.
OK = {"isa": "baseline", "threads": 1, "schedule": "stash", "row_block": 8, "vocab_block": 64}
OK |= {"min_ms": 1, "median_ms": 2, "gb_per_s": 3}
Line = dict[str, Any]
Cases = list[Line]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(text: str, *sets: str) -> int:
    return run(arguments(text, *sets))


def arguments(text: str, *sets: str) -> list[str]:
    Path("c.yaml").write_text(text)
    return ["sweep", "--config=c.yaml", *(f"--set={value}" for value in sets)]


def cases_of(text: str, *sets: str) -> Cases:
    Path("c.yaml").write_text(text)
    return [case.identity for case in read_sweep(Config(Path("c.yaml"), list(sets))).cases.values()]


def results() -> Cases:
    return [json.loads(line) for line in Path("r.jsonl").read_text().splitlines()]


def count_cases() -> Counter[str]:
    return Counter(json.dumps(line["case"]) for line in results())


def thread_count(request: Line) -> int:
    """Of a request for a case, by which a test tells them apart."""
    nodes = request["config"]["children"]
    return next((int(node["text"]) for node in nodes if node["key"] == "threads"), 0)


@pytest.fixture
def fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case has figures at once."""
    answer = Answer(True, [{"event": "result", "line": OK}], {})
    monkeypatch.setattr(sweep, "ask_apart", lambda *_, **__: answer)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """No case may run."""
    monkeypatch.setattr(sweep, "ask_apart", None)


# --------------------------------------------------------------------------------------------------------------------- cases


def test_every_combination_is_a_case_once_in_order(folder: Path) -> None:
    cases = cases_of(CHEAP)
    assert len({json.dumps(case) for case in cases}) == len(cases) == 24
    assert [case["vocab_block"] for case in cases[:3]] == [64, 128, 64]
    assert [case["threads"] for case in cases[:7:2]] == [1, 2, 3, 1]
    assert [(case["tokens"], case["vocab"]) for case in cases[5:7]] == [(3, 256), (5, 512)]
    assert [case["loss"] for case in cases[11:13]] == ["cross_entropy", "logprobs"]


def test_options_belong_to_the_loss_and_settings_to_the_case(folder: Path) -> None:
    plain, case = cases_of(
        "loss: [cross_entropy, {name: cross_entropy, label_smoothing: 0.1, reduction: sum}]\nshape: 2x64\n"
        "dtype: fp16\nin_place: true\niters: 7\nwarmup: 2\nseed: 5\nisa: baseline\nrow_block: 3\nschedule: recompute\n"
    )
    assert plain == case | {"options": {}}
    assert case == {
        "loss": "cross_entropy",
        "options": {"label_smoothing": 0.1, "reduction": "sum"},
        **{"tokens": 2, "vocab": 64, "dtype": "float16", "pass": "value_and_grad"},
        **{"isa": "baseline", "threads": 0, "schedule": "recompute"},
        **{"row_block": 3, "vocab_block": 0},
        **{"in_place": True, "iters": 7, "warmup": 2, "seed": 5},
    }


@pytest.mark.parametrize("preset", ["grpo", "dr_grpo", "gspo", "cispo", "vespo", "reinforce"])
def test_a_preset_is_named_beside_the_options_that_it_sets(preset: str, folder: Path) -> None:
    named = "loss: {name: policy_loss, epsilon_high: 0.2, preset: %s}\nshape: 2x64\ndtype: bf16\n"
    (case,) = cases_of(named % preset)
    assert case["preset"] == preset
    plain = {name: value for name, value in case.items() if name != "preset"}
    options = json.dumps({"name": "policy_loss"} | case["options"])
    assert cases_of(f"loss: {options}\nshape: 2x64\ndtype: bf16\n") == [plain]


def test_of_what_is_no_loss_the_gradient_is_a_backward_once(folder: Path) -> None:
    text = "loss: [logprobs, cross_entropy]\nshape: 2x64\ndtype: bf16\n"
    assert [case["pass"] for case in cases_of(text)] == ["backward", "value_and_grad"]
    both = cases_of(text + "pass: [value_and_grad, backward]\n")
    assert [case["pass"] for case in both] == ["backward", "value_and_grad", "backward"]


def test_a_set_replaces_a_list_and_the_output_is_named_after_the_config(folder: Path) -> None:
    Path("sub").mkdir()
    Path("sub/d.yaml").write_text(BASE + "threads: [1, 2, 3]\n")
    sets = ["threads=[4,5]", "time_limit_s=1.5", "memory_limit_mb=100"]
    read = read_sweep(Config(Path("sub/d.yaml"), sets))
    assert [case.identity["threads"] for case in read.cases.values()] == [4, 5]
    assert (read.seconds, read.megabytes, read.output) == (1.5, 100, Path("d.jsonl"))
    sets = ["output=r.jsonl"]
    assert read_sweep(Config(Path("sub/d.yaml"), sets)).output == folder / "r.jsonl"
    Path("sub/d.yaml").write_text(BASE + "output: r.jsonl\n")
    assert read_sweep(Config(Path("sub/d.yaml"), [])).output == folder / "sub/r.jsonl"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dtype: bf16\nloss: cross_entropy\n", "shape: required, but missing"),
        ("dtype: bf16\nshape: 2x64\n", "loss: required, but missing"),
        (BASE + "threads: []\n", "c.yaml:4: threads: an empty list"),
        (BASE + "threads:\n", "c.yaml:4: threads: has no value"),
        (BASE + "threads: 1025\n", "c.yaml:4: threads: 1025 is out of range: expected 0 to 1024"),
        (BASE + "threads: [1,\n  x]\n", "c.yaml:5: threads: expected an integer, got 'x'"),
        (BASE + "threads: [1, 2, 1]\n", "c.yaml:4: threads: 1 stands there twice"),
        (BASE + "threads: [-1]\n", "c.yaml:4: threads: -1 is out of range"),
        (BASE + "threads: {a: 1}\n", "c.yaml:4: threads: expected an integer, got a section"),
        (BASE + "isa: [mmx]\n", "c.yaml:4: isa: 'mmx' is none of "),
        (BASE + "pass: sideways\n", "c.yaml:4: pass: 'sideways' is none of forward, backward, value_and_grad"),
        (BASE + "blocks: 3\n", "c.yaml:4: blocks: unknown key; known here: "),
        (BASE + "thread: 3\n", "c.yaml:4: thread: unknown key; did you mean threads?"),
        (BASE + "iters: [1, 2]\n", "c.yaml:4: iters: expected an integer, got a list"),
        (BASE + "time_limit_s: 0\n", "c.yaml:4: time_limit_s: expected a number from 0.001 to 1e+06, got '0'"),
        (BASE + "memory_limit_mb: -1\n", "c.yaml:4: memory_limit_mb: expected a number from 0 to "),
        (BASE + "cuda_kernel: cluster\n", "c.yaml:4: cuda_kernel: expected auto on cpu from logits, got cluster"),
        (BASE + "device: tpu\n", "c.yaml:4: device: expected cpu, cuda or cuda:N, got tpu"),
        (BASE + "threads: 1\ndevice: cuda\n", "c.yaml:4: threads: expected 0 on cuda from logits, got 1"),
        (BASE + "device: cuda\nvocab_block: 64\n", "c.yaml:5: vocab_block: expected 0 on cuda from logits, got 64"),
        (BASE + "device: cuda\nisa: avx2\n", "c.yaml:5: isa: expected auto on cuda from logits, got avx2"),
        (BASE + "device: cuda\nmemory_limit_mb: 100\n", "c.yaml:5: memory_limit_mb: expected none on a GPU"),
        ("shape: 2x64\ndtype: [bf16, bfloat16]\nloss: cross_entropy\n", "c.yaml:2: dtype: bfloat16 stands there twice"),
        ("shape: [2x64, 2x64]\ndtype: bf16\nloss: cross_entropy\n", "c.yaml:1: shape: 2x64 stands there twice"),
        ("shape: 2x64\ndtype: bf16\nloss: focal\n", "c.yaml:3: loss: 'focal' is none of logprobs, "),
        ("shape: 2x64\ndtype: bf16\nloss: sweep\n", "c.yaml:3: loss: 'sweep' is none of logprobs, "),
        ("shape: 2x64\ndtype: bf16\nloss: soft_cross_entropy\n", "c.yaml:3: loss: 'soft_cross_entropy' is none of "),
        ("shape: 2x64\ndtype: bf16\nloss: {name: cross_entropy, smoothing: 0.1}\n", "c.yaml:3: smoothing: unknown key"),
        ("shape: 2x64\ndtype: bf16\nloss:\n  - {label_smoothing: 0.1}\n", "c.yaml:4: loss.name: required, but missing"),
        (
            "shape: 2x64\ndtype: bf16\nloss: [cross_entropy, {name: cross_entropy}]\n",
            "c.yaml:3: loss: cross_entropy stands there twice",
        ),
        (LINEAR + "threads: 1025\n", "c.yaml:9: threads: 1025 is out of range"),
        (LINEAR.replace("hidden: 64\n", ""), "c.yaml: hidden: linear_cross_entropy needs the hidden size, got none"),
        (LINEAR.replace("1MiB", "1MB"), "c.yaml:5: workspace: expected bytes, as 65536, "),
        (LINEAR + "head_layout: hw\n", "c.yaml:9: head_layout: 'hw' is none of vh, hv"),
        (LINEAR + "in_place: true\n", "c.yaml:9: in_place: linear_cross_entropy has no logits"),
        (LINEAR.replace("linear_", ""), "c.yaml:3: hidden: cross_entropy takes logits; this is for the functions linear_*"),
        (BASE + "workspace: 1MiB\n", "c.yaml:4: workspace: cross_entropy takes logits"),
        (BASE + "output: c.yaml\n", "output: expected a file that is not read, got "),
        (
            BASE + f"threads: {[*range(400)]}\nrow_block: {[*range(400)]}\n",
            "c.yaml:2: shape: all lists together make more than 100000 cases",
        ),
        *(
            (
                f"loss: cross_entropy\ndtype: bf16\nshape: {shape}\n",
                f"c.yaml:3: shape: expected TOKENSxVOCAB, each 1 to 2147483647, got '{shape}'",
            )
            for shape in "64 64x x64 64x64x64 0x64 64x-1 2x3000000000 axb 1.5x64 \u0661x64".split()
        ),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_key_and_line_before_a_case_runs(
    text: str, message: str, folder: Path, broken: None, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(text) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tileloss: ") and captured.err.count("\n") == 1
    assert message in captured.err
    assert [path.name for path in folder.iterdir()] == ["c.yaml"]


def test_a_config_that_is_missing_is_the_environments(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["sweep", "--config=none.yaml"]) == 3
    assert "none.yaml" in capfd.readouterr().err


# ------------------------------------------------------------------------------------------------------------ real cases


def test_every_case_has_the_benchs_figures(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command(CHEAP) == 0
    captured = capfd.readouterr()
    assert captured.out.startswith(f"sweep c.yaml: 24 cases, results in {folder}/r.jsonl\n\n")
    assert captured.out.endswith("\n\nok: 24\n")
    assert "\nlogprobs [5, 512] bfloat16 backward\n" in captured.out
    assert captured.err.splitlines()[23].startswith(
        "[24/24] logprobs [5, 512] bfloat16 backward threads=3 vocab_block=128: "
    )
    assert len(count_cases()) == len(results()) == 24
    for line in results():
        assert (
            list(line)
            == (
                "tool version case status pass isa threads schedule row_block vocab_block workspace_bytes iters first_call_s "
                "median_ms min_ms mean_ms mem_after_alloc mem_peak mem_scratch gb_per_s predicted_ms buffers seconds"
            ).split()
        )
        assert (line["tool"], line["status"]) == ("sweep", "ok")
        assert line["vocab_block"] == line["case"]["vocab_block"]
        assert line["threads"] <= line["case"]["threads"]
        for key in ("first_call_s", "median_ms", "min_ms", "mean_ms", "mem_peak", "gb_per_s"):
            assert line[key] > 0


@pytest.mark.parametrize(
    ("text", "sets", "words", "counts"),
    [
        (
            CHEAP,
            [
                "loss=[{name: policy_loss, preset: dr_grpo}, {name: policy_loss, preset: gspo, delta: 3}]",
                *("shape=8x256", "threads=1", "vocab_block=64"),
            ],
            ["policy_loss preset=gspo ", " delta=3.0 "],
            "ok: 2",
        ),
        (
            LINEAR,
            [],
            [
                "\nlinear_cross_entropy [64, 2000] bfloat16 value_and_grad hidden 64\n",
                *("TFLOP/s", "best: workspace="),
            ],
            "ok: 2",
        ),
        (
            LINEAR,
            ["loss=linear_logprobs", "head_layout=hv", "workspace=0"],
            ["\nlinear_logprobs [64, 2000] bfloat16 backward hidden 64\n"],
            "ok: 1",
        ),
        (
            LINEAR,
            ["pass=[value_and_grad, backward]", "workspace=0"],
            [f" [64, 2000] bfloat16 {each} hidden 64\n" for each in ("value_and_grad", "backward")],
            "ok: 2",
        ),
        (
            CHEAP,
            ["vocab_block=100", "loss=cross_entropy", "threads=1"],
            ["vocab_block: expected a multiple of 64", "best: none\n"],
            "error: 2",
        ),
        (
            CHEAP,
            ["shape=100000000x151936", "loss=cross_entropy", "threads=1"],
            ["out_of_memory: logits: needs 30387200.0 MB"],
            "out_of_memory: 2",
        ),
        (
            CHEAP,
            ["shape=[5000x50000, 3x256]", "loss=cross_entropy", "threads=1", "memory_limit_mb=400"],
            ["out_of_memory: logits: cannot allocate 500.0 MB"],
            "ok: 2\nout_of_memory: 2",
        ),
        (  # too little for its threads, and for the logits, whatever this process has left
            CHEAP,
            ["shape=4000x4000", "loss=cross_entropy", "threads=4", "memory_limit_mb=1"],
            ["out_of_memory: "],
            "out_of_memory: 2",
        ),
        (
            LONG,
            ["time_limit_s=0.2", "threads=[1,2]"],
            ["timeout: killed after 0.2 s\n"],
            "timeout: 2",
        ),
    ],
)
def test_cases_are_measured_or_end_in_their_way(
    text: str,
    sets: list[str],
    words: list[str],
    counts: str,
    folder: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert command(text, *sets) == (0 if counts.startswith("ok") and "\n" not in counts else 1)
    captured = capfd.readouterr()
    assert captured.out.endswith(f"\n\n{counts}\n")
    for each in words:
        assert each in captured.out + captured.err
    for line in results():
        assert ("message" in line) is (line["status"] != "ok")
        if "hidden" in line["case"]:
            assert line["tflops"] > 0
            assert line["workspace_bytes"] <= (line["case"]["workspace"] or 1 << 40)


# 36 bytes a row, of which the logits are 2. The limit stops a case that allocates first.
def test_rows_that_do_not_fit_are_refused_before_anything_is_allocated(folder: Path) -> None:
    found = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    assert found
    rows = int(found[1]) * 1024 // 20
    if rows > 1 << 31:
        return  # no bench has as many
    assert command(BASE + "output: r.jsonl\n", f"shape={rows}x1", "memory_limit_mb=1000") == 1
    (line,) = results()
    assert line["status"] == "out_of_memory"
    assert ": needs " in line["message"] and "are available beside" in line["message"]


def test_the_kernels_of_a_device_are_measured(folder: Path) -> None:
    if not ON_HOST.is_dir():
        pytest.skip("NOT RUN: no cuda_on_host")
    sets = ["device=cuda", "cuda_kernel=[two_reads, cluster]", "iters=1", "output=r.jsonl"]
    ran = spawn(*arguments(BASE, *sets), LD_LIBRARY_PATH=str(ON_HOST))
    out = ran.communicate()[0]
    assert ran.returncode == 0
    assert "cross_entropy [2, 64] bfloat16 value_and_grad on cuda\n" in out
    assert "best: cuda_kernel=" in out
    assert len(results()) == 2
    for line in results():
        assert line["cuda_kernel"] == line["case"]["cuda_kernel"]
        assert line["calls"] >= 1
        # By the device's clock, which the host does not keep waiting: that is done when it synchronises.
        assert 0 < line["host_ns"] < 1e6 * line["median_ms"]


# --------------------------------------------------------------------------------------------- every way in which one can end


def say(text: str) -> None:
    os.write(2, text.encode())


def crash() -> None:
    faulthandler.disable()  # pytest's
    say("warming up\nheap is broken\n")
    os.kill(os.getpid(), signal.SIGSEGV)


def hang() -> None:
    say("0123456789\n" * 100_000 + "waiting\n")
    time.sleep(300)


def run_out() -> None:
    raise MemoryError


def limits() -> None:
    group = os.getpgrp() == os.getpid() != os.getppid()
    size = resource.getrlimit(resource.RLIMIT_AS)[0]
    victim = Path("/proc/self/oom_score_adj").read_text().strip()
    say(f"{group} {victim} {size > 4_000_000_000} {size < 30_000_000_000}: {os.read(0, 1)!r}\n")
    os._exit(9)


# By the number of threads: what a case's process does before the bench.
HARM: dict[int, Callable[[], None]] = {
    **{2: crash, 3: hang, 4: run_out, 5: limits, 6: lambda: os._exit(0)},
    **{8: lambda: os.kill(os.getpid(), signal.SIGKILL), 9: lambda: os.kill(os.getpid(), 9)},
}


def test_it_goes_on_after_every_kind_of_failure_and_records_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    kills = iter([*[7] * 10, 8])  # somebody was killed for memory while the last case ran

    def ask(request: Line, before: Callable[[], None], seconds: float) -> Answer:
        def first() -> None:
            before()
            HARM.get(thread_count(request), lambda: None)()

        return ask_apart(request, before=first, seconds=seconds)

    monkeypatch.setattr(sweep, "ask_apart", ask)
    monkeypatch.setattr(sweep, "_oom_kills", lambda: next(kills, 8))
    text = BASE + f"threads: {[*range(1, 10)]}\nmemory_limit_mb: 4000\noutput: r.jsonl\n"
    assert command(text, "time_limit_s=4") == 1
    captured = capfd.readouterr()
    expected = [
        ("ok", None),
        ("crashed", "signal 11, Segmentation fault; it said: heap is broken"),
        ("timeout", "killed after 4 s; it said: waiting"),
        ("out_of_memory", "out of memory"),
        ("error", "exit code 9; it said: True 1000 True True: b''"),
        ("error", "exit code 0"),
        ("ok", None),
        ("crashed", "signal 9, Killed"),
        ("out_of_memory", "killed by the kernel for its memory"),
    ]
    assert [(line["status"], line.get("message")) for line in results()] == expected
    assert [line["case"]["threads"] for line in results()] == [*range(1, 10)]
    assert [line.get("signal") for line in results()][1:8:6] == [11, 9]
    assert all(line["seconds"] > 0 for line in results())
    for number in range(1, 10):
        assert f"[{number}/9] " in captured.err
    counts = "crashed: 2\nerror: 2\nok: 2\nout_of_memory: 2\ntimeout: 1\n"
    assert captured.out.endswith(counts)

    # A failed case has its line as well: nothing is left to do, nothing is added.
    before = Path("r.jsonl").read_text()
    monkeypatch.setattr(sweep, "ask_apart", None)
    assert command(text) == 1
    assert Path("r.jsonl").read_text() == before
    assert capfd.readouterr().out.endswith(counts)


# ------------------------------------------------------------------------------------------------------------- results file


def test_it_goes_on_from_a_file_cut_anywhere(
    folder: Path, fine: None, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(CHEAP) == 0
    whole = Path("r.jsonl").read_text()
    for tenth in range(10):
        cut = whole[: len(whole) * tenth // 10 + tenth]
        kept, _, torn = cut.rpartition("\n")
        Path("r.jsonl").write_text(cut)
        capfd.readouterr()
        assert command(CHEAP) == 0
        is_torn = torn not in ("", *whole.splitlines())
        assert ("torn last line" in capfd.readouterr().err) is is_torn
        assert Path("r.jsonl").read_text().startswith(kept)
        assert len(results()) == len(count_cases()) == 24


def test_a_whole_last_line_without_its_newline_is_not_measured_again(
    folder: Path, fine: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(CHEAP) == 0
    whole = Path("r.jsonl").read_text()
    Path("r.jsonl").write_text(whole.rstrip("\n"))
    monkeypatch.setattr(sweep, "ask_apart", None)
    capfd.readouterr()
    assert command(CHEAP) == 0
    captured = capfd.readouterr()
    assert captured.err == ""
    assert "\n24 of them are there already\n" in captured.out
    assert Path("r.jsonl").read_text() == whole


def test_other_settings_are_other_cases_and_old_lines_are_kept(
    folder: Path, fine: None, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(CHEAP) == 0
    before = Path("r.jsonl").read_text()
    assert command(CHEAP, "iters=2", "threads=[1]") == 0
    assert "\nnote: 24 results there belong to other settings: kept and ignored\n" in capfd.readouterr().out  # fmt: skip
    assert Path("r.jsonl").read_text().startswith(before)
    assert len(count_cases()) == 24 + 8


def test_the_lines_of_the_compiled_program_are_gone_on_with(folder: Path, broken: None) -> None:
    """Of one that chose no max_length, which a bench of today has in its options, and with members in another order."""
    parts = [
        '"loss":"policy_loss","preset":"dr_grpo","options":{"aggregation":"seq_mean_token_sum_norm"},"tokens":17,"vocab":64,'
        '"dtype":"bfloat16","pass":"backward","isa":"auto","threads":0,"schedule":"auto","row_block":0,"vocab_block":0,'
        '"in_place":false,"iters":1,"warmup":0,"seed":0',
        '"loss":"linear_cross_entropy","options":{"label_smoothing":0.1},"tokens":17,"vocab":64,"dtype":"bfloat16",'
        '"pass":"backward","isa":"auto","threads":0,"schedule":"auto","row_block":0,"vocab_block":0,"hidden":64,'
        '"head_layout":"hv","workspace":1048576,"in_place":false,"iters":1,"warmup":0,"seed":0',
        '"loss":"cross_entropy","options":{},"tokens":17,"vocab":64,"dtype":"bfloat16","pass":"backward","isa":"auto",'
        '"threads":0,"schedule":"auto","row_block":0,"vocab_block":0,"cuda_kernel":"cluster","device":"cuda:1",'
        '"in_place":false,"iters":1,"warmup":0,"seed":0',
    ]
    figures = json.dumps(OK | {"tflops": 1})[1:]
    Path("r.jsonl").write_text(
        "".join(f'{{"case":{{{part}}},"status":"ok",{figures}\n' for part in parts)
    )
    before = Path("r.jsonl").read_text()
    text = "shape: 17x64\ndtype: bf16\npass: backward\niters: 1\nwarmup: 0\noutput: r.jsonl\n"
    for loss, *sets in (
        ("{name: policy_loss, preset: dr_grpo}",),
        ("{name: linear_cross_entropy, label_smoothing: 0.1}", "head_layout=hv", "hidden=64"),
        ("cross_entropy", "device=cuda:1", "cuda_kernel=cluster"),
    ):
        workspace = ["workspace=1MiB"] if "hidden=64" in sets else []
        assert command(f"loss: {loss}\n{text}", *sets, *workspace) == 0
    assert Path("r.jsonl").read_text() == before


GOOD = '{"case":{"a":1},"status":"timeout"}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"tool":"gradcheck"}\n', "r.jsonl:1: not a sweep's result: no case"),
        (GOOD + '{"case":3,"status":"timeout"}\n', "r.jsonl:2: not a sweep's result: no case"),
        (GOOD + '{"case":{}}\n', "r.jsonl:2: not a sweep's result: no status"),
        ('{"case":{},"status":"ok"}\n', "r.jsonl:1: not a sweep's result: no isa"),
        (
            json.dumps({"case": {"hidden": 1}, "status": "ok"} | OK) + "\n",
            "r.jsonl:1: not a sweep's result: no tflops",
        ),
        (GOOD + GOOD, "r.jsonl:2: a second result of the case"),
        ("nonsense\n" + GOOD, "r.jsonl:1: not a JSON object"),
        (GOOD + "precious data without newline", "r.jsonl:2: not a JSON object"),
        *(  # what the report divides by
            (
                json.dumps({"case": {}, "status": "ok"} | OK | {key: value}) + "\n",
                f"r.jsonl:1: not a sweep's result: {key}: expected a number above 0, got {json.dumps(value)}",
            )
            for key in ("median_ms", "min_ms")
            for value in (0, -1.5, "2", None)
        ),
    ],
)
def test_lines_of_another_kind_are_refused_and_kept(
    text: str, message: str, folder: Path, broken: None, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("r.jsonl").write_text(text)
    assert command(BASE + "output: r.jsonl\n") == 2
    assert message in capfd.readouterr().err
    assert Path("r.jsonl").read_text() == text


def test_a_full_disk_leaves_earlier_results_and_a_resume_completes_them(
    folder: Path, fine: None, capfd: pytest.CaptureFixture[str]
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        assert command(CHEAP) == 3
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    problems = [os.strerror(number) for number in (errno.EFBIG, errno.ENOSPC)]
    said = capfd.readouterr().err.splitlines()[-1]
    assert said in [f"tileloss: {folder}/r.jsonl: {problem}" for problem in problems]
    assert 2 < len(results()) < 24
    assert command(CHEAP) == 0
    assert len(results()) == len(count_cases()) == 24


# ------------------------------------------------------------------------------------------------------------ what it says


def test_the_report_names_the_best_of_each_group_and_what_matters(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cases = cases_of(
        "loss: cross_entropy\nshape: 2x64\ndtype: [bf16, fp32]\nrow_block: [1, 2]\nvocab_block: [64, 128]\n"
    )
    medians = (4, 2, 4.04, 2.02, 10, 30, 10, 0)  # bf16: 1x64, 1x128, 2x64, 2x128; then fp32
    lines = [
        {"case": case, "status": "ok"} | OK | {"median_ms": ms}
        for case, ms in zip(cases, medians, strict=True)
    ]
    lines[7] = {"case": cases[7], "status": "crashed", "message": "signal 11"}
    print_report(lines)
    out = capfd.readouterr().out
    for text in (
        "\ncross_entropy [2, 64] bfloat16 value_and_grad\n",
        "\nbest: row_block=1 vocab_block=128: 2 ms\n",
        "\ncross_entropy [2, 64] float32 value_and_grad\n",
        "\nbest: row_block=1 vocab_block=64: 10 ms\n",
        " crashed\n",
        "\nrow_block: 1.010 x, at most 1.010 x\n",
        "\nvocab_block: 2.000 x, at most 3.000 x\n",
        " 0 to 4.04 ms\n",
        # Bars are in proportion: 2 of 4.04 ms are 20 of 40 characters.
        f" {20 * '#'} best\n",
        f" {40 * '#'}\n",
    ):
        assert text in out


def test_a_group_without_a_result_has_no_best(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    print_report([{"case": cases_of(BASE)[0], "status": "timeout", "message": "killed"}])
    assert "\nbest: none\n" in capfd.readouterr().out


@pytest.mark.parametrize("patience_s", [0, 60])  # before there is a bar
def test_on_a_terminal_only_failures_stay(
    patience_s: float, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Answer(True, [{"event": "result", "line": OK}], {})

    def ask(request: Line, **_: Any) -> Answer:
        if thread_count(request) == 2:
            raise Crashed("exit code 9", None)
        return answer

    monkeypatch.setattr(sweep, "ask_apart", ask)
    monkeypatch.setattr(progress, "_PATIENCE_S", patience_s)
    monkeypatch.setattr(progress, "_BETWEEN_BARS_S", 0)
    reading, writing = pty.openpty()
    with os.fdopen(writing, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        command(BASE + "threads: [1, 2]\noutput: r.jsonl\n")
        terminal.write("the end")
        terminal.flush()
        said = ""
        while not said.endswith("the end"):  # a terminal hands on what it has so far
            said += os.read(reading, 1 << 16).decode()
    os.close(reading)
    line = "[2/2] cross_entropy [2, 64] bfloat16 value_and_grad threads=2: error: exit code 9\r\n"
    assert line in said
    assert ("1/2" in said) is (patience_s == 0)  # the bar's
    assert "threads=1: 2 ms" not in said


# --------------------------------------------------------------------------------------------------------- kills and stops


def fork_sweep(given: list[str]) -> Any:
    """A process that sweeps, forked off this one, which has imported everything."""

    def work() -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os._exit(run(given))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def test_killed_at_random_points_it_loses_repeats_and_doubles_nothing(folder: Path) -> None:
    given = arguments(CHEAP)
    begin = time.monotonic()
    assert fork_sweep(given).join() is None
    whole = time.monotonic() - begin
    assert len(results()) == 24
    Path("r.jsonl").unlink()
    points = random.Random(1)
    in_the_middle = kills = 0
    before = ""
    while kills < 8:
        process = fork_sweep(given)
        time.sleep(points.uniform(0, whole / 3))
        process.kill()
        process.join()
        after = Path("r.jsonl").read_text() if Path("r.jsonl").exists() else ""
        assert after.startswith(before)  # no kill within a write: a cut file has a test of its own
        before = after
        kills += 1
        if process.exitcode != -signal.SIGKILL:
            assert len(results()) == len(count_cases()) == 24
            Path("r.jsonl").unlink()
            before = ""
        else:
            in_the_middle += 0 < after.count("\n") < 24
    assert in_the_middle > 1
    fork_sweep(given).join()
    assert len(results()) == len(count_cases()) == 24


def test_killed_it_takes_its_case_and_its_lock_with_it(folder: Path) -> None:
    process = fork_sweep(arguments(LONG))
    (child,) = wait_for(lambda: children_of(process.pid))
    process.kill()
    process.join()
    wait_for(lambda: is_gone(child))
    assert command(LONG, "iters=1") == 0


def test_two_on_one_file_are_refused(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = fork_sweep(arguments(LONG))
    try:
        wait_for(lambda: children_of(first.pid))
        assert command(LONG, "iters=1") == 3
        assert "r.jsonl: another process writes to it" in capfd.readouterr().err
        assert Path("r.jsonl").read_text() == ""
    finally:
        first.kill()
        first.join()


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_with_its_case_and_it_goes_on_later(by: int, folder: Path) -> None:
    assert command(LONG, "iters=1") == 0
    before = Path("r.jsonl").read_text()  # an earlier result, which must survive
    stopped = spawn(*arguments(LONG))
    (child,) = wait_for(lambda: children_of(stopped.pid))
    time.sleep(0.1)
    stopped.send_signal(by)
    out, err = stopped.communicate()
    assert stopped.returncode == 128 + by
    assert err == f"tileloss: stopped by {signal.Signals(by).name}\n"
    assert "\nstopped with 0 of 1 cases done: the same command goes on from here\n" in out
    wait_for(lambda: is_gone(child))
    assert Path("r.jsonl").read_text() == before


def test_the_configs_in_the_documents_are_read(folder: Path) -> None:
    for name, count in (("small", 12), ("linear", 16), ("blocks", 24)):
        config = Config(ROOT / f"configs/sweep_{name}.yaml", [])
        assert len(read_sweep(config).cases) == count
