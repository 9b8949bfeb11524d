"""`tileloss bench` and `tileloss info`: result lines and their figures, tables, what is refused, stops."""

from __future__ import annotations

import argparse
import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import tileloss
from processes import children_of, spawn, wait_for
from tileloss.testing._judge import Answer, ask_apart
from tileloss.tools import bench, info
from tileloss.tools.command import run

ON_HOST = tileloss.library_path().with_name("cuda_on_host")  # two devices that are the host
SMALL = ("--tokens=40", "--vocab=500", "--iters=2", "--warmup=0")
LINEAR = ("--loss=linear_cross_entropy", "--hidden=64")
# Of every line, in this order.
KEYS = """
tool version impl loss tokens vocab hidden dtype device in_place entropy options preset workspace warmup seed pass isa threads
schedule row_block vocab_block workspace_bytes iters first_call_s median_ms min_ms mean_ms mem_after_alloc mem_peak mem_scratch
gb_per_s in_place_ms copy_ms read_ms exp_ms roof_ms ratio_to_roof roofs_difference roofs_steady
""".split()
OF_KERNELS = ["predicted_ms", "buffers", "speedup_over_reference"]
OF_HEADS = [
    *("head_layout", "dhead_dtype", "roof_tflops", "roof_share"),
    *("tflops", "kept_columns", "kept_rows"),
]
Line = dict[str, Any]


def command(*arguments: str) -> int:
    return run(list(arguments))


def lines_of(capfd: pytest.CaptureFixture[str], *arguments: str) -> list[Line]:
    assert command("bench", *arguments, "--json") == 0
    return [json.loads(line) for line in capfd.readouterr().out.splitlines()]


def check_line(line: Line) -> None:
    more = [key for key in (*OF_HEADS, *OF_KERNELS) if key in line]
    assert [key for key in line if key not in more] == KEYS
    positive = (
        *("threads", "first_call_s", "median_ms", "min_ms", "mean_ms", "mem_after_alloc"),
        *("gb_per_s", "in_place_ms", "copy_ms", "read_ms", "exp_ms", "roof_ms"),
    )
    assert all(line[key] > 0 for key in positive)
    assert line["min_ms"] <= line["median_ms"] and line["mem_peak"] >= line["mem_after_alloc"]
    assert line["ratio_to_roof"] == pytest.approx(line["median_ms"] / line["roof_ms"])
    if not line["hidden"] and "teacher_temperature" not in line["options"]:
        writes = line["pass"] != "forward"
        memory = "read_ms" if not writes else "in_place_ms" if line["in_place"] else "copy_ms"
        assert line["roof_ms"] == max(line[memory], line["exp_ms"])


@pytest.mark.parametrize("in_place", [False, True])
def test_a_line_has_every_field_and_the_gradient_of_the_kernel_is_last(
    in_place: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ["--impl=both", "--entropy", "--seed=9", "--set=label_smoothing=0.1"]
    lines = lines_of(capfd, *SMALL, *flags, *(["--in-place"] if in_place else []))
    passes = ["forward", "value_and_grad"]
    assert [(line["impl"], line["pass"]) for line in lines] == [
        (impl, each) for impl in ("reference", "kernel") for each in passes
    ]
    for line in lines:
        check_line(line)
        assert (line["tokens"], line["vocab"], line["seed"]) == (40, 500, 9)
        assert (line["dtype"], line["hidden"], line["preset"]) == ("bfloat16", None, None)
        assert (line["in_place"], line["entropy"]) == (in_place, True)
        assert line["options"] == {"label_smoothing": 0.1}
        assert line["roofs_steady"] is (line["roofs_difference"] <= 0.15)
    for of_reference, line in zip(lines[:2], lines[2:], strict=True):
        ratio = of_reference["median_ms"] / line["median_ms"]
        assert line["speedup_over_reference"] == pytest.approx(ratio)


def test_numbers_are_decimal_with_leading_zeros_too(capfd: pytest.CaptureFixture[str]) -> None:
    line = lines_of(capfd, "--tokens=010", "--vocab=0080", "--iters=08", "--warmup=00")[-1]
    assert [line[key] for key in ("tokens", "vocab", "iters", "warmup")] == [10, 80, 8, 0]


@pytest.mark.parametrize("loss", ["cross_entropy", "policy_loss"])
@pytest.mark.parametrize("each", ["forward", "backward", "value_and_grad"])
def test_one_pass_alone_is_timed_against_its_roof(
    each: str, loss: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (line,) = lines_of(capfd, *SMALL, f"--pass={each}", f"--loss={loss}", "--in-place")
    check_line(line)
    assert line["pass"] == each


def test_the_gradient_of_what_is_no_loss_is_its_backward(capfd: pytest.CaptureFixture[str]) -> None:
    flags = [*SMALL, "--loss=logprobs"]
    assert [line["pass"] for line in lines_of(capfd, *flags)] == ["forward", "backward"]
    (line,) = lines_of(capfd, *flags, "--pass=value_and_grad")
    assert line["pass"] == "backward"


# Useful products of a forward and of a gradient, each of 2 N H V operations.
@pytest.mark.parametrize(
    ("flags", "products"),
    [
        ("--loss=linear_cross_entropy --set=label_smoothing=0.1 --entropy", (1, 3)),
        ("--loss=linear_cross_entropy --head-layout=hv --dhead-dtype=bf16", (1, 3)),
        ("--loss=linear_policy_loss --preset=grpo --frozen-head", (1, 2)),
        ("--loss=linear_policy_loss --preset=gspo --dtype=fp32 --isa=baseline", (1, 3)),
        ("--loss=linear_logprobs --dtype=fp16", (1, 3)),
        ("--loss=linear_policy_loss --pass=backward", (3,)),
        ("--loss=linear_distillation", (2, 4)),
        ("--loss=linear_distillation --frozen-head", (2, 3)),
        ("--loss=linear_distillation --pass=backward", (4,)),
    ],
)
def test_with_the_head_figures_are_of_useful_products(
    flags: str, products: tuple[int, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    lines = lines_of(capfd, *SMALL, *flags.split(), "--hidden=64")
    for line, times in zip(lines, products, strict=True):
        check_line(line)
        operations = times * 2 * 40 * 64 * 500
        assert line["tflops"] * line["median_ms"] * 1e9 == pytest.approx(operations)
        assert line["roof_share"] == pytest.approx(line["tflops"] / line["roof_tflops"])
        assert line["roof_ms"] * line["roof_tflops"] * 1e9 >= operations * (1 - 1e-9)
        assert sum(line["buffers"].values()) == line["workspace_bytes"]
        is_frozen, is_turned = "--frozen-head" in flags, "--head-layout=hv" in flags
        assert line["head_layout"] == ("hv" if is_turned else "vh")
        narrow = "bfloat16" if is_turned else "float32"
        assert line["dhead_dtype"] == (None if is_frozen else narrow)


@pytest.mark.parametrize("in_place", [False, True])
def test_of_distillation_both_sides_are_read(
    in_place: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ["--loss=distillation", "--set=divergence=jsd", *(["--in-place"] if in_place else [])]
    for line, matrices in zip(lines_of(capfd, *SMALL, *flags), (2, 3), strict=True):
        moved = line["gb_per_s"] * line["median_ms"] * 1e6
        assert moved == pytest.approx(matrices * 40 * 500 * 2)
        assert line["options"]["divergence"] == "jsd"
        assert line["roof_ms"] >= 2 * line["exp_ms"]


# The logits are 10 MB in 16 bits, dhead 5 MB, which holds half of them first: a kernel that took either in secret would be seen.
def test_the_workspace_is_a_cap_on_the_plan_and_on_what_is_measured(
    capfd: pytest.CaptureFixture[str],
) -> None:
    shape = ("--tokens=256", "--vocab=20000", "--iters=1", "--warmup=0", "--threads=2")
    other = 1 << 20  # stacks of threads; Linux counts resident pages in batches of 64 a thread
    stash = lines_of(capfd, *LINEAR, *shape, "--schedule=stash")[-1]
    assert (stash["schedule"], stash["kept_columns"], stash["kept_rows"]) == ("stash", 20000, 128)
    assert stash["workspace"] is None
    assert stash["workspace_bytes"] > 128 * 20_000 * 2  # the other half
    assert stash["mem_scratch"] <= stash["workspace_bytes"] + other
    capped = lines_of(capfd, *LINEAR, *shape, "--workspace=4MiB")[-1]
    assert (capped["schedule"], capped["workspace"]) == ("stash", 4 << 20)
    assert 0 < capped["kept_columns"] < 10_000
    assert capped["workspace_bytes"] <= 4 << 20
    assert capped["mem_scratch"] <= (4 << 20) + other


@pytest.mark.parametrize("preset", ["grpo", "gspo", "vespo"])
def test_a_preset_is_timed_with_further_options(
    preset: str, capfd: pytest.CaptureFixture[str]
) -> None:
    more = ["--set=beta=0.1", "--set=sampler_correction=truncate", "--in-place"]
    lines = lines_of(capfd, *SMALL, "--loss=policy_loss", f"--preset={preset}", *more)
    assert [line["pass"] for line in lines] == ["forward", "value_and_grad"]
    for line in lines:
        assert line["preset"] == preset
        assert line["options"]["beta"] == 0.1


@pytest.mark.parametrize(
    ("flags", "max_length"),
    [
        (["--tokens=300"], 256),  # of the longest sequence that it draws
        (["--tokens=17"], 17),
        (["--tokens=17", "--set=max_length=1000"], 1000),
    ],
)
def test_the_max_length_that_a_preset_needs_is_supplied(
    flags: list[str], max_length: int, capfd: pytest.CaptureFixture[str]
) -> None:
    policy = ["--loss=policy_loss", "--preset=dr_grpo", "--vocab=64", "--iters=1", "--warmup=0"]
    assert lines_of(capfd, *policy, *flags)[-1]["options"]["max_length"] == max_length


@pytest.mark.parametrize("tokens", [1, 257])
def test_tokens_of_every_number_may_have_losses_of_their_own(
    tokens: int, capfd: pytest.CaptureFixture[str]
) -> None:
    sets = ["--set=aggregation=none", "--set=advantage_level=token"]
    shape = [f"--tokens={tokens}", "--vocab=64", "--iters=1"]
    assert len(lines_of(capfd, "--loss=policy_loss", *shape, *sets)) == 2


# -------------------------------------------------------------------------------------------------------------- what it says


def test_the_table_and_the_results_file_are_of_one_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "r.jsonl"
    for runs in (1, 2):
        flags = ["--loss=policy_loss", "--preset=grpo", "--in-place", "--entropy", "--threads=1"]
        assert command("bench", *SMALL, *flags, f"--output={output}") == 0
        out = capfd.readouterr().out.splitlines()
        start = "policy_loss grpo [40, 500] bfloat16, in place, with entropy, 1 threads, "
        assert out[0] == start + "2 iterations after 0"
        assert out[2].split() == ["roof", "ms"]
        kept = [json.loads(line) for line in output.read_text().splitlines()]
        assert len(kept) == 2 * runs
        for row, line in zip(out[-2:], kept[-2:], strict=True):
            check_line(line)
            assert row.split()[:4] == [line["pass"], "kernel", line["isa"], line["schedule"]]
            assert f" {line['median_ms']:.2f} " in row


def test_with_the_head_the_table_has_roof_share_and_memory(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert command("bench", *SMALL, *LINEAR, "--head-layout=hv", "--frozen-head") == 0
    out = capfd.readouterr().out
    for words in (
        *("[40, 64] x [64, 500], frozen head bfloat16", "products, in L1", "TFLOP/s", "of roof"),
        *("part of its workspace", "workspace MB", "measured MB", "kept columns", "rows in dhead"),
    ):
        assert words in out


@pytest.mark.parametrize(
    ("steady", "warning"),
    [
        (True, ""),
        (None, ""),  # stopped before they were measured again
        (False, "tileloss: warning: the roofs at the start and at the end differ by 42 %: the machine was not quiet\n"),
    ],
    ids=str,
)  # fmt: skip
def test_roofs_that_were_not_steady_are_told(
    steady: bool | None,
    warning: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[Answer] = []

    def measured(request: Line, told: Any, **_: Any) -> None:
        answer = ask_apart(request)
        for event in answer.events:
            if event["event"] == "result":
                event["line"] |= {"roofs_steady": steady, "roofs_difference": 0.42}
                event["line"] |= {"speedup_over_reference": 2.5}
            told(event)
        answers.append(answer)

    monkeypatch.setattr(bench, "run_request", measured)
    assert command("bench", *SMALL) == 0
    captured = capfd.readouterr()
    assert captured.err == warning
    assert "value_and_grad: 2.5 x the reference\n" in captured.out
    assert answers


# --------------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tokens=0"], "--tokens: 0 is out of range: expected 1 to 2147483647"),
        (["--tokens=2147483649"], "--tokens: 2147483649 is out of range"),
        (["--tokens=1e3"], "--tokens: expected an integer, got '1e3'"),
        (["--tokens=0x10"], "--tokens: expected an integer, got '0x10'"),
        (["--tokens="], "--tokens: expected an integer, got ''"),
        (["--iters=99999999999999999999"], "--iters: 99999999999999999999 is out of range"),
        (["--iters=0"], "--iters: 0 is out of range: expected 1 to 1000000"),
        (["--seed=-1"], "--seed: -1 is out of range"),
        (["--threads=1025"], "--threads: 1025 is out of range: expected 0 to 1024"),
        (["--dtype=int8"], "--dtype: 'int8' is none of "),
        (["--isa=mmx"], "--isa: 'mmx' is none of "),
        (["--loss=focal"], "--loss: 'focal' is none of logprobs, cross_entropy, "),
        (["--set=lable=1"], "--set lable=1: lable: unknown key"),
        (["--set=label_smoothing=2"], "--set label_smoothing=2: label_smoothing: 2 is out of range"),
        (["--vocab-block=100"], "vocab_block: expected a multiple of 64"),
        (["--device=cuda:x"], "--device: expected cpu, cuda or cuda:N, got cuda:x"),
        (["--device=cuda", "--impl=both"], "--impl: expected kernel on cuda, as the reference runs on the cpu alone"),
        (["--device=cuda", "--threads=2"], "--threads: expected 0 on cuda from logits, got 2"),
        (["--cuda-kernel=cluster"], "--cuda-kernel: expected auto on cpu from logits, got cluster"),
        (["--impl=fast"], "--impl: 'fast' is none of kernel, reference, both"),
        (["--pass=sideways"], "--pass: 'sideways' is none of forward, backward, value_and_grad"),
        (["--pass=backward", "--impl=both"], "--impl: the reference has no backward from a row state"),
        (["--loss=distillation", "--impl=both"], "--impl: there is no reference for distillation"),
        (["--loss=policy_loss", "--preset=cispo"], "epsilon_high"),
        (["--loss=policy_loss", "--preset=ppo"], "--preset: expected one of grpo, bnpo, "),
        (["--loss=policy_loss", "--set=preset=ppo"], "--set preset=ppo: preset: 'ppo' is none of grpo, "),
        (
            ["--loss=policy_loss", "--preset=grpo", "--set=preset=gspo"],
            "expected one preset, got --preset grpo and --set preset=gspo",
        ),
        (["--preset=grpo"], "--preset: expected none, as cross_entropy has no presets, got 'grpo'"),
        (["--hidden=64"], "are for the functions linear_*, got cross_entropy"),
        (["--frozen-head"], "are for the functions linear_*, got cross_entropy"),
        (["--loss=linear_cross_entropy"], "--hidden: linear_cross_entropy needs the hidden size, got none"),
        ([*LINEAR, "--in-place"], "--in-place: linear_cross_entropy has no logits"),
        ([*LINEAR, "--head-layout=hw"], "--head-layout: 'hw' is none of vh, hv"),
        ([*LINEAR, "--impl=both"], "--impl: there is no reference for linear_cross_entropy"),
        ([*LINEAR, "--dtype=fp32", "--dhead-dtype=bf16"], "dhead.dtype: expected float32"),
        ([*LINEAR, "--workspace=64MB"], "--workspace: expected bytes, as 65536, "),
        ([*LINEAR, "--workspace=1KiB"], "got a budget of 1024"),
        (["--implementation=xla"], "--implementation: expected --frontend jax, got none"),
        (["--frontend=jax", "--in-place"], "--in-place: expected none with --frontend jax"),
        (["--frontend=jax", "--threads=1"], "--threads: expected none with --frontend jax"),
        (["--frontend=jax", "--iters=0"], "--iters: 0 is out of range"),
        (["--output=-"], "--output: expected a file to write, got '-'"),
        *(
            ([f"--loss={loss}", "--hidden=32"], f"--loss: '{loss}' is none of logprobs, ")
            for kind in ("soft_cross_entropy", "sparse_distillation", "sweep")
            for loss in (kind, f"linear_{kind}")
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_what_is_wrong_is_one_line_with_its_flag(
    flags: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command("bench", *SMALL, *flags) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tileloss: ") and message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tokens=100000000", "--vocab=151936"], "logits: needs 30387200.0 MB"),
        # Nearly 2^63 bytes, and nearly 2^64: more than an int64_t counts.
        (["--tokens=2147483647", "--vocab=2147483647"], "logits: needs 9223372028264.8 MB"),
        (
            ["--tokens=2147483647", "--vocab=2147483647", "--dtype=fp32"],
            "logits: needs 18446744056529.7 MB",
        ),
        (
            ["--loss=linear_cross_entropy", "--tokens=4", "--vocab=100000000", "--hidden=16384"],
            "head: needs 3276800.0 MB",
        ),
        ([*SMALL, "--output=/nonexistent/r.jsonl"], "/nonexistent/r.jsonl: No such file"),
    ],
    ids=str,
)
def test_what_the_machine_lacks_exits_with_three(
    flags: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command("bench", *flags) == 3
    assert message in capfd.readouterr().err


def test_devices_are_counted() -> None:
    if not ON_HOST.is_dir():
        pytest.skip("NOT RUN: no cuda_on_host")
    asked = spawn("bench", "--device=cuda:2", LD_LIBRARY_PATH=str(ON_HOST))
    assert "--device: expected cuda:0 to cuda:1, got cuda:2" in asked.communicate()[1]
    assert asked.returncode == 3


def test_a_library_of_a_device_that_cannot_be_opened_is_not_taken_for_none(tmp_path: Path) -> None:
    (tmp_path / "libtileloss_cuda.so").write_text("no library")
    asked = spawn("bench", "--device=cuda", LD_LIBRARY_PATH=str(tmp_path))
    assert "libtileloss_cuda.so: file too short" in asked.communicate()[1]
    assert asked.returncode == 3


# The reference ends after 5 calls, the kernel's millionth is never reached.
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_stopped_it_tells_what_was_measured_so_far(by: int, tmp_path: Path) -> None:
    output = tmp_path / "r.jsonl"
    flags = ["--tokens=64", "--vocab=4096", "--iters=1000000", "--impl=both", "--json"]
    for seconds in (1, 4, 16):  # on a busy machine it comes as far only later
        stopped = spawn("bench", *flags, f"--output={output}")
        wait_for(lambda: children_of(stopped.pid), stopped)  # noqa: B023
        time.sleep(seconds)
        stopped.send_signal(by)
        out = stopped.communicate()[0]
        assert stopped.returncode == 128 + by
        if out:
            break
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["pass"] for line in lines] == ["forward", "value_and_grad"]
    for line in lines:
        check_line(line)
        assert line["impl"] == "reference"
        assert line["roofs_difference"] is None and line["roofs_steady"] is None
    assert [json.loads(line) for line in output.read_text().splitlines()] == lines


# --------------------------------------------------------------------------------------------------------------------- info


@pytest.mark.full
def test_info_says_what_the_machine_is_and_does(capfd: pytest.CaptureFixture[str]) -> None:
    assert command("info", "--json") == 0
    told = json.loads(capfd.readouterr().out)
    assert list(told) == list(INFO)
    assert list(told["roofs"]) == list(INFO["roofs"])
    assert told["functions"][0] == "logprobs" and told["isa_available"][0] == "baseline"
    assert told["threads"] >= 1 and told["devices"]["cpu"] == 1
    assert all(value > 0 for name, value in told["roofs"].items() if name != "loops")


INFO: Line = {
    "version": "1.2.3",
    "build": {"compiler": "g++ 12", "type": "Release", "flags": "-O2"},
    "functions": ["logprobs", "cross_entropy"],
    "cpu": "a cpu",
    "cpu_features": "AMX",
    "isa_available": ["baseline", "avx2"],
    "amx": "",
    "devices": {"cpu": 1, "cuda": 2},
    "devices_note": "",
    "isa_chosen": "avx2",
    "isa_note": "a note",
    "TILELOSS_ISA": None,
    "threads": 3,
    "caches": [{"level": "1", "type": "Data", "size": "48K", "shared_by_cpus": "0-1"}],
    "memory_available_bytes": 24_060_000_000,
    "huge_pages": "[always]",
    "roofs": {
        **{"in_place_gb_per_s": 12.94, "copy_gb_per_s": 10, "read_gb_per_s": 7.06},
        **{"exp_g_per_s": 2.55, "products_bfloat16_tflops": 0.1984},
        **{"products_float32_tflops": 0.06, "loops": "avx2; read: 1 stream"},
    },
}


def test_info_is_a_table(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(**instead: Any) -> list[list[str]]:
        event = {"event": "result", "line": INFO | instead}
        monkeypatch.setattr(info, "run_request", lambda *_, **__: Answer(True, [event], {}))
        assert info.run(argparse.Namespace(json=False)) == 0
        lines = capfd.readouterr().out.splitlines()
        return [re.split("  +", line, maxsplit=1) for line in lines if line.strip("- ")]

    assert rows() == [
        ["tileloss", "1.2.3"],
        ["compiler", "g++ 12"],
        ["build", "Release -O2"],
        ["functions", "logprobs, cross_entropy"],
        ["cpu", "a cpu (AMX)"],
        ["instruction sets", "baseline, avx2"],
        ["chosen", "avx2 (TILELOSS_ISA not set; a note)"],
        ["devices", "cpu, 2 cuda"],
        ["threads", "3 (TILELOSS_NUM_THREADS, affinity, cgroup quota)"],
        ["L1 Data", "48K, cpus 0-1"],
        ["memory available", "24.1 GB"],
        ["huge pages", "[always]"],
        ["roof, in place", "12.9 GB/s read and written"],
        ["roof, copy", "10.0 GB/s read and written"],
        ["roof, read", "7.1 GB/s"],
        ["roof, exp", "2.5 billion/s"],
        ["roof, products", "0.198 TFLOP/s bfloat16, 0.060 float32"],
        ["roof loops", "avx2; read: 1 stream"],
    ]
    others = rows(TILELOSS_ISA="avx2", devices={"cpu": 1}, devices_note=", not cuda (no library)")
    assert ["chosen", "avx2 (TILELOSS_ISA=avx2)"] in others
    assert ["devices", "cpu, not cuda (no library)"] in others


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_info_can_be_stopped(by: int) -> None:
    stopped = spawn("info")
    wait_for(lambda: children_of(stopped.pid), stopped)
    stopped.send_signal(by)
    assert stopped.communicate()[0] == ""
    assert stopped.returncode == 128 + by
