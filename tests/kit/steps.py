"""What the kit runs, in the order of what one wants to know first. Programs and files are named from the kit's folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

KIT = Path(__file__).resolve().parent
TILELOSS = (sys.executable, "-m", "tileloss")
# CUDA's own checks look at every access, which takes ten times as long and more: of the C API's suites those that reach each
# kernel with the smallest rows. What cuBLASLt's kernels write is not seen by initcheck, to which all that a head's rows are made
# of is uninitialized.
SANITIZED = "*SpecialValues.*:*RowOutputsOf*:*MergedShards.*:Linear.*"
SLOW = "MergedShards.APlan*:Linear.PoliciesAgree*"
NOT_SANITIZED = {"memcheck": "MergedShards.APlan*", "initcheck": f"{SLOW}:Linear.*"}

# Kernels of a stream may overlap.
OVERLAP = {"TILELOSS_CUDA_PDL": "1"}


@dataclass(frozen=True)
class Command:
    """`must_print`: a regular expression that its output has where it passes. `{output}` in an argument: the results' folder."""

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    must_print: str = ""


@dataclass(frozen=True)
class Step:
    """`at_once`: how many of its commands run side by side."""

    name: str
    limit_s: float
    commands: tuple[Command, ...]
    at_once: int = 1


def python(name: str, script: str, *arguments: str, **environment: str) -> Command:
    return Command(name, (sys.executable, script, *arguments), environment)


def pytest(name: str, *arguments: str, processes: int = 8, **environment: str) -> Command:
    processes = min(processes, len(os.sched_getaffinity(0)))
    options = ("-q", "--maxfail=20", "-p", "no:cacheprovider", f"--numprocesses={processes}")
    return Command(name, (sys.executable, "-m", "pytest", *options, *arguments), environment)


def suite(shard: int, shards: int) -> Command:
    environment = {
        "GTEST_TOTAL_SHARDS": str(shards),
        "GTEST_SHARD_INDEX": str(shard),
        "TILELOSS_NUM_THREADS": "2",
    }
    arguments = (
        "bin/api_test",
        "--gtest_brief=1",
        f"--gtest_filter={(KIT / 'suites.txt').read_text().strip()}",
    )
    return Command(f"api_{shard}", arguments, environment, must_print=r"\[  PASSED  \]")


def gradcheck(config: Path, *sets: str) -> Command:
    arguments = [
        *TILELOSS,
        "gradcheck",
        "--device",
        "cuda",
        "--mutants",
        "--quiet",
        "--config",
        f"configs/{config.name}",
        *sets,
    ]
    return Command(config.stem, tuple(arguments), {"TILELOSS_NUM_THREADS": "2"})


def gradchecks() -> tuple[Command, ...]:
    commands = []
    sizes = (KIT / "small_model.txt").read_text().split()
    for config in sorted((KIT / "configs").glob("gradcheck_*.yaml")):
        if config.stem.endswith("_model"):
            continue
        sets = sizes if "linear" in config.stem else sizes[:-1]  # the last is the head's
        commands.append(gradcheck(config, *(sets if "qwen" in config.stem else ())))
    return tuple(commands)


def sanitizer(tool: str) -> Command:
    suites = ("--gtest_brief=1", f"--gtest_filter={SANITIZED}-{NOT_SANITIZED.get(tool, SLOW)}")
    arguments = (
        "compute-sanitizer",
        "--tool",
        tool,
        "--error-exitcode",
        "1",
        "bin/api_test",
        *suites,
    )
    nothing = r"ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards"
    return Command(tool, arguments, {"TILELOSS_NUM_THREADS": "2"}, must_print=nothing)


def check() -> list[Step]:
    losses, models = "tests/python/cuda_losses.py", "tests/python/cuda_models.py"
    segments = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    info = Command("info", (*TILELOSS, "info"), must_print="cuda")
    jax, handlers = "tests/python/cuda_jax.py", "tests/python/test_jax_cuda.py"
    as_needed = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    tools = ("memcheck", "racecheck", "synccheck", "initcheck")
    return [
        Step("device", 40, (info, python("versions", "versions.py")), 2),
        Step(
            "first",
            60,
            (python("first", "first.py"), gradcheck(Path("gradcheck_ce_edges.yaml"))),
            2,
        ),
        Step("api", 90, tuple(suite(shard, 8) for shard in range(8)), 8),
        Step("gradchecks", 60, gradchecks(), 8),
        Step(
            "torch",
            90,
            (
                pytest("losses", losses, processes=6),
                pytest("models", models, processes=4),
                pytest("segments", losses, "-k", "values or graph or captur", **segments),
            ),
            3,
        ),
        Step(
            "jax",
            90,
            (
                pytest("losses", jax, processes=0, XLA_PYTHON_CLIENT_MEM_FRACTION="0.3"),
                pytest("as_needed", jax, processes=2, **as_needed),
                pytest("handlers", handlers, "-k", "test_the_handlers and gpu", processes=0),
            ),
            3,
        ),
        Step("rows", 60, (python("rows", "rows.py"),)),
        Step("sanitizers", 75, tuple(map(sanitizer, tools)), 4),
        Step(
            "overlap",
            45,
            (
                python("first", "first.py", **OVERLAP),
                pytest("graphs", losses, "-k", "graph or captur", processes=4, **OVERLAP),
            ),
            2,
        ),
    ]


def compare(name: str, *only: str, tokens: int = 2048, hidden: int = 1536) -> Command:
    sizes = ("--tokens", str(tokens), "--hidden", str(hidden), "--limit", "25")
    patterns = [word for pattern in only for word in ("--only", pattern)]
    program = (sys.executable, "benchmarks/compare.py", "--device", "cuda", *sizes, *patterns)
    return Command(name, (*program, "--output", f"{{output}}/{name}.jsonl"))


BENCH = (*TILELOSS, "bench", "--device", "cuda", "--vocab", "151936", "--dtype", "bf16")


def bench(
    name: str, loss: str, *arguments: str, output: str = "bench", **environment: str
) -> Command:
    program = (*BENCH, "--loss", loss, *arguments, "--output", f"{{output}}/{output}.jsonl")
    return Command(name, program, environment)


def launches() -> tuple[Command, ...]:
    """Calls of which launches are a good part, whose kernels do not overlap, and do."""
    rows = ("cross_entropy", "--in-place", "--tokens", "64")
    head = ("linear_cross_entropy", "--tokens", "2048", "--hidden", "1536")
    return tuple(
        bench(f"{call[0]}_{name}", *call, output=f"launches_{name}", **environment)
        for name, environment in {"apart": {}, "overlap": OVERLAP}.items()
        for call in (rows, head)
    )


def profile(name: str, loss: str, *arguments: str, of: tuple[str, ...]) -> Command:
    """Kernels of some calls, as Nsight Compute sees them."""
    ncu = ("ncu", "--clock-control", "none", "--target-processes", "all", *of)
    return Command(
        name, (*ncu, *BENCH, "--loss", loss, "--iters", "2", "--warmup", "1", *arguments)
    )


def measure() -> list[Step]:
    logits = []
    for loss, more in (("cross_entropy", ()), ("policy_loss", ("--preset", "grpo"))):
        for tokens in (2048, 512, 8192):
            name, arguments = f"{loss}_{tokens}", (*more, "--in-place", "--tokens", str(tokens))
            logits.append(bench(name, loss, *arguments))
            if tokens == 2048:
                logits.append(bench(f"{name}_backward", loss, *arguments, "--pass", "backward"))
    linear, head = "linear_cross_entropy", ("--tokens", "8192", "--hidden", "4096")
    kept = ("--pass", "value_and_grad", "--workspace", "8GiB")
    heads = (
        bench("head", linear, *head),
        bench("head_kept", linear, *head, *kept),
        bench("head_small", linear, "--tokens", "2048", "--hidden", "1536"),
    )
    # Cuts that the planner does not choose; its own are above.
    blocks = (
        bench("two_reads", "cross_entropy", "--in-place", "--tokens", "2048", "--cuda-kernel", "two_reads"),
        *(bench(f"head_of_{rows}", linear, *head, *kept, "--row-block", rows) for rows in ("512", "2048")),
    )  # fmt: skip
    large = {"tokens": 8192, "hidden": 4096}
    in_place = ("--in-place", "--pass", "value_and_grad", "--tokens")
    some = ("--set", "basic", "--launch-count", "8")
    durations = ("--metrics", "gpu__time_duration.sum", "--csv", "--launch-count")
    kernels = (
        profile("rows", "cross_entropy", *in_place, "2048", of=some),
        profile("head", linear, *head, "--pass", "value_and_grad", of=some),
        profile("times_of_policy", "policy_loss", *in_place, "512", of=(*durations, "40")),
        profile("times_of_head", linear, *head, *kept, of=(*durations, "400")),
    )
    return [
        Step("roofs", 40, (compare("roofs", "roofs/*", "roofs_linear/*", **large),)),
        Step("logits", 60, tuple(logits)),
        Step("head", 50, heads),
        Step("launches", 30, launches()),
        Step("blocks", 30, blocks),
        # Not torch's with float32 logits, which are compiled once more.
        Step("peers", 75, (compare("peers", "cross_entropy/*[!s]", "grpo/*[!s]"),)),
        Step("peers_head", 75, (compare("peers_head", f"{linear}/*", **large),)),
        Step("training", 45, (compare("training", "training_step/*"),)),
        Step("kernels", 40, kernels),
    ]


STEPS = {"check": check, "measure": measure}
